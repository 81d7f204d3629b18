"""What a run reports: key=value lines for people, metrics.jsonl for programs. Written by rank 0 alone."""

import contextlib
import datetime
import json
import math
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch

from .job import write_atomically
from .place import Place


class Progress:
    """Loss, throughput and time left, live on a terminal and as plain lines in a batch log, and as JSON lines.

    `unit` is what a step consumes (images, tokens), `per_step` how many of them over all ranks. The run begins after
    step number `first_step` and ends after `total_steps`. `flops_per_unit` is a unit's share of what all devices can
    compute in a second: with it mfu (model FLOPs utilization) is logged, or once that it is unknown, if that is nan.
    The time that saving and evaluation take counts in neither. Of `args` it uses checkpoint_dir, where metrics.jsonl
    is, log_every and tensorboard.
    """

    def __init__(
        self,
        args: Namespace,
        place: Place,
        unit: str,
        per_step: int,
        first_step: int,
        total_steps: int,
        flops_per_unit: float | None = None,
    ):
        self.place, self.log_every, self.total_steps = place, args.log_every, total_steps
        self.unit, self.per_step, self.flops_per_unit = unit, per_step, flops_per_unit
        self.live = sys.stdout.isatty()
        self.file = self.board = None
        if place.rank == 0:
            args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            self.file = self.open_metrics(args.checkpoint_dir / "metrics.jsonl", first_step)
            if args.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(args.checkpoint_dir / "tensorboard", purge_step=first_step + 1)
            if flops_per_unit is not None and math.isnan(flops_per_unit) and place.device.type == "cuda":
                print("No MFU in the log: PEAK_FLOPS in char_transformer.py does not have this GPU", flush=True)
        self.loss_sum = torch.zeros((), device=place.device)  # since the last log line; read only there
        self.last_step = first_step
        self.start_timing(first_step)

    def start_timing(self, step: int):
        """The throughput is that of the steps after this one. On a GPU all before it must be done: read a result."""
        self.timed_step, self.timed_from = step, time.perf_counter() - self.place.seconds_saving

    @staticmethod
    def open_metrics(path: Path, first_step: int):
        """Drops the lines of an earlier start beyond the step it is resumed from, so that no step appears twice."""
        if path.exists():
            kept = []
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, or a hole: a node has crashed
                    kept += [line + "\n"] if json.loads(line)["step"] <= first_step else []
            write_atomically(path, "".join(kept))
        return path.open("a", buffering=1)

    def add(self, step: int, loss: torch.Tensor) -> bool:
        """Counts a step with this rank's average loss. Returns whether a log line is due: then call log()."""
        self.loss_sum += loss.detach()
        return step % self.log_every == 0 or step == self.total_steps

    def log(self, step: int, epoch: int, **values: float):
        """Logs the average loss since the last log line, the throughput, and `values`. By all ranks.

        The ranks' shares of a batch are equally large, so the mean of their means is the mean. A loss that is not
        finite ends the run.
        """
        loss = self.check_loss(step)
        seconds = time.perf_counter() - self.place.seconds_saving - self.timed_from
        rate = (step - self.timed_step) * self.per_step / seconds
        left = datetime.timedelta(seconds=round((self.total_steps - step) * self.per_step / rate))
        event = {"step": step, "epoch": epoch, "loss": loss, **values, f"{self.unit}_per_second": rate}
        if self.flops_per_unit is not None and not math.isnan(self.flops_per_unit):
            event["mfu"] = self.flops_per_unit * rate
        self.write(event, f" time_left={left}", self.live)
        self.loss_sum = torch.zeros((), device=self.place.device)
        self.last_step = step
        self.start_timing(step)

    def check_loss(self, step: int) -> float:
        """The average loss since the last log line. One that is not finite ends all ranks: call it before a save."""
        [total] = self.place.all_reduced(self.loss_sum.reshape(1).clone())
        loss = total / self.place.world_size / max(1, step - self.last_step)
        if not math.isfinite(loss):
            self.place.stop(f"the loss is {loss} at step {step}: try a lower --learning-rate or another --precision")
        return loss

    def log_evaluation(self, step: int, epoch: int, **values: float):
        """A line for an evaluation, which stays on a terminal, too. The time it took does not count as training."""
        self.write({"step": step, "epoch": epoch, **values}, "", live=False)
        self.start_timing(step)

    def write(self, event: dict[str, float], end: str, live: bool):
        if self.file is None:
            return
        try:
            self.file.write(json.dumps(event) + "\n")
            for name, value in event.items() if self.board else ():
                self.board.add_scalar(name, value, event["step"])
            if self.board:
                self.board.flush()  # the run ends by os._exit
        except OSError as error:  # a full disk: no reason to end, and this line is on stdout as well
            print(f"warning: {self.file.name} is without step {event['step']}: {error.strerror}", file=sys.stderr)
        shown = {key: f"{value:.5g}" if isinstance(value, float) else str(value) for key, value in event.items()}
        shown["step"] += f"/{self.total_steps}"
        line = " ".join(f"{key}={value}" for key, value in shown.items()) + end
        start = "\r\x1b[K" if self.live else ""  # over the line before
        print(start + line, end="" if live else "\n", flush=True)
