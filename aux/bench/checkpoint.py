#!/usr/bin/env python3
"""What checkpoints, and being ready to stop, cost train_fsdp.py on the CPU.

    python aux/prepare_data.py shakespeare
    python aux/bench/checkpoint.py                # one rank; some three minutes: leave the machine alone meanwhile
    ./torchrun.sh aux/bench/checkpoint.py         # two, who have to agree
    python aux/bench/checkpoint.py --check        # status 1 when a ratio is more than the one stated below

Three trainings take turns, step for step the same: one that neither saves nor asks whether to stop, one that asks after
every step (checkpoint.Boundary, as train_fsdp.py does), and one that also saves every 200 steps. Compared are the
medians of the rounds; a round is 200 steps, so with its share of one checkpoint.
"""

import os
import shutil
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
import step_zero
import train_fsdp
from char_transformer import CharTransformer

# --- main -------------------------------------------------------------------------------------------------------------

STEPS = 200
HIGHEST = {"asks": 1.01, "asks and saves": 1.02}  # times as long as the bare steps


def training_arguments(data_dir: Path, folder: Path, saves: bool) -> Namespace:
    """train_fsdp.py's, at nanoGPT's CPU settings."""
    sys.argv = ["train_fsdp.py", "--data-dir", str(data_dir), "--checkpoint-dir", str(folder), "--device", "cpu"]
    sys.argv += ["--checkpoint-every", str(STEPS) if saves else "1000000"]
    return train_fsdp.parse_arguments()


def training(args: Namespace, asks: bool, rank: int, world_size: int, device: torch.device) -> Callable[[], None]:
    """A function that trains 200 steps more."""
    mesh = train_fsdp.make_mesh(args, device, world_size)
    place = train_fsdp.data_place(mesh)
    args.precision = train_fsdp.choose_precision(args, device, world_size)
    torch.manual_seed(args.seed)
    vocabulary = characters.read_vocabulary(args.data_dir)["characters"]
    model = CharTransformer(len(vocabulary), args.context, args.layers, args.heads, args.width, args.dropout)
    train_fsdp.split(args, model, mesh)
    optimizer = train_fsdp.make_optimizer(args, model)
    windows = characters.windows(args.data_dir, "train", args.context)
    checkpoint.take_over(args.checkpoint_dir, rank)
    boundary, step = checkpoint.Boundary(args, 0, rank, world_size, device), 0

    def train():
        nonlocal step
        for _ in range(STEPS):
            batch = train_fsdp.draw_batch(args, windows, step, *place, device)
            train_fsdp.train_step(args, step, model, optimizer, batch)
            step += 1
            if asks and boundary(step)[0]:
                sharded_checkpoint.save(args.checkpoint_dir, step, model, optimizer, {}, 2)

    return train


def main(options: Namespace):
    if fault := characters.missing_data(options.data_dir, 64):
        sys.exit(f"checkpoint.py: {fault}")
    scratch = Path(tempfile.gettempdir(), f"bench-checkpoint-{os.getppid()}")  # the same for all ranks of a torchrun
    kinds = {"bare": (False, False), "asks": (True, False), "asks and saves": (True, True)}
    arguments = {
        name: training_arguments(options.data_dir, scratch / name, saves) for name, (_, saves) in kinds.items()
    }
    place = train_fsdp.init_process_group(arguments["bare"])
    torch.set_num_threads(1)
    sides = {name: training(arguments[name], asks, *place) for name, (asks, _) in kinds.items()}
    seconds = {name: [] for name in sides}
    for _ in range(options.rounds + 1):
        for name, train in sides.items():
            start = time.perf_counter()
            train()
            seconds[name].append(time.perf_counter() - start)
    rank, world_size, _ = place
    if rank != 0:
        return
    shutil.rmtree(scratch)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    print(f"{STEPS} steps of nanoGPT's CPU settings, ranks: {world_size}, medians of {options.rounds} rounds")
    print("| training | seconds | ratio | at most |\n|---|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median:.3f} | {median / medians['bare']:.4f} | {HIGHEST.get(name, '')} |")
    missed = [name for name, most in HIGHEST.items() if medians[name] > most * medians["bare"]]
    for name in missed:
        print(f"MISSED: a training that {name} takes more than {HIGHEST[name]} times as long", file=sys.stderr)
    if missed and options.check:
        step_zero.end()


if __name__ == "__main__":
    main(options)
    step_zero.leave()
