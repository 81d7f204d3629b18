"""Checkpoints: when the ranks save and stop, files that are written whole or not at all, and the way back from them.

A checkpoint folder belongs to one start of one job, whose name is in the file `owner` in it. Slurm requeues a job whose
node it has lost sight of, and on that node the old ranks may still be alive. They find another owner, and end.
"""

import contextlib
import copy
import errno
import os
import pickle
import re
import shutil
import signal
import sys
import time
import zipfile
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import heartbeat, stop_request
from .job import HOST, JOB, RESTART_COUNT, requeue, resume_command, write_atomically
from .place import Place, stop


def seed_from(*numbers: int) -> int:
    """One 32-bit seed from several numbers: torch's generator on a CPU looks at no more bits than that.

    Seeded by (seed, step, rank) at every step, dropout needs no random state in a checkpoint to resume as it was.
    """
    return zlib.crc32(repr(numbers).encode())


class Checkpoints:
    """The checkpoints of a run: files checkpoint_step_N.pt in args.checkpoint_dir, written by rank 0.

    `run` is what makes a run the same run (batch size, seed, ...), as plain values: only a run that is equal in all of
    them can be resumed, and rank 0 compares them. Of `args` it uses checkpoint_dir, checkpoint_every, keep_checkpoints,
    resume, timeout and save_timeout. All methods are collectives. A fault ends all ranks with one sentence.
    """

    suffix = ".pt"

    def __init__(self, args: Namespace, place: Place, run: dict, total_steps: int):
        self.args, self.place, self.run, self.total_steps = args, place, run, total_steps
        self.folder: Path = args.checkpoint_dir
        self.step, self.resumed_from, self.values, self.failed = 0, 0, {}, False
        self.agreed_step, self.agree_next, self.agreed_at, self.saved_at = 0, 1, time.monotonic(), time.monotonic()

    @classmethod
    def conflict(cls, args: Namespace) -> str | None:
        """One sentence when this run cannot save into --checkpoint-dir, or would mix its checkpoints with others."""
        return conflicting(args.checkpoint_dir, args.resume, cls.suffix)

    def resume(self, parts: dict[str, Any]) -> int:
        """Claims the folder and, with --resume, loads the newest whole checkpoint into `parts` (model, optimizer, ...).

        Returns its step, or 0 for a new run. What save() was given besides the parts is then in self.values.
        """
        if self.place.rank == 0 and (fault := claim(self.folder)):
            stop(fault)
        with self.place.longer_timeout(self.args.save_timeout):
            found = self.load(parts) if self.args.resume else None
        if found:
            self.step, self.values = found.pop("step"), found
            self.resumed_from = self.step
        elif self.args.resume and self.place.rank == 0 and (fault := missing(self.folder)):
            stop(fault)
        self.agreed_step, self.agree_next = self.step, self.step + 1
        heartbeat.step = self.step
        if self.args.resume and self.place.rank == 0:
            resumed = f"Resumed after step {self.step}" if self.step else f"No whole checkpoint in {self.folder}"
            print(resumed, flush=True)
        return self.step

    def due(self, step: int) -> tuple[bool, bool]:
        """Whether to save after step number `step`, and whether to stop then: the same answer on every rank.

        A signal may reach one rank only, and clocks differ, so the ranks exchange what they know. They do so about once
        a second rather than after each step, since it costs a collective and, on a GPU, a wait. How many steps a second
        has is exchanged, too, so that all ranks count alike.
        """
        self.step = heartbeat.step = step
        every, unit = self.args.checkpoint_every
        save = step == self.total_steps or (unit == "steps" and step % every == 0)
        if step < self.agree_next:
            return save, False
        now = time.monotonic()
        overdue = unit == "minutes" and now - self.saved_at > 60 * every
        fault = owner_fault(self.folder) if self.place.rank == 0 else None
        speed = (step - self.agreed_step) / (now - self.agreed_at)
        values = (stop_request.received > 0, overdue, fault is not None, speed)
        asked, overdue, superseded, speed = self.place.all_reduced(values, dist.ReduceOp.MAX)
        if superseded:
            self.place.stop_if_any(fault)
        if overdue:
            self.saved_at = now
        self.agreed_step, self.agreed_at, self.agree_next = step, now, step + max(1, int(speed))
        self.place.set_timeout(self.args.timeout)  # the first step is done
        return bool(save or overdue or asked), bool(asked)

    def save(self, step: int, parts: dict[str, Any], **values: Any):
        """Writes a checkpoint of the parts' states and `values` (plain ones), and removes all but the newest.

        One that cannot be written is a warning: older ones are kept, and the run continues.
        """
        self.step, start = step, time.perf_counter()
        with self.place.longer_timeout(self.args.save_timeout):
            self.failed = not self.write(step, parts, values)
        self.place.seconds_saving += time.perf_counter() - start

    def finish(self, result: str):
        """Prints the last line of a run. Rank 0 requeues the job of a run that was stopped before its end.

        If the job cannot be requeued, it prints the command that resumes the run, and the job will end with status 1.
        """
        [failures] = self.place.all_reduced([self.failed])
        if failures:
            self.place.stop("the last steps could not be saved")
        if self.place.rank != 0:
            return
        done = self.step >= self.total_steps
        # torchrun, once told to stop, fails even if its ranks finish. Requeued, the job finds that all is done.
        told = self.place.launcher == "torchrun" and stop_request.received == signal.SIGTERM
        print(f"Finished: {result}" if done else f"Stopped after step {self.step}, saved", flush=True)
        if JOB == "none" or (done and not told):
            return
        command = resume_command(self.folder)
        reason = requeue(self.step > self.resumed_from, "" if done else command)
        if reason is not None and not done:
            print(f"Not requeued: {reason}. To resume it:\n    {command}", file=sys.stderr)
            self.place.status = 1

    # Another format overrides these two.

    def load(self, parts: dict[str, Any]) -> dict | None:
        """Loads the newest whole checkpoint, if there is one. Returns its step and the values that save() was given.

        Rank 0 chooses for all: no two ranks may resume from different files. Each of them maps the file into memory.
        """
        chosen = [self.choose() if self.place.rank == 0 else None]
        if self.place.world_size > 1:
            dist.broadcast_object_list(chosen, src=0, device=self.place.device)
        path, content, fault = chosen[0]
        if fault:
            self.place.stop(fault)
        if path is None:
            return None
        try:
            if fingerprint(path) != content:
                raise OSError("it is another file")
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # as of a checkpoint that is damaged: one of half a dozen kinds
            fault = not_shared(path, first_line(error))
        self.place.stop_if_any(fault)
        for name, part in parts.items():
            # A copy: an optimizer would keep the mapped tensors as they are, and their file will be removed one day.
            part.load_state_dict(copy.deepcopy(state.pop(name)))
        del state["run"]
        return state

    def choose(self) -> tuple[Path | None, int | None, str | None]:
        """The newest whole checkpoint, its fingerprint, and what is wrong with it in one sentence. By rank 0 alone."""
        try:
            if (found := newest(self.folder)) is None:
                return None, None, None
            path, state = found
            return path, fingerprint(path), self.other_run(state["run"])
        except OSError as error:
            return None, None, str(error)

    def write(self, step: int, parts: dict[str, Any], values: dict) -> bool:
        """Whether the checkpoint could be written."""
        if self.place.rank != 0:
            return True
        state = {"run": self.run, "step": step, **values} | {name: part.state_dict() for name, part in parts.items()}
        return write(state, self.folder, step, self.args.keep_checkpoints)

    def other_run(self, run: dict) -> str | None:
        """One sentence when a checkpoint is of another run, or None."""
        changed = [f"{name} was {run.get(name)}, not {now}" for name, now in self.run.items() if run.get(name) != now]
        of = f"the checkpoints in {self.folder} are of another run"
        return f"{of}: {', '.join(changed)}; or choose another --checkpoint-dir" if changed else None


