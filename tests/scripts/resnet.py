"""A stranger's script with preemption.py and heartbeat.py: a small ResNet of torchvision's, with
BatchNorm, AdamW, a schedule, best.pt, random flips in loader workers.

The rank that the variable STUCK names stays for ever in step 8 of its first start, and each step
takes SLOW seconds more in the first start.
"""

import preemption

preemption.listen()

import itertools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.datasets import FakeData
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.transforms import v2

import heartbeat

EPOCHS, BATCH = 2, 4
first_start = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
slow = float(os.environ.get("SLOW", 0)) if first_start else 0
stuck = os.environ.get("STUCK") if first_start else None

dist.init_process_group("gloo")
rank = dist.get_rank()
heartbeat.start(after=float(os.environ.get("AFTER", 60)))


class Flipped(Dataset):
    """Pictures with a random flip that depends on the epoch and the index alone: whichever worker
    draws it, and whenever."""

    def __init__(self):
        to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
        self.pictures = FakeData(96, (3, 32, 32), num_classes=5, transform=to_tensor)
        self.flip, self.epoch = v2.RandomHorizontalFlip(), 0

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        picture, label = self.pictures[index]
        torch.manual_seed(self.epoch * len(self) + index)
        return self.flip(picture), label


class ResumableSampler(DistributedSampler):
    start = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start, None)


data = Flipped()
sampler = ResumableSampler(data, drop_last=True)
workers = {"num_workers": 1, "worker_init_fn": preemption.ignore}
loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True, **workers)

torch.manual_seed(0)
model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
# DDP rebuilds its buckets after the first pass. With this one a resumed run is equal bit for bit.
ddp.eval()
ddp(torch.zeros(2, 3, 32, 32)).sum().backward()
optimizer.zero_grad()

path, steps_done, best = Path("last.pt"), 0, float("inf")
if path.exists():
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    steps_done, best = saved["steps_done"], saved["best"]
    print(f"rank {rank} resumed after step {steps_done}", flush=True)


def save(name: str):
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"schedule": schedule.state_dict(), "steps_done": steps_done, "best": best}
        torch.save(state, name + ".part")
        os.replace(name + ".part", name)
    dist.barrier()


stopped = False
for epoch in range(steps_done // len(loader), EPOCHS):
    ddp.train()
    data.epoch = epoch
    sampler.set_epoch(epoch)
    sampler.start = (steps_done - epoch * len(loader)) * BATCH
    for pictures, labels in loader:
        time.sleep(slow)
        while stuck == str(rank) and steps_done == 7:
            pass
        loss = torch.nn.functional.cross_entropy(ddp(pictures), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        steps_done += 1
        heartbeat.step = steps_done
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {steps_done}: loss {mean:.9f}", flush=True)
        if steps_done % 5 == 0 and preemption.asked("cpu"):
            stopped = True
            break
    save("last.pt")
    if stopped:
        break
    # Of whole data and not of the epoch's steps, of which a resumed run has only the last ones.
    ddp.eval()
    for buffer in model.buffers():  # BatchNorm's, which differ between the ranks
        dist.broadcast(buffer, 0)
    with torch.no_grad():
        held_out = [data[i] for i in range(rank, len(data), dist.get_world_size())]
        pictures, labels = torch.utils.data.default_collate(held_out)
        loss_sum = torch.nn.functional.cross_entropy(model(pictures), labels, reduction="sum")
    dist.all_reduce(loss_sum)
    if loss_sum < best:
        best = loss_sum.item()
        save("best.pt")

if rank == 0 and stopped:
    print(f"stopped after step {steps_done}", flush=True)
    preemption.requeue()
dist.barrier()
dist.destroy_process_group()
os._exit(0)
