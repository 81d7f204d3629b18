#!/usr/bin/env python3
"""What checkpoints, and being ready to stop, cost train_fsdp.py on the CPU.

    python aux/prepare_data.py shakespeare
    python aux/bench/checkpoint.py                # one rank; some three minutes: leave the machine alone meanwhile
    ./torchrun.sh aux/bench/checkpoint.py         # two, who have to agree
    python aux/bench/checkpoint.py --check        # status 1 when a ratio is more than the one stated below

A small model is trained, in turns of ten steps: without saving or asking whether to stop, asking after every step
(Checkpoints.due, as train_fsdp.py does), and asking and saving every 200 steps. A round is 200 steps of each, so
with its share of one checkpoint; printed are the medians of the rounds' ratios. Turns are that short, and the tensors
the same, because the machine's speed drifts, and three models in three places of its memory differ by 2 %.

Then a model with 128 MB of weights and optimizer state is saved at once and asynchronously in turn: printed is how long
the steps have to wait for each, in the second case to copy the state and, later, to publish what has been written.
"""

import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

from resilience.arguments import ArgumentParser, whole_number

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default="data/shakespeare")
    parser.add_argument("--rounds", type=whole_number(1), default=9)
    parser.add_argument("--check", action="store_true", help="status 1 when something stated is missed")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_arguments()  # before torch: a typing mistake costs no second

import torch

import characters
import train_fsdp
from language_model import choose_precision
from resilience.place import Place, end, init_process_group
from resilience.sharded_checkpoints import size_of, state_of

# --- main -------------------------------------------------------------------------------------------------------------

STEPS, TURN = 200, 10
LARGE = ["--layers", "6", "--heads", "6", "--width", "384"]
LOWEST = 3  # times as long as an asynchronous save of it, a plain one makes the steps wait
HIGHEST = {"asks": 1.01, "asks and saves": 1.02}  # times as long as the bare steps


def training_arguments(data_dir: Path, folder: Path, saves: bool, *others: str) -> Namespace:
    """train_fsdp.py's, at nanoGPT's CPU settings."""
    sys.argv = ["train_fsdp.py", "--data-dir", str(data_dir), "--checkpoint-dir", str(folder), "--device", "cpu"]
    sys.argv += ["--checkpoint-every", str(STEPS) if saves else "1000000", *others]
    return train_fsdp.parse_arguments()


def training(args: Namespace, place: Place) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """What train_fsdp.py trains."""
    mesh = train_fsdp.make_mesh(args, place.device, place.world_size)
    model = train_fsdp.make_model(train_fsdp.metadata_of(args), args.dropout)
    train_fsdp.split(args, model, mesh)
    train_fsdp.initialize(model, place.device, args.seed)
    return model, train_fsdp.make_optimizer(args, model)


