"""Checkpoints of a model that no rank holds whole, with torch.distributed.checkpoint.

A checkpoint is a folder checkpoint_step_N. The tensors in it are stored by name and by place in the
whole tensor, not by rank: it can be read on any number of ranks and under any split. The folder
gets its name when all of it is written, and manifest.json in it has the length and checksum of each
file, so that damage is noticed before it is read.

A large one is copied into the CPU's memory, and a thread writes it while the steps go on. It gets
its name after a later step, once every rank has written its part, and at the latest before the next
save and at the run's end. The same thread removes what is no longer kept.

Beware: the format's index (.metadata) is a Python pickle. Load only what you trust.
"""

import datetime
import json
import os
import re
import time
import warnings
import zlib
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils._pytree import tree_leaves

from .checkpoint_files import (
    find_checkpoints,
    first_line,
    not_shared,
    prune,
    quarantine,
    remove,
    rename,
    step_of,
    unreadable,
    warn_not_saved,
)
from .checkpoints import Checkpoints
from .job import JOB, RESTART_COUNT
from .place import Place

# One process without a group: dcp warns of that.
# One process alone: dcp warns of that.
warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")


class ShardedCheckpoints(Checkpoints):
    """The checkpoints of a run whose model may be split. The parts are "model" and "optimizer"."""

    # Bytes of the whole checkpoint: a smaller one is written in about the time of the copy.
    asynchronous_from = 100e6

    def __init__(self, args: Namespace, place: Place, run: dict, total_steps: int):
        super().__init__(args, place, run, total_steps)
        self.thread = ThreadPoolExecutor(1)
        # Of async_save. From CUDA every checkpoint is copied into the same pinned memory. (In torch
        # 2.11 a DefaultStager fails at its second checkpoint.)
        stager = staging.BlockingAsyncStager(cache_staged_state_dict=place.device.type == "cuda")
        self.options: dict[str, Any] = {"async_stager": stager}
        self.timeout = datetime.timedelta(seconds=args.save_timeout)
        if dist.is_initialized() and place.device.type == "cuda":
            # At the start, because gloo's interface need not be NCCL's: a fault of it shows now.
            start = datetime.timedelta(seconds=args.init_timeout)
            with place.connecting("gloo"):
                group = dist.new_group(backend="gloo", timeout=start)
            dist.distributed_c10d._set_pg_timeout(self.timeout, group)
            self.options["process_group"] = group
        # Step, metadata, and what measure_files will return
        self.writing: tuple[int, dict, Future] | None = None
        self.removing: Future | None = None  # on rank 0

    def load_files(self, parts: dict[str, Any]) -> dict | None:
        found = newest_folder(self.folder, self.place)
        if found is None:
            return None
        path, metadata = found
        if fault := self.other_run(metadata.pop("run")):
            self.place.stop(fault)
        load_folder(path, **parts)
        del metadata["files"]
        return metadata

    def due(self, step: int) -> tuple[bool, bool]:
        save, stop = super().due(step)
        if self.writing and self.agreed_step == step:  # the ranks have just met
            [busy] = self.place.all_reduced([not self.writing[-1].done()])
            start = time.perf_counter()
            if not busy:
                with self.place.longer_timeout(self.args.save_timeout):
                    self.end_writing()
            self.place.seconds_saving += time.perf_counter() - start
        return save, stop

    def finish(self, result: str):
        with self.place.longer_timeout(self.args.save_timeout):
            self.end_writing()
            self.end_removing()
        super().finish(result)

    def save_files(self, step: int, parts: dict[str, Any], values: dict) -> bool:
        self.end_writing()
        self.end_removing()  # there may be no room for one more
        rank, world_size, temporary = self.place.rank, self.place.world_size, self.temporary(step)

        def prepare():
            remove(temporary)  # it could not be written before
            temporary.mkdir(parents=True)

        try:
            on_all_ranks(prepare if rank == 0 else None, world_size)
        except OSError as error:
            return self.not_written(step, error)
        state, metadata = state_of(**parts), {"step": step, "run": self.run, **values}
        large = size_of(state) >= self.asynchronous_from
        if large and dist.is_initialized() and "process_group" not in self.options:
            # Beside that of the steps, whose collectives it would come between
            self.options["process_group"] = dist.new_group(backend="gloo", timeout=self.timeout)
        # Else its thread opens a context on GPU 0.
        writer = dcp.FileSystemWriter(temporary, per_thread_copy_ahead=0)
        saved = dcp.async_save(state, storage_writer=writer, **self.options) if large else None

        def save() -> dict:
            saved.result() if saved else dcp.save(state, checkpoint_id=temporary)
            return measure_files(temporary, rank, world_size)

        if not large:
            return self.publish_folder(step, metadata, save)
        self.writing = step, metadata, self.thread.submit(save)
        return True

    def end_writing(self):
        """Waits for the checkpoint that is being written, if there is one, and publishes it."""
        if self.writing:
            (step, metadata, files), self.writing = self.writing, None
            self.failed = not self.publish_folder(step, metadata, files.result)

    def end_removing(self):
        """Waits until the checkpoints that are no longer kept are removed."""
        if self.removing:
            self.removing.result()

    def publish_folder(self, step: int, metadata: dict, save: Callable[[], dict]) -> bool:
        """Saves, and gives the checkpoint its name if every rank has written its part."""
        rank, world_size, temporary = self.place.rank, self.place.world_size, self.temporary(step)

        def finish():
            whole = json.dumps(metadata | {"files": files})
            with (temporary / "manifest.json").open("w") as file:
                file.write(f"{whole}\n{zlib.crc32(whole.encode())}\n")
                file.flush()
                os.fsync(file.fileno())
            rename(temporary, self.folder / f"checkpoint_step_{step}")

        try:
            files = merged(on_all_ranks(save, world_size))
            on_all_ranks(finish if rank == 0 else None, world_size)
        except OSError as error:
            return self.not_written(step, error)
        if rank == 0:
            self.removing = self.thread.submit(prune, self.folder, step, self.args.keep_checkpoints)
        return True

    def temporary(self, step: int) -> Path:
        """Where a checkpoint is until it is whole."""
        return self.folder / f".checkpoint_step_{step}.{JOB}.{RESTART_COUNT}.tmp"

    def not_written(self, step: int, error: OSError) -> bool:
        if self.place.rank == 0:
            remove(self.temporary(step))
            warn_not_saved(self.folder / f"checkpoint_step_{step}", str(error))
        return False


