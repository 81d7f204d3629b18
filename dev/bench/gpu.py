#!/usr/bin/env python3
"""Training on one GPU, as ratios: what compilation, casts, projections, the vocabulary, DDP, FSDP and saving cost.

    python dev/bench/gpu.py                  # leave the GPU alone meanwhile; the sizes are made for one of 80 GB
    python dev/bench/gpu.py --only qkv       # the rows with that word
    python dev/bench/gpu.py --check          # status 1 when a gate is missed
    python dev/bench/gpu.py --device cpu     # a dry run: the same code, tiny models, nothing compiled, no figures

In every row A and B take turns of about two seconds between two synchronizations. The ratio is A's time for a step (or
a batch, or a save) over B's: the median of nine rounds. All of it is bfloat16 on random tokens, without dropout.
"nanoGPT" is the way of its train.py (github.com/karpathy/nanoGPT), written fresh: batches stacked from slices of a
memory-mapped file and fetched during the step before, the whole model and its loss compiled, fused AdamW.
"""

import gc
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import rows
from resilience.arguments import ArgumentParser, number, whole_number

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=whole_number(1), default=9)
    parser.add_argument("--seconds", type=number(0), default=2.0, help="of a turn; one of a dry run is one step")
    parser.add_argument("--only", default="", metavar="WORD", help="rows with this word in their names (default: all)")
    parser.add_argument("--check", action="store_true", help="status 1 when a gate is missed")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_arguments()  # before torch: a typing mistake costs no second

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import characters
import language_model
import train_fsdp
from char_transformer import CharTransformer, peak_flops
from resilience.place import Place
from resilience.sharded_checkpoints import ShardedCheckpoints

# Millions of parameters: layers, heads, width, context, batch, vocabulary. nanoGPT's settings for characters; GPT-2's
SIZES = {10: (6, 6, 384, 256, 64, 65), 124: (12, 12, 768, 1024, 12, 50304), 350: (24, 16, 1024, 1024, 8, 50304)}
TINY = {10: (2, 2, 32, 16, 2, 65), 124: (2, 2, 32, 32, 2, 512), 350: (3, 2, 64, 32, 2, 512)}  # of a dry run
HIGHEST = {"feeding / step": 0.05}  # ratio

Turn = Callable[[int], float]  # does so many steps, and returns the seconds that they took

# --- data and model ---------------------------------------------------------------------------------------------------


def arguments(folder: Path, device: str, millions: int) -> Namespace:
    """train_fsdp.py's own, for a model of one of the sizes and random tokens in `folder`."""
    layers, heads, width, context, batch, vocabulary = (TINY if device == "cpu" else SIZES)[millions]
    data = folder / str(vocabulary)
    if not data.exists():
        data.mkdir()
        kinds, count = [chr(0x100 + i) for i in range(vocabulary)], 10_000 if device == "cpu" else 2_000_000
        content = {"characters": kinds, "dtype": "uint16", "source": "random tokens", "train_tokens": count}
        (data / "vocabulary.json").write_text(json.dumps(content))
        np.random.default_rng(0).integers(vocabulary, size=count, dtype=np.uint16).tofile(data / "train.bin")
    flags = {"--layers": layers, "--heads": heads, "--width": width, "--context": context, "--batch-size": batch}
    flags |= {"--dropout": 0, "--steps": 1_000_000, "--device": device}
    flags |= {"--data-dir": data, "--checkpoint-dir": folder / "saved"}
    sys.argv = ["train_fsdp.py", *(str(part) for flag in flags.items() for part in flag)]
    args = train_fsdp.parse_arguments()
    args.precision, args.compile = "bf16", True
    return args


def make_model(args: Namespace, vocabulary: int = 0, fused: bool | None = None) -> CharTransformer:
    """char_transformer.py's, or with another vocabulary or the attention below."""
    sizes = {name: vars(args)[name] for name in ("layers", "heads", "width", "context")}
    model = CharTransformer(vocabulary=vocabulary or kinds_of(args), **sizes)
    for block in model.blocks:
        if fused is not None:
            block.attention = Attention(args.width, args.heads, fused)
        if args.compile:
            block.compile()
    return model.to(args.device)


def kinds_of(args: Namespace) -> int:
    return len(characters.read_vocabulary(args.data_dir)["characters"])


class Attention(nn.Module):
    """Multi-head self-attention, (B, T, C) to (B, T, C), with one projection for q, k and v, or with three."""

    def __init__(self, width: int, heads: int, fused: bool):
        super().__init__()
        self.heads = heads
        sizes = [3 * width] if fused else [width] * 3
        self.projections = nn.ModuleList(nn.Linear(width, size, bias=False) for size in sizes)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [part for project in self.projections for part in project(x).split(x.size(-1), dim=-1)]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


# --- what is measured -------------------------------------------------------------------------------------------------


