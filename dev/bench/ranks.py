"""What two ranks gain on a language model: DistributedDataParallel over one rank, tensor parallelism over DTensor's.

    python aux/prepare_data.py shakespeare
    python dev/bench/ranks.py             # two ranks of one thread each; a minute on two quiet cores
    python dev/bench/ranks.py --check     # status 1 when less is reached than is promised

Both at nanoGPT's CPU settings with 64 sequences a step over all ranks, in float32. Two processes take turns: rank 0
alone, both with DistributedDataParallel, both with tensor_parallel_by_hand.py, and both with parallelize_module and
the plan of train_tp.py. The gate is the loss after as many steps: it is the same in all four. Noted besides: how much
longer rank 0's step takes beside rank 1, which trains the same on its own, and what a step spends its time on.
"""

import os
import subprocess
import sys
from argparse import SUPPRESS, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "distributed")]

import rows
from resilience.arguments import ArgumentParser, number, whole_number
from rows import Row

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default="data/shakespeare", help="of aux/prepare_data.py")
    parser.add_argument("--rounds", type=whole_number(1), default=9, help="turns of each, after a first one")
    parser.add_argument("--seconds", type=number(0), default=1.5, help="of rank 0's turn alone")
    parser.add_argument("--check", action="store_true", help="status 1 when less is reached than is promised")
    parser.add_argument("--rank", action="store_true", help=SUPPRESS)  # this process is one of the two
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()  # before torch: a typing mistake costs no second

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import characters
import language_model
import train_fsdp
from parallel_plan import parallel_plan, whole
from tensor_parallel_by_hand import split_by_hand, split_loss

CPU = torch.device("cpu")
FLAGS = ["--size", "cpu", "--batch-size", "64", "--precision", "fp32", "--device", "cpu"]
LEASTS = {"two ranks, DistributedDataParallel": 0.9, "tensor parallelism by hand": 1.4}

# --- the sides --------------------------------------------------------------------------------------------------------


def make_model(args: Namespace) -> nn.Module:
    model = language_model.make_model(language_model.metadata_of(args), args.dropout)
    return language_model.initialize(model, CPU, args.seed)


def plain_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def loss_by_hand(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return split_loss(model, model(tokens), targets)


class Side:
    """Steps of one of the ways: its model, which part of the batch this rank has, and the loss of that."""

    def __init__(self, args: Namespace, model: nn.Module, loss_of: Callable, parts: int = 1, dtensor: bool = False):
        self.args, self.model, self.loss_of, self.dtensor = args, model, loss_of, dtensor
        self.part, self.parts = (dist.get_rank(), parts) if parts > 1 else (0, 1)
        self.optimizer = language_model.make_optimizer(args, model)
        self.windows, self.loss = characters.windows(args.data_dir, "train", args.context), torch.zeros(())

    def __call__(self, step: int):
        batch = characters.random_batch(self.args, self.windows, step, self.part, self.parts, CPU)
        with loss_parallel() if self.dtensor else torch.enable_grad():
            loss = self.loss_of(self.model, batch[:, :-1], batch[:, 1:])
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = whole(loss.detach())


def make_sides(args: Namespace) -> dict[str, Side]:
    """Rank 1 has nothing to do while rank 0 is alone."""
    by_hand = split_by_hand(make_model(args), dist.get_rank(), 2)
    dtensor = make_model(args)
    parallelize_module(dtensor, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)), parallel_plan(False))
    dtensor.tie()  # parallelize_module has made two parameters of the one
    return {
        "one": Side(args, make_model(args), plain_loss),
        "ddp": Side(args, DistributedDataParallel(make_model(args)), plain_loss, parts=2),
        "by hand": Side(args, by_hand, loss_by_hand),
        "dtensor": Side(args, dtensor, plain_loss, dtensor=True),
        "beside": Side(args, make_model(args), plain_loss),  # last: a rank that is early waits in the others
    }


def average(loss: torch.Tensor) -> float:
    """Over both ranks."""
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss.item() / 2


# --- main -------------------------------------------------------------------------------------------------------------


def main(options: Namespace):
    if fault := characters.missing_data(options.data_dir, 64):
        sys.exit(f"ranks.py: {fault}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [__file__, "--rank", "--data-dir", str(options.data_dir), "--rounds", str(options.rounds)]
    command += ["--seconds", str(options.seconds), *(["--check"] if options.check else [])]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [text for text in done.stderr.splitlines() if text.startswith("ranks.py: ")]
        sys.exit("\n".join(said) or f"ranks.py: a rank has failed:\n{done.stderr}")


def run_rank(options: Namespace):
    """One of the two processes. Rank 0 reports."""
    dist.init_process_group("gloo")
    sys.argv = ["train_fsdp.py", "--data-dir", str(options.data_dir), "--checkpoint-dir", "unused", *FLAGS]
    args, rank = train_fsdp.parse_arguments(), dist.get_rank()
    sides, missed = make_sides(args), []
    counted = {name: in_turn(side, rank, alone=name == "one") for name, side in sides.items()}
    taken, busy = rows.take_turns(counted, options.rounds, options.seconds, agree)
    cpu = torch.tensor([[cpu for _, cpu in times] for times in taken.values()], dtype=torch.float64)
    both = cpu.clone()
    dist.all_reduce(both)
    losses = {name: average(side.loss) for name, side in sides.items() if name != "one"}
    parts = {name: rows.parts_of(sides[name], name) for name in ("by hand", "dtensor")}
    if rank == 0:
        losses["one"] = sides["one"].loss.item()
        wall = torch.tensor([[wall for wall, _ in times] for times in taken.values()], dtype=torch.float64)
        others = torch.tensor(busy) - (both - cpu).sum(0) / wall.sum(0)  # rank 1 is no other program
        taken = {name: torch.stack(times, 1).tolist() for name, *times in zip(taken, wall, both, strict=True)}
        beside = median(b / a for (a, _), (b, _) in zip(taken["one"], taken["beside"], strict=True))
        rows.print_heads()
        rounds = [
            ("two ranks, DistributedDataParallel", "one rank, as a share of 2", "ddp", "one", 2.0),
            ("tensor parallelism by hand", "parallelize_module, DTensor", "by hand", "dtensor", 1.0),
        ]
        for name, other, mine, theirs, ideal in rounds:
            good = abs(losses[mine] - losses[theirs]) < 0.02 * losses[theirs]
            quality = f"loss {losses[mine]:.3f}, theirs {losses[theirs]:.3f}"
            row = Row(name, other, LEASTS[name], taken[mine], taken[theirs], ideal, quality, good, busy=others.tolist())
            row.notes = {"beside another rank": beside} | parts.get(mine, {}) | parts.get(theirs, {})
            missed.append(rows.report(row))
        if any(missed) and options.check:
            print("ranks.py: " + "; ".join(filter(None, missed)), file=sys.stderr, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(int(any(missed) and options.check))  # gloo's threads can abort Python while it shuts down


def in_turn(side: Side, rank: int, alone: bool) -> Callable[[int], None]:
    """The steps of a side, without those that only rank 0 does, on rank 1."""
    return (lambda step: None) if alone and rank else side


def agree(steps: int) -> int:
    """What rank 0 says."""
    said = torch.tensor([steps])
    dist.broadcast(said, 0)
    return said.item()


if __name__ == "__main__":
    run_rank(args) if args.rank else main(args)