def newest_folder(folder: Path, place: Place) -> tuple[Path, dict] | None:
    """The newest whole checkpoint and its metadata; damaged ones are quarantined. By all ranks."""
    rank, world_size = place.rank, place.world_size
    # Rank 0 looks for all: other nodes may see an older folder.
    candidates = [find_checkpoints(folder) if rank == 0 else None]
    if world_size > 1:
        dist.broadcast_object_list(candidates, src=0)
    for path in candidates[0]:
        # Which is no damage.
        place.stop_if_any(None if path.exists() else not_shared(path, "it is not there"))
        try:
            metadata = on_all_ranks(lambda path=path: read_metadata(path), world_size)[0]
            found = merged(
                on_all_ranks(lambda path=path: measure_files(path, rank, world_size), world_size)
            )
            files = metadata["files"]
            wrong = {name for name in found.keys() | files if found.get(name) != files.get(name)}
            if not wrong:
                return path, metadata
            reason = f"{min(wrong)} in it is not the file that was written"
        except OSError as error:
            reason = str(error)
            if fault := unreadable(path, error):
                place.stop(fault)
        if rank == 0:
            quarantine(path, reason)
    return None


def load_folder(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None):
    """Reads a checkpoint into a model, split or not, and its optimizer. By all ranks."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    optimizers = [] if optimizer is None else [optimizer]
    set_state_dict(
        model,
        optimizers,
        model_state_dict=state["model"],
        optim_state_dict=state.get("optimizer", {}),
    )


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """The tensors by their names in the model, the same whatever wraps or splits it."""
    model_state, optimizer_state = get_state_dict(model, [] if optimizer is None else [optimizer])
    return (
        {"model": model_state, "optimizer": optimizer_state}
        if optimizer is not None
        else {"model": model_state}
    )


def size_of(state: dict) -> int:
    """The bytes of a checkpoint, those of all ranks: DTensors count whole."""
    return sum(
        leaf.numel() * leaf.itemsize
        for leaf in tree_leaves(state)
        if isinstance(leaf, torch.Tensor)
    )


def on_all_ranks(work: Callable[[], Any] | None, world_size: int) -> list:
    """Does `work` here, and returns all results by rank. Raises OSError on all if one failed."""
    result, fault, number = None, None, None
    try:
        result = work() if work else None
    except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
        fault, number = first_line(error), getattr(error, "errno", None)
    results = [(result, fault, number)] * world_size
    if world_size > 1:
        dist.all_gather_object(results, (result, fault, number))
    for rank, (_, fault, number) in enumerate(results):
        if fault is not None:
            error = OSError(f"rank {rank}: {fault}")
            error.errno = number
            raise error
    return [result for result, _, _ in results]


def read_metadata(path: Path) -> dict:
    """What manifest.json holds. Raises OSError when that is not what was written."""
    whole, _, checksum = (
        (path / "manifest.json").read_text(errors="replace").rstrip("\n").partition("\n")
    )
    if checksum == str(zlib.crc32(whole.encode())) and (metadata := json.loads(whole))[
        "step"
    ] == step_of(path):
        return metadata
    raise OSError("its manifest.json is not the file that was written")


def measure_files(folder: Path, rank: int, world_size: int) -> dict[str, list[int]]:
    """Length and CRC-32 of this rank's share of all files but manifest.json.

    The files are named after the ranks that wrote them: __RANK_NUMBER.distcp. Each rank reads its
    own, which it has just written, or will need to load its part of the model.
    """
    mine = {}
    for path in folder.iterdir():
        writer = re.match(r"__(\d+)_", path.name)
        if path.name == "manifest.json" or (int(writer[1]) if writer else 0) % world_size != rank:
            continue
        length = checksum = 0
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                length, checksum = length + len(part), zlib.crc32(part, checksum)
        mine[path.name] = [length, checksum]
    return mine


def merged(parts: list[dict]) -> dict:
    return {name: value for part in parts for name, value in part.items()}
