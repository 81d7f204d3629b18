"""Signs of life: every rank of a job keeps writing its last step into a file of its own, and reads its neighbour's.

A rank that crashes ends the job by itself. One that is stuck (a stopped process, a cut link, a loader that waits for
ever) makes all others wait, until their collective gives up after --timeout seconds, and that error names the wrong
ranks. So half-way there the job's log gets a sentence with the rank, the host and what it is doing.

The files are log/JOB/ranks-START/RANK, a line of JSON each; aux/watch_job.py shows them.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path

from .stop_request import ATTEMPT, HOST

LINE = 4096  # bytes, always as many: a reader never finds the end of an older, longer line

step = 0  # that this rank has done; checkpoint.Boundary counts


def start(rank: int, world_size: int, timeout: float):
    """Starts the thread that gives the signs, if this is a job. `timeout`, in seconds, is that of the collectives."""
    if world_size > 1 and "SLURM_JOB_ID" in os.environ:
        folder = Path("log", os.environ["SLURM_JOB_ID"], f"ranks-{ATTEMPT}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            return say(rank, f"warning: no signs of life in {folder}: {error.strerror}")
        threading.Thread(target=beat, args=(file, folder, rank, world_size, timeout), daemon=True).start()


def beat(file: int, folder: Path, rank: int, world_size: int, timeout: float):
    """Never ends. With 1,000 ranks a sign every ten seconds is enough: a hundred a second for the file system."""
    interval = max(min(2, timeout / 10), world_size / 100)
    mine, neighbours = Unchanged(timeout / 2), Unchanged(timeout / 2)
    while True:
        faulthandler.dump_traceback_later(timeout)  # put off each time: it comes when not even this thread runs
        stack, waits = main_stack()
        stuck = mine.too_long((step, stack))
        sign = {"rank": rank, "host": HOST, "step": step, "time": time.time(), "stack": stack, "waits": waits}
        sign |= {"of": world_size, "still": time.monotonic() - mine.since}  # seconds at this step and place
        with contextlib.suppress(OSError):  # a full disk; the line is as long as the one it takes the place of
            os.pwrite(file, json.dumps(sign).encode().ljust(LINE), 0)
        other = read(folder / str((rank - 1) % world_size))
        if neighbours.too_long(other) and other:
            who = f"rank {other['rank']} on {other['host']}"
            say(rank, f"{who} has given no sign of life for {timeout / 2:.0f} s; its last step is {other['step']}")
        if stuck and rank == 0:
            say(rank, describe_stuck([read(folder / str(other)) for other in range(world_size)], timeout / 2))
        time.sleep(interval)


class Unchanged:
    """Tells, once, when a value has stayed the same for too long."""

    def __init__(self, seconds: float):
        self.seconds, self.value, self.since, self.told = seconds, None, time.monotonic(), False

    def too_long(self, value: object) -> bool:
        now = time.monotonic()
        if value != self.value:
            self.value, self.since, self.told = value, now, False
        due = not self.told and now - self.since > self.seconds
        self.told = self.told or due
        return due


def read(path: Path) -> dict | None:
    """What another rank has written last; None where nothing is there (yet) or it is being written."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def main_stack() -> tuple[list[str], bool]:
    """What this rank's main thread is doing, the innermost call last, and whether that is to wait for other ranks."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    inside_torch = ("torch/distributed/", "torch/autograd/")  # gloo's collectives of a backward pass are in autograd
    ours = ("highest", "all_reduced")  # with NCCL, ranks wait where the result is read
    waits = any(part in frames[-1].filename for part in inside_torch) or frames[-1].name in ours
    return [f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in frames][-12:], waits


def describe_stuck(signs: list[dict | None], seconds: float) -> str:
    """Who keeps the others waiting: those that are in no collective, or else those who are fewest at one place."""
    places = defaultdict(list)
    for sign in filter(None, signs):
        places[sign["waits"], tuple(sign["stack"])].append(sign)
    groups = sorted(places.items(), key=lambda group: (group[0][0], len(group[1])))
    (_, stack), there = groups[0]
    ranks = ", ".join(f"rank {sign['rank']} on {sign['host']} (step {sign['step']})" for sign in there[:4])
    more = f" and {len(there) - 4} more" if len(there) > 4 else ""
    return f"no step for {seconds:.0f} s. First to look at: {ranks}{more}, in\n    " + "\n    ".join(stack)


def say(rank: int, sentence: str):
    print(f"[Rank {rank} on {HOST}] {sentence}", file=sys.stderr, flush=True)
