"""The processes of jobs on the local cluster: their ids on this machine."""

from collections.abc import Iterator
from pathlib import Path


def having(*variables: str) -> Iterator[tuple[int, str]]:
    """The processes that have these variables, and their command lines."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            env, command = (process / "environ").read_bytes(), (process / "cmdline").read_text()
        except OSError:
            continue  # it has ended meanwhile
        if {variable.encode() for variable in variables} <= set(env.split(b"\0")):
            yield int(process.name), command


def of(job: int, node: str = "") -> Iterator[tuple[int, str]]:
    """Those of a job, on one node or any."""
    where = [f"SLURMD_NODENAME={node}"] if node else []
    return having(f"SLURM_JOB_ID={job}", *where)


def python(job: int, name: str, node: str = "") -> Iterator[int]:
    """A job's Python processes whose command line has `name` in it."""
    for process, command in of(job, node):
        if "python" in command.split("\0")[0] and name in command:
            yield process


def starters(job: int) -> set[int]:
    """What starts the ranks of each node: torchrun, or the spawner."""
    return {*python(job, "torch.distributed.run"), *python(job, "spawn_ranks.py")}


def ranks(job: int, name: str, node: str = "") -> list[int]:
    """The ranks of a script. Those of the spawner have no script in their command line."""
    found = {*python(job, name, node), *python(job, "spawn_main", node)}
    return sorted(found - starters(job))
