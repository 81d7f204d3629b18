"""The scripts' command lines, without torch. A mistake is one sentence from rank 0."""

import argparse
import contextlib
import datetime
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from .ranks import RESTART_COUNT, find_ranks


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Adds the default to the help of an option if it is a number or a text."""

    def _get_help_string(self, action: argparse.Action) -> str:
        has_one = type(action.default) in (int, float, str) and action.default != argparse.SUPPRESS
        if has_one and "default" not in action.help:
            return f"{action.help} (default: {action.default})"
        return action.help


class ArgumentParser(argparse.ArgumentParser):
    """argparse, except that an error is one sentence, which only rank 0 prints."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def error(self, message: str):
        # Rank 0 has the same arguments, and fails the job.
        if find_ranks().rank != 0:
            raise SystemExit(0)
        # The message may quote control characters, which a terminal would obey.
        shown = "".join(character if character.isprintable() else " " for character in message)
        sentence = f"{self.prog}: {shown} (--help lists the arguments)"
        print(sentence, file=sys.stderr, flush=True)
        raise SystemExit(2)

    def add_checkpoint_arguments(self):
        """Where and how often a run saves its state, and whether it resumes."""
        add = self.add_argument
        help = "where to save (default: checkpoints/JOB, or date and time without a job)"
        add("--checkpoint-dir", type=Path, help=help)
        help = "save after so many steps, such as 500, or minutes, such as 10m; a run also saves "
        help += "at its end, and when it is asked to stop"
        add("--checkpoint-every", type=interval, default="10m", metavar="N|Nm", help=help)
        help = "keep the newest N checkpoints"
        add("--keep-checkpoints", type=whole_number(2), default=2, metavar="N", help=help)
        help = "resume from the newest checkpoint in --checkpoint-dir (a requeued job does)"
        add("--resume", action="store_true", default=RESTART_COUNT != "0", help=help)
        help = "make resumed runs equal to uninterrupted ones on the same number and kind of CUDA "
        help += "nodes, as they always are on CPUs; this is slower"
        add("--deterministic", action="store_true", help=help)
        help = "also write the metrics for TensorBoard, into tensorboard/ beside metrics.jsonl"
        add("--tensorboard", action="store_true", help=help)

    def add_timeout_arguments(self):
        """How long a rank waits for others: shorter in steps than at the start and around files."""
        seconds = {"type": number(1), "metavar": "SECONDS"}
        help = "how long to wait for a rank at the start, until the first step is done"
        self.add_argument("--init-timeout", default=300, help=help, **seconds)
        help = "how long to wait for a rank in a step"
        self.add_argument("--timeout", default=120, help=help, **seconds)
        help = "how long to wait for a rank in a save, a load or an evaluation"
        self.add_argument("--save-timeout", default=1800, help=help, **seconds)

    def parse_args(self, arguments: list[str] | None = None) -> argparse.Namespace:
        """Parses, and fills in the folder for checkpoints."""
        args = super().parse_args(arguments)
        if "checkpoint_dir" in args and args.checkpoint_dir is None:
            if args.resume and "SLURM_JOB_ID" not in os.environ:
                self.error("--resume needs the --checkpoint-dir of an earlier run")
            now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
            run = os.environ.get("SLURM_JOB_ID", now)
            # Another srun in the same allocation is another run: job 7, then 7.1.
            srun_step = int(os.environ.get("SLURM_STEP_ID", 0))
            if 0 < srun_step < 2**31:
                run += f".{srun_step}"
            args.checkpoint_dir = Path("checkpoints", run)
        return args


def whole_number(minimum: int) -> Callable[[str], int]:
    """An argparse type: at least `minimum`, and not more than torch takes for a seed or a size."""

    def parse(text: str) -> int:
        with contextlib.suppress(ValueError):
            if minimum <= int(text) < 2**31:
                return int(text)
        which = f"a whole number of at least {minimum} and less than 2**31"
        raise argparse.ArgumentTypeError(f"{text!r} is not {which}")

    return parse


def number(minimum: float, below: float = 1e9) -> Callable[[str], float]:
    """An argparse type: a number of at least `minimum` and less than `below`."""

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            if minimum <= float(text) < below:
                return float(text)
        which = f"a number of at least {minimum:g} and less than {below:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not {which}")

    return parse


def interval(text: str) -> tuple[float, str]:
    """An argparse type: "500" is (500, "steps"), "10m" is (10.0, "minutes")."""
    with contextlib.suppress(ValueError):
        every = (float(text[:-1]), "minutes") if text.endswith("m") else (int(text), "steps")
        if 0 < every[0] < math.inf:
            return every
    which = "neither a number of steps, such as 500, nor of minutes, such as 10m"
    raise argparse.ArgumentTypeError(f"{text!r} is {which}")


def indivisible(flag: str, value: int, parts: int, what: str) -> str | None:
    """One sentence if `value` is not divisible by `parts` (in words: `what`), or None."""
    if value % parts == 0:
        return None
    below = value - value % parts
    above = below + parts
    other = below if below > 0 else above + parts
    return f"{flag} {value} is not divisible by {what}: {other} or {above} would do"
