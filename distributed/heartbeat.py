"""Heartbeats: every rank says where it is, so that the one for which all wait can be named.

    import heartbeat
    with heartbeat.meeting(local_rank, device):    # or heartbeat.start() after it
        dist.init_process_group(...)
    ...
        heartbeat.step = step      # after every step: a number that rises through all epochs
    ...
    heartbeat.alive(600)           # before a save of ten minutes at most, on every rank
    ...
        heartbeat.alive()          # after every batch of an evaluation

A rank that fails ends the job by itself. But if one hangs, the others wait in a collective until it
times out, and that error names the wrong rank. With these lines `python aux/watch_job.py JOB` shows
what each rank is doing, and if ranks wait for another one for 60 seconds, the log has

    no step for 60 s. First to look at: rank 2 on node-2 (step 49), in ...

and if the others have waited for a fifth of a minute more than a rank,

    rank 2 on node-2 holds the others back: it has waited in 3% of the last minute, they far longer

A heartbeat is a line of JSON in log/JOB/ranks-START/RANK, or by hand in log/local/ranks-PORT/RANK.
Each rank writes one every two seconds; in a job of more than 60 ranks less often, so that all
together write 30 times a second. With HEARTBEAT_LIMIT=600 a run ends that has taken a step, and
takes none for 600 seconds.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict, deque
from pathlib import Path
from statistics import median_high

step: int | None = None
# Set by `alive`: until that time.monotonic() no step after that one is expected.
expected: tuple[float, int | None] = (0.0, None)

HOST = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
# Files in which a rank waits for others: DDP broadcasts a model's buffers in torch/nn/parallel, and
# with gloo the collectives of a backward pass are in torch/autograd. With NCCL a rank waits in the
# line that reads a result. That may be in any file of yours, so holds_up looks at the step first.
WAITING = ("torch/distributed/", "torch/nn/parallel/", "torch/autograd/")
WAITING += ("/preemption.py",)
LIBRARIES = (os.path.dirname(os.__file__), "/site-packages/", "/dist-packages/", "<frozen")


@contextlib.contextmanager
def meeting(local_rank: int, device, asked: str = "auto"):
    """Around init_process_group: the ranks meet, say where they are, and begin their heartbeats.

    A rank that does not reach the others within 300 seconds prints where it waits, and ends.
    `asked` is what --device says: "auto", and yet a CPU, is a fault in a job that was granted GPUs.
    """
    import torch
    import torch.distributed as dist

    if (
        device.type == "cpu"
        and asked == "auto"
        and os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"
    ):
        sys.exit("Slurm granted GPUs, but torch sees none: check nvidia-smi, or pass --device cpu")
    faulthandler.dump_traceback_later(300, exit=True)
    yield
    # A first sum over all ranks shows whether their connections work. .item() waits for it.
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    total.item()
    faulthandler.cancel_dump_traceback_later()
    start()
    place = f"world size: {dist.get_world_size()} | local rank: {local_rank} | device: {device}"
    # One write with its line break, so that the lines of two ranks do not mix.
    print(f"[Rank: {dist.get_rank()} | {os.uname().nodename} | {place}]\n", end="", flush=True)


def start(after: float = 60):
    """Starts the thread that writes, and after `after` seconds without a step reports."""
    import torch.distributed as dist  # watch_job.py reads heartbeats without torch

    heart = Heart(after, dist.get_rank(), dist.get_world_size())
    threading.Thread(target=heart.beat, daemon=True).start()


def alive(seconds: float = 0):
    """Counts as a step, after which the next one may take so many seconds more than usual."""
    global expected
    expected = (time.monotonic() + seconds, step)


class Heart:
    """The thread of a rank. `after` is the time in seconds without a step until a report."""

    def __init__(self, after: float, rank: int, world_size: int):
        env = os.environ
        self.rank, self.world_size = rank, world_size
        self.limit = float(env.get("HEARTBEAT_LIMIT") or "inf")
        # The interval is in seconds. All ranks together write at most 30 times a second.
        self.after, self.interval = min(after, self.limit), max(2, self.world_size / 30)
        self.size = 4096  # bytes of a heartbeat
        # Ten times a second, for `after` seconds: whether this rank waited for others.
        self.waits, self.named = deque(maxlen=int(10 * self.after)), set()
        # For aux/ledger.py: how often it was looked at, was in a step, and waited there
        self.began, self.first_step, self.counts = time.time(), None, [0, 0, 0]
        self.folder = Path("log/local", f"ranks-{env.get('MASTER_PORT', 0)}")
        if "SLURM_JOB_ID" in env:
            restarts = env.get("SLURM_RESTART_COUNT", 0)
            self.folder = Path("log", env["SLURM_JOB_ID"], f"ranks-{restarts}")

    def beat(self):
        """Writes and reports, as long as the process lives."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Without O_DSYNC an NFS client would keep the writes to itself for half a minute.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DSYNC
            self.file = os.open(self.folder / str(self.rank), flags, 0o666)
        except OSError as error:
            return self.say(f"warning: no heartbeats: {error}")

        last, since = None, time.monotonic()
        next_write, next_look, late, reported = since, since + self.after, False, False
        while True:
            now = time.monotonic()
            if (step, expected) != last:
                last, late, reported = (step, expected), False, False
                until, its_step = expected
                since = max(now, until) if its_step == step else now
            seconds = max(0, now - since)
            # A rank is late when half of the time is over. It writes that at once. So at the end of
            # the time, a rank whose last heartbeat is not late can no longer write: its process has
            # hung, or its node.
            if now >= next_write or (seconds > self.after / 2 and not late):
                late = seconds > self.after / 2
                self.write(seconds)
                next_write = now + self.interval
            self.counts[0] += 1
            # Not before the first step, nor in a save or an evaluation.
            if step != expected[1]:
                self.waits.append(main_stack()[2])
                self.counts[1] += 1
                self.counts[2] += self.waits[-1]
                self.first_step = step if self.first_step is None else self.first_step
            if self.rank == 0 and now >= next_look:
                next_look = now + max(self.after / 4, self.world_size / 30)
                with contextlib.suppress(OSError):  # a file server that is away
                    for beat in holds_back(self.look()[0]):
                        if beat["rank"] not in self.named:
                            self.named.add(beat["rank"])
                            self.say(slow_rank(beat))
            if seconds > self.after and not reported:
                reported = True
                self.report(seconds)
            # Before the first step a script may compile or load for as long as it likes.
            if seconds > self.limit and step is not None:
                self.end(seconds)
            time.sleep(0.1)

    def write(self, seconds: float):
        """Writes the heartbeat of a rank that has been in its step for so many seconds."""
        stack, frame, waits = main_stack()
        waited = sum(self.waits) / len(self.waits) if self.counts[1] > 10 * self.after else None
        beat = {"rank": self.rank, "world_size": self.world_size, "host": HOST, "step": step}
        beat |= {"time": time.time(), "interval": self.interval, "seconds_in_step": seconds}
        beat |= {"began": self.began, "first_step": self.first_step, "counts": self.counts}
        beat |= {"waits": waits, "waited": waited, "frame": frame, "stack": stack}
        text = json.dumps(beat).encode()
        # Never shorter than the one before, whose end would remain behind it.
        self.size = max(self.size, len(text))
        with contextlib.suppress(OSError):  # a full disk
            os.pwrite(self.file, text.ljust(self.size), 0)

    def speaks(self) -> bool:
        """Whether this rank reports: all before it are silent."""
        for rank in range(self.rank):
            with contextlib.suppress(OSError, ValueError):
                beat = json.loads((self.folder / str(rank)).read_text())
                if beat["seconds_in_step"] > self.after / 2:
                    return False
        return True

    def look(self) -> tuple[list[dict], list[dict]]:
        """The heartbeats of all ranks, and of those that are silent."""
        # An earlier run with more ranks may have left heartbeats in log/local.
        beats = [beat for beat in read_beats(self.folder) if beat["rank"] < self.world_size]
        return beats, [beat for beat in beats if beat["seconds_in_step"] <= self.after / 2]

    def report(self, seconds: float):
        """Says who keeps the others waiting."""
        if not self.speaks():
            return
        beats, silent = self.look()
        missing = sorted(set(range(self.world_size)) - {beat["rank"] for beat in beats})
        no_step = f"no step for {seconds:.0f} s"
        if missing:
            none = f"{len(missing)} of {self.world_size} ranks have sent no heartbeat"
            return self.say(f"{no_step}: {none}, the first is rank {missing[0]}")
        first = silent or holds_up(beats)
        if not first:
            return self.say(f"{no_step}: all ranks are in {beats[0]['frame']}")
        names = [f"rank {beat['rank']} on {beat['host']} (step {beat['step']})" for beat in first]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        what = "which sends no heartbeat, last seen" if silent else "which is"
        sentence = f"{no_step}. First to look at: {', '.join(names[:4])}{more}, {what} in"
        self.say("\n    ".join([sentence, *first[0]["stack"]]))

    def end(self, seconds: float):
        """Ends this rank, and says because of whom. All do, some seconds apart."""
        speaks = self.speaks()
        if speaks:
            beats, silent = self.look()
            found = [f"rank {beat['rank']} on {beat['host']}" for beat in silent or holds_up(beats)]
            whom = found[0] if found else "no rank by itself"
            print(f"Ended, because of {whom}: no step for {seconds:.0f} s", flush=True)
        # The one that speaks ends first, because srun reports who does.
        time.sleep(1 if speaks else 10)
        os._exit(1)

    def say(self, sentence: str):
        print(f"[Rank {self.rank} on {HOST}] {sentence}", file=sys.stderr, flush=True)