def measure(options: Namespace, scratch: Path) -> tuple[Place, dict[str, list[float]]]:
    """Seconds of every round, of each of the three kinds; the first round, a warm-up, is left out."""
    kinds = {kind: training_arguments(options.data_dir, scratch / kind, "saves" in kind) for kind in ("bare", *HIGHEST)}
    place = init_process_group(kinds["bare"])
    torch.set_num_threads(1)
    for args in kinds.values():
        args.precision = choose_precision(args, place)
    model, optimizer = training(kinds["bare"], place)
    parts = {"model": model, "optimizer": optimizer}
    windows = characters.windows(options.data_dir, "train", kinds["bare"].context)
    checkpoints = {kind: train_fsdp.open_checkpoints(kinds[kind], place) for kind in HIGHEST}
    for opened in checkpoints.values():
        opened.resume(parts)
    seconds = {kind: [0.0] * (options.rounds + 1) for kind in kinds}
    for first in range(0, STEPS * (options.rounds + 1), TURN):
        for kind, args in kinds.items():
            start = time.perf_counter()
            for step in range(first, first + TURN):
                batch = characters.random_batch(args, windows, step, place.rank, place.world_size, place.device)
                train_fsdp.train_step(args, step, model, optimizer, batch)
                if kind != "bare" and checkpoints[kind].due(step + 1)[0]:
                    checkpoints[kind].save(step + 1, parts)
            seconds[kind][first // STEPS] += time.perf_counter() - start
    return place, {kind: times[1:] for kind, times in seconds.items()}


def measure_saves(options: Namespace, scratch: Path, place: Place) -> tuple[float, dict[str, list[float]]]:
    """Bytes of a checkpoint, and the seconds that the steps wait for it; the first round is left out."""
    args = training_arguments(options.data_dir, scratch / "saves", False, *LARGE)
    args.precision = "fp32"
    model, optimizer = training(args, place)
    windows = characters.windows(options.data_dir, "train", args.context)
    batch = characters.random_batch(args, windows, 0, place.rank, place.world_size, place.device)
    train_fsdp.train_step(args, 0, model, optimizer, batch)  # AdamW has no state before
    parts, checkpoints = {"model": model, "optimizer": optimizer}, train_fsdp.open_checkpoints(args, place)
    checkpoints.resume(parts)
    size = size_of(state_of(**parts))
    seconds = {"at once": [], "asynchronously": []}
    for step in range(1, 2 * (options.rounds + 1) + 1):
        kind = "at once" if step % 2 else "asynchronously"
        checkpoints.asynchronous_from = math.inf if step % 2 else size
        place.all_reduced([0])  # the ranks begin together
        start = time.perf_counter()
        checkpoints.save(step, parts)
        waited = time.perf_counter() - start
        while checkpoints.writing and not checkpoints.writing[-1].done():
            time.sleep(0.01)  # here the steps go on
        place.all_reduced([0])
        start = time.perf_counter()
        checkpoints.end_writing()
        seconds[kind].append(waited + time.perf_counter() - start)
    return size, {kind: times[1:] for kind, times in seconds.items()}


def main(options: Namespace):
    if fault := characters.missing_data(options.data_dir, 64):
        sys.exit(f"checkpoint.py: {fault}")
    scratch = Path(tempfile.gettempdir(), f"bench-checkpoint-{os.getppid()}")  # the same for all ranks of a torchrun
    try:
        place, seconds = measure(options, scratch)
        size, waits = measure_saves(options, scratch, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # by whichever rank is first: all have trained, or it is over
    if place.rank != 0:
        return place.shutdown()
    print(f"{STEPS} steps of nanoGPT's CPU settings, ranks: {place.world_size}, medians of {options.rounds} rounds")
    print("| training | seconds | ratio | at most |\n|---|---|---|---|")
    missed = []
    for kind, times in seconds.items():
        ratio = statistics.median(time / bare for time, bare in zip(times, seconds["bare"], strict=True))
        print(f"| {kind} | {statistics.median(times):.3f} | {ratio:.4f} | {HIGHEST.get(kind, '')} |")
        if ratio > HIGHEST.get(kind, math.inf):
            missed.append(f"MISSED: a training that {kind} takes more than {HIGHEST[kind]} times as long")
    plain, asynchronous = waits.values()
    ratio = statistics.median(long / short for long, short in zip(plain, asynchronous, strict=True))
    print(f"\nSteps wait for a checkpoint of {size / 1e6:.0f} MB, medians of {options.rounds} rounds")
    print("| at once | asynchronously | ratio | at least |\n|---|---|---|---|")
    print(f"| {statistics.median(plain):.3f} s | {statistics.median(asynchronous):.3f} s | {ratio:.1f} | {LOWEST} |")
    if ratio < LOWEST:
        missed.append(f"MISSED: a plain save makes the steps wait less than {LOWEST} times as long")
    for line in missed:
        print(line, file=sys.stderr)
    if missed and options.check:
        end()
    place.shutdown()


if __name__ == "__main__":
    main(options)
