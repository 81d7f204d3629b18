"""Train a ConvNet on MNIST with DistributedDataParallel. Every process (rank) runs this whole file.

    python aux/prepare_data.py mnist                      # once, before any job
    ./torchrun.sh distributed/train_ddp.py --epochs 3     # one rank per GPU, or two on the CPU
    sbatch launch_slurm_with_torchrun.sh distributed/train_ddp.py --epochs 3

EDIT marks the lines to change for your own data and model.
Grown from local/train_single.py: process group, data, model, checkpoint, training.
"""

import argparse
import math
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import mnist  # EDIT: your data

# --- arguments ---
parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64, help="images per step over all ranks")
parser.add_argument("--learning-rate", type=float, default=0.02, help="of SGD with momentum 0.9")
parser.add_argument("--dropout", type=float, default=0.25)
parser.add_argument("--seed", type=int, default=0, help="of weights, data order and dropout")
parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
default_device = os.environ.get("TRAIN_DEVICE", "auto")
parser.add_argument("--device", choices=["auto", "cpu"], default=default_device)
parser.add_argument("--data-dir", default="data/mnist", help="written by aux/prepare_data.py")
parser.add_argument("--log-every", type=int, default=100, help="steps between two log lines")
parser.add_argument(
    "--checkpoint-dir", type=Path, help="default: checkpoints/ and the job id or time"
)
# A requeued job runs the same command again, so it resumes without being told.
requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
parser.add_argument("--resume", action="store_true", default=requeued)
args = parser.parse_args()
if min(args.epochs, args.batch_size, args.log_every) < 1 or not 0 <= args.dropout < 1:
    parser.error("--epochs, --batch-size and --log-every must be 1 or more, --dropout below 1")

# --- process group ---
# RANK is this process's number among all WORLD_SIZE, from 0; LOCAL_RANK is its number on this node.
# The launcher sets them. Under srun without a launcher there are only Slurm's own variables.
rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", 0)))
local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
world_size = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", 1)))


def log(text: str):
    if rank == 0:
        print(text, flush=True)


def stop(sentence: str):
    # One write with its line break, so that the lines of two ranks do not mix.
    sys.stderr.write(f"{sentence}\n")
    sys.exit(1)


use_cuda = args.device != "cpu" and torch.cuda.is_available()
if args.device != "cpu" and not use_cuda and os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0":
    stop("Slurm granted GPUs, but torch sees none: check nvidia-smi, or pass --device cpu")
device = torch.device("cpu")
if use_cuda:
    # GPU number local_rank. If Slurm hides the other ranks' GPUs, this rank's is number 0.
    device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)

if world_size > 1 and "MASTER_ADDR" not in os.environ:
    stop(f"this is one of {world_size} ranks, but MASTER_ADDR is not set: use a launcher")
# The ranks meet in a store at MASTER_ADDR:MASTER_PORT, or in memory if there is only one process.
store = dist.HashStore() if world_size == 1 else None
# NCCL communicates between GPUs, gloo between CPUs.
backend = "nccl" if use_cuda else "gloo"
dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
# NCCL connects in the first all_reduce, a sum over all ranks. On the wrong network it would wait
# for ever, so SIGALRM ends this rank after 300 seconds.
signal.alarm(300)
dist.all_reduce(torch.zeros(1, device=device))
signal.alarm(0)
host = os.uname().nodename
place = f"world size: {world_size} | local rank: {local_rank} | device: {device}"
# One write with its line break, so that the lines of two ranks do not mix.
print(f"[Rank: {rank} | {host} | {place}]\n", end="", flush=True)

# --- data ---
# EDIT: your two data sets. collate_fn is only for those of mnist.py, which return whole batches.
try:
    train_set, test_set = mnist.load(args.data_dir)
    source = mnist.describe(args.data_dir)
except ValueError as error:
    stop(str(error))
if args.batch_size > len(train_set):
    stop(f"--batch-size {args.batch_size} is more than the {len(train_set)} images")
if args.batch_size % world_size != 0:
    stop(f"--batch-size {args.batch_size} must be divisible by {world_size} (ranks)")
