"""Checkpoints: a file is whole or not there, the newest whole one is found again, and the ranks agree when to save."""

import contextlib
import errno
import os
import pickle
import re
import shutil
import sys
import time
import zipfile
import zlib
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist

from . import heartbeat, step_zero, stop_request


def seed_from(*numbers: int) -> int:
    """One 32-bit seed from several numbers: torch's generator on a CPU looks at no more bits than that.

    Seeded by (seed, step, rank) at every step, dropout needs no random state in a checkpoint to go on as it would have.
    """
    return zlib.crc32(repr(numbers).encode())


class Boundary:
    """What the ranks do together between two steps: go on, save, or save and stop.

    A signal may reach one rank only, and clocks differ, so the ranks exchange what they know: about once a second
    rather than after each step, since it costs a collective and, on a GPU, a wait. How many steps a second has is
    exchanged, too, so that all ranks count alike.
    """

    def __init__(self, args: Namespace, step: int, rank: int, world_size: int, device: torch.device):
        self.args, self.rank, self.world_size, self.device = args, rank, world_size, device
        self.step, self.next, self.time, self.saved = step, step + 1, time.monotonic(), time.monotonic()

    def __call__(self, step: int) -> tuple[bool, bool]:
        """After step number `step`, on every rank: whether to save, and whether to stop."""
        heartbeat.step = step
        every, unit = self.args.checkpoint_every
        save = unit == "steps" and step % every == 0
        if step < self.next:
            return save, False
        now = time.monotonic()
        overdue = unit == "minutes" and now - self.saved > 60 * every
        stop = stop_request.received > 0 or (self.rank == 0 and stop_request.launcher_asks())
        other = self.rank == 0 and owner_fault(self.args.checkpoint_dir) is not None
        stop, overdue, other, speed = self.highest(stop, overdue, other, (step - self.step) / (now - self.time))
        if other:
            step_zero.stop(owner_fault(self.args.checkpoint_dir) or "", self.rank, speak=self.rank == 0)
        if overdue:
            self.saved = now
        self.step, self.time, self.next = step, now, step + max(1, int(speed))
        return bool(save or overdue or stop), bool(stop)

    def highest(self, *values: float) -> list[float]:
        """The greatest of every value over the ranks."""
        if self.world_size == 1:
            return list(values)
        known = torch.tensor(values, dtype=torch.float32, device=self.device)
        dist.all_reduce(known, op=dist.ReduceOp.MAX)
        return known.tolist()


def take_over(folder: Path, rank: int):
    """From now on no other attempt writes into `folder`. On every rank, before anything in there is read."""
    if rank != 0:
        return
    try:
        fault = stop_request.claim(folder)
    except OSError as error:
        fault = f"{folder} cannot be written ({error.strerror}): nothing could be saved"
    if fault:
        step_zero.stop(fault)
    for path in folder.glob(".checkpoint_step_*.tmp"):  # of attempts that were killed while they saved
        remove(path)


def remove(path: Path):
    """A checkpoint, file or folder. What cannot be removed stays: no reason to end a training."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def save(state: dict, folder: Path, step: int, keep: int) -> bool:
    """Writes checkpoint_step_N.pt, whole or not at all, and removes all but the newest `keep`. By rank 0 alone.

    Returns False, after a warning, if it cannot be written (a full disk, say); what was there before still is.
    """
    path = folder / f"checkpoint_step_{step}.pt"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save makes a RuntimeError of a full disk
        remove(temporary)
        warn_not_saved(path, first_line(error))
        return False
    prune(folder, step, keep)
    return True


def prune(folder: Path, step: int, keep: int):
    """Removes all but the newest `keep` of the checkpoints up to this step. Those beyond are nothing to count on."""
    for old in [path for path in find(folder) if step_of(path) <= step][keep:]:
        remove(old)


def publish(temporary: Path, path: Path):
    """Gives a file or folder its name, unless another start of the job has taken over; then this one ends."""
    if fault := owner_fault(path.parent):
        step_zero.stop(fault)
    if path.is_dir():  # a name that is taken, os.replace gives to a file only
        shutil.rmtree(path)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name, too, must survive a power cut
    os.close(folder)


def owner_fault(folder: Path) -> str | None:
    """One sentence when another start of this job, or another job, has begun to write into `folder`; or None."""
    owner = stop_request.owner(folder)
    if owner == stop_request.token():
        return None
    return f"{folder} now belongs to another attempt ({owner}): this one writes nothing more and ends"


def first_line(error: BaseException) -> str:
    """What went wrong at first: of a full disk torch.save makes a RuntimeError that does not speak of it."""
    for _, (failure, _) in getattr(error, "failures", {}).items():  # of dcp's CheckpointException
        return first_line(failure)
    while cause := error.__cause__ or error.__context__:
        error = cause
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def warn_not_saved(path: Path, reason: str):
    print(f"warning: {path} could not be saved, older ones are kept: {reason}", file=sys.stderr, flush=True)


def find(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the newest first: by the number in their name, never by their date.

    Files checkpoint_step_N.pt, or the folders checkpoint_step_N that sharded_checkpoint.py writes.
    """
    named = [path for path in folder.glob("checkpoint_*") if re.fullmatch(r"checkpoint_step_\d+(\.pt)?", path.name)]
    return sorted(named, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removesuffix(".pt").removeprefix("checkpoint_step_"))


