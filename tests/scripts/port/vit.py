"""vit.py on many GPUs, in a job that Slurm may end: chapter 2's lines, and chapter 7's."""

import preemption

preemption.listen()

import argparse
import copy
import faulthandler
import itertools
import math
import os
import sys

import torch
import torch.distributed as dist
from exam_data import KINDS, Drawings
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--train-drawings", type=int, default=512)
parser.add_argument("--checkpoint", default="vit.pt", help="resumes from it, if it is there")
parser.add_argument("--exact", action="store_true", help="float64, and nothing random")
options = parser.parse_args()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
faulthandler.dump_traceback_later(300, exit=True)
dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
dist.barrier()
faulthandler.cancel_dump_traceback_later()
rank, world_size = dist.get_rank(), dist.get_world_size()
if options.batch_size % world_size != 0:
    sys.exit(f"{world_size} ranks cannot share a batch of {options.batch_size}")
per_rank = options.batch_size // world_size
torch.manual_seed(0)
torch.set_default_dtype(torch.float64 if options.exact else torch.float32)


class ViT(nn.Module):
    """Images (batch, 1, 16, 16) to logits (batch, KINDS)."""

    def __init__(self, width: int = 32, dropout: float = 0.1):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, KINDS)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.blocks(tokens).mean(1))


def mixed(images: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup: each image with another one of the batch, and their labels in the same shares."""
    labels = nn.functional.one_hot(kinds, KINDS).to(images.dtype)
    if options.exact:
        return images, labels
    share, other = torch.rand(()).item(), torch.randperm(len(images), device=images.device)
    return images.lerp(images[other], share), labels.lerp(labels[other], share)


class ResumableSampler(DistributedSampler):
    start = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start, None)


train_set = Drawings(options.train_drawings, train=True, augment=not options.exact)
test_set = Drawings(101, train=False)
workers = {"num_workers": 1, "multiprocessing_context": "fork"}
workers["worker_init_fn"] = preemption.ignore
sampler = ResumableSampler(train_set, drop_last=True)
train_loader = DataLoader(train_set, per_rank, sampler=sampler, drop_last=True, **workers)
own = range(rank, len(test_set), world_size)
test_loader = DataLoader(test_set, per_rank, sampler=own, **workers)

model = ViT(dropout=0.0 if options.exact else 0.1).to(device)
ddp = nn.parallel.DistributedDataParallel(model)
averaged = copy.deepcopy(model).requires_grad_(False)  # EMA
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
steps = options.epochs * len(train_loader)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1, (step + 1) / 10) * (1 + math.cos(math.pi * step / steps)) / 2
)
scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda" and not options.exact)
parts = {"model": model, "averaged": averaged, "optimizer": optimizer}
parts |= {"schedule": schedule, "scaler": scaler}
step, best = 0, -1.0
if os.path.exists(options.checkpoint):
    saved = torch.load(options.checkpoint, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    step, best = saved["step"], saved["best"]
    if rank == 0:
        print(f"Resumed after step {step}", flush=True)
torch.manual_seed(1 + rank + world_size * step)  # augmentation, mixup and dropout: each rank's own


def save():
    if rank == 0:
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state | {"step": step, "best": best}, options.checkpoint + ".part")
        os.replace(options.checkpoint + ".part", options.checkpoint)
    dist.barrier()


stopped = False
for epoch in range(step // len(train_loader), options.epochs):
    sampler.set_epoch(epoch)
    sampler.start = step % len(train_loader) * per_rank
    model.train()
    for images, kinds in train_loader:
        stopped = preemption.asked(device, step)
        if stopped:
            break
        images, labels = mixed(images.to(device, torch.get_default_dtype()), kinds.to(device))
        with torch.autocast(device.type, torch.bfloat16, enabled=not options.exact):
            logits = ddp(images)
        loss = nn.functional.cross_entropy(logits.to(images.dtype), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = schedule.get_last_lr()[0]
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        with torch.no_grad():
            for mean, weight in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.05)
        step += 1
        mean_loss = loss.detach() / world_size
        dist.all_reduce(mean_loss)
        if rank == 0:
            said = f"step={step} loss={mean_loss.item():.9f} learning_rate={rate:.9f}"
            print(said, flush=True)
    if stopped:
        break
    averaged.eval()
    correct = torch.zeros(1, device=device)
    with torch.no_grad():
        for images, kinds in test_loader:
            logits = averaged(images.to(device, torch.get_default_dtype()))
            correct += (logits.argmax(1) == kinds.to(device)).sum()
    dist.all_reduce(correct)
    accuracy = correct.item() / len(test_set)
    if not math.isfinite(mean_loss.item()):
        sys.exit(f"the loss is {mean_loss.item()} in step {step}")
    if accuracy > best:
        best = accuracy
        if rank == 0:
            torch.save(averaged.state_dict(), options.checkpoint + ".best")
    if rank == 0:
        print(f"epoch={epoch + 1} accuracy={accuracy:.4f} best={best:.4f}", flush=True)
    save()
if stopped:
    save()
preemption.end(stopped)
