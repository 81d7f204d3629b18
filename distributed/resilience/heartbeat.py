"""Heartbeats: every rank says where it is, so that the one that others wait for can be named.

A rank that crashes ends the job by itself. One that is stuck (a stopped process, a cut link, a
loader that waits for ever) makes all others wait until their collective times out, and that error
names the wrong ranks. So half-way to the timeout the log gets a sentence with the rank, the host
and what it is doing.

A heartbeat is a line of JSON in log/JOB/ranks-START/RANK, which aux/watch_job.py shows. Each rank
writes every two seconds, or every world_size / 30 seconds in a job of more than 60 ranks, which is
thirty writes a second in all. A rank whose step takes much longer than those before it writes at
once, after a quarter of the timeout. After half of it, it reads its neighbour's, and rank 0 reads
all.

A rank that has been asked to stop cannot save without the others, and NCCL does not always notice
that a peer is gone. So it also reads those of its node, and ends if one is silent.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

from . import stop_request
from .job import HOST, JOB, RESTART_COUNT
from .ranks import Ranks, say, stop

LINE = 4096  # bytes of every beat, so that a reader never finds the end of an older, longer line
SILENT = 10  # seconds


class Heartbeat:
    """What a rank says about itself.

    `step` is the last that it has done, None until that is known, as while a checkpoint is loaded.
    `timeout` is what collectives may take at present, in seconds: see Place.set_timeout. Once it
    is `finished`, a silent rank on this node is one that has ended well.
    """

    def __init__(self, ranks: Ranks, timeout: float):
        self.ranks, self.timeout = ranks, timeout
        self.step: int | None = None
        self.finished = False
        self.folder = Path("log", JOB, f"ranks-{RESTART_COUNT}")
        self.phase, self.since = (None, timeout), time.monotonic()
        self.longest = defaultdict(float)  # seconds of a step so far, by the timeout that held
        self.written, self.late = None, 0
        self.asked_at = self.looked_at = 0.0

    def start(self):
        """Starts a thread that writes and reads, in a job."""
        if JOB == "none":
            return
        try:
            self.open_file()
            threading.Thread(target=self.look_every_second, daemon=True).start()
        except OSError as error:
            say(f"warning: no heartbeats: {error}", self.ranks.rank)

    def open_file(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        # Without O_DSYNC an NFS client would keep the writes to itself for half a minute.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DSYNC
        self.file = os.open(self.folder / str(self.ranks.rank), flags, 0o666)

    def look_every_second(self):
        while True:
            self.look()
            time.sleep(1)

    def look(self):
        step, timeout, now = self.step, self.timeout, time.monotonic()
        if (step, timeout) != self.phase:
            # A save, which has a timeout of its own, is no part of a step.
            if timeout == self.phase[1]:
                self.longest[timeout] = max(self.longest[timeout], now - self.since)
            self.phase, self.since = (step, timeout), now

        # Steps that usually take long are not late, or each of them would be written and read.
        seconds = now - self.since
        quarter = max(timeout / 4, 1.2 * min(self.longest[timeout], timeout / 2))
        half = max(timeout / 2, quarter + timeout / 8)
        late, before = (seconds >= quarter) + (seconds >= half), self.late

        asked = stop_request.came()
        interval = max(min(2, timeout / 10), self.ranks.world_size / 30)
        if asked:
            interval = min(interval, SILENT / 2)
        # By rank, so that not all write in the same second.
        slot = int(now / interval + self.ranks.rank / self.ranks.world_size)
        if (slot, late) != self.written:
            self.write_beat(seconds, interval, late > 0)
            self.written, self.late = (slot, late), late
        if late == 2 > before:
            self.report_stuck(half)

        # asked_at: since when it has been asked to stop, and awake. After a suspension of the job
        # all heartbeats are old.
        if not asked or now - self.looked_at > SILENT / 2:
            self.asked_at = now
        self.looked_at = now
        if now - self.asked_at >= SILENT and not self.finished:
            self.end_beside_silent_rank()

    def write_beat(self, seconds: float, interval: float, stalled: bool):
        stack, frame, in_collective = main_stack()
        beat = {
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
            "host": HOST,
            "time": time.time(),
            "step": self.step,
            "seconds_in_step": seconds,
            "stalled": stalled,
            "interval": interval,
            "in_collective": in_collective,
            "frame": frame,
            "stack": stack,
        }
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self.file, json.dumps(beat).encode().ljust(LINE), 0)

    def beat_of(self, rank: int) -> dict | None:
        return read_beat(self.folder / str(rank))

    def report_stuck(self, seconds: float):
        """A neighbour that is alive has written when a quarter of the timeout was over."""
        rank, world_size = self.ranks.rank, self.ranks.world_size
        other = self.beat_of((rank - 1) % world_size)
        if other and (age := time.time() - other["time"]) > self.timeout / 3:
            who, last = f"rank {other['rank']} on {other['host']}", other["step"]
            say(f"{who} has sent no heartbeat for {age:.0f} s; its last step is {last}", rank)
        if rank == 0:
            beats = [self.beat_of(each) for each in range(world_size)]
            say(describe_stuck(list(filter(None, beats)), seconds), rank)

    def end_beside_silent_rank(self):
        """Ends this process if another rank of its node sends no heartbeats, although it does."""
        beats = {rank: self.beat_of(rank) for rank in self.ranks.of_this_node()}
        ages = {rank: time.time() - beat["time"] for rank, beat in beats.items() if beat}
        if ages.pop(self.ranks.rank, SILENT) >= SILENT:  # a full disk
            return
        for rank, age in ages.items():
            # In a large job a rank that has not been asked writes less often.
            if age > max(SILENT, 2 * beats[rank]["interval"]):
                gone = f"rank {rank} on this node has sent no heartbeat for {age:.0f} s"
                sentence = f"asked to stop, but {gone}: without it this rank cannot save, and ends"
                stop(sentence, self.ranks.rank)


def read_beat(path: Path) -> dict | None:
    """The last heartbeat of a rank; None if there is none yet, or while it is being written."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def main_stack() -> tuple[list[str], str, bool]:
    """What the main thread is doing: its stack, one of its frames, and whether it waits for ranks.

    The stack has the innermost call last. The frame is the innermost one that is not of a library,
    or "-". Unlike traceback.extract_stack this looks at no source file.
    """
    frame, calls, own = sys._current_frames()[threading.main_thread().ident], [], "-"
    # gloo's collectives of a backward pass are in autograd. With NCCL, ranks wait when the result
    # of a collective is read.
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    waits = "torch/distributed/" in path or "torch/autograd/" in path or name == "all_reduced"
    while frame:
        call = f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
        if own == "-" and not of_a_library(frame.f_code.co_filename):
            own = call
        calls.insert(0, call)
        frame = frame.f_back
    return calls[-12:], own, waits


def of_a_library(path: str) -> bool:
    """Whether a source file is Python's own or an installed package's."""
    library = os.path.dirname(os.__file__)
    return path.startswith((library, "<")) or "/site-packages/" in path or "/dist-packages/" in path


def behind(beat: dict) -> tuple[float, bool]:
    """The key by which the ranks that others wait for come first.

    NCCL is asynchronous: others get some steps further before they wait, and then not always inside
    torch.distributed. So the lowest step counts, and at the same step the rank in no collective.
    """
    return -1 if beat["step"] is None else beat["step"], beat["in_collective"]


def describe_stuck(beats: list[dict], seconds: float) -> str:
    """Who keeps the others waiting: those that are behind, or else the fewest at one place."""
    places = defaultdict(list)
    for beat in beats:
        places[behind(beat), tuple(beat["stack"])].append(beat)
    (_, stack), stuck = min(places.items(), key=lambda place: (place[0][0], len(place[1])))
    ranks = [f"rank {beat['rank']} on {beat['host']} (step {beat['step']})" for beat in stuck]
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    first = f"no step for {seconds:.0f} s. First to look at: {', '.join(ranks[:4])}{more}, in"
    return "\n    ".join([first, *stack])