def synchronize(args: Namespace):
    if args.device == "cuda":
        torch.cuda.synchronize()


def timed(args: Namespace, step: Callable[[int], object]) -> Turn:
    """Turns of `step`, which gets its number."""
    numbers = itertools.count()

    def turn(count: int) -> float:
        synchronize(args)
        start = time.perf_counter()
        for _ in range(count):
            step(next(numbers))
        synchronize(args)
        return time.perf_counter() - start

    return turn


def ours(args: Namespace) -> Turn:
    """Steps of train_fsdp.py in one process, as its main() does them."""
    device, model = torch.device(args.device), language_model.make_model(language_model.metadata_of(args))
    train_fsdp.split(args, model, None)
    language_model.initialize(model, device, args.seed)
    optimizer = language_model.make_optimizer(args, model)
    windows = characters.windows(args.data_dir, "train", args.context)

    def step(number: int):
        batch = characters.random_batch(args, windows, number, 0, 1, device)
        train_fsdp.train_step(args, number, model, optimizer, batch)

    return timed(args, step)


def uncompiled(args: Namespace) -> Namespace:
    return Namespace(**vars(args) | {"compile": False})


def feeding(args: Namespace) -> Turn:
    """The batches of such steps alone, until they are on the device."""
    windows, device = characters.windows(args.data_dir, "train", args.context), torch.device(args.device)
    return timed(args, lambda number: characters.random_batch(args, windows, number, 0, 1, device))


def nanogpt(args: Namespace) -> Turn:
    """Steps of nanoGPT's train.py."""
    model = make_model(uncompiled(args), fused=True)
    optimizer = language_model.make_optimizer(args, model)  # which is nanoGPT's

    @torch.compile  # all of it
    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model(tokens)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    def fetch() -> list[torch.Tensor]:
        data = np.memmap(args.data_dir / "train.bin", dtype=np.uint16, mode="r")  # anew each time, as nanoGPT does
        starts, pair = torch.randint(len(data) - args.context, (args.batch_size,)).tolist(), []
        for shift in (0, 1):
            rows = [data[i + shift : i + shift + args.context].astype(np.int64) for i in starts]
            pair.append(torch.stack([torch.from_numpy(row) for row in rows]))
        return [x.pin_memory().to("cuda", non_blocking=True) for x in pair] if args.device == "cuda" else pair

    fetched = fetch()

    def step(number: int):
        nonlocal fetched
        for group in optimizer.param_groups:
            group["lr"] = language_model.learning_rate(args, number)
        with torch.autocast(args.device, torch.bfloat16):
            loss = loss_of(*fetched)
        fetched = fetch()  # while the device computes
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number % 10 == 0:
            loss.item()

    return timed(args, step)


