#!/usr/bin/env python3
"""What checkpoints, being ready to stop, and Python's garbage collection cost train_fsdp.py on the CPU.

    python aux/prepare_data.py shakespeare
    python dev/bench/checkpoint.py                # one rank; some four minutes: leave the machine alone meanwhile
    ./torchrun.sh dev/bench/checkpoint.py         # two, who have to agree
    python dev/bench/checkpoint.py --check        # status 1 when a ratio is more than the one stated below

A small model is trained, in turns of ten steps: without saving or asking whether to stop, asking after every step
(Checkpoints.due, as train_fsdp.py does), and asking and saving every 200 steps. A round is 200 steps of each, so
with its share of one checkpoint; printed are the medians of the rounds' ratios. Turns are that short, and the tensors
the same, because the machine's speed drifts, and three models in three places of its memory differ by 2 %.

Then a model with 128 MB of weights and optimizer state is saved in three ways in turn: with torch.save, as a plain
script does, and as train_fsdp.py does, at once and asynchronously. Printed is how long the steps have to wait for each,
in the last case to copy the state and, later, to publish what has been written. rows.py says what the columns are.

Garbage collections are timed by Python's own callbacks (gc.callbacks) over 1,000 steps: those of train_fsdp.py
(--gc-every 50), which freezes what is there before it makes the model, then those that come by themselves. A full
collection of all objects comes seldom, but at another step on each rank, and all ranks wait for it: it is timed once.
"""

import gc
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

import rows
from resilience.arguments import ArgumentParser, whole_number
from rows import Row

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default="data/shakespeare")
    parser.add_argument("--rounds", type=whole_number(1), default=9)
    parser.add_argument("--skip-training", action="store_true", help="leave out all but the checkpoint of 128 MB")
    parser.add_argument("--check", action="store_true", help="status 1 when something stated is missed")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_arguments()  # before torch: a typing mistake costs no second

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import characters
import language_model
import train_fsdp
from language_model import choose_precision
from resilience.place import Place, end, init_process_group
from resilience.sharded_checkpoints import load, newest, size_of, state_of

# --- main -------------------------------------------------------------------------------------------------------------

STEPS, TURN = 200, 10
LARGE = ["--layers", "6", "--heads", "6", "--width", "384"]
COLLECTED = 1000  # steps
LOWEST = 3  # times as long as an asynchronous save of it, torch.save or one at once makes the steps wait
HIGHEST = {"asks": 1.01, "asks and saves": 1.02}  # times as long as the bare steps


def training_arguments(data_dir: Path, folder: Path, saves: bool, *others: str) -> Namespace:
    """train_fsdp.py's, at nanoGPT's CPU settings."""
    sys.argv = ["train_fsdp.py", "--data-dir", str(data_dir), "--checkpoint-dir", str(folder), "--device", "cpu"]
    sys.argv += ["--checkpoint-every", str(STEPS) if saves else "1000000", *others]
    return train_fsdp.parse_arguments()


def training(args: Namespace, place: Place) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """What train_fsdp.py trains."""
    mesh = train_fsdp.make_mesh(args, place.device, place.world_size)
    model = language_model.make_model(language_model.metadata_of(args), args.dropout)
    train_fsdp.split(args, model, mesh)
    language_model.initialize(model, place.device, args.seed)
    return model, language_model.make_optimizer(args, model)


def measure(options: Namespace, scratch: Path, place: Place) -> dict[str, list[float]]:
    """Seconds of every round, of each of the three kinds; the first round, a warm-up, is left out."""
    kinds = {kind: training_arguments(options.data_dir, scratch / kind, "saves" in kind) for kind in ("bare", *HIGHEST)}
    for args in kinds.values():
        args.precision = choose_precision(args, place)
    model, optimizer = training(kinds["bare"], place)
    parts = {"model": model, "optimizer": optimizer}
    windows = characters.windows(options.data_dir, "train", kinds["bare"].context)
    checkpoints = {kind: language_model.open_checkpoints(kinds[kind], place) for kind in HIGHEST}
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
    return {kind: times[1:] for kind, times in seconds.items()}


def measure_collections(options: Namespace, scratch: Path, place: Place) -> dict[str, list[float]]:
    """Seconds of each garbage collection, by what brought it about."""
    args = training_arguments(options.data_dir, scratch / "collections", False)
    args.precision = choose_precision(args, place)
    gc.freeze()
    gc.disable()  # both as language_model.prepare does, before there is a model
    model, optimizer = training(args, place)
    windows = characters.windows(options.data_dir, "train", args.context)
    by_itself, full = "by itself", "a full one of all objects"
    seconds, begun = {f"--gc-every {args.gc_every}": [], by_itself: [], full: []}, [0.0]

    def train(steps: int):
        for step in range(steps):
            batch = characters.random_batch(args, windows, step, place.rank, place.world_size, place.device)
            train_fsdp.train_step(args, step, model, optimizer, batch)
            if not gc.isenabled() and (step + 1) % args.gc_every == 0:
                gc.collect()

    def timed(phase: str, info: dict):
        if phase == "start":
            begun[0] = time.perf_counter()
        else:
            seconds[kind].append(time.perf_counter() - begun[0])

    train(50)
    gc.callbacks.append(timed)
    for kind in seconds:
        if kind == by_itself:
            gc.unfreeze()
            gc.enable()
        if kind == full:
            gc.collect()
        else:
            train(COLLECTED)
    gc.callbacks.remove(timed)
    return seconds


