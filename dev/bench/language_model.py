#!/usr/bin/env python3
"""How fast train_fsdp.py's step is in one CPU process, against a loop that works as nanoGPT's train.py does.

    python aux/prepare_data.py shakespeare
    python dev/bench/language_model.py               # about ten minutes: leave the machine alone meanwhile
    python dev/bench/language_model.py --check       # status 1 when a ratio is less than the one stated below

The other side: slices of a memory-mapped file stacked for every batch, the loss read at every step, AdamW without
fused kernels, float32. Both sides take turns, on equally many threads, with the same sequences of the text in each
step: rows.py says what the columns are. Judged are the precision that train_fsdp.py chooses on this CPU, and float32.
What the model has learnt is judged by its loss over the whole validation split after whole trainings, the mean of three
seeds, and after the turns by that of both sides. Batches alone are compared with those of a Dataset that encodes
one sample at a time, as minGPT's examples do.
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import rows
from resilience.arguments import ArgumentParser, number, whole_number
from rows import Row

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default="data/shakespeare")
    parser.add_argument("--rounds", type=whole_number(1), default=9)
    parser.add_argument("--seconds", type=number(0), default=2.0, help="of one side's turn in a round")
    parser.add_argument("--skip-compile", action="store_true", help="leave out torch.compile (it needs a C++ compiler)")
    parser.add_argument("--skip-training", action="store_true", help="leave out the whole trainings")
    parser.add_argument("--check", action="store_true", help="status 1 when something stated is missed")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_arguments()  # before torch: a typing mistake costs no second

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import characters
import train_fsdp
from char_transformer import Attention, CharTransformer, attend
from language_model import choose_precision, initialize, learning_rate, make_model, make_optimizer, metadata_of
from resilience.checkpoints import seed_from
from resilience.place import Place

CPU = torch.device("cpu")
ALONE = Place(0, 0, 1, CPU, torch.distributed.HashStore(), "none")
SIZES = {
    "nanoGPT's CPU settings": ["--size", "cpu"],
    "10.65 million parameters": ["--size", "gpu", "--batch-size", "16", "--dropout", "0"],  # nanoGPT's 64: 12 s a step
}
# size, threads: least ratio on a CPU with bfloat16 tiles (as Intel's AMX has), with AVX512-BF16 alone, and of float32
LEASTS = {
    ("nanoGPT's CPU settings", 1): (1.8, 1.65, 1.15),
    ("nanoGPT's CPU settings", 2): (1.6, 1.5, 1.15),
    ("10.65 million parameters", 1): (3.0, 1.75, 1.05),
    ("10.65 million parameters", 2): (3.0, 1.75, 1.05),
}
NANOGPT = "nanoGPT-style loop"
LEAST_LOADING = 40
HIGHEST_LOSS = 1.90  # nats per character: the mean of SEEDS
SEEDS = (0, 1, 2)


class NanoAttention(Attention):
    """The rows of the projection are q, k and v one after the other, as in nanoGPT."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = attend(q, k, v, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


def parse(data_dir: Path, *flags: str):
    """train_fsdp.py's own arguments, its automatic choice of precision made."""
    sys.argv = ["train_fsdp.py", "--data-dir", str(data_dir), "--checkpoint-dir", "unused", *flags]
    args = train_fsdp.parse_arguments()
    args.precision = choose_precision(args, ALONE)
    return args


def new_model(args) -> CharTransformer:
    return initialize(make_model(metadata_of(args), args.dropout), CPU, args.seed)


def ours(args) -> Callable[[int], None]:
    """One step of train_fsdp.py, as its main() does it."""
    model = new_model(args)
    train_fsdp.split(args, model, None)
    optimizer = make_optimizer(args, model)
    windows = characters.windows(args.data_dir, "train", args.context)
    loss_sum = torch.zeros(())

    def step(number: int):
        batch = characters.random_batch(args, windows, number, 0, 1, CPU)
        loss_sum.add_(train_fsdp.train_step(args, number, model, optimizer, batch)[0])

    step.model = model
    return step


