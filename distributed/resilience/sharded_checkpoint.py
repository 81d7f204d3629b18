"""Checkpoints of a model that no rank holds whole: every rank writes its part, with torch.distributed.checkpoint.

A checkpoint is a folder checkpoint_step_N. The tensors in it are stored by name and by place in the whole tensor, not
by rank: it can be read on any number of ranks and under any split. The folder gets its name only when all of it is
there, and whole.json in it has the length and checksum of each file, so that damage is noticed before it is read.

Beware: the format's index (.metadata) is a Python pickle. Load only checkpoints from someone you trust.
"""

import json
import os
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from . import step_zero, stop_request
from .checkpoint import find, first_line, out_of_reach, pass_over, prune, publish, remove, step_of, warn_not_saved


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict, keep: int) -> bool:
    """Writes checkpoint_step_N with `facts` (plain values) in its whole.json, and removes all but the newest `keep`.

    By all ranks. Returns False everywhere, after a warning, when one of them could not write its part (a full disk,
    say); what was there before still is.
    """
    rank, world_size = place()
    path = folder / f"checkpoint_step_{step}"
    job = os.environ.get("SLURM_JOB_ID", "none")
    temporary = folder / f".checkpoint_step_{step}.{job}.{stop_request.ATTEMPT}.tmp"

    def prepare():
        remove(temporary)  # it could not be written before
        temporary.mkdir(parents=True)

    def write():
        with warnings.catch_warnings(action="ignore"):  # one process alone need not be told that it is
            dcp.save(state_of(model, optimizer), checkpoint_id=temporary, no_dist=world_size == 1)

    def finish():
        whole = json.dumps({"step": step, **facts, "files": files})
        with (temporary / "whole.json").open("w") as file:
            file.write(f"{whole}\n{zlib.crc32(whole.encode())}\n")
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)

    try:
        on_all_ranks(prepare if rank == 0 else None, world_size)
        on_all_ranks(write, world_size)
        files = merged(on_all_ranks(lambda: measure_files(temporary, rank, world_size), world_size))
        on_all_ranks(finish if rank == 0 else None, world_size)
    except OSError as error:
        if rank == 0:
            remove(temporary)
            warn_not_saved(path, str(error))
        return False
    if rank == 0:
        prune(folder, step, keep)
    return True


def on_all_ranks(work: Callable[[], Any] | None, world_size: int) -> list:
    """Does `work` here and waits for the others. Returns the results by rank; raises OSError on all if one failed."""
    result, fault, number = None, None, None
    try:
        result = work() if work else None
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        fault, number = first_line(error), getattr(error, "errno", None)
    results = agree((result, fault, number), world_size)
    for rank, (_, fault, number) in enumerate(results):
        if fault is not None:
            error = OSError(f"rank {rank}: {fault}")
            error.errno = number
            raise error
    return [result for result, _, _ in results]


def newest(folder: Path) -> tuple[Path, dict] | None:
    """The newest whole checkpoint and its facts; damaged ones are named on stderr and passed over. By all ranks."""
    rank, world_size = place()
    candidates = [find(folder) if rank == 0 else None]  # rank 0 looks for all: file systems lag
    if world_size > 1:
        dist.broadcast_object_list(candidates, src=0)
    for path in candidates[0]:
        try:
            facts = on_all_ranks(lambda path=path: read_facts(path), world_size)[0]
            found = merged(on_all_ranks(lambda path=path: measure_files(path, rank, world_size), world_size))
            names = {name for name in found.keys() | facts["files"] if found.get(name) != facts["files"].get(name)}
            if not names:
                return path, facts
            reason = f"{min(names)} in it is not the file that was written"
        except OSError as error:
            reason = str(error)
            if fault := out_of_reach(path, error):
                step_zero.stop(fault, rank, speak=rank == 0)
        if rank == 0:
            pass_over(path, reason)
    return None


def read_facts(path: Path) -> dict:
    """What whole.json in a checkpoint says. Raises OSError when that is not what was written."""
    whole, _, checksum = (path / "whole.json").read_text(errors="replace").rstrip("\n").partition("\n")
    if checksum == str(zlib.crc32(whole.encode())) and (facts := json.loads(whole))["step"] == step_of(path):
        return facts
    raise OSError("its whole.json is not the file that was written")


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None):
    """Reads a checkpoint into a model, split or not, and its optimizer. To be called by all ranks."""
    _, world_size = place()
    state = state_of(model, optimizer)
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=path, no_dist=world_size == 1)
    optimizers = [] if optimizer is None else [optimizer]
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state.get("optimizer", {}))


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict:
    """The tensors by their names in the model, the same whatever wraps or splits it."""
    model_state, optimizer_state = get_state_dict(model, [] if optimizer is None else [optimizer])
    return {"model": model_state, "optimizer": optimizer_state} if optimizer is not None else {"model": model_state}


def measure_files(folder: Path, rank: int, world_size: int) -> dict[str, list[int]]:
    """Length and CRC-32 of this rank's share of all files but whole.json."""
    mine = {}
    for path in sorted(path for path in folder.iterdir() if path.name != "whole.json")[rank::world_size]:
        length = checksum = 0
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                length, checksum = length + len(part), zlib.crc32(part, checksum)
        mine[path.name] = [length, checksum]
    return mine


def merged(parts: list[dict]) -> dict:
    return {name: facts for part in parts for name, facts in part.items()}


def agree(value, world_size: int) -> list:
    """Everybody's `value`, by rank."""
    values = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(values, value)
    return values


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
