"""A stand-in for a train script, without torch: prints what this rank was given, as one line of JSON."""

import json
import os
import sys

env = os.environ
if "TORCHELASTIC_RUN_ID" in env or "SPAWN_RANKS" in env:
    rank, local_rank, world_size = (int(env[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
else:
    rank, local_rank, world_size = (int(env[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"))
given = {
    "rank": rank,
    "local_rank": local_rank,
    "world_size": world_size,
    "master_addr": env["MASTER_ADDR"],
    "master_port": env["MASTER_PORT"],
    "host": env["SLURMD_NODENAME"],
    "threads": env.get("OMP_NUM_THREADS"),
    "job_world_size": [env.get(name) for name in ("NNODES", "NPROC_PER_NODE", "WORLD_SIZE")],
    "cuda": env.get("CUDA_VISIBLE_DEVICES"),
    "cpus": sorted(os.sched_getaffinity(0)),
    "arguments": sys.argv[1:],
}
os.write(1, f"VARIABLES {json.dumps(given)}\n".encode())  # one write, so that lines of several ranks do not mix
