"""Train a ConvNet on MNIST with DistributedDataParallel: the script to copy first.

    python aux/prepare_data.py mnist                      # once, before any job
    python distributed/train_ddp.py                       # one process: CUDA, Apple's MPS or the CPU
    ./torchrun.sh distributed/train_ddp.py --epochs 3     # all GPUs of this machine, or two CPU ranks
    sbatch launch_slurm_to_torch.sh distributed/train_ddp.py --epochs 3

Grown from local/train_single.py: arguments, process group, data, steps, main.

    git diff --no-index local/train_single.py distributed/train_ddp.py
"""

import datetime
import math
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from resilience import stop_request
from resilience.arguments import ArgumentParser, device_name, number, uneven, whole_number

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=whole_number(1), default=3, help="passes over the images")
    parser.add_argument("--max-steps", type=whole_number(1), help="stop after this many steps in all (default: never)")
    parser.add_argument("--batch-size", type=whole_number(1), default=64, help="images per step, over all ranks")
    parser.add_argument("--learning-rate", type=number(0), default=0.02, help="of SGD with momentum")
    parser.add_argument("--dropout", type=number(0, below=1), default=0.25, help="share of activations dropped")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of weights, order and dropout")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of autocast")
    device = os.environ.get("TRAIN_DEVICE", "auto")
    parser.add_argument("--device", type=device_name, default=device, help="auto, cpu, cuda or mps; or TRAIN_DEVICE")
    parser.add_argument("--data-dir", type=Path, default="data/mnist", help="of aux/prepare_data.py")
    parser.add_argument("--num-workers", type=whole_number(0), default=0, help="loader processes of each rank")
    parser.add_argument("--log-every", type=whole_number(1), default=100, help="steps between two log lines")
    parser.add_checkpoint_arguments()
    parser.add_timeout_arguments()
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()  # before torch: a typing mistake costs no second
    stop_request.listen()

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import mnist
from resilience import checkpoint, heartbeat, step_zero
from resilience.progress import Progress

# --- process group ----------------------------------------------------------------------------------------------------


