#!/usr/bin/env python3
"""How fast train_fsdp.py's step is in one CPU process, against a loop that works as nanoGPT's train.py does.

    python aux/prepare_data.py shakespeare
    python aux/bench/language_model.py               # about ten minutes: leave the machine alone meanwhile
    python aux/bench/language_model.py --check       # status 1 when a ratio is less than the one stated below

The other side: slices of a memory-mapped file stacked for every batch, the loss read at every step, AdamW without
fused kernels, float32. Both sides take turns, on equally many threads, and the medians of the rounds are compared:
trust the ratios, not the tokens per second. The ratio that is judged is that of the precision which train_fsdp.py
chooses on this CPU; float32 is shown beside it. Last comes a whole training and its loss.
"""

import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

from resilience.arguments import ArgumentParser, number, whole_number

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default="data/shakespeare")
    parser.add_argument("--rounds", type=whole_number(1), default=9)
    parser.add_argument("--seconds", type=number(0), default=2.0, help="of one side's turn in a round")
    parser.add_argument("--skip-compile", action="store_true", help="leave out torch.compile (it needs a C++ compiler)")
    parser.add_argument("--skip-training", action="store_true", help="leave out the whole training at the end")
    parser.add_argument("--check", action="store_true", help="status 1 when something stated is missed")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_arguments()  # before torch: a typing mistake costs no second

import numpy as np
import torch
import torch.nn.functional as F

import characters
import train_fsdp
from char_transformer import Attention, CharTransformer, attend
from language_model import choose_precision
from resilience.place import Place

CPU = torch.device("cpu")
ALONE = Place(0, 0, 1, CPU, torch.distributed.HashStore(), "none")
SIZES = {
    "nanoGPT's CPU settings": ["--size", "cpu"],
    "10.65 million parameters": ["--size", "gpu", "--batch-size", "4", "--dropout", "0"],
}
# size, threads: least ratio on a CPU with bfloat16 tiles (as Intel's AMX has), and on another
FLOORS = {
    ("nanoGPT's CPU settings", 1): (1.5, 1.1),
    ("nanoGPT's CPU settings", 2): (1.4, 1.1),
    ("10.65 million parameters", 1): (3.0, 1.1),
    ("10.65 million parameters", 2): (3.0, 1.1),
}
HIGHEST_LOSS = 1.91  # nats per character; nanoGPT's README has 1.88


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


def make_model(args) -> CharTransformer:
    return train_fsdp.initialize(train_fsdp.make_model(train_fsdp.metadata_of(args), args.dropout), CPU, args.seed)


def ours(args) -> Callable[[int], None]:
    """One step of train_fsdp.py, as its main() does it."""
    model = make_model(args)
    train_fsdp.split(args, model, None)
    optimizer = train_fsdp.make_optimizer(args, model)
    windows = characters.windows(args.data_dir, "train", args.context)
    loss_sum = torch.zeros(())

    def step(number: int):
        batch = characters.random_batch(args, windows, number, 0, 1, CPU)
        loss_sum.add_(train_fsdp.train_step(args, number, model, optimizer, batch)[0])

    step.model = model
    return step


