"""FSDP2 by hand on many GPUs: the batch of one, and a job that may be stopped.

    sbatch launch_slurm_with_torchrun.sh examples/with_fsdp.py [FOLDER]

It needs preemption.py and checkpoint.py. FOLDER holds the checkpoints of the run that it continues.
Without one, each job has a folder of its own, which a requeue keeps.
"""

import sys

sys.path.append("distributed")  # EDIT: where preemption.py and checkpoint.py are
import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import itertools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import checkpoint

EPOCHS, BATCH, SAVE_EVERY = 3, 32, 10
run = os.environ.get("RUN", "by_hand")  # the job's number, which env.sh exports
folder = sys.argv[1] if len(sys.argv) > 1 else f"checkpoints/{run}"

device = torch.device("cpu")
if torch.accelerator.is_available():
    number = int(os.environ["LOCAL_RANK"]) if torch.accelerator.device_count() > 1 else 0
    torch.accelerator.set_device_index(number)
    device = torch.device(torch.accelerator.current_accelerator().type, number)
dist.init_process_group(dist.get_default_backend_for_device(device))
rank, world_size = dist.get_rank(), dist.get_world_size()
if BATCH % world_size != 0:
    sys.exit(f"{world_size} ranks cannot share a batch of {BATCH}")
per_rank = BATCH // world_size


class ResumableSampler(DistributedSampler):
    start = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start, None)


torch.manual_seed(0)  # the same weights, on any number of ranks
inputs = torch.randn(512, 16)
train_set = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = ResumableSampler(train_set, drop_last=True)
loader = DataLoader(train_set, per_rank, sampler=sampler, drop_last=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
model.to(device)
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))

checkpoints, extra = checkpoint.Folder(folder), {"schedule": schedule}
step = checkpoints.load(model, optimizer, extra)
for epoch in range(step // len(loader), EPOCHS):
    sampler.set_epoch(epoch)
    sampler.start = step % len(loader) * per_rank
    for batch in loader:
        inputs, targets = (part.to(device) for part in batch)
        rate = schedule.get_last_lr()[0]
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step={step} learning_rate={rate:.8f} loss={mean.item():.6f}", flush=True)

        stopped = preemption.asked(device, step)
        if stopped or step % SAVE_EVERY == 0:
            checkpoints.save(step, model, optimizer, extra)
        if stopped:
            preemption.end(True, not checkpoints.wait(), folder)

saved = checkpoints.wait()
weights = model[0].weight.full_tensor().sum()
print(f"rank {rank} of {world_size}: weights {weights:.6f}\n", end="")
preemption.end(preemption.asked(device), not saved, folder)