def find_ranks() -> tuple[str, int, int, int]:
    """Who started this process, and its place: (launcher, rank, local_rank, world_size)."""
    env = os.environ
    # Children of torchrun and spawn_ranks.py inherit Slurm's variables, so their own marks are looked at first. The
    # batch shell has SLURM_PROCID, too, always 0: ranks exist only in a step that srun numbers, not in one near 2**32.
    if "TORCHELASTIC_RUN_ID" in env or "SPAWN_RANKS" in env:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "mp"
    elif "SLURM_PROCID" in env and int(env.get("SLURM_STEP_ID", 2**32)) < 2**31:
        if "MASTER_ADDR" not in env:  # `srun python train_ddp.py`, typed by hand
            hosts = subprocess.run(["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]], capture_output=True)
            env["MASTER_ADDR"] = hosts.stdout.decode().split("\n")[0]
        job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
        env.setdefault("MASTER_PORT", str(61000 + (job + 1009 * step) % 4536))
        if "OMP_NUM_THREADS" not in env:
            torch.set_num_threads(int(env.get("SLURM_CPUS_PER_TASK", 1)))  # else every rank would use the whole node
        return "srun", int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), int(env["SLURM_NTASKS"])
    elif all(name in env for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        launcher = "environment"
    else:
        return "none", 0, 0, 1
    return launcher, int(env["RANK"]), int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"])


def init_process_group(args: Namespace, fault: str | None = None, **facts) -> tuple[int, int, torch.device]:
    """Finds this rank's place, meets the others, prints Step 0 (with `facts`) and starts NCCL or gloo.

    Returns (rank, world_size, device). A fault on any rank stops all of them, with one sentence.
    """
    launcher, rank, local_rank, world_size = find_ranks()
    store = step_zero.meet(launcher, rank, local_rank, world_size, datetime.timedelta(seconds=args.init_timeout))
    device, device_fault = step_zero.choose_device(args.device, local_rank, world_size)
    facts = {"world size": world_size, "local rank": local_rank, "device": str(device), "launcher": launcher, **facts}
    step_zero.check(store, rank, world_size, device, facts, device_fault or fault)
    if world_size > 1:
        backend, timeout = "nccl" if device.type == "cuda" else "gloo", datetime.timedelta(seconds=args.timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        assert dist.get_world_size() == world_size
        heartbeat.start(rank, world_size, args.timeout)
    return rank, world_size, device


# --- data -------------------------------------------------------------------------------------------------------------


def make_loaders(args: Namespace, rank: int, world_size: int, device: torch.device) -> tuple[DataLoader, DataLoader]:
    """This rank's share of the training and the test batches: images (n, 1, 28, 28) float32, labels (n,) int64.

    The ranks' shares of step i together are images i * batch_size to (i + 1) * batch_size of one permutation, which
    depends on seed and epoch alone: the same step on any number of ranks.
    """
    train_set, test_set = mnist.MNIST(args.data_dir, train=True), mnist.MNIST(args.data_dir, train=False)
    options = {"collate_fn": mnist.whole_batch, "num_workers": args.num_workers, "pin_memory": device.type == "cuda"}
    options["worker_init_fn"] = stop_request.ignore
    sampler = DistributedSampler(train_set, world_size, rank, shuffle=True, seed=args.seed)
    sampler = mnist.ResumableSampler(sampler)
    train_loader = DataLoader(train_set, args.batch_size // world_size, sampler=sampler, **options)
    mine = range(rank, len(test_set), world_size)  # not padded as DistributedSampler does: every image once
    test_loader = DataLoader(test_set, batch_size=1000, sampler=mine, **options)
    return train_loader, test_loader


# --- model ------------------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Images (n, 1, 28, 28) to logits (n, 10): two convolutions, two linears, 1.2 million parameters."""

    def __init__(self, dropout: float):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.linear1 = nn.Linear(64 * 12 * 12, 128)
        self.linear2 = nn.Linear(128, 10)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv2(F.relu(self.conv1(images))), 2))
        x = self.dropout(x.permute(0, 2, 3, 1).flatten(1))  # as channels_last lies in memory: no copy
        return self.linear2(self.dropout(F.relu(self.linear1(x))))


def make_model(args: Namespace, device: torch.device) -> tuple[ConvNet, torch.optim.Optimizer]:
    """The network and its optimizer in their fastest forms, but on MPS, where channels_last is not to be trusted.

    github.com/pytorch/pytorch/issues/175189: gradients on MPS that were wrong, and silently so.
    """
    fast = device.type != "mps"
    model = ConvNet(args.dropout).to(device, memory_format=torch.channels_last if fast else None)
    options = {"lr": args.learning_rate, "momentum": 0.9, "nesterov": True, "fused": fast}
    return model, torch.optim.SGD(model.parameters(), **options)


def autocast(args: Namespace, device: torch.device) -> torch.autocast:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
    return torch.autocast(device.type, dtype, enabled=args.precision != "fp32")


# --- steps ------------------------------------------------------------------------------------------------------------


def all_reduced(values: torch.Tensor, world_size: int) -> list[float]:
    """The sums of `values` over all ranks."""
    if world_size > 1:
        dist.all_reduce(values)
    return values.tolist()


def train_epoch(args, step, model, optimizer, scaler, loader, rank, world_size, device, progress) -> Iterator[int]:
    """Trains on every image once, or on those after `step` if that is inside the epoch; yields each new step number."""
    model.train()
    epoch, done = step // len(loader) + 1, step % len(loader)
    loader.sampler.whole.set_epoch(epoch)
    loader.sampler.done = done * loader.batch_size
    mine = len(range(rank, len(loader.dataset), world_size))  # without what DistributedSampler pads to equal lengths
    mine, left = mine - done * loader.batch_size, len(loader.dataset) - done * args.batch_size  # left: over all ranks
    loss_sum, count = torch.zeros((), device=device), 0  # since the last log line; read only there
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if args.dropout:
            torch.manual_seed(checkpoint.seed_from(args.seed, step, rank))
        with autocast(args, device):
            logits = model(images)
        here, everywhere = min(len(images), mine), min(args.batch_size, left)
        loss = F.cross_entropy(logits[:here].float(), labels[:here], reduction="sum")
        optimizer.zero_grad()
        scaler.scale(loss * world_size / everywhere).backward()  # DDP divides by world_size: the mean over all images
        scaler.step(optimizer)
        scaler.update()
        loss_sum += loss.detach()
        count += here
        mine, left = mine - here, left - everywhere
        step += 1
        if step % args.log_every == 0 or step == args.max_steps:
            all_loss, all_count = all_reduced(torch.stack((loss_sum, torch.tensor(count, device=device))), world_size)
            progress.step(step, epoch, int(all_count), loss=all_loss / all_count)
            loss_sum, count = torch.zeros((), device=device), 0
        yield step


def settle_buckets(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device):
    """Two backward passes whose gradients are thrown away, before a run is resumed.

    DDP puts gradients into buckets anew after its first step; a sum in another order is a sum with other roundings.
    """
    for _ in range(2):
        model(torch.zeros(1, 1, 28, 28, device=device)).sum().backward()
    optimizer.zero_grad()


@torch.inference_mode()
def evaluate(args, model: nn.Module, loader: DataLoader, world_size: int, device: torch.device) -> tuple[float, float]:
    """Average loss and accuracy over all test images, each counted once."""
    model.eval()
    sums = torch.zeros(2, device=device)  # loss, right answers
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with autocast(args, device):
            logits = model(images).float()
        sums += torch.stack((F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()))
    loss, right = all_reduced(sums / len(loader.dataset), world_size)
    return loss, right


# --- main -------------------------------------------------------------------------------------------------------------


def find_fault(args: Namespace) -> str | None:
    """What is wrong with the arguments or the files on this node, in one sentence, or None."""
    world_size = find_ranks()[3]
    fault = uneven("--batch-size", args.batch_size, world_size, f"{world_size} ranks")
    return fault or mnist.missing_data(args.data_dir) or checkpoint.in_the_way(args.checkpoint_dir, args.resume, ".pt")


def main(args: Namespace):
    rank, world_size, device = init_process_group(args, find_fault(args))
    if rank == 0:
        print(f"Data: {mnist.describe(args.data_dir)}. Checkpoints: {args.checkpoint_dir}", flush=True)
    facts = mnist.identity(args)

    torch.manual_seed(args.seed)  # the same weights on every rank
    train_loader, test_loader = make_loaders(args, rank, world_size, device)
    bare_model, optimizer = make_model(args, device)
    model = bare_model
    if world_size > 1:
        model = DistributedDataParallel(bare_model, device_ids=[device.index] if device.type == "cuda" else None)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    step, loss, accuracy, stop, saved = 0, math.nan, math.nan, False, True
    parts = {"model": bare_model, "optimizer": optimizer, "scaler": scaler}
    checkpoint.take_over(args.checkpoint_dir, rank)
    if args.resume and (state := checkpoint.load_on_all_ranks(args.checkpoint_dir, rank, world_size, device)):
        if fault := checkpoint.changes(args.checkpoint_dir, state["run"], facts):
            step_zero.stop(fault, rank, speak=rank == 0)
        if world_size > 1:
            settle_buckets(model, optimizer, device)
        step, loss, accuracy = (state[name] for name in ("step", "test_loss", "test_accuracy"))
        for name, part in parts.items():
            part.load_state_dict(state[name])
    if args.resume and rank == 0:
        print(f"Resumed after step {step}" if step else f"No whole checkpoint in {args.checkpoint_dir}", flush=True)

    total_steps = min(args.epochs * len(train_loader), args.max_steps or sys.maxsize)
    progress = Progress(args.checkpoint_dir if rank == 0 else None, "images", step, total_steps)
    boundary = checkpoint.Boundary(args, step, rank, world_size, device)
    while step < total_steps and not stop:
        steps = train_epoch(args, step, model, optimizer, scaler, train_loader, rank, world_size, device, progress)
        for step in steps:
            save, stop = boundary(step)
            if step % len(train_loader) == 0 or step == total_steps:
                loss, accuracy = evaluate(args, bare_model, test_loader, world_size, device)
                progress.epoch(step, math.ceil(step / len(train_loader)), test_loss=loss, test_accuracy=accuracy)
                save = True
            if save and rank == 0:
                state = {"run": facts, "step": step, "test_loss": loss, "test_accuracy": accuracy}
                state |= {name: part.state_dict() for name, part in parts.items()}
                saved = checkpoint.save(state, args.checkpoint_dir, step, args.keep_checkpoints)
            if stop or step == total_steps:
                break
    epoch = math.ceil(step / len(train_loader))
    result = f"epoch={epoch} average_loss={loss:.4f} accuracy={accuracy:.4f}"
    checkpoint.finish(step, total_steps, saved, rank, result)


if __name__ == "__main__":
    main(args)
    step_zero.leave()  # only here: gloo deadlocks now and then when DDP, in main, is the last to hold the group
