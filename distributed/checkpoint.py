"""Checkpoints: a file is whole or not there, and the newest whole one is found again."""

import os
import re
import sys
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist


def save(state: dict, path: Path):
    """Writes `state` so that `path` holds all of it or what it held before, whenever the process is killed.

    Raises RuntimeError or OSError (a full disk, say) and then leaves no file behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path):
    """Brings the names in `folder` to the disk: a new one, too, must survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def find(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the newest first: by the number in their name, never by their date.

    Files checkpoint_epoch_N.pt, or the folders checkpoint_step_N that sharded_checkpoint.py writes.
    """
    names = re.compile(r"checkpoint_(?:epoch_(\d+)\.pt|step_(\d+))")
    matches = [names.fullmatch(path.name) for path in folder.glob("checkpoint_*")]
    newest_first = sorted(filter(None, matches), key=lambda match: -int(match[1] or match[2]))
    return [folder / match[0] for match in newest_first]


def in_the_way(folder: Path, resume: bool) -> str | None:
    """One sentence when a new run would mix its checkpoints with those of another one; None when all is well."""
    if resume or not (found := find(folder)):
        return None
    return f"{found[0]} is of an earlier run: continue that one with --resume, or choose another --checkpoint-dir"


def load_newest(folder: Path) -> dict | None:
    """The newest checkpoint that is whole, on the CPU, or None; damaged ones are named on stderr and passed over."""
    for path in find(folder):
        try:
            with zipfile.ZipFile(path) as archive:  # torch.load does not look at the checksums
                damaged = archive.testzip()
            if damaged is None:
                return torch.load(path, map_location="cpu", weights_only=True)
            reason = f"{damaged} in it fails its checksum"
        except Exception as error:  # truncated, it raises one of half a dozen kinds, depending on where it was cut
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f"warning: checkpoint {path} is damaged and skipped: {reason}", file=sys.stderr, flush=True)
    return None


def load_on_all_ranks(folder: Path, rank: int, world_size: int, device: torch.device) -> dict | None:
    """`load_newest` on rank 0, which chooses for all: no two ranks may go on from different files."""
    state = [load_newest(folder) if rank == 0 else None]
    if world_size > 1:
        dist.broadcast_object_list(state, src=0, device=device)
    return state[0]
