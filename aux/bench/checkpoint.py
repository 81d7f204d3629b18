#!/usr/bin/env python3
"""What checkpoints, and being ready to stop, cost train_fsdp.py in one CPU process.

    python aux/prepare_data.py shakespeare
    python aux/bench/checkpoint.py                # some five minutes: leave the machine alone meanwhile
    python aux/bench/checkpoint.py --check        # status 1 when a ratio is more than the one stated below

Three trainings take turns, step for step the same: one that neither saves nor asks whether to stop, one that asks after
every step (checkpoint.Boundary, as train_fsdp.py does), and one that also saves every 200 steps. Compared are the
medians of the rounds; a round is 200 steps, so with its share of one checkpoint.
"""

import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

from arguments import ArgumentParser, whole_number

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
import checkpoint
import sharded_checkpoint
import train_fsdp
from char_transformer import CharTransformer

# --- main -------------------------------------------------------------------------------------------------------------

CPU, STEPS = torch.device("cpu"), 200
HIGHEST = {"asks": 1.01, "asks and saves": 1.02}  # times as long as the bare steps


def training(data_dir: Path, folder: Path, asks: bool, saves: bool) -> Callable[[], None]:
    """A function that trains 200 steps more at nanoGPT's CPU settings."""
    sys.argv = ["train_fsdp.py", "--data-dir", str(data_dir), "--checkpoint-dir", str(folder)]
    sys.argv += ["--checkpoint-every", str(STEPS) if saves else "1000000"]
    args = train_fsdp.parse_arguments()
    args.precision = train_fsdp.choose_precision(args, CPU, 1)
    torch.manual_seed(args.seed)
    vocabulary = characters.read_vocabulary(args.data_dir)["characters"]
    model = CharTransformer(len(vocabulary), args.context, args.layers, args.heads, args.width, args.dropout)
    train_fsdp.split(args, model, None)
    optimizer = train_fsdp.make_optimizer(args, model)
    windows = characters.windows(args.data_dir, "train", args.context)
    boundary, step = checkpoint.Boundary(args, 0, 0, 1, CPU), 0

    def train():
        nonlocal step
        for _ in range(STEPS):
            batch = train_fsdp.draw_batch(args, windows, step, 0, 1, CPU)
            train_fsdp.train_step(args, step, model, optimizer, batch)
            step += 1
            if asks and boundary(step)[0]:
                sharded_checkpoint.save(folder, step, model, optimizer, {}, 2)

    return train


def main(options: Namespace):
    if fault := characters.missing_data(options.data_dir, 64):
        sys.exit(f"checkpoint.py: {fault}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        kinds = {"bare": (False, False), "asks": (True, False), "asks and saves": (True, True)}
        sides = {name: training(options.data_dir, Path(scratch, name), *kind) for name, kind in kinds.items()}
        seconds = {name: [] for name in sides}
        for _ in range(options.rounds + 1):
            for name, train in sides.items():
                start = time.perf_counter()
                train()
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    print(f"{STEPS} steps of nanoGPT's CPU settings on one thread, medians of {options.rounds} rounds")
    print("| training | seconds | ratio | at most |\n|---|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median:.3f} | {median / medians['bare']:.4f} | {HIGHEST.get(name, '')} |")
    missed = [name for name, most in HIGHEST.items() if medians[name] > most * medians["bare"]]
    for name in missed:
        print(f"MISSED: a training that {name} takes more than {HIGHEST[name]} times as long", file=sys.stderr)
    sys.exit(1 if missed and options.check else 0)


if __name__ == "__main__":
    main(options)
