"""Chapter 7's: many_gpus.py in a job that Slurm may end. It saves within an epoch, and resumes."""

import preemption

preemption.listen()

import faulthandler
import itertools
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


class ResumableSampler(DistributedSampler):
    start = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start, None)


to_tensor = v2.Compose([v2.ToImage(), v2.Resize((SIZE, SIZE)), v2.ToDtype(torch.float32, True)])
train_set = ImageFolder("data/images/train", to_tensor)
test_set = ImageFolder("data/images/test", to_tensor)
workers = {"num_workers": 2, "multiprocessing_context": "fork"}
workers["worker_init_fn"] = preemption.ignore
# 2. Each takes its part of the data.
if BATCH % world_size != 0:
    sys.exit(f"{world_size} ranks cannot share a batch of {BATCH}")
per_rank = BATCH // world_size
sampler = ResumableSampler(train_set, drop_last=True)
train_loader = DataLoader(train_set, per_rank, sampler=sampler, drop_last=True, **workers)
test_loader = DataLoader(test_set, BATCH, sampler=range(rank, len(test_set), world_size), **workers)

torch.manual_seed(0)
model = get_model(NETWORK, num_classes=len(train_set.classes)).to(device)
# 3. They train one model.
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train_loader))

# A requeued job keeps its RUN, and so its file. An argument names another one, if it is there.
path, resume = f"last_{run}.pt", "SLURM_RESTART_COUNT" in os.environ
if len(sys.argv) > 1:
    path, resume = sys.argv[1], True
folder, name = os.path.split(os.path.abspath(path))
found = [rank == 0 and resume and name in os.listdir(folder)]
dist.broadcast_object_list(found)  # rank 0's, because a node may see a new file later
steps_done, best = 0, -1.0
if found[0]:
    # On the CPU, because the GPU has no room for the weights twice.
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    steps_done, best = saved["steps_done"], saved["best"]
    del saved
    if rank == 0:
        print(f"Resumed after step {steps_done}", flush=True)


def save():
    if not all(weight.isfinite().all() for weight in model.parameters()):
        sys.exit(f"weights are not finite after step {steps_done}: {path} stays as it was")
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"schedule": schedule.state_dict(), "steps_done": steps_done, "best": best}
        # Written under another name, then renamed, so that an end in between loses nothing.
        torch.save(state, path + ".part")
        os.replace(path + ".part", path)
    dist.barrier()  # no rank leaves while rank 0 saves


stopped = False
for epoch in range(steps_done // len(train_loader), EPOCHS):
    sampler.set_epoch(epoch)
    sampler.start = steps_done % len(train_loader) * per_rank
    first, start = steps_done, time.perf_counter()
    model.train()
    for images, labels in train_loader:
        # Ask before the step: a stop on the last one of an epoch would skip its evaluation.
        stopped = preemption.asked(device, steps_done)
        if stopped:
            break
        loss = nn.functional.cross_entropy(ddp(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        steps_done += 1
    if stopped:
        break
    # 4. They sum what they count.
    loss = loss.detach() / world_size
    dist.all_reduce(loss)
    loss = loss.item()  # waits for the GPU
    images_per_second = (steps_done - first) * BATCH / (time.perf_counter() - start)
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
            torch.save(model.state_dict(), f"best_{run}.pt.part")
            os.replace(f"best_{run}.pt.part", f"best_{run}.pt")
    save()
# A signal may have come during the last evaluation or save.
stopped = stopped or preemption.asked(device)
if stopped:
    save()
    if rank == 0:
        print(f"Stopped after step {steps_done}, saved", flush=True)
preemption.end(stopped, arguments=path)
