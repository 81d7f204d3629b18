"""A stand-in for a train script, without torch: prints what this rank was given, as one line of JSON."""

import json
import os
import signal
import sys

env = os.environ
given = {
    "rank": int(env["RANK"]),
    "local_rank": int(env["LOCAL_RANK"]),
    "world_size": int(env["WORLD_SIZE"]),
    "master_addr": env["MASTER_ADDR"],
    "master_port": env["MASTER_PORT"],
    "host": env["SLURMD_NODENAME"],
    "job": env["SLURM_JOB_ID"],
    "threads": env.get("OMP_NUM_THREADS"),
    "job_world_size": [env.get(name) for name in ("NNODES", "NPROC_PER_NODE", "WORLD_SIZE")],
    "cuda": env.get("CUDA_VISIBLE_DEVICES"),
    "cpus": sorted(os.sched_getaffinity(0)),
    "path": env["PATH"],
    "usr1": signal.getsignal(signal.SIGUSR1).name,
    "arguments": sys.argv[1:],
}
os.write(1, f"VARIABLES {json.dumps(given)}\n".encode())  # one write, so that lines of several ranks do not mix