def measure_saves(options: Namespace, scratch: Path, place: Place) -> list[Row]:
    """How long the steps wait for a checkpoint; the first round is left out."""
    args = training_arguments(options.data_dir, scratch / "saves", False, *LARGE)
    args.precision = "fp32"
    model, optimizer = training(args, place)
    windows = characters.windows(options.data_dir, "train", args.context)
    batch = characters.random_batch(args, windows, 0, place.rank, place.world_size, place.device)
    train_fsdp.train_step(args, 0, model, optimizer, batch)  # AdamW has no state before
    parts, checkpoints = {"model": model, "optimizer": optimizer}, language_model.open_checkpoints(args, place)
    checkpoints.resume(parts)
    size = size_of(state_of(**parts))
    kinds = {"torch.save": math.inf, "a save at once": math.inf, "asynchronously": size}
    seconds, busy, step = {kind: [] for kind in kinds}, [], 0
    for _ in range(options.rounds + 1):
        with rows.watched(busy):
            for kind, checkpoints.asynchronous_from in kinds.items():
                step += 1
                place.all_reduced([0])  # the ranks begin together
                start = rows.now()
                if kind == "torch.save":
                    torch.save({name: part.state_dict() for name, part in parts.items()}, scratch / f"{place.rank}.pt")
                else:
                    checkpoints.save(step, parts)
                wall, cpu = rows.since(start)
                while checkpoints.writing and not checkpoints.writing[-1].done():
                    time.sleep(0.01)  # here the steps go on
                place.all_reduced([0])
                start = rows.now()
                checkpoints.end_writing()
                more = rows.since(start)
                checkpoints.end_removing()  # beside the steps, too
                seconds[kind].append((wall + more[0], cpu + more[1]))
    other = dict(zip(parts, training(Namespace(**vars(args) | {"seed": args.seed + 1}), place), strict=True))
    load(newest(checkpoints.folder, place)[0], **other)
    good = equal(state_of(**other), state_of(**parts))
    plain = torch.load(scratch / f"{place.rank}.pt", weights_only=True)
    good &= equal(plain, {name: part.state_dict() for name, part in parts.items()})
    quality = "what is read back is what was saved" if good else "what is read back is SOMETHING ELSE"
    name, mine = f"steps wait for a checkpoint of {size / 1e6:.0f} MB", seconds["asynchronously"][1:]
    others = [kind for kind in kinds if kind != "asynchronously" and (kind != "torch.save" or place.world_size == 1)]
    sides = [(kind, LOWEST, mine, seconds[kind][1:]) for kind in others]
    return [Row(name, *side, quality=quality, good=good, busy=busy[1:]) for side in sides]


def equal(state: dict, other: dict) -> bool:
    """Whether all tensors of two states are equal, those of the model and of the optimizer."""
    sides = [[whole(leaf) for leaf in tree_leaves(side) if isinstance(leaf, torch.Tensor)] for side in (state, other)]
    return len(sides[0]) == len(sides[1]) > 0 and all(map(torch.equal, *sides))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(options: Namespace):
    if fault := characters.missing_data(options.data_dir, 64):
        sys.exit(f"checkpoint.py: {fault}")
    scratch = Path(tempfile.gettempdir(), f"bench-checkpoint-{os.getppid()}")  # the same for all ranks of a torchrun
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        place = init_process_group(training_arguments(options.data_dir, scratch / "none", False))
        torch.set_num_threads(1)
        seconds = {} if options.skip_training else measure(options, scratch, place)
        collections = {} if options.skip_training else measure_collections(options, scratch, place)
        waits = measure_saves(options, scratch, place)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # by whichever rank is first: all have trained, or it is over
    if place.rank != 0:
        return place.shutdown()
    if seconds:
        print(f"{STEPS} steps of nanoGPT's CPU settings, ranks: {place.world_size}, medians of {options.rounds} rounds")
        print("| training | seconds | ratio | at most |\n|---|---|---|---|")
    missed = []
    for kind, times in seconds.items():
        ratio = statistics.median(time / bare for time, bare in zip(times, seconds["bare"], strict=True))
        print(f"| {kind} | {statistics.median(times):.3f} | {ratio:.4f} | {HIGHEST.get(kind, '')} |")
        if ratio > HIGHEST.get(kind, math.inf):
            missed.append(f"MISSED: a training that {kind} takes more than {HIGHEST[kind]} times as long")
    if collections:
        print(f"| garbage, {COLLECTED} steps | collections | ms in all | ms of the longest |\n|---|---|---|---|")
    for kind, times in collections.items():
        print(f"| {kind} | {len(times)} | {1000 * sum(times):.2f} | {1000 * max(times, default=0):.2f} |")
    rows.print_heads()
    missed += [f"MISSED: {sentence}" for row in waits if (sentence := rows.report(row))]
    for line in missed:
        print(line, file=sys.stderr)
    if missed and options.check:
        end()
    place.shutdown()


if __name__ == "__main__":
    main(options)
