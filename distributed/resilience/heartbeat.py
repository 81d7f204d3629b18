"""Heartbeats: every rank of a job keeps writing its last step into a file of its own, and reads its neighbour's.

A rank that crashes ends the job by itself. One that is stuck (a stopped process, a cut link, a loader that waits for
ever) makes all others wait, until their collective times out after --timeout seconds, and that error names the wrong
ranks. So half-way to the timeout the job's log gets a sentence with the rank, the host and what it is doing.

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

from .job import HOST, JOB, RESTART_COUNT

LINE = 4096  # bytes, always as many: a reader never finds the end of an older, longer line

step: int | None = None  # the last that this rank has done; None until it is known, as while a checkpoint is loaded
known = threading.Event()  # set when the step has just become known


def resume(first_step: int):
    """To be called once it is known where the run begins: the file has it at once."""
    global step
    step = first_step
    known.set()


def start(rank: int, world_size: int, timeout: float):
    """Starts the heartbeat's thread, if this is a job. `timeout`, in seconds, is that of the collectives."""
    if world_size > 1 and JOB != "none":
        folder = Path("log", JOB, f"ranks-{RESTART_COUNT}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            return report(rank, f"warning: no heartbeats in {folder}: {error.strerror}")
        threading.Thread(target=beat, args=(file, folder, rank, world_size, timeout), daemon=True).start()


def beat(file: int, folder: Path, rank: int, world_size: int, timeout: float):
    """Never ends. With 1,000 ranks a heartbeat every ten seconds is enough: a hundred a second for the file system."""
    interval = max(min(2, timeout / 10), world_size / 100)
    mine, neighbour = Unchanged(timeout / 2), Unchanged(timeout / 2)
    while True:
        faulthandler.dump_traceback_later(timeout)  # put off each time: it comes when not even this thread runs
        stack, frame, waits = main_stack()
        stuck = mine.too_long((step, stack))
        sign = {"rank": rank, "host": HOST, "step": step, "time": time.time(), "stack": stack, "frame": frame}
        sign |= {"waits": waits, "of": world_size, "still": time.monotonic() - mine.since}  # seconds at step and place
        with contextlib.suppress(OSError):  # a full disk; the line is as long as the one that it overwrites
            os.pwrite(file, json.dumps(sign).encode().ljust(LINE), 0)
        other = read(folder / str((rank - 1) % world_size))
        if neighbour.too_long(other) and other:
            who = f"rank {other['rank']} on {other['host']}"
            report(rank, f"{who} has given no sign of life for {timeout / 2:.0f} s; its last step is {other['step']}")
        if stuck and rank == 0:
            report(rank, describe_stuck([read(folder / str(other)) for other in range(world_size)], timeout / 2))
        if known.wait(interval):
            known.clear()


class Unchanged:
    """Notices, once, that a value has stayed the same for too long."""

    def __init__(self, seconds: float):
        self.seconds, self.value, self.since, self.noticed = seconds, None, time.monotonic(), False

    def too_long(self, value: object) -> bool:
        now = time.monotonic()
        if value != self.value:
            self.value, self.since, self.noticed = value, now, False
        due = not self.noticed and now - self.since > self.seconds
        self.noticed = self.noticed or due
        return due


def read(path: Path) -> dict | None:
    """The last heartbeat of a rank; None where there is none yet, or while it is being written."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def main_stack() -> tuple[list[str], str, bool]:
    """What this rank's main thread is doing: its stack, one frame of that, and whether it waits for other ranks.

    The stack has the innermost call last. The frame is the innermost one that is of a script, ours or the user's, and
    not of a library; "-" if there is none.
    """
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    inside_torch = ("torch/distributed/", "torch/autograd/")  # gloo's collectives of a backward pass are in autograd
    # With NCCL, ranks wait where the result is read.
    waits = any(part in frames[-1].filename for part in inside_torch) or frames[-1].name == "all_reduced"
    shown = [f"{frame.name} ({frame.filename}:{frame.lineno})" for frame in frames]
    own = [text for text, frame in zip(shown, frames, strict=True) if not of_a_library(frame.filename)]
    return shown[-12:], own[-1] if own else "-", waits


def of_a_library(path: str) -> bool:
    """Whether a source file is Python's own or an installed package's."""
    library = os.path.dirname(os.__file__)
    return path.startswith((library, "<")) or "/site-packages/" in path or "/dist-packages/" in path


def describe_stuck(signs: list[dict | None], seconds: float) -> str:
    """Who keeps the others waiting: those that are in no collective, or else the fewest that are at one place."""
    places = defaultdict(list)
    for sign in filter(None, signs):
        places[sign["waits"], tuple(sign["stack"])].append(sign)
    groups = sorted(places.items(), key=lambda group: (group[0][0], len(group[1])))
    (_, stack), stuck = groups[0]
    ranks = ", ".join(f"rank {sign['rank']} on {sign['host']} (step {sign['step']})" for sign in stuck[:4])
    more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
    return f"no step for {seconds:.0f} s. First to look at: {ranks}{more}, in\n    " + "\n    ".join(stack)


def report(rank: int, sentence: str):
    print(f"[Rank {rank} on {HOST}] {sentence}", file=sys.stderr, flush=True)
