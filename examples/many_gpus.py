"""Chapter 2's script on many GPUs: one_gpu.py, with its model, its schedule and its batch."""

import faulthandler
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.models import get_model
from torchvision.transforms import v2

NETWORK, SIZE = "resnet18", 64  # for a GPU "resnet50", 224
EPOCHS, BATCH = 3, 64
# 1. The ranks meet.
device = torch.device("cpu")
# CUDA, ROCm or XPU, but not Apple's mps, which has no collectives.
if torch.accelerator.is_available() and sys.platform != "darwin":
    number = int(os.environ["LOCAL_RANK"]) if torch.accelerator.device_count() > 1 else 0
    torch.accelerator.set_device_index(number)
    device = torch.device(torch.accelerator.current_accelerator().type, number)
faulthandler.dump_traceback_later(300, exit=True)
backend = dist.get_default_backend_for_device(device)
dist.init_process_group(backend, device_id=None if device.type == "cpu" else device)
dist.barrier()
faulthandler.cancel_dump_traceback_later()
rank, world_size = dist.get_rank(), dist.get_world_size()
print(f"[Rank: {rank} | {os.uname().nodename} | {device}]\n", end="", flush=True)
run = os.environ.get("RUN", "by_hand")  # the job's number, which env.sh exports

to_tensor = v2.Compose([v2.ToImage(), v2.Resize((SIZE, SIZE)), v2.ToDtype(torch.float32, True)])
train_set = ImageFolder("data/images/train", to_tensor)
test_set = ImageFolder("data/images/test", to_tensor)
workers = {"num_workers": 2, "multiprocessing_context": "fork"}
# 2. Each takes its part of the data.
if BATCH % world_size != 0:
    sys.exit(f"{world_size} ranks cannot share a batch of {BATCH}")
per_rank = BATCH // world_size
sampler = DistributedSampler(train_set, drop_last=True)
train_loader = DataLoader(train_set, per_rank, sampler=sampler, drop_last=True, **workers)
test_loader = DataLoader(test_set, BATCH, sampler=range(rank, len(test_set), world_size), **workers)

torch.manual_seed(0)
model = get_model(NETWORK, num_classes=len(train_set.classes)).to(device)
# 3. They train one model.
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train_loader))

best = -1.0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    start = time.perf_counter()
    model.train()
    for images, labels in train_loader:
        loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    # 4. They sum what they count.
    loss = loss.detach() / world_size
    dist.all_reduce(loss)
    loss = loss.item()  # waits for the GPU
    images_per_second = len(train_loader) * BATCH / (time.perf_counter() - start)
    model.eval()
    # BatchNorm's averages are each rank's own: all test with those of rank 0, which saves them.
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    correct = torch.zeros(1, device=device)
    with torch.no_grad():
        for images, labels in test_loader:
            correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    accuracy = correct.item() / len(test_set)
    # 5. Rank 0 prints and saves.
    if rank == 0:
        print(f"{epoch=} {loss=:.4f} {accuracy=:.4f} {images_per_second=:.0f}", flush=True)
    if accuracy > best:
        best = accuracy
        if rank == 0:
            torch.save(model.state_dict(), f"best_{run}.pt")
dist.barrier()
dist.destroy_process_group()
if device.type == "cpu":
    os._exit(0)  # gloo on a CPU may abort a Python that shuts down
