"""Heartbeats: every rank tells where it is, and that it is alive, so that the one that others wait for can be named.

A rank that crashes ends the job by itself. One that is stuck (a stopped process, a cut link, a loader that waits for
ever) makes all others wait, until their collective times out, and that error names the wrong ranks. So half-way to the
timeout the job's log gets a sentence with the rank, the host and what it is doing. There are two kinds of heartbeats:

- Files log/JOB/ranks-START/RANK, a line of JSON each, which aux/watch_job.py shows. A rank writes its own every two
  seconds, and in a job of more than 60 ranks every world_size / 30 seconds: thirty writes a second in all, however many
  ranks there are. At 4,096 ranks that is 7 operations a second per thousand ranks. When a step has taken a quarter, and
  when it has taken half of the timeout, it writes at once; later, up to three quarters, where steps usually take that
  long. Only after the half, once, it reads: its neighbour's file, rank 0 all.
- Datagrams between the ranks of a node, one a second, which no file system sees. NCCL does not always notice that a
  peer is gone. A rank that has been asked to stop cannot save without it, and would wait until its collective times
  out: when another one on its node has been silent for ten seconds, it ends at once.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from . import stop_request
from .job import HOST, JOB, RESTART_COUNT

LINE = 4096  # bytes, always as many: a reader never finds the end of an older, longer line
SILENT = 10  # seconds

step: int | None = None  # the last that this rank has done; None until it is known, as while a checkpoint is loaded
timeout = 120.0  # seconds that collectives may take at present: see Place.set_timeout
finished = False  # from now on a silent rank on this node is one that has ended well


def start(rank: int, world_size: int, local_ranks: Iterable[int]):
    """Starts a thread for either kind: a file system that hangs must not look like a rank that has ended.

    `local_ranks` are the ranks of this node.
    """
    for kind in [Files] * (JOB != "none") + [Datagrams] * (sys.platform == "linux"):
        try:
            heart = kind(rank, world_size, local_ranks)
        except OSError as error:
            report(rank, f"warning: no heartbeats: {error}")
        else:
            threading.Thread(target=every_second, args=(heart.beat,), daemon=True).start()


def every_second(beat: Callable[[], None]):
    """Never ends."""
    while True:
        beat()
        time.sleep(1)


# --- files ------------------------------------------------------------------------------------------------------------


class Files:
    """This rank's file, and a look at the others' when there is no step for half of the timeout."""

    def __init__(self, rank: int, world_size: int, local_ranks: Iterable[int]):
        self.rank, self.world_size, self.folder = rank, world_size, Path("log", JOB, f"ranks-{RESTART_COUNT}")
        self.phase, self.since, self.slot, self.late = None, 0.0, 0.0, 0
        self.longest = defaultdict(float)  # seconds of a step so far, by the timeout that held
        self.folder.mkdir(parents=True, exist_ok=True)
        # O_DSYNC: an NFS client would keep what is written to itself for half a minute.
        self.file = os.open(self.folder / str(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DSYNC, 0o666)

    def beat(self):
        now, interval = time.monotonic(), max(min(2, timeout / 10), self.world_size / 30)
        news = self.phase is None or (self.phase[0] is None) != (step is None)
        if (step, timeout) != self.phase:  # what a save has taken, with a timeout of its own, is no part of a step
            if self.phase and self.phase[1] == timeout:
                self.longest[timeout] = max(self.longest[timeout], now - self.since)
            self.phase, self.since = (step, timeout), now
        still, usual = now - self.since, min(self.longest[timeout], timeout / 2)
        quarter = max(timeout / 4, 1.2 * usual)  # else every step that takes long would be written, and read
        half = max(timeout / 2, quarter + timeout / 8)
        late, before = (still >= quarter) + (still >= half), self.late
        slot = (now / interval + self.rank / self.world_size) // 1  # not all ranks in the same second
        if news or late != before or slot != self.slot:
            self.write(still, interval, late > 0)
            self.slot, self.late = slot, late
        if late == 2 > before:
            self.report_stuck(half)

    def write(self, still: float, interval: float, stalled: bool):
        stack, frame, in_collective = main_stack()
        beat = {"rank": self.rank, "world_size": self.world_size, "host": HOST, "time": time.time(), "step": step}
        beat |= {"stack": stack, "frame": frame, "in_collective": in_collective, "stalled": stalled}
        beat |= {"seconds_in_step": still, "interval": interval}
        with contextlib.suppress(OSError):  # a full disk; the line is as long as the one that it overwrites
            os.pwrite(self.file, json.dumps(beat).encode().ljust(LINE), 0)

    def report_stuck(self, seconds: float):
        """A neighbour that is alive stands still, too, and has written that when a quarter of the timeout was over."""
        other = read(self.folder / str((self.rank - 1) % self.world_size))
        if other and (age := time.time() - other["time"]) > timeout / 3:
            who, last = f"rank {other['rank']} on {other['host']}", other["step"]
            report(self.rank, f"{who} has sent no heartbeat for {age:.0f} s; its last step is {last}")
        if self.rank == 0:
            beats = [read(self.folder / str(other)) for other in range(self.world_size)]
            report(self.rank, describe_stuck(beats, seconds))


def read(path: Path) -> dict | None:
    """The last heartbeat of a rank; None where there is none yet, or while it is being written."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def main_stack() -> tuple[list[str], str, bool]:
    """What this rank's main thread is doing: its stack, one frame of that, and whether it waits for other ranks.

    The stack has the innermost call last. The frame is the innermost one that is of a script, ours or the user's, and
    not of a library; "-" if there is none. Unlike traceback.extract_stack this looks at no source file.
    """
    frame, found = sys._current_frames()[threading.main_thread().ident], []
    while frame:
        found.insert(0, (frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    name, path, _ = found[-1]
    inside_torch = ("torch/distributed/", "torch/autograd/")  # gloo's collectives of a backward pass are in autograd
    # With NCCL, ranks wait where the result is read.
    waits = any(part in path for part in inside_torch) or name == "all_reduced"
    shown = [f"{name} ({path}:{line})" for name, path, line in found]
    own = [text for text, (_, path, _) in zip(shown, found, strict=True) if not of_a_library(path)]
    return shown[-12:], own[-1] if own else "-", waits


def of_a_library(path: str) -> bool:
    """Whether a source file is Python's own or an installed package's."""
    library = os.path.dirname(os.__file__)
    return path.startswith((library, "<")) or "/site-packages/" in path or "/dist-packages/" in path


def behind(beat: dict) -> tuple[float, bool]:
    """The key by which the ranks that others wait for come first.

    NCCL is asynchronous: others get some steps further before they wait, and then not always inside torch.distributed.
    So the lowest step counts, and at the same step who is in no collective.
    """
    return -1 if beat["step"] is None else beat["step"], beat["in_collective"]


def describe_stuck(beats: list[dict | None], seconds: float) -> str:
    """Who keeps the others waiting: those that are behind, or else the fewest that are at one place."""
    places = defaultdict(list)
    for beat in filter(None, beats):
        places[behind(beat), tuple(beat["stack"])].append(beat)
    groups = sorted(places.items(), key=lambda group: (group[0][0], len(group[1])))
    (_, stack), stuck = groups[0]
    ranks = ", ".join(f"rank {beat['rank']} on {beat['host']} (step {beat['step']})" for beat in stuck[:4])
    more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
    return f"no step for {seconds:.0f} s. First to look at: {ranks}{more}, in\n    " + "\n    ".join(stack)


# --- datagrams --------------------------------------------------------------------------------------------------------


class Datagrams:
    """A socket of each rank on a node, in Linux' abstract namespace: no file stays behind."""

    def __init__(self, rank: int, world_size: int, local_ranks: Iterable[int]):
        job = f"\0heartbeat.{JOB}.{RESTART_COUNT}.{os.environ.get('MASTER_PORT')}"
        names = {f"{job}.{other}".encode(): other for other in local_ranks}
        self.rank, self.others = rank, {name: other for name, other in names.items() if other != rank}
        self.missed: dict[int, int] = {}  # seconds, by rank, of this rank's own: one that is suspended counts none
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(f"{job}.{rank}")

    def beat(self):
        faulthandler.dump_traceback_later(timeout)  # put off each time: it comes when not even this thread runs
        for other in self.others:
            with contextlib.suppress(OSError):  # it does not listen yet, or no more
                self.socket.sendto(b"alive", other)
        for other in self.missed:
            self.missed[other] += 1
        with contextlib.suppress(BlockingIOError):
            while True:
                _, sender = self.socket.recvfrom(16)
                if sender in self.others:
                    self.missed[self.others[sender]] = 0
        silent = [other for other, missed in self.missed.items() if missed >= SILENT]
        if silent and not finished and stop_request.came():
            gone = f"rank {silent[0]} on this node has sent no heartbeat for {SILENT} s"
            report(self.rank, f"asked to stop, but {gone}: without it this rank cannot save, and ends")
            os._exit(1)


def report(rank: int, sentence: str):
    print(f"[Rank {rank} on {HOST}] {sentence}", file=sys.stderr, flush=True)