# Each rank gets an equal share of the shuffled images, and every world_size-th test image.
sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
test_sampler = range(rank, len(test_set), world_size)
options = {"collate_fn": mnist.collate, "pin_memory": use_cuda}  # EDIT
batch_size = args.batch_size // world_size
train_loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **options)
test_loader = DataLoader(test_set, batch_size=1000, sampler=test_sampler, **options)

# --- model ---
torch.manual_seed(args.seed)
# EDIT: your model
model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(),
    nn.Dropout(args.dropout), nn.Flatten(),
    nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(128, 10),
)  # fmt: skip
# Convolutions are faster in this layout.
model = model.to(device, memory_format=torch.channels_last)
# ddp has the weights of model, and its backward() averages the gradients over all ranks.
ddp = nn.parallel.DistributedDataParallel(model)
# fused: one kernel updates all weights.
optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9, fused=True)
autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

# --- checkpoint ---
run = os.environ.get("SLURM_JOB_ID", time.strftime("%Y-%m-%d_%H-%M-%S"))
folder = args.checkpoint_dir or Path("checkpoints", run)
saved = {int(path.stem.split("_")[-1]): path for path in folder.glob("checkpoint_epoch_*.pt")}
epochs_done = max(saved, default=0)
if saved and not args.resume:
    stop(f"{folder} has checkpoints: pass --resume, or choose another --checkpoint-dir")
if saved:
    checkpoint = torch.load(saved[epochs_done], map_location=device, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    # Its state includes the learning rate, so a new --learning-rate has no effect.
    optimizer.load_state_dict(checkpoint["optimizer"])
    log(f"Resumed after epoch {epochs_done}")
if rank == 0:
    folder.mkdir(parents=True, exist_ok=True)
log(f"Data: {source}. Checkpoints: {folder}")

# --- training ---
for epoch in range(epochs_done + 1, args.epochs + 1):
    model.train()
    # A new order in every epoch, the same after a resume.
    sampler.set_epoch(epoch)
    # A different seed for each rank, because their dropout must differ.
    torch.manual_seed((args.seed + epoch) * world_size + rank)
    losses, start = [], time.perf_counter()
    for step, (images, labels) in enumerate(train_loader, start=1):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with autocast:
            loss = nn.functional.cross_entropy(ddp(images).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # .item() here would make the CPU wait for the GPU at every step.
        losses.append(loss.detach())

        if step % args.log_every == 0 or step == len(train_loader):
            # The sum over all ranks of their shares of the mean.
            mean_loss = torch.stack(losses).mean() / world_size
            dist.all_reduce(mean_loss)
            mean_loss = mean_loss.item()
            if not math.isfinite(mean_loss):
                stop(f"the loss is {mean_loss}: try a lower --learning-rate")
            seconds_per_step = (time.perf_counter() - start) / len(losses)
            steps_left = (args.epochs - epoch + 1) * len(train_loader) - step
            line = f"epoch={epoch} step={step}/{len(train_loader)} loss={mean_loss:.6f}"
            line += f" images_per_second={args.batch_size / seconds_per_step:.0f}"
            line += f" time_left={timedelta(seconds=round(seconds_per_step * steps_left))}"
            log(line)
            losses, start = [], time.perf_counter()

    model.eval()
    # The sum of the losses, and the number of correct predictions.
    sums = torch.zeros(2, device=device)
    with torch.inference_mode(), autocast:
        for images, labels in test_loader:
            logits, labels = model(images.to(device)).float(), labels.to(device)
            sums[0] += nn.functional.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(1) == labels).sum()
    dist.all_reduce(sums)
    test_loss, accuracy = (sums / len(test_set)).tolist()
    log(f"epoch={epoch} test_loss={test_loss:.6f} test_accuracy={accuracy:.4f}")

    if rank == 0:
        # Written to a temporary name, then renamed: a job that ends here leaves no partial file.
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(checkpoint, folder / "part")
        os.replace(folder / "part", folder / f"checkpoint_epoch_{epoch}.pt")

log(f"Finished: epoch={args.epochs}, checkpoints in {folder}")
dist.destroy_process_group()
if not use_cuda:
    # A thread of gloo can outlive the group and crash Python's shutdown, which this skips.
    os._exit(0)