def in_the_way(folder: Path, resume: bool, suffix: str) -> str | None:
    """One sentence when a run would mix its checkpoints (of that suffix) with others, or can have none; or None."""
    try:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        usable = there.is_dir() and os.access(there, os.W_OK)
        found = find(folder)
    except OSError as error:  # a name that is too long, say
        return f"--checkpoint-dir cannot be used: {error.strerror}"
    if not usable:
        return f"{there} cannot be written: choose another --checkpoint-dir"
    if foreign := next((path for path in found if path.suffix != suffix), None):
        return f"{foreign} is of a script that saves otherwise: choose another --checkpoint-dir"
    if resume or not found:
        return None
    return f"{found[0]} is of an earlier run: continue that one with --resume, or choose another --checkpoint-dir"


def changes(folder: Path, before: dict, now: dict) -> str | None:
    """One sentence when what makes a run the same run differs from what a checkpoint has been made with; or None."""
    told = [f"{name} was {before.get(name)}, not {value}" for name, value in now.items() if before.get(name) != value]
    if not told:
        return None
    return f"the checkpoints in {folder} are of another run: {', '.join(told)}; or choose another --checkpoint-dir"


def finish(step: int, total_steps: int, saved: bool, rank: int, result: str):
    """The last words of a run, in the log and to the launcher, which requeues a job that was stopped before its end."""
    if not saved:
        step_zero.stop("the last steps could not be saved", rank, speak=rank == 0)
    if rank == 0:
        done = step == total_steps
        try:
            stop_request.tell_launcher("finished" if done else "stopped", step)
        except OSError as error:
            step_zero.stop(f"step {step} is saved, but no launcher can be told ({error.strerror}): --resume goes on")
        print(f"Finished: {result}" if done else f"Stopped after step {step}: --resume goes on", flush=True)


def load_newest(folder: Path) -> dict | None:
    """The newest checkpoint that is whole, on the CPU, or None; damaged ones are named on stderr and passed over.

    Raises OSError when one cannot be read for another reason: the next start may well read it.
    """
    for path in find(folder):
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
                damaged = archive.testzip()
            if damaged is None:
                return torch.load(path, map_location="cpu", weights_only=True)
            reason = f"{damaged} in it fails its checksum"
        except Exception as error:  # truncated, it raises one of half a dozen kinds, depending on where it was cut
            reason = first_line(error)
            if fault := out_of_reach(path, error):
                raise OSError(fault) from error
        pass_over(path, reason)
    return None


def out_of_reach(path: Path, error: Exception) -> str | None:
    """One sentence when what raises this may be whole, but not to be read now, or of a refused kind; or None."""
    damage = getattr(error, "errno", None) in (None, errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOTDIR)
    if damage and not isinstance(error, MemoryError | pickle.UnpicklingError):
        return None
    return f"{path} is not damaged, but cannot be loaded: {first_line(error)}"


def lost(folder: Path) -> str | None:
    """One sentence when `folder` must have had a checkpoint, but none is whole; or None: then a run may begin."""
    if damaged := list(folder.glob("damaged_*")):
        return f"{folder} has {len(damaged)} damaged checkpoints and no whole one: choose another --checkpoint-dir"
    if step := os.environ.get("JOB_STEP_BEFORE"):
        return f"step {step} was saved before the job was requeued, but {folder} has no checkpoint any more"
    return None


def pass_over(path: Path, reason: str):
    """Names a damaged checkpoint, and puts it aside: it must not count as one of those to keep."""
    print(f"warning: checkpoint {path} is damaged and skipped: {reason}", file=sys.stderr, flush=True)
    if owner_fault(path.parent) is None:
        with contextlib.suppress(OSError):
            os.replace(path, path.with_name(f"damaged_{path.name}"))


def load_on_all_ranks(folder: Path, rank: int, world_size: int, device: torch.device) -> dict | None:
    """`load_newest` on rank 0, which chooses for all: no two ranks may go on from different files."""
    state = [None]
    if rank == 0:
        try:
            state = [load_newest(folder)]
        except OSError as error:
            step_zero.stop(str(error))
        if state == [None] and (fault := lost(folder)):
            step_zero.stop(fault)
    if world_size > 1:
        dist.broadcast_object_list(state, src=0, device=device)
    return state[0]
