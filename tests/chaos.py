#!/usr/bin/env python3
"""Injects one fault after another into a job on the local cluster (root), until the job is done.

    make cluster
    ./local/cluster/namespaces.sh exec sbatch --parsable launch_slurm_to_torch.sh train.py
    python3 tests/chaos.py --every 20 --seed 1 JOBID

Some faults make the job fail. It is then requeued, as its owner would do, and resumes from its
newest checkpoint.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

NAMESPACES = Path(__file__).resolve().parents[1] / "local/cluster/namespaces.sh"
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED", "OUT_OF_MEMORY", "PREEMPTED")


def slurm(*command: object) -> str:
    """A command of Slurm's on the cluster that CLUSTER names; its output."""
    command = [NAMESPACES, "exec", *map(str, command)]
    return subprocess.run(command, capture_output=True, text=True).stdout


def show(job: int) -> dict[str, str]:
    shown = slurm("scontrol", "show", "job", "-o", job)
    return dict(part.split("=", 1) for part in shown.split() if "=" in part)


def processes_with(*variables: str) -> Iterator[tuple[int, str]]:
    """The processes that have these variables: their ids on the host and command lines."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            env, command = (process / "environ").read_bytes(), (process / "cmdline").read_text()
        except OSError:
            continue  # it has ended meanwhile
        if {variable.encode() for variable in variables} <= set(env.split(b"\0")):
            yield int(process.name), command


def all_processes(job: int, node: str = "") -> Iterator[tuple[int, str]]:
    """Those of a job, on one node or any."""
    where = [f"SLURMD_NODENAME={node}"] if node else []
    return processes_with(f"SLURM_JOB_ID={job}", *where)


def processes(job: int, name: str, node: str = "") -> Iterator[int]:
    """The ids of a job's Python processes whose command line has `name` in it."""
    for process, command in all_processes(job, node):
        if "python" in command.split("\0")[0] and name in command:
            yield process


def starters(job: int) -> set[int]:
    """What starts the ranks of each node: torchrun, or the spawner."""
    return {*processes(job, "torch.distributed.run"), *processes(job, "spawn_ranks.py")}


def ranks(job: int, name: str = "train_", node: str = "") -> list[int]:
    """The ranks of a script, of a job on one node or any. Those of the spawner have no script in
    their command line."""
    found = {*processes(job, name, node), *processes(job, "spawn_main", node)}
    return sorted(found - starters(job))


def kill_one(moments: random.Random, found: Collection[int]):
    if found:
        os.kill(moments.choice(sorted(found)), signal.SIGKILL)


def stop_a_rank_for_a_while(job: int, moments: random.Random):
    found = ranks(job)
    if found:
        victim = moments.choice(found)
        os.kill(victim, signal.SIGSTOP)
        time.sleep(2)
        os.kill(victim, signal.SIGCONT)


def cut_a_link_for_a_while(job: int, moments: random.Random):
    """Too short to be noticed, but for the time lost."""
    # It has just ended.
    nodes = slurm("scontrol", "show", "hostnames", show(job)["NodeList"]).split() or ["node-1"]
    victim = ("--node", moments.choice(nodes), "ip", "link", "set", "eth0")
    slurm(*victim, "down")
    time.sleep(2)
    slurm(*victim, "up")


FAULTS: dict[str, Callable[[int, random.Random], object]] = {
    "SIGTERM": lambda job, _: slurm("scancel", "--signal=TERM", job),
    "SIGTERM to the batch shell as well": lambda job, _: slurm("scancel", "-f", "-s", "TERM", job),
    "scontrol requeue": lambda job, _: slurm("scontrol", "requeue", job),
    "kill -9 of a rank": lambda job, moments: kill_one(moments, ranks(job)),
    "kill -9 of a torchrun or spawner": lambda job, moments: kill_one(moments, starters(job)),
    "a rank stopped for 2 s": stop_a_rank_for_a_while,
    "the link of a node down for 2 s": cut_a_link_for_a_while,
}


def main():
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    add = parser.add_argument
    add("job", type=int, metavar="JOBID")
    help = "of running time between two faults"
    add("--every", type=float, default=20, metavar="SECONDS", help=help)
    add("--seed", type=int, default=0)
    add("--faults", type=int, default=sys.maxsize, help="leave the job alone after so many")
    args = parser.parse_args()
    moments, faults, running_since = random.Random(args.seed), 0, None
    while (shown := show(args.job)).get("JobState") not in ("COMPLETED", "CANCELLED"):
        if not shown:
            sys.exit(f"chaos.py: no job {args.job} on the local cluster")
        state = shown["JobState"]
        if state in ENDED:
            slurm("scontrol", "requeue", args.job)
            print(f"{state}: requeued", flush=True)
        running_since = (running_since or time.monotonic()) if state == "RUNNING" else None
        if running_since and time.monotonic() - running_since > args.every and faults < args.faults:
            faults, running_since = faults + 1, None
            name = moments.choice(list(FAULTS))
            print(f"fault {faults}: {name}", flush=True)
            FAULTS[name](args.job, moments)
        time.sleep(0.5)
    print(f"{shown['JobState']} after {faults} faults and {shown['Restarts']} restarts")


if __name__ == "__main__":
    main()
