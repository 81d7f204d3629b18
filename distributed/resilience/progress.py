"""What rank 0 reports of a run: key=value lines for people, metrics.jsonl for programs."""

import contextlib
import datetime
import json
import math
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch

from .checkpoint_files import write_atomically
from .group import Group


class Progress:
    """Loss, throughput and time left: as plain lines and as JSON lines.

    `unit` is what a step consumes (images, tokens), `per_step` how many of them over all ranks. The
    run begins after step `first_step` and ends after `total_steps`. `flops_per_unit` is a unit's
    share of what all devices can compute in a second: with it mfu (model FLOPs utilization) is
    logged, unless it is nan. The time that saving and evaluation take counts in neither.
    """

    def __init__(
        self,
        args: Namespace,
        group: Group,
        unit: str,
        per_step: int,
        first_step: int,
        total_steps: int,
        flops_per_unit: float = math.nan,
    ):
        self.group, self.log_every, self.total_steps = group, args.log_every, total_steps
        self.unit, self.per_step, self.flops_per_unit = unit, per_step, flops_per_unit
        self.file = self.board = None
        if group.rank == 0:
            args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            self.file = open_metrics(args.checkpoint_dir / "metrics.jsonl", first_step)
            if args.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                folder = args.checkpoint_dir / "tensorboard"
                self.board = SummaryWriter(folder, purge_step=first_step + 1)
        # Since the last log line. It is read only there, because reading waits for the GPU.
        self.loss_sum = torch.zeros((), device=group.device)
        self.last_step = first_step
        self.start_timing(first_step)

    def start_timing(self, step: int):
        """Throughput counts the steps after this one. Before, a GPU must have finished its work."""
        self.timed_step, self.timed_from = step, time.perf_counter() - self.group.seconds_saving

    def add(self, step: int, loss: torch.Tensor) -> bool:
        """Counts a step with this rank's average loss. Returns whether log() is to be called."""
        self.loss_sum += loss.detach()
        return step % self.log_every == 0 or step == self.total_steps

    def log(self, step: int, epoch: int, **values: float):
        """Logs the average loss since the last line, the throughput, and `values`.

        All ranks call it together. A loss that is not finite ends the run.
        """
        loss = self.check_loss(step)
        seconds = time.perf_counter() - self.group.seconds_saving - self.timed_from
        rate = (step - self.timed_step) * self.per_step / seconds
        left = datetime.timedelta(seconds=round((self.total_steps - step) * self.per_step / rate))
        event = {"step": step, "epoch": epoch, "loss": loss, **values}
        event[f"{self.unit}_per_second"] = rate
        if not math.isnan(self.flops_per_unit):
            event["mfu"] = self.flops_per_unit * rate
        self.write_event(event, f" time_left={left}")
        self.loss_sum.zero_()
        self.last_step = step
        self.start_timing(step)

    def check_loss(self, step: int) -> float:
        """The average loss since the last log line. One that is not finite ends all ranks.

        The ranks' shares of a batch are equally large, so the mean of their means is the mean.
        """
        [total] = self.group.all_reduced(self.loss_sum.reshape(1).clone())
        loss = total / self.group.world_size / max(1, step - self.last_step)
        if not math.isfinite(loss):
            remedy = "try a lower --learning-rate or another --precision"
            self.group.stop_if_any(f"the loss is {loss} at step {step}: {remedy}")
        return loss

    def log_evaluation(self, step: int, epoch: int, **values: float):
        """Logs `values`. The time that the evaluation took does not count as training."""
        self.write_event({"step": step, "epoch": epoch, **values})
        self.start_timing(step)

    def write_event(self, event: dict[str, float], end: str = ""):
        """On rank 0 prints a line, and writes one into metrics.jsonl, and for TensorBoard."""
        if self.file is None:
            return
        try:
            self.file.write(json.dumps(event) + "\n")
            if self.board:
                for name, value in event.items():
                    self.board.add_scalar(name, value, event["step"])
                self.board.flush()  # the run ends by os._exit
        except OSError as error:
            # A full disk is no reason to end, and this line is on stdout as well.
            without = f"{self.file.name} is without step {event['step']}"
            print(f"warning: {without}: {error.strerror}", file=sys.stderr)
        words = [f"step={event.pop('step')}/{self.total_steps}"]
        for name, value in event.items():
            words.append(f"{name}={value:.5g}" if isinstance(value, float) else f"{name}={value}")
        print(" ".join(words) + end, flush=True)


def open_metrics(path: Path, first_step: int):
    """Drops the lines that a run which is resumed after `first_step` writes again: those of later
    steps, and an evaluation after that step."""
    if path.exists():
        kept = []
        for line in path.read_text(errors="replace").splitlines():
            # A node's crash may have left half a line, or a hole.
            with contextlib.suppress(ValueError, KeyError, TypeError):
                event = json.loads(line)
                if event["step"] < first_step + ("loss" in event):
                    kept.append(line + "\n")
        write_atomically(path, "".join(kept))
    return path.open("a", buffering=1)