def theirs(args) -> Callable[[int], None]:
    """One step the way of nanoGPT's train.py."""
    model = make_model(metadata_of(args), args.dropout)
    with torch.device("meta"):
        for block in model.blocks:
            block.attention = NanoAttention(args.width, args.heads, args.dropout)
    initialize(model, CPU, args.seed)  # by name: both sides begin with the same numbers
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    dtype = characters.read_vocabulary(args.data_dir)["dtype"]

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(args.data_dir / "train.bin", dtype=dtype, mode="r")  # anew each time, as nanoGPT does
        generator = torch.Generator().manual_seed(seed_from(args.seed, number))  # the sequences of ours
        starts = torch.randint(len(data) - args.context, (args.batch_size,), generator=generator)
        x = torch.stack([torch.from_numpy(data[i : i + args.context].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + args.context].astype(np.int64)) for i in starts])
        return x, y

    def step(number: int):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, number)
        x, y = batch(number)
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    step.model, step.batch = model, batch
    return step


class Samples(Dataset):
    """Stretches of a text, encoded when they are asked for: the way of minGPT's examples."""

    def __init__(self, text: str, context: int):
        self.text, self.context = text, context
        self.numbers = {letter: number for number, letter in enumerate(sorted(set(text)))}

    def __len__(self) -> int:
        return len(self.text) - self.context

    def __getitem__(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = [self.numbers[letter] for letter in self.text[start : start + self.context + 1]]
        return torch.tensor(encoded[:-1]), torch.tensor(encoded[1:])


def loading(options: Namespace) -> Row:
    """Batches alone, 64 sequences of 256 characters."""
    args = parse(options.data_dir, "--size", "gpu")
    windows, known = characters.windows(options.data_dir, "train", args.context), characters.read_vocabulary
    letters = known(options.data_dir)["characters"]
    samples = Samples("".join(letters[number] for number in windows[:, 0].tolist()), args.context)
    batches = iter(DataLoader(samples, batch_size=args.batch_size, shuffle=True))
    sides = {
        "theirs": lambda step: next(batches),
        "ours": lambda step: characters.random_batch(args, windows, step, 0, 1, CPU),
    }
    taken, _ = rows.take_turns(sides, options.rounds, options.seconds / 4)
    x, y = samples[1234]
    mine = characters.read(windows, torch.tensor([1234]), CPU)[0].tolist()
    same = [[letters[i] for i in mine[:-1]], [letters[i] for i in mine[1:]]]
    same = same == [[sorted(set(samples.text))[i] for i in part.tolist()] for part in (x, y)]
    quality = f"{'the same' if same else 'OTHER'} text"
    sides = taken["ours"], taken["theirs"]
    return Row("text alone", "per-sample text Dataset", LEAST_LOADING, *sides, quality=quality, good=same, by_cpu=True)


def time_of_first_step(step: Callable[[int], None]) -> float:
    start = time.perf_counter()
    step(0)
    return time.perf_counter() - start


@torch.no_grad()
def loss_of(args: Namespace, model) -> float:
    """Over the whole validation split, in nats per character."""
    return train_fsdp.evaluate(args, ALONE, model, characters.fixed_batches(args, 0, 1, CPU))


def whole_trainings(options: Namespace) -> dict[str, list[float]]:
    """The losses of SEEDS at nanoGPT's CPU settings: ours in the precision that train_fsdp.py chooses, and theirs."""
    losses = {"ours": [], "theirs": []}
    for seed in SEEDS:
        flags = ["--size", "cpu", "--eval-windows", "0", "--seed", str(seed)]
        chosen, fp32 = parse(options.data_dir, *flags), parse(options.data_dir, *flags, "--precision", "fp32")
        for name, side, args in (("ours", ours, chosen), ("theirs", theirs, fp32)):
            step = side(args)
            for index in range(args.steps):
                step(index)
            losses[name].append(loss_of(args, step.model))
    return losses


def compare(options: Namespace, size: str, count: int, tiles: bool) -> list[Row]:
    """The rows of a size on so many threads: float32, and bfloat16 where train_fsdp.py chooses it."""
    with_tiles, with_avx512, without = LEASTS[size, count]
    leasts = {"fp32": without, "bf16": with_tiles if tiles else with_avx512}
    names = {kind: f"language model, {size}, {count} thread{'s' if count > 1 else ''}, {kind}" for kind in leasts}
    if count > len(os.sched_getaffinity(0)):
        return [Row(names[kind], NANOGPT, leasts[kind], missing="one CPU") for kind in leasts]
    torch.set_num_threads(count)
    chosen, fp32 = (parse(options.data_dir, *SIZES[size], *more) for more in ((), ("--precision", "fp32")))
    sides = {"theirs": theirs(fp32), "fp32": ours(fp32), chosen.precision: ours(chosen)}
    taken, busy = rows.take_turns(sides, options.rounds, options.seconds)
    few = Namespace(**vars(fp32) | {"eval_windows": 40})
    losses = {name: loss_of(few, step.model) for name, step in sides.items()}
    parts = {name: rows.parts_of(step, name) for name, step in sides.items()}
    found = []
    for kind, least in leasts.items():
        if kind not in taken:
            found.append(Row(names[kind], NANOGPT, least, missing="no fast bfloat16 on this CPU"))
            continue
        row = Row(names[kind], NANOGPT, least, taken[kind], taken["theirs"], by_cpu=count == 1, busy=busy)
        row.good = losses[kind] < losses["theirs"] + 0.05
        row.quality = f"loss {losses[kind]:.3f}, theirs {losses['theirs']:.3f}"
        row.notes = {"tokens_a_step": chosen.batch_size * chosen.context} | parts["theirs"] | parts[kind]
        found.append(row)
    return found


def judge_losses(options: Namespace, found: list[Row], losses: dict[str, list[float]]):
    """Adds the whole trainings' gate to the rows of nanoGPT's CPU settings: it is on the mean of ours."""
    real = characters.read_vocabulary(options.data_dir)["source"] == "Tiny Shakespeare"
    mine, others = (mean(losses[side]) for side in ("ours", "theirs"))
    for row in found:
        limit = f", at most {HIGHEST_LOSS:.2f}" if real else " (of another text, not judged)"
        row.quality += f"; whole trainings: loss {mine:.3f}{limit}, theirs {others:.3f}"
        row.good &= not real or mine <= HIGHEST_LOSS
        row.notes |= {f"{side}, seed {seed}": loss for side in losses for seed, loss in enumerate(losses[side])}


def main(options: Namespace):
    if fault := characters.missing_data(options.data_dir, 256):
        sys.exit(f"language_model.py: {fault}")
    threads = min(2, len(os.sched_getaffinity(0)))
    tiles = getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16", False)
    torch.set_num_threads(threads)
    losses = None if options.skip_training else whole_trainings(options)
    rows.print_heads()
    missed = []
    for size in SIZES:
        for count in (1, 2):
            found = compare(options, size, count, tiles)
            if losses and size == "nanoGPT's CPU settings":
                judge_losses(options, found, losses)
            missed += [rows.report(row) for row in found]
    torch.set_num_threads(1)
    missed.append(rows.report(loading(options)))

    if not options.skip_compile:
        torch.set_num_threads(threads)
        plain, compiled = (parse(options.data_dir, "--size", "cpu", *flags) for flags in ([], ["--compile"]))
        compiled_step, plain_step = ours(compiled), ours(plain)
        warm_up = time_of_first_step(compiled_step)
        sides = {"plain": plain_step, "compiled": compiled_step}
        taken, _ = rows.take_turns(sides, options.rounds, options.seconds)
        plain, compiled = (median(wall for wall, _ in taken[name]) for name in sides)
        pays = f"pays after {warm_up / (plain - compiled):,.0f} steps" if plain > compiled else "never pays here"
        print(f"\n--compile, nanoGPT's CPU settings, {threads} threads: {plain / compiled:.2f} times as fast,")
        print(f"after a first step of {warm_up:.1f} s: {pays}.", flush=True)
    if options.check and any(missed):
        sys.exit("language_model.py: " + "; ".join(filter(None, missed)))


if __name__ == "__main__":
    main(options)
