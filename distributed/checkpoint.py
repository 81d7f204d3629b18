"""Checkpoints of a model that may be split over the ranks: written whole or not at all.

    import checkpoint
    runs = checkpoint.Folder("checkpoints/7")        # on every rank, after init_process_group
    extra = {"schedule": schedule, "ema": ema, "best": math.inf}
    first = runs.load(model, optimizer, extra)       # the step of the newest one, or 0
    ...
        runs.save(step, model, optimizer, extra)     # returns when it is copied; a thread writes it
    ...
    saved = runs.wait()                              # before the process group ends

The tensors are stored by their names and their places in the whole model, so a run resumes with any
number of ranks, and with DDP, FSDP2 or tensor parallelism. The optimizer's options are stored, too:
to change the learning rate of a run, set it in optimizer.param_groups after the load.

`extra` is whatever else a run needs to resume: what has a state_dict, such as a schedule, an
average of the weights (split like the model, if that is) or a GradScaler, gets it back by its
load_state_dict; a plain value, such as a best score or a place in a stream, is replaced in `extra`.
Values are rank 0's. Without `extra` a run resumes as if they were new.
Beware: the index of a checkpoint (.metadata) is a Python pickle. Load only what you trust.
"""

import contextlib
import json
import os
import re
import shutil
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor


class Folder:
    """The folders step_N in `path`, of which the newest `keep` stay. All ranks call each method.

    `about` are plain values, such as the seed, which each checkpoint holds in about.json. One with
    other values is not loaded. With resume=False there must be no checkpoint. A fault ends all
    ranks with one sentence.
    """

    def __init__(
        self, path: str | Path, keep: int = 2, about: dict | None = None, resume: bool = True
    ):
        # As JSON reads them again: a tuple is a list.
        self.keep, self.about = keep, json.loads(json.dumps(about or {}))
        self.resume, self.step = resume, 0  # the step that was saved or loaded last
        # A group of its own, because a thread writes while the steps use the others.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(hours=1))
        self.rank, self.host = dist.get_rank(), os.uname().nodename
        self.path = self.from_rank_0(Path(path))
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.stager: BlockingAsyncStager | None = None

        # Slurm requeues a job whose node it has lost, and there the old start may still be alive.
        # So the file `owner` names the start that may write: a job, its restarts, and a process.
        job, restarts = (os.environ.get(f"SLURM_{x}", 0) for x in ("JOB_ID", "RESTART_COUNT"))
        self.owner = self.from_rank_0(f"{job} {restarts} {self.host} {os.getpid()}")
        used = self.rank == 0 and not resume and steps(self.path)
        again = f"{self.path} has checkpoints: pass --resume, or choose another --checkpoint-dir"
        self.end_if(again if used else None)
        self.end_if(self.claim() if self.rank == 0 else None)
        self.end_if(self.unseen())

    def claim(self) -> str | None:
        """Makes this start the one that may write. Returns a fault, or None."""
        owner, (job, restarts, *_) = self.path / "owner", self.owner.split()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            theirs = owner.read_text().split() if owner.exists() else []
            if theirs[:1] == [job] and int(theirs[1]) > int(restarts):
                return f"{self.path} belongs to a later start of this job, so this one ends"
            owner.write_text(self.owner)
        except OSError as error:
            return f"{self.path} cannot be written: {error.strerror}"
        except (ValueError, IndexError):
            return f"{owner} is damaged: delete it"
        # What starts have left that were killed while they saved.
        for part in self.path.glob(".step_*"):
            shutil.rmtree(part, ignore_errors=True)
        return None

    def unseen(self) -> str | None:
        """A fault if this rank does not see what rank 0 has written, or None."""
        with contextlib.suppress(OSError):
            # NFS looks at the server again when the folder above is opened.
            os.scandir(self.path.parent).close()
            self.path.mkdir(parents=True, exist_ok=True)
            seen = "owner" in os.listdir(self.path)
            if seen and (self.path / "owner").read_text() == self.owner:
                return None
        where = f"rank {self.rank} on {self.host}"
        return f"{where} does not see what rank 0 writes: all nodes must share {self.path}"

    def load(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: dict | None = None
    ) -> int:
        """Loads the newest checkpoint that can be read. Returns its step, or 0 if there is none."""
        found = self.from_rank_0(steps(self.path))
        for step in found:
            path = self.path / f"step_{step}"
            self.end_if(self.difference(path) if self.rank == 0 else None)
            state = state_of(model, optimizer, extra)
            try:
                # If a rank cannot read its part, this fails on all of them.
                dcp.load(state, checkpoint_id=path, process_group=self.group)
            except (Exception, dcp.CheckpointException) as error:
                self.warn(f"{path} cannot be read: {cause(error)}")
                continue
            weights, moments = state["model"], state["optimizer"]
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
            for name, value in state.get("extra", {}).items():
                if hasattr(extra[name], "load_state_dict"):
                    extra[name].load_state_dict(value)
                else:
                    extra[name] = value
            self.say(f"Resumed after step {step}")
            self.step = step
            return step
        self.end_if(f"no checkpoint in {self.path} can be read" if found else None)
        if self.resume:
            self.say(f"No checkpoint in {self.path}: the run begins at step 0")
        return 0

    def difference(self, path: Path) -> str | None:
        """A fault if a checkpoint holds other values than `about`, or None."""
        try:
            theirs = flat(json.loads((path / "about.json").read_text()))
        except (OSError, ValueError):
            return None  # of a script without values, or damaged
        for name, value in flat(self.about).items():
            if theirs.get(name) != value:
                was = f"{path} has {name} {theirs.get(name)}, not {value}"
                return f"{was}: resume it with its own, or choose another folder"
        return None

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: dict | None = None,
    ):
        """Begins a checkpoint. One that cannot be written is a warning, and the older ones stay; if
        there is none, the next save ends the run.

        Weights that are not finite end the run, and the older checkpoints stay as well.
        """
        written = self.wait()
        # A stop may come in a step that has been saved already.
        if self.from_rank_0(written and step == self.step):
            return
        self.step, fault = step, None
        if self.rank == 0 and not written and not steps(self.path):
            fault = f"no checkpoint can be written to {self.path}, so the run ends"
        if not finite(model):
            fault = f"the weights are not finite after step {step}, and not saved"
            fault += ": try a lower learning rate"
        self.end_if(fault)
        if self.stager is None:
            # From CUDA each checkpoint is copied into the same pinned memory.
            cuda = next(model.parameters()).device.type == "cuda"
            self.stager = BlockingAsyncStager(cache_staged_state_dict=cuda)
        # By the owner's words, because an old start may write the same step.
        part = self.path / f".step_{step}.{self.owner.replace(' ', '.')}"
        # Copying ahead is off, because its thread would open a context on GPU 0.
        writer = dcp.FileSystemWriter(part, per_thread_copy_ahead=0)
        state, stager = own_part(state_of(model, optimizer, extra), self.rank), self.stager
        written = dcp.async_save(
            state, storage_writer=writer, process_group=self.group, async_stager=stager
        )
        self.writing = self.thread.submit(self.publish, written, part, step)

    def publish(self, written: Future, part: Path, step: int) -> bool:
        """Gives a checkpoint its name when all ranks have written it. Runs in the thread."""
        path = self.path / f"step_{step}"
        try:
            written.result()
            if self.rank != 0:
                return True
            with (part / "about.json").open("w") as file:
                json.dump(self.about, file)
                file.flush()
                os.fsync(file.fileno())
            owner = (self.path / "owner").read_text()
            if owner != self.owner:
                self.warn(f"{self.path} belongs to another start now ({owner}), so this one ends")
                os._exit(1)
            # os.replace does not replace full folders.
            shutil.rmtree(path, ignore_errors=True)
            os.replace(part, path)
            # So that the new name survives a power cut.
            folder = os.open(self.path, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except (Exception, dcp.CheckpointException) as error:
            if self.rank == 0:
                # torch's error does not say that a disk is full.
                free = f"{shutil.disk_usage(self.path).free >> 20} MiB are free"
                self.warn(f"step {step} is not saved, older ones stay, {free}: {cause(error)}")
                shutil.rmtree(part, ignore_errors=True)
            return False
        # Later steps may be of a run that was given up.
        for old in [n for n in steps(self.path) if n <= step][self.keep :]:
            shutil.rmtree(self.path / f"step_{old}", ignore_errors=True)
        return True

    def wait(self) -> bool:
        """Until the last checkpoint is written. Whether it was, as far as this rank knows."""
        return self.writing is None or self.writing.result()

    def from_rank_0(self, value):
        """Rank 0's value, on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, 0, self.group)
        return values[0]

    def end_if(self, fault: str | None):
        """Ends all ranks if one has a fault. Rank 0 prints the first."""
        faults = [None] * dist.get_world_size()
        dist.all_gather_object(faults, fault, self.group)
        faults = list(filter(None, faults))
        if faults:
            # No rank ends before it is printed, because then the launcher would end the others.
            if self.rank == 0:
                print(faults[0], file=sys.stderr, flush=True)
            self.from_rank_0(None)
            sys.exit(1)

    def say(self, sentence: str):
        if self.rank == 0:
            print(sentence, flush=True)

    def warn(self, sentence: str):
        if self.rank == 0:
            print(f"warning: {sentence}", file=sys.stderr, flush=True)


def steps(path: Path) -> list[int]:
    """The steps of the whole checkpoints in a folder, the newest first."""
    names = [re.fullmatch(r"step_(\d+)", found.name) for found in path.glob("step_*")]
    return sorted((int(name[1]) for name in names if name), reverse=True)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, extra: dict | None) -> dict:
    """The tensors by their names in the model, the same whatever wraps or splits it."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    if extra:
        state["extra"] = {
            name: value.state_dict() if hasattr(value, "state_dict") else value
            for name, value in extra.items()
        }
    return state


def flat(values: dict, prefix: str = "") -> dict:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    found = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def own_part(state: dict, rank: int) -> dict:
    """Without what all ranks hold whole, except on rank 0: the others need no memory to copy it."""
    mine = {}
    for name, value in state.items():
        if isinstance(value, dict):
            mine[name] = own_part(value, rank)
        elif rank == 0 or isinstance(value, DTensor):
            mine[name] = value
    return mine


def finite(model: torch.nn.Module) -> bool:
    """Whether all weights of this rank are finite."""
    parts = [w.to_local() if isinstance(w, DTensor) else w for w in model.parameters()]
    return bool(torch.stack([part.isfinite().all() for part in parts]).all())


def cause(error: BaseException) -> str:
    """The first line of what began it. dcp's own error names only the ranks."""
    for failure, _ in getattr(error, "failures", {}).values():
        return cause(failure)
    return (str(error) or repr(error)).splitlines()[0]
