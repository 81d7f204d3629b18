"""When the ranks save and stop together, and how a run gets back to where it was.

No rank holds the whole model. In a checkpoint torch.distributed.checkpoint stores the tensors by
name and by place in the whole tensor, not by rank, so it can be read on any number of ranks and
under any split.

The steps wait only until each rank's part is copied into the CPU's memory. A thread of each rank
writes it, over a process group of its own, while they go on. The next save and the run's end wait
for that thread.

Beware: the format's index (.metadata) is a Python pickle. Load only what you trust.
"""

import shutil
import sys
import time
import warnings
from argparse import Namespace
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import heartbeat
import preemption

from .checkpoint_files import (
    claim,
    first_line,
    measure_files,
    newest,
    owner_fault,
    prune,
    publish,
    read_manifest,
    write_manifest,
)
from .group import Group
from .ranks import JOB, RESTART_COUNT

# dcp warns if there is one process without a group.
warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")


class Checkpoints:
    """The checkpoints of a run: folders checkpoint_step_N in args.checkpoint_dir.

    `run` is what makes a run the same run (batch size, seed, ...), as plain values: only a run that
    is equal in all of them can be resumed. Of `args` it uses checkpoint_dir, checkpoint_every,
    keep_checkpoints, resume, timeout and save_timeout. All ranks call each method together. A fault
    ends all of them with one sentence.
    """

    def __init__(self, args: Namespace, group: Group, run: dict, total_steps: int):
        self.args, self.group, self.run, self.total_steps = args, group, run, total_steps
        self.folder: Path = args.checkpoint_dir
        self.step = 0
        self.values: dict[str, Any] = {}
        # When the ranks last agreed whether to stop, and when they will do so again.
        self.agreed_step, self.agree_next = 0, 1
        self.agreed_at = self.saved_at = time.monotonic()

        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.failed = False
        # From CUDA every checkpoint is copied into the same pinned memory. (In torch 2.11 a
        # DefaultStager fails at its second checkpoint.)
        cuda = group.device.type == "cuda"
        self.stager = staging.BlockingAsyncStager(cache_staged_state_dict=cuda)
        self.writers = None
        if dist.is_initialized():
            self.writers = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=args.save_timeout)
            )

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Claims the folder and, with --resume, loads the newest whole checkpoint.

        Returns its step, or 0 for a new run. self.values has the values that save() was given.
        """
        self.group.stop_if_any(claim(self.folder) if self.group.rank == 0 else None)
        if self.args.resume:
            with self.group.longer_timeout(self.args.save_timeout):
                self.load(model, optimizer)
            if self.group.rank == 0:
                none = f"No whole checkpoint in {self.folder}"
                print(f"Resumed after step {self.step}" if self.step else none, flush=True)
        self.agreed_step, self.agree_next = self.step, self.step + 1
        heartbeat.step = self.step
        return self.step

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        """Loads the newest whole checkpoint, if there is one."""
        if (path := newest(self.folder, self.group)) is None:
            return
        self.values = read_manifest(path)
        del self.values["files"]
        self.stop_if_of_another_run(self.values.pop("run"))
        load_folder(path, model, optimizer)
        self.step = self.values.pop("step")

    def due(self, step: int) -> tuple[bool, bool]:
        """Whether to save after this step, and whether to stop then: the same on every rank.

        A signal may reach one rank only, and clocks differ, so the ranks exchange what they know.
        They do so about once a second, because it costs a collective and, on a GPU, a wait. They
        also exchange the number of steps per second, so that all ranks count alike.
        """
        self.step = heartbeat.step = step
        every, unit = self.args.checkpoint_every
        save = step == self.total_steps or (unit == "steps" and step % every == 0)
        if step < self.agree_next:
            return save, False

        now = time.monotonic()
        overdue = unit == "minutes" and now - self.saved_at > 60 * every
        fault = owner_fault(self.folder) if self.group.rank == 0 else None
        speed = (step - self.agreed_step) / (now - self.agreed_at)
        values = (preemption.received, overdue, fault is not None, speed)
        asked, overdue, superseded, speed = self.group.all_reduced(values, dist.ReduceOp.MAX)
        if superseded:
            self.group.stop_if_any(fault)
        if overdue:
            self.saved_at = now
        self.agreed_step, self.agreed_at = step, now
        self.agree_next = step + max(1, int(speed))
        self.group.set_timeout(self.args.timeout)  # the first step is done
        return bool(save or overdue or asked), bool(asked)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, **values: Any):
        """Begins to write a checkpoint after so many steps, with `values`, which are plain ones.

        One that cannot be written is a warning: older ones are kept, the run continues.
        """
        self.step, start = step, time.perf_counter()
        with self.group.longer_timeout(self.args.save_timeout):
            self.end_writing()
            self.begin_writing(state_of(model, optimizer), values)
        self.group.seconds_saving += time.perf_counter() - start

    def begin_writing(self, state: dict, values: dict):
        """Copies the state into the CPU's memory, and leaves the rest to the thread."""
        path = self.folder / f"checkpoint_step_{self.step}"
        temporary = path.with_name(f".{path.name}.{JOB}.{RESTART_COUNT}.tmp")
        # Copying ahead is off, because the thread that copies would open a context on GPU 0.
        writer = dcp.FileSystemWriter(temporary, per_thread_copy_ahead=0)
        written = dcp.async_save(
            state, storage_writer=writer, process_group=self.writers, async_stager=self.stager
        )
        metadata = {"step": self.step, "run": self.run, **values}
        self.writing = self.thread.submit(self.end_folder, written, temporary, path, metadata)

    def end_writing(self):
        """Waits for the checkpoint that is being written, if there is one."""
        if self.writing:
            self.failed = not self.writing.result()
            self.writing = None

    def end_folder(self, written: Future, temporary: Path, path: Path, metadata: dict) -> bool:
        """Gives a checkpoint its name if every rank has written its part. Runs in the thread.

        Returns False on rank 0, after a warning, if that could not be done.
        """
        rank, files, fault = self.group.rank, {}, None
        try:
            written.result()
            files = measure_files(temporary, rank, self.group.world_size)
        # A CheckpointException is a BaseException, but no Exception.
        except (Exception, dcp.CheckpointException) as error:
            fault = f"rank {rank}: {first_line(error)}"
        parts = self.group.gathered((files, fault), self.writers)
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
            shutil.rmtree(temporary, ignore_errors=True)
            what = f"{path} could not be saved, older ones are kept: {first_line(error)}"
            print(f"warning: {what}", file=sys.stderr, flush=True)
            return False
        prune(self.folder, metadata["step"], self.args.keep_checkpoints)
        return True

    def finish(self, result: str):
        """Prints the last line of a run. Rank 0 requeues the job of one that was stopped.

        If it cannot, the command that resumes the run is printed, and the status will be 1.
        """
        with self.group.longer_timeout(self.args.save_timeout):
            self.end_writing()
        self.group.stop_if_any("the last steps could not be saved" if self.failed else None)
        if self.group.rank != 0:
            return
        done = self.step >= self.total_steps
        stopped = f"Stopped after step {self.step}, saved"
        print(f"Finished: {result}" if done else stopped, flush=True)
        # torchrun, once told to stop, fails even if its ranks finish. Requeued, the job finds that
        # all is done.
        told = preemption.received and self.group.ranks.launcher == "torchrun"
        if done and not told:
            return
        requeued = preemption.requeue(f"--resume --checkpoint-dir {self.folder}")
        if not requeued and not done:
            self.group.status = 1

    def stop_if_of_another_run(self, run: dict):
        """Rank 0 decides, because other ranks read less of the data that is in `run`."""
        changed = []
        for name, now in self.run.items():
            if run.get(name) != now:
                changed.append(f"{name} was {run.get(name)}, not {now}")
        of = f"the checkpoints in {self.folder} are of a different run ({', '.join(changed)})"
        remedy = "use the arguments of that run, or choose another --checkpoint-dir"
        fault = f"{of}: {remedy}" if changed else None
        self.group.stop_if_any(fault if self.group.rank == 0 else None)


def load_folder(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None):
    """Reads a checkpoint into a model, split or not, and its optimizer. All ranks call it.

    Raises dcp's CheckpointException.
    """
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
