"""Folders of checkpoints: written whole or not at all, found again, and whose they are.

A checkpoint is a folder checkpoint_step_N with the files of all ranks, and manifest.json with the
length and checksum of each file, so that damage is noticed before it is read.

The folder of all checkpoints belongs to one start of one job, whose name is in the file `owner` in
it. Slurm requeues a job whose node it has lost sight of, and on that node the old ranks may still
be alive. They find another owner, and end.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import zlib
from pathlib import Path

from .group import Group
from .ranks import HOST, JOB, RESTART_COUNT, end, say

# Parts of a folder may be missing. Other errors of a file system are not damage.
OF_DAMAGE = (errno.EINVAL, errno.EISDIR, errno.ENOENT, errno.ENOTDIR)

# --- the folder ---


def find_checkpoints(folder: Path) -> list[Path]:
    """The folders checkpoint_step_N in `folder`, the highest N first."""
    name = r"checkpoint_step_\d+"
    paths = [path for path in folder.glob("checkpoint_*") if re.fullmatch(name, path.name)]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("checkpoint_step_"))


def folder_fault(folder: Path, resume: bool) -> str | None:
    """One sentence if checkpoints cannot be saved in `folder`, or None."""
    other = "choose another --checkpoint-dir"
    above = (folder.absolute(), *folder.absolute().parents)
    try:
        nearest = next(path for path in above if path.exists())
        found = find_checkpoints(folder)
    except OSError as error:  # a name that is too long, for example
        return f"--checkpoint-dir cannot be used: {error.strerror}"
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        return f"{nearest} cannot be written: {other}"
    if found and not resume:
        return f"{found[0]} is from an earlier run: continue that one with --resume, or {other}"
    return None


def prune(folder: Path, step: int, keep: int):
    """Removes all but the newest `keep` up to this step. Later ones may be of an abandoned run."""
    for old in [path for path in find_checkpoints(folder) if step_of(path) <= step][keep:]:
        shutil.rmtree(old, ignore_errors=True)


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

    Returns one sentence if a later start has claimed it, or it cannot be written; or None.
    """
    start = re.fullmatch(r"job (\d+), start (\d+), .*", owner(folder))
    if start and start[1] == JOB and int(start[2]) > int(RESTART_COUNT):
        return f"{folder} belongs to a later start of this job: this one is superseded, and ends"
    try:
        write_atomically(folder / "owner", token())
    except OSError as error:
        return f"{folder} cannot be written ({error.strerror}): nothing could be saved"
    # Starts that were killed while they saved have left these.
    for path in folder.glob(".checkpoint_step_*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    return None


def owner_fault(folder: Path) -> str | None:
    """One sentence if another start of this job, or another job, has claimed `folder`; or None."""
    if (other := owner(folder)) == token():
        return None
    now = f"{folder} now belongs to another attempt ({other})"
    return f"{now}: this one writes nothing more and ends"


# --- to write ---


def write_atomically(path: Path, text: str):
    """A reader finds the whole text, or what was there before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def write_manifest(folder: Path, metadata: dict):
    """The metadata as a line of JSON, and a line with its CRC-32. Raises OSError."""
    text = json.dumps(metadata)
    with (folder / "manifest.json").open("w") as file:
        file.write(f"{text}\n{zlib.crc32(text.encode())}\n")
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, path: Path):
    """Gives a whole folder its name, or ends this process, rank 0, if another start owns `path`.

    Raises OSError.
    """
    if fault := owner_fault(path.parent):
        say(fault, 0)
        end()
    # os.replace does not replace full folders.
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)
    # The new name must also survive a power cut.
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


# --- to read ---


def newest(folder: Path, group: Group) -> Path | None:
    """The newest whole checkpoint, the same one on all ranks. Damaged ones are quarantined.

    Each rank checks its share of the files. Errors that are no damage, such as those of a hanging
    file system, end the run, because the next start may well read the files.
    """
    for path in group.gathered(find_checkpoints(folder) if group.rank == 0 else [])[0]:
        damage = fault = None
        try:
            check_folder(path, group.rank, group.world_size)
        except Exception as error:
            damage = first_line(error)
            if isinstance(error, OSError) and error.errno not in OF_DAMAGE:
                fault = f"{path} is not damaged, but cannot be loaded: {damage}"
        if not fault and not os.path.exists(path):
            here = f"{path} does not exist on this node, but rank 0 sees it"
            fault = f"{here}: all nodes must share --checkpoint-dir"
        group.stop_if_any(fault)
        damages = list(filter(None, group.gathered(damage)))
        if not damages:
            return path
        if group.rank == 0:
            quarantine(path, damages[0])

    fault, damaged = None, list(folder.glob("damaged_*")) if group.rank == 0 else []
    if damaged:
        what = f"{folder} has {len(damaged)} damaged checkpoints and no whole one"
        fault = f"{what}: choose another --checkpoint-dir"
    group.stop_if_any(fault)
    return None


def read_manifest(folder: Path) -> dict:
    """The metadata. Raises ValueError if the file is not the one that was written, or OSError."""
    text, _, checksum = (folder / "manifest.json").read_text(errors="replace").partition("\n")
    if checksum.strip() == str(zlib.crc32(text.encode())):
        metadata = json.loads(text)
        if metadata["step"] == step_of(folder):
            return metadata
    raise ValueError("its manifest.json is not the file that was written")


def check_folder(folder: Path, rank: int, world_size: int):
    """Raises ValueError if a file of this rank's share is not as it was written, or OSError."""
    found = measure_files(folder, rank, world_size)
    for name, measured in read_manifest(folder)["files"].items():
        if is_in_share(name, rank, world_size) and found.get(name) != measured:
            raise ValueError(f"{name} in it is not the file that was written")


def measure_files(folder: Path, rank: int, world_size: int) -> dict[str, list[int]]:
    """Length in bytes and CRC-32 of each file of this rank's share, by name. Raises OSError."""
    measured = {}
    for path in folder.iterdir():
        if path.name == "manifest.json" or not is_in_share(path.name, rank, world_size):
            continue
        length = checksum = 0
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                length, checksum = length + len(part), zlib.crc32(part, checksum)
        measured[path.name] = [length, checksum]
    return measured


def is_in_share(name: str, rank: int, world_size: int) -> bool:
    """Whether this rank checks the file. Rank r checks what a rank r wrote (__r_NUMBER.distcp). If
    fewer ranks read than wrote, it also checks what the ranks r + world_size, ... wrote. Rank 0
    checks all other files."""
    writer = re.match(r"__(\d+)_", name)
    return (int(writer[1]) if writer else 0) % world_size == rank


def quarantine(path: Path, reason: str):
    """Renames a damaged checkpoint, so that it does not count as one of those to keep."""
    sentence = f"warning: checkpoint {path} is damaged and skipped: {reason}"
    print(sentence, file=sys.stderr, flush=True)
    if owner_fault(path.parent) is None:
        with contextlib.suppress(OSError):
            os.replace(path, path.with_name(f"damaged_{path.name}"))


def first_line(error: BaseException) -> str:
    """The first cause of an error, because torch's own does not mention a full disk."""
    for _, (failure, _) in getattr(error, "failures", {}).items():  # dcp's CheckpointException
        return first_line(failure)
    while cause := error.__cause__ or error.__context__:
        error = cause
    return str(error).splitlines()[0] if str(error) else type(error).__name__