def theirs(args) -> Callable[[int], None]:
    """One step the way of nanoGPT's train.py."""
    model = make_model(args)
    for block in model.blocks:
        block.attention = NanoAttention(args.width, args.heads, args.dropout)
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    dtype = characters.read_vocabulary(args.data_dir)["dtype"]

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        data = np.memmap(args.data_dir / "train.bin", dtype=dtype, mode="r")  # anew each time, as nanoGPT does
        starts = torch.randint(len(data) - args.context, (args.batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + args.context].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + args.context].astype(np.int64)) for i in starts])
        return x, y

    def step(number: int):
        for group in optimizer.param_groups:
            group["lr"] = train_fsdp.learning_rate(args, number)
        x, y = batch()
        logits = model(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def measure(sides: dict[str, Callable[[int], None]], rounds: int, seconds: float) -> dict[str, float]:
    """Median seconds per step of each side; they take turns of about `seconds`, of which the first is not counted."""
    for step in sides.values():
        step(0)
    start = time.perf_counter()
    next(iter(sides.values()))(1)
    steps = max(1, round(seconds / (time.perf_counter() - start)))
    taken = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, step in sides.items():
            start = time.perf_counter()
            for index in range(steps):
                step(2 + turn * steps + index)
            taken[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def time_of_first_step(step: Callable[[int], None]) -> float:
    start = time.perf_counter()
    step(0)
    return time.perf_counter() - start


def main(options: Namespace):
    if fault := characters.missing_data(options.data_dir, 256):
        sys.exit(f"language_model.py: {fault}")
    missed = []
    threads = [count for count in (1, 2) if count <= len(os.sched_getaffinity(0))]
    known = getattr(torch.cpu, "get_capabilities", dict)()
    extensions = [name for name in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if known.get(name)]
    print(f"torch {torch.__version__}, {known.get('cpu_name', 'CPU')} with {', '.join(extensions)}")
    print(f"{characters.describe(options.data_dir)}; medians of {options.rounds} rounds, tokens per second\n")
    print("| size | threads | precision | like nanoGPT | train_fsdp.py | ratio | at least |")
    print("|---|---|---|---|---|---|---|")
    for size, flags in SIZES.items():
        for count in threads:
            torch.set_num_threads(count)
            chosen, fp32 = parse(options.data_dir, *flags), parse(options.data_dir, *flags, "--precision", "fp32")
            sides = {"theirs": theirs(fp32), "fp32": ours(fp32), chosen.precision: ours(chosen)}
            taken = measure(sides, options.rounds, options.seconds)
            tokens, floor = chosen.batch_size * chosen.context, FLOORS[size, count]["amx_bf16" not in extensions]
            for precision in list(taken)[1:]:
                ratio, judged = taken["theirs"] / taken[precision], precision == chosen.precision
                speeds = f"{tokens / taken['theirs']:,.0f} | {tokens / taken[precision]:,.0f}"
                print(
                    f"| {size} | {count} | {precision} | {speeds} | {ratio:.2f} | {floor if judged else ''} |",
                    flush=True,
                )
                if judged and ratio < floor:
                    missed.append(f"{size}, {count} threads: {ratio:.2f} instead of at least {floor}")

    if not options.skip_compile:
        plain, compiled = (parse(options.data_dir, "--size", "cpu", *flags) for flags in ([], ["--compile"]))
        compiled_step, plain_step = ours(compiled), ours(plain)
        warm_up = time_of_first_step(compiled_step)
        taken = measure({"plain": plain_step, "compiled": compiled_step}, options.rounds, options.seconds)
        gain = taken["plain"] - taken["compiled"]
        pays = f"pays after {warm_up / gain:,.0f} steps" if gain > 0 else "never pays here"
        print(f"\n--compile, nanoGPT's CPU settings, {threads[-1]} threads: {taken['plain'] / taken['compiled']:.2f}")
        print(f"times as fast, after a first step of {warm_up:.1f} s: {pays}.", flush=True)

    if not options.skip_training:
        args = parse(options.data_dir, "--size", "cpu", "--eval-windows", "0")
        step, start = ours(args), time.perf_counter()
        for index in range(args.steps):
            step(index)
        seconds = time.perf_counter() - start
        loss = train_fsdp.evaluate(args, ALONE, step.model, characters.fixed_batches(args, 0, 1, CPU))
        print(f"\n{args.steps} steps of nanoGPT's CPU settings took {seconds:.0f} s on {threads[-1]} threads; the loss")
        print(f"over the whole validation split is then {loss:.3f} nats per character.")
        if characters.read_vocabulary(options.data_dir)["source"] != "Tiny Shakespeare":
            print("(not judged: nanoGPT's figure is of Tiny Shakespeare)")
        elif loss > HIGHEST_LOSS:
            missed.append(f"validation loss {loss:.3f} instead of at most {HIGHEST_LOSS}")
    for sentence in missed:
        print(f"MISSED: {sentence}", file=sys.stderr)
    sys.exit(1 if missed and options.check else 0)


if __name__ == "__main__":
    main(options)
