"""The same on many GPUs: the model, the schedule and the batch over all ranks are as before."""

import faulthandler
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split
from torchvision.datasets import FakeData
from torchvision.models import resnet18
from torchvision.transforms import v2

EPOCHS, BATCH = 2, 16
device = torch.device("cpu")
if torch.accelerator.is_available():  # CUDA, ROCm or XPU
    number = int(os.environ["LOCAL_RANK"]) if torch.accelerator.device_count() > 1 else 0
    torch.accelerator.set_device_index(number)
    device = torch.device(torch.accelerator.current_accelerator().type, number)
faulthandler.dump_traceback_later(300, exit=True)
backend = dist.get_default_backend_for_device(device)
gpu = None if device.type == "cpu" else device
dist.init_process_group(backend, device_id=gpu, timeout=timedelta(minutes=30))
rank, world_size = dist.get_rank(), dist.get_world_size()
dist.barrier()
print(f"[Rank: {rank} | {os.uname().nodename} | {device}]\n", end="", flush=True)
faulthandler.cancel_dump_traceback_later()
run = os.environ.get("RUN", "by_hand")  # the job's number, which env.sh exports
if BATCH % world_size != 0:
    sys.exit(f"{world_size} ranks cannot share a batch of {BATCH}")

to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
data = FakeData(112, (3, 32, 32), num_classes=4, transform=to_tensor)
train_set, test_set = random_split(data, [96, 16], torch.Generator().manual_seed(0))
workers = {"num_workers": 2, "multiprocessing_context": "fork"}
sampler = DistributedSampler(train_set, drop_last=True)
part = Subset(test_set, range(rank, len(test_set), world_size))
train_loader = DataLoader(
    train_set, BATCH // world_size, sampler=sampler, drop_last=True, **workers
)
test_loader = DataLoader(part, BATCH, **workers)

torch.manual_seed(0)
model = resnet18(num_classes=4).to(device)
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train_loader))

best = -1.0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    ddp.train()
    for images, labels in train_loader:
        loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    # BatchNorm's averages are each rank's own after the last step: all test with those of rank 0,
    # which it saves.
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    correct = torch.zeros(1, device=device)
    with torch.no_grad():
        for images, labels in test_loader:
            correct += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct)
    loss = loss.detach() / world_size
    dist.all_reduce(loss)
    accuracy = correct.item() / len(test_set)
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}, test accuracy {accuracy:.4f}", flush=True)
    if accuracy > best:
        best = accuracy
        if rank == 0:
            torch.save(model.state_dict(), f"best_{run}.pt")
dist.barrier()
dist.destroy_process_group()
if device.type == "cpu":
    os._exit(0)  # gloo on a CPU may abort a Python that shuts down
