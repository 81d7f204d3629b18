"""Command lines of the scripts, without torch: a mistake is one sentence, from one rank, before any slow import."""

import argparse
import datetime
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from .job import RESTART_COUNT

# cuBLAS and NCCL otherwise choose among algorithms that sum in another order: by the free memory, or by the network.
DETERMINISTIC = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
}


def one_line(text: str) -> str:
    """The text as a log may show it: no line breaks, and nothing that a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        shown = type(action.default) in (int, float, str) and action.default != argparse.SUPPRESS
        return f"{action.help} (default: {action.default})" if shown and "default" not in action.help else action.help


class ArgumentParser(argparse.ArgumentParser):
    """argparse, except that an error is one sentence, and that only the first of many ranks prints it."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def error(self, message: str):
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
        if rank != "0":  # rank 0 has the same arguments: it prints the mistake, and fails the job
            raise SystemExit(0)
        print(f"{self.prog}: {one_line(message)} (--help lists the arguments)", file=sys.stderr, flush=True)
        raise SystemExit(2)

    def add_checkpoint_arguments(self):
        """Where and how often a run saves its state, and whether it resumes."""
        self.add_argument("--checkpoint-dir", type=Path, help="default: checkpoints/ and the job id, or date and time")
        help = "steps, as 500, or minutes, as 10m; a run also saves at its end and when it is asked to stop"
        self.add_argument("--checkpoint-every", type=interval, default="10m", metavar="N|Nm", help=help)
        self.add_argument("--keep-checkpoints", type=whole_number(2), default=2, metavar="N", help="the newest N")
        help = "resume from the newest checkpoint in --checkpoint-dir (a requeued job does so by itself)"
        self.add_argument("--resume", action="store_true", default=RESTART_COUNT != "0", help=help)
        help = "slower, but a resumed run on as many CUDA nodes of the same kind is bit for bit the same, as on CPUs"
        self.add_argument("--deterministic", action="store_true", help=help)
        help = "also write what metrics.jsonl has for TensorBoard, into the folder tensorboard beside it"
        self.add_argument("--tensorboard", action="store_true", help=help)

    def add_timeout_arguments(self):
        """How long a rank waits for others: long at the start and around files, so that it can be short in steps."""
        seconds = {"type": number(1), "metavar": "SECONDS"}
        help = "to wait for a rank at the start, until the first step is done"
        self.add_argument("--init-timeout", default=300, help=help, **seconds)
        self.add_argument("--timeout", default=120, help="to wait for a rank in a step", **seconds)
        help = "to wait for a rank in a save, a load or an evaluation"
        self.add_argument("--save-timeout", default=1800, help=help, **seconds)

    def parse_args(self, arguments: list[str] | None = None) -> argparse.Namespace:
        """Fills in the default folder for checkpoints, too, and sets what --deterministic needs before CUDA starts."""
        args = super().parse_args(arguments)
        if vars(args).get("tensorboard") and importlib.util.find_spec("tensorboard") is None:
            self.error("--tensorboard needs the package tensorboard: python -m pip install tensorboard")
        if vars(args).get("deterministic"):
            for name, value in DETERMINISTIC.items():
                os.environ.setdefault(name, value)
        if "checkpoint_dir" in args and args.checkpoint_dir is None:
            if (args.resume or vars(args).get("sample")) and "SLURM_JOB_ID" not in os.environ:
                self.error(f"--{'resume' if args.resume else 'sample'} needs the --checkpoint-dir of an earlier run")
            args.checkpoint_dir = new_checkpoint_dir()
        return args


def new_checkpoint_dir() -> Path:
    """The default folder of a run: named after its job, or without Slurm after date and time."""
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path("checkpoints", os.environ.get("SLURM_JOB_ID", now))


def device_name(text: str) -> str:
    """An argparse type: a kind of device. Unlike choices, a type also checks a default, which may be TRAIN_DEVICE's."""
    if text not in ("auto", "cpu", "cuda", "mps"):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, cpu, cuda or mps (default: TRAIN_DEVICE, or auto)")
    return text


def whole_number(minimum: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `minimum`, and not more than torch takes for a seed or a size."""

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(r"[+-]?[0-9]{1,20}", text.strip()) else minimum - 1  # not 1_2: that is no 12
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        if number >= 2**31:
            raise argparse.ArgumentTypeError(f"{text!r} is too large a number")
        return number

    return parse


def number(minimum: float, below: float = 1e9) -> Callable[[str], float]:
    """An argparse type: a number of at least `minimum` and less than `below`."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not minimum <= number < below:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number of at least {minimum:g} and less than {below:g}"
            )
        return number

    return parse


def interval(text: str) -> tuple[float, str]:
    """An argparse type: "500" is (500, "steps"), "10m" is (10.0, "minutes")."""
    try:
        every = (float(text[:-1]), "minutes") if text.endswith("m") else (int(text), "steps")
    except ValueError:
        every = (0, "")
    if not 0 < every[0] < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of steps, as 500, nor of minutes, as 10m")
    return every


def indivisible(flag: str, value: int, parts: int, what: str) -> str | None:
    """One sentence when `value` does not divide by `parts` (in words: `what`), with the nearest that do; or None."""
    if value % parts == 0:
        return None
    more = value - value % parts + parts
    return f"{flag} {value} does not divide by {what}: {more - parts or more + parts} or {more} would do"
