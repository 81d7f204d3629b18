"""Which rank this process is, and of which job, without torch; and how it ends with a fault."""

import os
import sys
from typing import NamedTuple

from heartbeat import HOST

JOB = os.environ.get("SLURM_JOB_ID", "none")
# How often Slurm has started this job before.
RESTART_COUNT = os.environ.get("SLURM_RESTART_COUNT", "0")


class Ranks(NamedTuple):
    """The numbers of this process. `launcher` is srun, torchrun, spawn, or hand."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str


def find_ranks() -> Ranks:
    """A launcher sets RANK, LOCAL_RANK and WORLD_SIZE. In a step of srun without a launcher there
    are Slurm's own numbers. Any other process is the only one."""
    env = os.environ
    slurm = env if 0 <= int(env.get("SLURM_STEP_ID", -1)) < 2**31 else {}
    rank = int(env.get("RANK", slurm.get("SLURM_PROCID", 0)))
    local_rank = int(env.get("LOCAL_RANK", slurm.get("SLURM_LOCALID", 0)))
    world_size = int(env.get("WORLD_SIZE", slurm.get("SLURM_NTASKS", 1)))

    nodes = int(slurm.get("SLURM_STEP_NUM_NODES", 1))
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", -(-world_size // nodes)))
    launcher = "srun" if slurm else "hand"
    if "TORCHELASTIC_RUN_ID" in env:  # set by torchrun and by spawn_ranks.py
        launcher = "torchrun" if "TORCHELASTIC_USE_AGENT_STORE" in env else "spawn"
    return Ranks(rank, local_rank, world_size, local_world_size, launcher)


def stop_if_independent(ranks: Ranks):
    """Ends this process if srun has started several training runs that do not know each other."""
    env = os.environ
    tasks, nodes = env.get("SLURM_NTASKS"), env.get("GROUP_WORLD_SIZE")
    in_step = 0 <= int(env.get("SLURM_STEP_ID", -1)) < 2**31
    if not in_step or ranks.launcher not in ("torchrun", "spawn") or tasks == nodes:
        return
    # Each of them has a rank 0, but the job has only one task 0.
    if int(env["SLURM_PROCID"]) > 0 or ranks.local_rank > 0:
        os._exit(0)
    say(
        f"{tasks} independent training runs instead of one: srun started {tasks} x "
        f"{ranks.launcher}, and this one knows of {nodes} node (world size {ranks.world_size}); "
        f"torchrun needs --nnodes={tasks} and the same --master-addr everywhere, never "
        f"--standalone (torchrun.sh does that)",
        ranks.rank,
    )
    end()


def say(sentence: str, rank: int):
    print(f"[Rank {rank} on {HOST}] {sentence}", file=sys.stderr, flush=True)


def end():
    """Ends this process with status 1, at once, because gloo's threads could block its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
