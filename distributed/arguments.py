"""Command lines of the scripts, without torch: a mistake is one sentence, from one rank, before any slow import."""

import argparse
import datetime
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path


def let_srun_read():
    """To be called between a last sentence and a bad exit: srun then ends the step, and what it has not read is lost.

    Measured with Slurm 22.05 and --kill-on-bad-exit=1: 20 of 40 sentences did not reach the log, with a pause none.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if "SLURM_STEP_ID" in os.environ:
        time.sleep(1)


def one_line(text: str) -> str:
    """The text as a log may show it: no line breaks, and nothing that a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)


class ArgumentParser(argparse.ArgumentParser):
    """argparse, except that an error is one sentence and that of many ranks only the first one says it."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str):
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
        if rank == "0":
            print(f"{self.prog}: {one_line(message)} (--help lists the arguments)", file=sys.stderr)
            let_srun_read()
        else:
            time.sleep(5)  # a rank that ends ends the job: let rank 0, which sees the same mistake, speak first
        raise SystemExit(2)


def new_checkpoint_dir() -> Path:
    """Where a run keeps its checkpoints unless told: a folder of its job's, or without Slurm of the moment's."""
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path("checkpoints", os.environ.get("SLURM_JOB_ID", now))


def was_requeued() -> bool:
    """Slurm has started this job before: it goes on from what it left, without being told to."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def device_name(text: str) -> str:
    """An argparse type: a kind of device. Unlike choices, a type also checks a default, which may be TRAIN_DEVICE's."""
    if text not in ("auto", "cpu", "cuda", "mps"):
        raise argparse.ArgumentTypeError(f"{text!r} is not auto, cpu, cuda or mps (default: TRAIN_DEVICE, or auto)")
    return text


def whole_number(minimum: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `minimum`, and not more than torch takes for a seed or a size."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
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


def uneven(flag: str, value: int, parts: int, what: str) -> str | None:
    """One sentence when `value` does not divide by `parts`, which people know as `what`, with the nearest that do."""
    if value % parts == 0:
        return None
    more = value - value % parts + parts
    return f"{flag} {value} does not divide by {what}: {more - parts or more + parts} or {more} would do"
