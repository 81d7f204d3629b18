"""Which rank this process is, by the one rule that all readers of RANK follow. Without torch."""

import os
import subprocess
import sys
from typing import NamedTuple

from .job import HOST


class Ranks(NamedTuple):
    """The numbers of this process. `launcher` is srun, torchrun, spawn, environment or none."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str

    def of_this_node(self) -> range:
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)


def find_ranks() -> Ranks:
    """RANK, LOCAL_RANK and WORLD_SIZE if RANK is set; Slurm's numbers in a bare srun; or 0 of 1.

    The batch shell also has a SLURM_PROCID, always 0. Only steps of srun have ranks, and those have
    a small SLURM_STEP_ID.
    """
    env = os.environ
    in_step = int(env.get("SLURM_STEP_ID", 2**32)) < 2**31
    if "RANK" in env:
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE"]
    elif in_step:
        names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"]
    else:
        return Ranks(0, 0, 1, 1, "none")
    try:
        rank, local_rank, world_size = (int(env[name]) for name in names)
    except KeyError as name:  # a container may have been given only some of Slurm's variables
        stop(f"this is one of several ranks, but {name} is not set: use a launcher", 0)

    launcher = "srun" if in_step else "environment"
    if "TORCHELASTIC_RUN_ID" in env:  # set by torchrun and by spawn_ranks.py
        launcher = "torchrun" if "TORCHELASTIC_USE_AGENT_STORE" in env else "spawn"
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", 1))
    if launcher == "srun":
        local_world_size = -(-world_size // int(env.get("SLURM_STEP_NUM_NODES", world_size)))
    return Ranks(rank, local_rank, world_size, local_world_size, launcher)


def hosts_of_step() -> list[str]:
    """The nodes of this srun in the order of their ranks; none in a container without scontrol."""
    try:
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
        return subprocess.run(command, capture_output=True, text=True).stdout.split()
    except (OSError, KeyError):
        return []


def say(sentence: str, rank: int):
    print(f"[Rank {rank} on {HOST}] {sentence}", file=sys.stderr, flush=True)


def stop(sentence: str, rank: int, speaker: int | None = None):
    """Ends this rank, which says why, with status 1.

    If other ranks know the fault as well, only the `speaker` says it, and fails the job. The others
    end with status 0, because a rank that fails gets the others ended before they speak.
    """
    if speaker is not None and rank != speaker:
        os._exit(0)
    say(sentence, rank)
    end()


def end():
    """Ends this process with status 1, at once, because gloo's threads could block its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