# --- the folder -------------------------------------------------------------------------------------------------------


def find(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the newest first: by the number in their name, never by their date.

    Files checkpoint_step_N.pt, or the folders checkpoint_step_N that sharded_checkpoints.py writes.
    """
    named = [path for path in folder.glob("checkpoint_*") if re.fullmatch(r"checkpoint_step_\d+(\.pt)?", path.name)]
    return sorted(named, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removesuffix(".pt").removeprefix("checkpoint_step_"))


def conflicting(folder: Path, resume: bool, suffix: str) -> str | None:
    """One sentence when a run would mix its checkpoints (of that suffix) with others, or can have none; or None."""
    try:
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        usable = nearest.is_dir() and os.access(nearest, os.W_OK)
        found = find(folder)
    except OSError as error:  # a name that is too long, for example
        return f"--checkpoint-dir cannot be used: {error.strerror}"
    if not usable:
        return f"{nearest} cannot be written: choose another --checkpoint-dir"
    if foreign := next((path for path in found if path.suffix != suffix), None):
        return f"{foreign} was written in another format: choose another --checkpoint-dir"
    if resume or not found:
        return None
    return f"{found[0]} is of an earlier run: continue that one with --resume, or choose another --checkpoint-dir"


def missing(folder: Path) -> str | None:
    """One sentence when `folder` must have had a checkpoint, but none is whole; or None: then a run may begin."""
    if damaged := list(folder.glob("damaged_*")):
        return f"{folder} has {len(damaged)} damaged checkpoints and no whole one: choose another --checkpoint-dir"
    return None


def prune(folder: Path, step: int, keep: int):
    """Removes all but the newest `keep` of the checkpoints up to this step. Later ones may be of an abandoned run."""
    for old in [path for path in find(folder) if step_of(path) <= step][keep:]:
        remove(old)


def remove(path: Path):
    """A checkpoint, file or folder. One that cannot be removed is no reason to end a training."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# --- fencing ----------------------------------------------------------------------------------------------------------


def token() -> str:
    """Who writes into a checkpoint folder: a start of a job, or a process."""
    return f"job {JOB}, start {RESTART_COUNT}, {HOST}:{os.getpid()}"


def claim(folder: Path) -> str | None:
    """From now on no other start of the job, and no other job, may write into `folder`. By rank 0, before it reads.

    Returns one sentence when that cannot be, as for a start that comes up after the one that superseded it; or None.
    """
    start = re.fullmatch(r"job (\d+), start (\d+), .*", owner(folder))
    if start and start[1] == JOB and int(start[2]) > int(RESTART_COUNT):
        return f"{folder} belongs to a later start of this job: this one has been superseded, and ends"
    try:
        write_atomically(folder / "owner", token())
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror}): nothing could be saved"
    for path in folder.glob(".checkpoint_step_*.tmp"):  # of starts that were killed while they saved
        remove(path)
    return None


