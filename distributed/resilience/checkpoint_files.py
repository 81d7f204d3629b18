"""Files and folders of checkpoints: written whole or not at all, found again, and whose they are.

A checkpoint folder belongs to one start of one job, whose name is in the file `owner` in it. Slurm
requeues a job whose node it has lost sight of, and on that node the old ranks may still be alive.
They find another owner, and end.
"""

import contextlib
import errno
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

from .job import HOST, JOB, RESTART_COUNT, write_atomically
from .place import Place
from .ranks import stop

# Zip archives point to places in a file, and parts of a folder may be missing. Other errors of a
# file system are not damage.
OF_DAMAGE = (errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOTDIR)

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
    other = "choose another --checkpoint-dir"
    above = (folder.absolute(), *folder.absolute().parents)
    try:
        nearest = next(path for path in above if path.exists())
        found = find_checkpoints(folder)
    except OSError as error:  # a name that is too long, for example
        return f"--checkpoint-dir cannot be used: {error.strerror}"
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        return f"{nearest} cannot be written: {other}"
    for path in found:
        if path.suffix != suffix:
            return f"{path} was written in another format: {other}"
    if found and not resume:
        return f"{found[0]} is from an earlier run: continue that one with --resume, or {other}"
    return None


def prune(folder: Path, step: int, keep: int):
    """Removes all but the newest `keep` up to this step. Later ones may be of an abandoned run."""
    for old in [path for path in find_checkpoints(folder) if step_of(path) <= step][keep:]:
        remove(old)


def remove(path: Path):
    """Removes a file or folder. One that cannot be removed is no reason to end a run."""
    with contextlib.suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# --- owner ---


def token() -> str:
    """Who writes into a checkpoint folder: a start of a job, or a process."""
    return f"job {JOB}, start {RESTART_COUNT}, {HOST}:{os.getpid()}"


def owner(folder: Path) -> str:
    """Who may write into `folder`. If that cannot be read, as on a full disk, it is still us."""
    try:
        return (folder / "owner").read_text()
    except OSError:
        return token()


def claim(folder: Path) -> str | None:
    """Makes this start of the job the only one that may write into `folder`. Only on rank 0.

    Returns one sentence if that cannot be, as for a start that has been superseded; or None.
    """
    start = re.fullmatch(r"job (\d+), start (\d+), .*", owner(folder))
    if start and start[1] == JOB and int(start[2]) > int(RESTART_COUNT):
        return f"{folder} belongs to a later start of this job: this one is superseded, and ends"
    try:
        write_atomically(folder / "owner", token())
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror}): nothing could be saved"
    # Left by starts that were killed while they saved.
    for path in folder.glob(".checkpoint_step_*.tmp"):
        remove(path)
    return None


def owner_fault(folder: Path) -> str | None:
    """One sentence if another start of this job, or another job, has claimed `folder`; or None."""
    if (other := owner(folder)) == token():
        return None
    now = f"{folder} now belongs to another attempt ({other})"
    return f"{now}: this one writes nothing more and ends"


# --- to write ---


def write_file(state: dict, path: Path) -> bool:
    """Writes a checkpoint file, whole or not at all. Only on rank 0.

    Returns False, after a warning, if it cannot be written, as on a full disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        not_saved(temporary, path, first_line(error))
        return False
    return True


def publish(temporary: Path, path: Path):
    """Gives a whole file or folder its name, or ends this process if another start owns `path`."""
    if fault := owner_fault(path.parent):
        stop(fault, 0)
    if path.is_dir():  # os.replace replaces files, but not full folders
        remove(path)
    os.replace(temporary, path)
    # The new name must also survive a power cut.
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def not_saved(temporary: Path, path: Path, reason: str):
    remove(temporary)
    sentence = f"warning: {path} could not be saved, older ones are kept: {reason}"
    print(sentence, file=sys.stderr, flush=True)


# --- to read ---


def newest(folder: Path, place: Place, check: Callable[[Path, int, int], None]) -> Path | None:
    """The newest whole checkpoint, the same one on all ranks. Damaged ones are quarantined.

    check(path, rank, world_size) reads this rank's share of one, and raises an error if it is
    damaged. Other errors, such as those of a hanging file system, end the run, because the next
    start may well read the file.
    """
    for path in place.gathered(find_checkpoints(folder) if place.rank == 0 else [])[0]:
        damage = fault = None
        try:
            check(path, place.rank, place.world_size)
        except Exception as error:
            damage = first_line(error)
            if isinstance(error, OSError) and error.errno not in OF_DAMAGE:
                fault = unreadable(path, error)
        if not fault and not os.path.exists(path):
            here = f"{path} does not exist on this node, but rank 0 sees it"
            fault = f"{here}: all nodes must share --checkpoint-dir"
        place.stop_if_any(fault)
        damages = list(filter(None, place.gathered(damage)))
        if not damages:
            return path
        if place.rank == 0:
            quarantine(path, damages[0])

    fault, damaged = None, list(folder.glob("damaged_*")) if place.rank == 0 else []
    if damaged:
        what = f"{folder} has {len(damaged)} damaged checkpoints and no whole one"
        fault = f"{what}: choose another --checkpoint-dir"
    place.stop_if_any(fault)
    return None


def check_file(path: Path, rank: int, world_size: int):
    """Rank 0 reads it for all, because torch.load does not look at the checksums."""
    if rank == 0:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} in it fails its checksum")


def quarantine(path: Path, reason: str):
    """Renames a damaged checkpoint, so that it does not count as one of those to keep."""
    sentence = f"warning: checkpoint {path} is damaged and skipped: {reason}"
    print(sentence, file=sys.stderr, flush=True)
    if owner_fault(path.parent) is None:
        with contextlib.suppress(OSError):
            os.replace(path, path.with_name(f"damaged_{path.name}"))


def unreadable(path: Path, error: Exception) -> str:
    return f"{path} is not damaged, but cannot be loaded: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first cause of an error, because torch.save's own does not mention a full disk."""
    for _, (failure, _) in getattr(error, "failures", {}).items():  # dcp's CheckpointException
        return first_line(failure)
    while cause := error.__cause__ or error.__context__:
        error = cause
    return str(error).splitlines()[0] if str(error) else type(error).__name__
