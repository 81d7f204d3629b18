"""Heartbeats: every rank tells where it is, so that the one that others wait for can be named.

A rank that crashes ends the job by itself. One that is stuck (a stopped process, a cut link, a
loader that waits for ever) makes all others wait until their collective times out, and that error
names the wrong ranks. So half-way to the timeout the log gets a sentence with the rank, the host
and what it is doing. There are two kinds of heartbeats:

- Files log/JOB/ranks-START/RANK, a line of JSON each, which aux/watch_job.py shows. A rank writes
  its own every two seconds, and in a job of more than 60 ranks every world_size / 30 seconds:
  thirty writes a second in all. When a step has taken a quarter, and when it has taken half of the
  timeout, it writes at once; later, up to three quarters, where steps usually take that long. Only
  after the half, once, it reads: its neighbour's file, rank 0 all.
- Datagrams between the ranks of a node, one a second. A rank that has been asked to stop cannot
  save without the others, and NCCL does not always notice that a peer is gone. When another rank
  of its node has been silent for ten seconds, it ends at once.
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
from collections.abc import Callable
from pathlib import Path

from . import stop_request
from .job import HOST, JOB, RESTART_COUNT
from .ranks import Ranks, say

LINE = 4096  # bytes, always as many: a reader never finds the end of an older, longer line
SILENT = 10  # seconds


class Heartbeat:
    """What a rank tells of itself.

    `step` is the last that it has done, None until that is known, as while a checkpoint is loaded.
    `timeout` is what collectives may take at present, in seconds: see Place.set_timeout. Once it
    is `finished`, a silent rank on this node is one that has ended well.
    """

    def __init__(self, ranks: Ranks, timeout: float):
        self.ranks, self.timeout = ranks, timeout
        self.step: int | None = None
        self.finished = False

    def start(self):
        """Starts a thread for either kind: a file system may hang, and the rank be well."""
        kinds = [Datagrams] if sys.platform == "linux" else []
        if JOB != "none":
            kinds.append(Files)
        for kind in kinds:
            try:
                look = kind(self).look
            except OSError as error:
                say(f"warning: no heartbeats: {error}", self.ranks.rank)
            else:
                threading.Thread(target=every_second, args=(look,), daemon=True).start()


def every_second(look: Callable[[], None]):
    while True:
        look()
        time.sleep(1)


# --- files ---


class Files:
    """This rank's file, and a look at the others' when there is no step for half of the timeout."""

    def __init__(self, heartbeat: Heartbeat):
        self.heartbeat, self.ranks = heartbeat, heartbeat.ranks
        self.phase, self.since, self.slot, self.late = None, 0.0, 0, 0
        self.longest = defaultdict(float)  # seconds of a step so far, by the timeout that held
        self.folder = Path("log", JOB, f"ranks-{RESTART_COUNT}")
        self.folder.mkdir(parents=True, exist_ok=True)
        # O_DSYNC: an NFS client would keep what is written to itself for half a minute.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DSYNC
        self.file = os.open(self.folder / str(self.ranks.rank), flags, 0o666)

    def look(self):
        step, timeout, now = self.heartbeat.step, self.heartbeat.timeout, time.monotonic()
        interval = max(min(2, timeout / 10), self.ranks.world_size / 30)
        news = self.phase is None or (self.phase[0] is None) != (step is None)
        if (step, timeout) != self.phase:
            # A save, which has a timeout of its own, is no part of a step.
            if self.phase and self.phase[1] == timeout:
                self.longest[timeout] = max(self.longest[timeout], now - self.since)
            self.phase, self.since = (step, timeout), now

        # Steps that usually take long are not late: each would be written, and read.
        still, usual = now - self.since, min(self.longest[timeout], timeout / 2)
        quarter = max(timeout / 4, 1.2 * usual)
        half = max(timeout / 2, quarter + timeout / 8)
        late, before = (still >= quarter) + (still >= half), self.late
        # Not all ranks write in the same second.
        slot = int(now / interval + self.ranks.rank / self.ranks.world_size)
        if news or late != before or slot != self.slot:
            self.write_beat(still, interval, late > 0)
            self.slot, self.late = slot, late
        if late == 2 > before:
            self.report_stuck(half)

    def write_beat(self, still: float, interval: float, stalled: bool):
        stack, frame, in_collective = main_stack()
        beat = {"rank": self.ranks.rank, "world_size": self.ranks.world_size, "host": HOST}
        beat |= {"time": time.time(), "step": self.heartbeat.step, "stack": stack, "frame": frame}
        beat |= {"in_collective": in_collective, "stalled": stalled}
        beat |= {"seconds_in_step": still, "interval": interval}
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self.file, json.dumps(beat).encode().ljust(LINE), 0)

    def report_stuck(self, seconds: float):
        """A neighbour that is alive has written when a quarter of the timeout was over."""
        rank, world_size = self.ranks.rank, self.ranks.world_size
        other = read_beat(self.folder / str((rank - 1) % world_size))
        if other and (age := time.time() - other["time"]) > self.heartbeat.timeout / 3:
            who, last = f"rank {other['rank']} on {other['host']}", other["step"]
            say(f"{who} has sent no heartbeat for {age:.0f} s; its last step is {last}", rank)
        if rank == 0:
            beats = [read_beat(self.folder / str(each)) for each in range(world_size)]
            say(describe_stuck(beats, seconds), rank)


def read_beat(path: Path) -> dict | None:
    """The last heartbeat of a rank; None where there is none yet, or while it is being written."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def main_stack() -> tuple[list[str], str, bool]:
    """What the main thread is doing: its stack, one frame of that, and whether it waits for ranks.

    The stack has the innermost call last. The frame is the innermost one that is not of a library,
    or "-". Unlike traceback.extract_stack this looks at no source file.
    """
    frame, found = sys._current_frames()[threading.main_thread().ident], []
    while frame:
        found.insert(0, (frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    name, path, _ = found[-1]
    # gloo's collectives of a backward pass are in autograd.
    inside_torch = ("torch/distributed/", "torch/autograd/")
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

    NCCL is asynchronous: others get some steps further before they wait, and then not always inside
    torch.distributed. So the lowest step counts, and at the same step who is in no collective.
    """
    return -1 if beat["step"] is None else beat["step"], beat["in_collective"]


def describe_stuck(beats: list[dict | None], seconds: float) -> str:
    """Who keeps the others waiting: those that are behind, or else the fewest at one place."""
    places = defaultdict(list)
    for beat in filter(None, beats):
        places[behind(beat), tuple(beat["stack"])].append(beat)
    groups = sorted(places.items(), key=lambda group: (group[0][0], len(group[1])))
    (_, stack), stuck = groups[0]
    ranks = ", ".join(
        f"rank {beat['rank']} on {beat['host']} (step {beat['step']})" for beat in stuck[:4]
    )
    more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
    return (
        f"no step for {seconds:.0f} s. First to look at: {ranks}{more}, in\n    "
        + "\n    ".join(stack)
    )


# --- datagrams ---


class Datagrams:
    """A socket of each rank on a node, in Linux' abstract namespace: no file stays behind."""

    def __init__(self, heartbeat: Heartbeat):
        self.heartbeat, rank = heartbeat, heartbeat.ranks.rank
        job = f"\0heartbeat.{JOB}.{RESTART_COUNT}.{os.environ.get('MASTER_PORT')}"
        others = [other for other in heartbeat.ranks.of_this_node() if other != rank]
        self.others = {f"{job}.{other}".encode(): other for other in others}
        # Seconds of this rank's own, by rank: one that is suspended counts none.
        self.missed: dict[int, int] = {}
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.socket.bind(f"{job}.{rank}")

    def look(self):
        # Put off each time: it comes when not even this thread runs.
        faulthandler.dump_traceback_later(self.heartbeat.timeout)
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
        if silent and not self.heartbeat.finished and stop_request.came():
            gone = f"rank {silent[0]} on this node has sent no heartbeat for {SILENT} s"
            sentence = f"asked to stop, but {gone}: without it this rank cannot save, and ends"
            say(sentence, self.heartbeat.ranks.rank)
            os._exit(1)
