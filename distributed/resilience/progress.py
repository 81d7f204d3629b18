"""What a run says of itself: key=value lines for people, metrics.jsonl for programs. Written by rank 0 alone."""

import contextlib
import datetime
import json
import sys
import time
from pathlib import Path

from .stop_request import write_whole


class Progress:
    """Throughput and time left, live on a terminal and as plain lines in a batch log, and every event as a JSON line.

    `unit` is what a step consumes (images, tokens); `total_steps` is where the run will end. On a rank other than 0,
    or with `folder` None, nothing is written.
    """

    def __init__(self, folder: Path | None, unit: str, first_step: int, total_steps: int):
        self.unit, self.total_steps, self.last_step = unit, total_steps, first_step
        self.live = sys.stdout.isatty()
        self.file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = self.open_metrics(folder / "metrics.jsonl", first_step)
        self.last_time = time.perf_counter()

    @staticmethod
    def open_metrics(path: Path, first_step: int):
        """Drops what an earlier attempt wrote beyond the step it is resumed from, so that no step appears twice."""
        if path.exists():
            kept = []
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line, or a hole: a node has crashed
                    kept += [line + "\n"] if json.loads(line)["step"] <= first_step else []
            write_whole(path, "".join(kept))
        return path.open("a", buffering=1)

    def step(self, step: int, epoch: int, count: int, **values: float):
        """A log event after `count` images or tokens since the last one; `values` (the loss) are averages over them."""
        now = time.perf_counter()
        seconds, steps = now - self.last_time, step - self.last_step
        self.last_time, self.last_step = now, step
        left = datetime.timedelta(seconds=round((self.total_steps - step) * seconds / steps))
        values[f"{self.unit}_per_second"] = count / seconds
        self.write({"step": step, "epoch": epoch, **values}, f"/{self.total_steps}", f" time_left={left}", self.live)

    def epoch(self, step: int, epoch: int, **values: float):
        """The end of an epoch: a line that stays on a terminal, too."""
        self.write({"step": step, "epoch": epoch, **values}, f"/{self.total_steps}", "", live=False)
        self.last_time, self.last_step = time.perf_counter(), step  # evaluation is not counted as training

    def write(self, event: dict[str, float], after_step: str, end: str, live: bool):
        if self.file is None:
            return
        try:
            self.file.write(json.dumps(event) + "\n")
        except OSError as error:  # a full disk: no reason to end, and this line is on stdout as well
            print(f"warning: {self.file.name} is without step {event['step']}: {error.strerror}", file=sys.stderr)
        shown = {key: f"{value:.5g}" if isinstance(value, float) else str(value) for key, value in event.items()}
        shown["step"] += after_step
        line = " ".join(f"{key}={value}" for key, value in shown.items()) + end
        start = "\r\x1b[K" if self.live else ""  # over the line before
        print(start + line, end="" if live else "\n", flush=True)
