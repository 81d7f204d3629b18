"""Checkpoints of a model that no rank holds whole, with torch.distributed.checkpoint.

A checkpoint is a folder checkpoint_step_N. The tensors in it are stored by name and by place in the
whole tensor, not by rank, so it can be read on any number of ranks and under any split. The folder
gets its name when all of it is written, and manifest.json in it has the length and checksum of each
file, so that damage is noticed before it is read.

The steps wait only until each rank's part is copied into the CPU's memory. A thread of each rank
writes it, over a process group of its own, while they go on. The next save and the run's end wait
for that thread.

Beware: the format's index (.metadata) is a Python pickle. Load only what you trust.
"""

import datetime
import json
import os
import re
import warnings
import zlib
from argparse import Namespace
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .checkpoint_files import first_line, newest, not_saved, prune, publish, step_of
from .checkpoints import Checkpoints
from .job import JOB, RESTART_COUNT
from .place import Place

# dcp warns if there is one process without a group.
warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")


class ShardedCheckpoints(Checkpoints):
    """The checkpoints of a run whose model may be split. The parts are "model" and "optimizer"."""

    def __init__(self, args: Namespace, place: Place, run: dict, total_steps: int):
        super().__init__(args, place, run, total_steps)
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        # From CUDA every checkpoint is copied into the same pinned memory. (In torch 2.11 a
        # DefaultStager fails at its second checkpoint.)
        cuda = place.device.type == "cuda"
        self.stager = staging.BlockingAsyncStager(cache_staged_state_dict=cuda)
        self.group = None
        if dist.is_initialized():
            # At the start, so that a fault shows now: gloo's interface need not be NCCL's.
            start = datetime.timedelta(seconds=args.init_timeout)
            with place.connecting("gloo", dist.distributed_c10d._get_default_store()):
                self.group = dist.new_group(backend="gloo", timeout=start)
            save = datetime.timedelta(seconds=args.save_timeout)
            dist.distributed_c10d._set_pg_timeout(save, self.group)

    def load_files(self, parts: dict[str, Any]) -> dict | None:
        found = newest_folder(self.folder, self.place)
        if found is None:
            return None
        path, metadata = found
        self.stop_if_of_another_run(metadata.pop("run"))
        load_folder(path, **parts)
        del metadata["files"]
        return metadata

    def save_files(self, step: int, parts: dict[str, Any], values: dict):
        self.end_writing()
        path = self.folder / f"checkpoint_step_{step}"
        temporary = path.with_name(f".{path.name}.{JOB}.{RESTART_COUNT}.tmp")
        # No copying ahead, because its thread would open a context on GPU 0.
        writer = dcp.FileSystemWriter(temporary, per_thread_copy_ahead=0)
        written = dcp.async_save(
            state_of(**parts),
            storage_writer=writer,
            process_group=self.group,
            async_stager=self.stager,
        )
        metadata = {"step": step, "run": self.run, **values}
        self.writing = self.thread.submit(self.end_folder, written, temporary, path, metadata)

    def finish(self, result: str):
        with self.place.longer_timeout(self.args.save_timeout):
            self.end_writing()
        super().finish(result)

    def end_writing(self):
        """Waits for the checkpoint that is being written, if there is one."""
        if self.writing:
            self.failed = not self.writing.result()
            self.writing = None

    def end_folder(self, written: Future, temporary: Path, path: Path, metadata: dict) -> bool:
        """Gives a checkpoint its name if every rank has written its part. Runs in the thread.

        Returns False on rank 0, after a warning, if that could not be done.
        """
        rank, files, fault = self.place.rank, {}, None
        try:
            written.result()
            files = measure_files(temporary, rank, self.place.world_size)
        except (Exception, dcp.api.CheckpointException) as error:  # which is a BaseException
            fault = f"rank {rank}: {first_line(error)}"
        parts = self.place.gathered((files, fault), self.group)
        if rank != 0:
            return True
        faults = [fault for _, fault in parts if fault]
        try:
            if faults:
                raise OSError(faults[0])
            files = {name: measured for part, _ in parts for name, measured in part.items()}
            write_manifest(temporary, metadata | {"files": files})
            publish(temporary, path)
        except OSError as error:
            not_saved(temporary, path, first_line(error))
            return False
        prune(self.folder, metadata["step"], self.args.keep_checkpoints)
        return True


# --- a folder ---


def newest_folder(folder: Path, place: Place) -> tuple[Path, dict] | None:
    """The newest whole checkpoint and the content of its manifest.json. All ranks call it."""
    path = newest(folder, place, check_folder)
    return None if path is None else (path, read_manifest(path))


def load_folder(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None):
    """Reads a checkpoint into a model, split or not, and its optimizer. All ranks call it."""
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        [] if optimizer is None else [optimizer],
        model_state_dict=state["model"],
        optim_state_dict=state.get("optimizer", {}),
    )


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """The tensors by their names in the model, the same whatever wraps or splits it."""
    if optimizer is None:
        return {"model": get_state_dict(model, [])[0]}
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def write_manifest(folder: Path, metadata: dict):
    text = json.dumps(metadata)
    with (folder / "manifest.json").open("w") as file:
        file.write(f"{text}\n{zlib.crc32(text.encode())}\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict:
    """Raises ValueError if it is not what was written."""
    text, _, checksum = (folder / "manifest.json").read_text(errors="replace").partition("\n")
    if checksum.strip() == str(zlib.crc32(text.encode())):
        metadata = json.loads(text)
        if metadata["step"] == step_of(folder):
            return metadata
    raise ValueError("its manifest.json is not the file that was written")


def check_folder(folder: Path, rank: int, world_size: int):
    """Raises ValueError if a file of this rank's share is not what was written."""
    found = measure_files(folder, rank, world_size)
    for name, measured in read_manifest(folder)["files"].items():
        if is_in_share(name, rank, world_size) and found.get(name) != measured:
            raise ValueError(f"{name} in it is not the file that was written")


def measure_files(folder: Path, rank: int, world_size: int) -> dict[str, list[int]]:
    """Length and CRC-32 of this rank's share of all files but manifest.json."""
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
    """Each rank reads the files that it has just written or needs to load, __RANK_NUMBER.distcp."""
    writer = re.match(r"__(\d+)_", name)
    return (int(writer[1]) if writer else 0) % world_size == rank
