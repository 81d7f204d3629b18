"""When the ranks save and stop together, and how a run gets back to where it was."""

import copy
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import stop_request
from .checkpoint_files import (
    check_file,
    claim,
    newest,
    owner_fault,
    prune,
    unreadable,
    write_file,
)
from .job import JOB, requeue, resume_command
from .place import Place


class Checkpoints:
    """The checkpoints of a run: files checkpoint_step_N.pt in args.checkpoint_dir, of rank 0.

    `run` is what makes a run the same run (batch size, seed, ...), as plain values: only a run that
    is equal in all of them can be resumed. Of `args` it uses checkpoint_dir, checkpoint_every,
    keep_checkpoints, resume, timeout and save_timeout. All ranks call each method together. A fault
    ends all of them with one sentence. ShardedCheckpoints has its own load_files and save_files.
    """

    def __init__(self, args: Namespace, place: Place, run: dict, total_steps: int):
        self.args, self.place, self.run, self.total_steps = args, place, run, total_steps
        self.folder: Path = args.checkpoint_dir
        self.step = self.resumed_from = 0
        self.values: dict[str, Any] = {}
        self.failed = False
        # When the ranks last agreed whether to stop, and when they will do so again
        self.agreed_step, self.agree_next = 0, 1
        self.agreed_at = self.saved_at = time.monotonic()

    def resume(self, parts: dict[str, Any]) -> int:
        """Claims the folder and, with --resume, loads the newest whole checkpoint into `parts`.

        Returns its step, or 0 for a new run. self.values has the values that save() was given.
        """
        self.place.stop_if_any(claim(self.folder) if self.place.rank == 0 else None)
        if self.args.resume:
            with self.place.longer_timeout(self.args.save_timeout):
                self.values = self.load_files(parts) or {"step": 0}
            self.step = self.resumed_from = self.values.pop("step")
            if self.place.rank == 0:
                none = f"No whole checkpoint in {self.folder}"
                print(f"Resumed after step {self.step}" if self.step else none, flush=True)
        self.agreed_step, self.agree_next = self.step, self.step + 1
        self.place.beat.step = self.step
        return self.step

    def due(self, step: int) -> tuple[bool, bool]:
        """Whether to save after this step, and whether to stop then: the same on every rank.

        A signal may reach one rank only, and clocks differ, so the ranks exchange what they know.
        They do so about once a second, because it costs a collective and, on a GPU, a wait. They
        also exchange the number of steps per second, so that all ranks count alike.
        """
        self.step = self.place.beat.step = step
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
        self.agreed_step, self.agreed_at = step, now
        self.agree_next = step + max(1, int(speed))
        self.place.set_timeout(self.args.timeout)  # the first step is done
        return bool(save or overdue or asked), bool(asked)

    def save(self, step: int, parts: dict[str, Any], **values: Any):
        """Saves the parts' states and `values` (plain ones), and removes all but the newest.

        A checkpoint that cannot be written is a warning: older ones are kept, the run continues.
        """
        self.step, start = step, time.perf_counter()
        with self.place.longer_timeout(self.args.save_timeout):
            self.save_files(step, parts, values)
        self.place.seconds_saving += time.perf_counter() - start

    def finish(self, result: str):
        """Prints the last line of a run. Rank 0 requeues the job of one that was stopped.

        If it cannot, it prints the command that resumes the run, and the status will be 1.
        """
        self.place.stop_if_any("the last steps could not be saved" if self.failed else None)
        if self.place.rank != 0:
            return
        done = self.step >= self.total_steps
        stopped = f"Stopped after step {self.step}, saved"
        print(f"Finished: {result}" if done else stopped, flush=True)
        # torchrun, once told to stop, fails even if its ranks finish. Requeued, the job finds that
        # all is done.
        torchrun = self.place.ranks.launcher == "torchrun"
        told = torchrun and stop_request.received == signal.SIGTERM
        if JOB == "none" or (done and not told):
            return
        command = resume_command(self.folder)
        reason = requeue(self.step > self.resumed_from, "" if done else command)
        if reason is not None and not done:
            sentence = f"Not requeued: {reason}. To resume it:\n    {command}"
            print(sentence, file=sys.stderr, flush=True)
            self.place.status = 1

    def load_files(self, parts: dict[str, Any]) -> dict | None:
        """Loads the newest whole checkpoint, if there is one. Returns its step and its values."""
        path = newest(self.folder, self.place, check_file)
        if path is None:
            return None
        state = fault = None
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # of many kinds, as for a value that is refused
            fault = unreadable(path, error)
        self.place.stop_if_any(fault)
        self.stop_if_of_another_run(state.pop("run"))
        for name, part in parts.items():
            # An optimizer would keep the mapped tensors, whose file will be removed one day.
            part.load_state_dict(copy.deepcopy(state.pop(name)))
        return state

    def save_files(self, step: int, parts: dict[str, Any], values: dict):
        """Writes a checkpoint; self.failed says whether that could not be done."""
        if self.place.rank != 0:
            return
        state = {"run": self.run, "step": step, **values}
        state |= {name: part.state_dict() for name, part in parts.items()}
        self.failed = not write_file(state, self.folder / f"checkpoint_step_{step}.pt")
        if not self.failed:
            prune(self.folder, step, self.args.keep_checkpoints)

    def stop_if_of_another_run(self, run: dict):
        """Rank 0 decides, because other ranks read less of the data that is in `run`."""
        changed = [
            f"{name} was {run.get(name)}, not {now}"
            for name, now in self.run.items()
            if run.get(name) != now
        ]
        of = f"the checkpoints in {self.folder} are of a different run ({', '.join(changed)})"
        remedy = "use the arguments of that run, or choose another --checkpoint-dir"
        fault = f"{of}: {remedy}" if changed else None
        self.place.stop_if_any(fault if self.place.rank == 0 else None)