def owner(folder: Path) -> str:
    """Who may write into `folder`. One that cannot be read is still ours: a full disk is not another owner."""
    try:
        return (folder / "owner").read_text()
    except OSError:
        return token()


def owner_fault(folder: Path) -> str | None:
    """One sentence when another start of this job, or another job, has claimed `folder`; or None."""
    other = owner(folder)
    if other == token():
        return None
    return f"{folder} now belongs to another attempt ({other}): this one writes nothing more and ends"


# --- files ------------------------------------------------------------------------------------------------------------


def write(state: dict, folder: Path, step: int, keep: int) -> bool:
    """Writes checkpoint_step_N.pt, whole or not at all, and removes all but the newest `keep`. By rank 0 alone.

    Returns False, after a warning, if it cannot be written, as on a full disk. Older ones are kept then.
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


def publish(temporary: Path, path: Path):
    """Gives a file or folder its name. Ends this process instead when another start of the job owns the folder."""
    if fault := owner_fault(path.parent):
        stop(fault)
    if path.is_dir():  # os.replace gives a name that is taken to a file only
        shutil.rmtree(path)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # the new name, too, must survive a power cut
    os.close(folder)


def warn_not_saved(path: Path, reason: str):
    print(f"warning: {path} could not be saved, older ones are kept: {reason}", file=sys.stderr, flush=True)


def newest(folder: Path) -> tuple[Path, dict] | None:
    """The newest whole checkpoint and what is in it, or None. Damaged ones are named on stderr and quarantined.

    Raises OSError when one cannot be read for another reason: the next start may well read it.
    """
    for path in find(folder):
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
                damaged = archive.testzip()
            if damaged is None:
                return path, torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            reason = f"{damaged} in it fails its checksum"
        except Exception as error:  # truncated, it raises one of half a dozen kinds, depending on where it was cut
            reason = first_line(error)
            if fault := unreadable(path, error):
                raise OSError(fault) from error
        quarantine(path, reason)
    return None


def fingerprint(path: Path) -> int:
    """What tells a checkpoint from another one: a checksum over the checksums in it, which are all that is read."""
    with zipfile.ZipFile(path) as archive:
        return zlib.crc32(repr([(part.filename, part.CRC) for part in archive.infolist()]).encode())


def unreadable(path: Path, error: Exception) -> str | None:
    """One sentence when the error is not damage: the file cannot be read now, or is of a refused kind; or None."""
    damage = getattr(error, "errno", None) in (None, errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOTDIR)
    if damage and not isinstance(error, MemoryError | pickle.UnpicklingError):
        return None
    return f"{path} is not damaged, but cannot be loaded: {first_line(error)}"


def not_shared(path: Path, reason: str) -> str:
    """One sentence on what a rank lacks of the checkpoint that rank 0 has found whole."""
    return f"{path} cannot be loaded here ({reason}), but by rank 0: all nodes must share --checkpoint-dir"


def quarantine(path: Path, reason: str):
    """Names a damaged checkpoint on stderr, and renames it: it must not count as one of those to keep."""
    print(f"warning: checkpoint {path} is damaged and skipped: {reason}", file=sys.stderr, flush=True)
    if owner_fault(path.parent) is None:
        with contextlib.suppress(OSError):
            os.replace(path, path.with_name(f"damaged_{path.name}"))


def first_line(error: BaseException) -> str:
    """The first cause of an error: of a full disk torch.save makes a RuntimeError that does not mention it."""
    for _, (failure, _) in getattr(error, "failures", {}).items():  # of dcp's CheckpointException
        return first_line(failure)
    while cause := error.__cause__ or error.__context__:
        error = cause
    return str(error).splitlines()[0] if str(error) else type(error).__name__
