"""Files and folders of checkpoints: written whole or not at all, found again, and whose they are.

A checkpoint folder belongs to one start of one job, whose name is in the file `owner` in it. Slurm
requeues a job whose node it has lost sight of, and on that node the old ranks may still be alive.
They find another owner, and end.
"""

import contextlib
import errno
import os
import pickle
import re
import shutil
import sys
import zipfile
import zlib
from pathlib import Path

import torch

from .job import HOST, JOB, RESTART_COUNT, write_atomically
from .ranks import stop

# --- the folder ---


def find_checkpoints(folder: Path) -> list[Path]:
    """Files checkpoint_step_N.pt, or sharded folders checkpoint_step_N: the highest N first."""
    pattern = r"checkpoint_step_\d+(\.pt)?"
    paths = [path for path in folder.glob("checkpoint_*") if re.fullmatch(pattern, path.name)]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removesuffix(".pt").removeprefix("checkpoint_step_"))


def folder_fault(folder: Path, resume: bool, suffix: str) -> str | None:
    """One sentence if checkpoints of that suffix cannot be saved in `folder`, or None."""
    above = (folder.absolute(), *folder.absolute().parents)
    try:
        nearest = next(path for path in above if path.exists())
        usable = nearest.is_dir() and os.access(nearest, os.W_OK)
        found = find_checkpoints(folder)
    except OSError as error:  # a name that is too long, for example
        return f"--checkpoint-dir cannot be used: {error.strerror}"
    other = "choose another --checkpoint-dir"
    if not usable:
        return f"{nearest} cannot be written: {other}"
    for path in found:
        if path.suffix != suffix:
            return f"{path} was written in another format: {other}"
    if found and not resume:
        return f"{found[0]} is of an earlier run: continue that one with --resume, or {other}"
    return None


def all_damaged(folder: Path) -> str | None:
    """One sentence if `folder` had checkpoints, but none is whole; or None: a run may begin."""
    damaged = list(folder.glob("damaged_*"))
    if not damaged:
        return None
    what = f"{folder} has {len(damaged)} damaged checkpoints and no whole one"
    return f"{what}: choose another --checkpoint-dir"


def prune(folder: Path, step: int, keep: int):
    """Removes all but the newest `keep` up to this step. Later ones may be of an abandoned run."""
    for old in [path for path in find_checkpoints(folder) if step_of(path) <= step][keep:]:
        remove(old)


def remove(path: Path):
    """A file or folder. One that cannot be removed is no reason to end a training."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# --- owner ---


def token() -> str:
    """Who writes into a checkpoint folder: a start of a job, or a process."""
    return f"job {JOB}, start {RESTART_COUNT}, {HOST}:{os.getpid()}"


def claim(folder: Path) -> str | None:
    """Makes this start of the job the only one that may write into `folder`. By rank 0.

    Returns one sentence if that cannot be, as for a start that has been superseded; or None.
    """
    start = re.fullmatch(r"job (\d+), start (\d+), .*", owner(folder))
    if start and start[1] == JOB and int(start[2]) > int(RESTART_COUNT):
        return f"{folder} belongs to a later start of this job: this one is superseded, and ends"
    try:
        write_atomically(folder / "owner", token())
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror}): nothing could be saved"
    # These are of starts that were killed while they saved.
    for path in folder.glob(".checkpoint_step_*.tmp"):
        remove(path)
    return None


def owner(folder: Path) -> str:
    """Who may write into `folder`. If that cannot be read, it is still us: as on a full disk."""
    try:
        return (folder / "owner").read_text()
    except OSError:
        return token()


def owner_fault(folder: Path) -> str | None:
    """One sentence if another start of this job, or another job, has claimed `folder`; or None."""
    other = owner(folder)
    if other == token():
        return None
    now = f"{folder} now belongs to another attempt ({other})"
    return f"{now}: this one writes nothing more and ends"


# --- files ---


def write_file(state: dict, path: Path) -> bool:
    """Writes a checkpoint file, whole or not at all. By rank 0.

    Returns False, after a warning, if it cannot be written, as on a full disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        rename(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save makes a RuntimeError of a full disk
        remove(temporary)
        warn_not_saved(path, first_line(error))
        return False
    return True


def rename(temporary: Path, path: Path):
    """Gives a whole file or folder its name, or ends this process if another start owns `path`."""
    if fault := owner_fault(path.parent):
        stop(fault, 0)
    if path.is_dir():  # os.replace gives a name that is taken to a file only
        shutil.rmtree(path)
    os.replace(temporary, path)
    # The new name must survive a power cut as well.
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def warn_not_saved(path: Path, reason: str):
    sentence = f"warning: {path} could not be saved, older ones are kept: {reason}"
    print(sentence, file=sys.stderr, flush=True)


def newest_file(folder: Path) -> tuple[Path, dict] | None:
    """The newest whole checkpoint and what is in it, or None. Damaged ones are quarantined.

    Raises OSError if one cannot be read for another reason: the next start may well read it.
    """
    for path in find_checkpoints(folder):
        try:
            # torch.load does not look at the checksums.
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is None:
                return path, torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            reason = f"{damaged} in it fails its checksum"
        except Exception as error:
            # A truncated file raises one of half a dozen kinds, depending on where it was cut.
            reason = first_line(error)
            if fault := unreadable(path, error):
                raise OSError(fault) from error
        quarantine(path, reason)
    return None


def fingerprint(path: Path) -> int:
    """It tells a checkpoint from another one: a checksum over the checksums in it."""
    with zipfile.ZipFile(path) as archive:
        parts = [(part.filename, part.CRC) for part in archive.infolist()]
    return zlib.crc32(repr(parts).encode())


def unreadable(path: Path, error: Exception) -> str | None:
    """One sentence if the error is not damage, as of a file system that hangs; or None."""
    of_damage = (None, errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOTDIR)
    refused = isinstance(error, MemoryError | pickle.UnpicklingError)
    if getattr(error, "errno", None) in of_damage and not refused:
        return None
    return f"{path} is not damaged, but cannot be loaded: {first_line(error)}"


def not_shared(path: Path, reason: str) -> str:
    """One sentence on a rank that lacks the checkpoint which rank 0 has found whole."""
    here = f"{path} cannot be loaded here ({reason}), but by rank 0"
    return f"{here}: all nodes must share --checkpoint-dir"


def quarantine(path: Path, reason: str):
    """Renames a damaged checkpoint, so that it does not count as one of those to keep."""
    sentence = f"warning: checkpoint {path} is damaged and skipped: {reason}"
    print(sentence, file=sys.stderr, flush=True)
    if owner_fault(path.parent) is None:
        with contextlib.suppress(OSError):
            os.replace(path, path.with_name(f"damaged_{path.name}"))


def first_line(error: BaseException) -> str:
    """The first cause of an error: torch.save's own does not mention a full disk."""
    for _, (failure, _) in getattr(error, "failures", {}).items():  # dcp's CheckpointException
        return first_line(failure)
    while cause := error.__cause__ or error.__context__:
        error = cause
    return str(error).splitlines()[0] if str(error) else type(error).__name__