def main_stack() -> tuple[list[str], str, bool]:
    """What the main thread is doing, as `describe` says it."""
    frame = sys._current_frames()[threading.main_thread().ident]
    calls = []
    while frame:
        calls.append((frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return describe(calls)


def describe(calls: list[tuple[str, str, int]]) -> tuple[list[str], str, bool]:
    """Where a thread is, from its calls as (function, file, line), the innermost first.

    Returns the texts of the 12 innermost calls, the innermost last; the text of the innermost that
    is not in a library, or "-"; and whether the innermost of all waits for other ranks.
    """
    texts, own = [], "-"
    for function, path, line in calls:
        text = f"{function} ({path}:{line})"
        if own == "-" and not any(part in path for part in LIBRARIES):
            own = text
        texts.insert(0, text)
    waits = any(part in calls[0][1] for part in WAITING) or "/checkpoint.py:" in own
    return texts[-12:], own, waits


def read_beats(folder: Path) -> list[dict]:
    """The last heartbeat of each rank, by rank. One that is just being written is left out."""
    beats = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError, ValueError):
            beats.append(json.loads(path.read_text()))
    return sorted(beats, key=lambda beat: beat["rank"])


def holds_back(beats: list[dict]) -> list[dict]:
    """The heartbeats of the ranks that slow down the others: all take equally long for a step, but
    these wait for a fifth of the time less."""
    shares = [beat.get("waited") for beat in beats]
    if len(beats) < 2 or None in shares:
        return []
    return [beat for beat in beats if beat["waited"] < median_high(shares) - 0.2]


def slow_rank(beat: dict) -> str:
    share = f"it has waited in {beat['waited']:.0%} of the last minute, they far longer"
    return f"rank {beat['rank']} on {beat['host']} holds the others back: {share}"


def holds_up(beats: list[dict]) -> list[dict]:
    """The heartbeats of the ranks for which the others wait; an empty list if all are at one place.

    These are the ranks at the lowest step; if they are at different places, those that wait for
    nobody; and if these are at different places, those at the place with the fewest ranks. The step
    comes first, because with NCCL the others get some steps further before they wait, and then not
    always inside torch.
    """
    places = defaultdict(list)
    for beat in beats:
        place = (-1 if beat["step"] is None else beat["step"], beat["waits"])
        places[place, tuple(beat["stack"])].append(beat)
    if len(places) < 2:
        return []
    return min(places.items(), key=lambda place: (place[0][0], len(place[1])))[1]