def plain(args: Namespace, model: nn.Module, autocast: bool = True) -> Turn:
    """Steps of a model without anything around them, on one and the same batch."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(kinds_of(args), (args.batch_size, args.context + 1), device=args.device)

    def step(number: int):
        with torch.autocast(args.device, torch.bfloat16, enabled=autocast):
            logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(args, step)


def sharded(args: Namespace, param_dtype: torch.dtype | None) -> Turn:
    """Steps under fully_shard, over the one rank: bfloat16 by its policy, or without a dtype by autocast."""
    model, mesh = make_model(args), init_device_mesh(args.device, (1,))
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return plain(args, model, autocast=param_dtype is None)


def saving(args: Namespace, asynchronous: bool) -> Turn:
    """Checkpoints as train_fsdp.py writes them, of model and optimizer: the seconds in which no step can be done."""
    model, place = make_model(args), Place(0, 0, 1, torch.device(args.device), None, "none")
    parts, steps = {"model": model, "optimizer": language_model.make_optimizer(args, model)}, itertools.count(1)
    folder = {"checkpoint_dir": args.checkpoint_dir / f"{asynchronous}", "keep_checkpoints": 1}
    checkpoints = ShardedCheckpoints(Namespace(**vars(args) | folder), place, {}, args.steps)
    checkpoints.asynchronous_from = 0 if asynchronous else math.inf

    def turn(count: int) -> float:
        seconds = 0.0
        for step in itertools.islice(steps, count):
            synchronize(args)
            start = time.perf_counter()
            checkpoints.failed = not checkpoints.write(step, parts, {})
            seconds += time.perf_counter() - start
            if asynchronous:
                checkpoints.writing[-1].result()  # here the steps go on
            start = time.perf_counter()
            checkpoints.end_writing()
            seconds += time.perf_counter() - start
            if checkpoints.failed:
                sys.exit("gpu.py: a checkpoint could not be written")
        return seconds

    return turn


def joining(args: Namespace, device_id: torch.device | None) -> Turn:
    """New process groups, each to the end of its first all-reduce: with `device_id` NCCL connects at once."""
    ones = torch.ones(1, device=args.device)

    def step(number: int):
        group = dist.new_group(device_id=device_id)
        dist.all_reduce(ones, group=group)
        synchronize(args)
        dist.destroy_process_group(group)

    return timed(args, step)


# A / B: millions of parameters, A, B
ROWS = {f"eager / compiled, {size} million": (size, lambda args: ours(uncompiled(args)), ours) for size in SIZES}
ROWS |= {
    "nanoGPT / ours": (124, nanogpt, ours),
    "autocast / FSDP's policy": (124, lambda args: sharded(args, None), lambda args: sharded(args, torch.bfloat16)),
    "q, k, v / fused qkv": (124, *(lambda args, f=f: plain(args, make_model(args, fused=f)) for f in (False, True))),
    "vocabulary 65 / 128": (10, *(lambda args, v=v: plain(args, make_model(args, v)) for v in (65, 128))),
    "DDP / FSDP": (
        124,
        lambda args: plain(args, DistributedDataParallel(make_model(args))),
        lambda args: sharded(args, torch.bfloat16),
    ),
    "without / with device_id": (
        10,
        lambda args: joining(args, None),
        lambda args: joining(args, torch.device("cuda", 0) if args.device == "cuda" else None),  # gloo takes none
    ),
    "feeding / step": (10, feeding, ours),
    "save / async save": (124, lambda args: saving(args, False), lambda args: saving(args, True)),
}

# --- main -------------------------------------------------------------------------------------------------------------


def measure(sides: list[Turn], rounds: int, seconds: float) -> list[tuple[float, ...]]:
    """Seconds a step of A and of B, in each round; a first one is not counted."""
    counts = []
    for turn in sides:
        turn(3)  # compiles
        counts.append(max(1, round(seconds / turn(1))))
    return [tuple(turn(n) / n for turn, n in zip(sides, counts, strict=True)) for _ in range(rounds + 1)][1:]


def report(name: str, args: Namespace, rounds: list[tuple[float, ...]]) -> str | None:
    """Prints a row. Returns a sentence when its gate is missed."""
    ratios, (a, b) = [a / b for a, b in rounds], map(statistics.median, zip(*rounds, strict=True))
    ratio, highest, besides = statistics.median(ratios), HIGHEST.get(name, math.inf), ""
    if ours in ROWS[name] and feeding not in ROWS[name]:
        with torch.device("meta"):
            flops = language_model.make_model(language_model.metadata_of(args)).flops_per_token(args.context)
        work = 100 * flops * args.batch_size * args.context / peak_flops(torch.device(args.device))
        besides = "MFU unknown" if math.isnan(work) else f"MFU {work / a:.1f} % / {work / b:.1f} %"
    elif name in HIGHEST:
        besides = f"at most {highest}"
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    if args.device == "cuda":  # `make bench` wants seconds, and a least: A / B at most 0.05 is B / A at least 20
        swapped = name in HIGHEST
        sides = [[(seconds[i], 0.0) for seconds in rounds] for i in ((0, 1) if swapped else (1, 0))]
        shown = " / ".join(reversed(name.split(" / "))) if swapped else name
        quality = ", ".join(filter(None, [torch.cuda.get_device_name(), besides]))
        rows.record(rows.Row(f"GPU: {shown}", shown.split(" / ")[0], 1 / highest, *sides, quality=quality))
    print(f"| {name} | {1000 * a:.2f} | {1000 * b:.2f} | {ratio:.3f} | {spread} | {besides} |", flush=True)
    return f"{name} is {ratio:.3f}, and at most {highest} is promised" if ratio > highest else None


def main(options: Namespace):
    cuda, missed = options.device == "cuda", []
    if cuda and not torch.cuda.is_available():
        rows.record(rows.Row("all of dev/bench/gpu.py", "on a GPU", 0, missing="no GPU"))
        sys.exit("gpu.py: no GPU here (a dry run: --device cpu)")
    name = torch.cuda.get_device_name() if cuda else "a CPU: a dry run, whose figures say nothing"
    print(f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}, medians of {options.rounds} rounds")
    print("| A / B | A, ms | B, ms | ratio | rounds | |\n|---|---|---|---|---|---|", flush=True)
    if cuda:
        torch.set_float32_matmul_precision("high")
    else:
        torch.compiler.set_stance("force_eager")
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        for name, (millions, *sides) in ROWS.items():
            if options.only in name:
                args = arguments(Path(folder), options.device, millions)
                rounds = measure([side(args) for side in sides], options.rounds, options.seconds if cuda else 0)
                missed.append(report(name, args, rounds))
                gc.collect()  # the models before the next ones
                torch.cuda.empty_cache()
                torch.compiler.reset()  # after eight recompilations of one function it would be left eager
    dist.destroy_process_group()
    if options.check and any(missed):
        sys.exit("gpu.py: " + "; ".join(filter(None, missed)))


if __name__ == "__main__":
    main(options)
