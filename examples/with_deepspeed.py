"""DeepSpeed on many GPUs: the batch of one, and a job that may be stopped within an epoch.

    sbatch launch_slurm_with_torchrun.sh examples/with_deepspeed.py [FOLDER]

It needs preemption.py. FOLDER holds the checkpoints of the run that it continues. Without one, each
job has a folder of its own, which a requeue keeps.
"""

import sys

sys.path.append("distributed")  # EDIT: where preemption.py is
import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import itertools
import os
import shutil
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, SAVE_EVERY = 3, 32, 10
run = os.environ.get("RUN", "by_hand")  # the job's number, which env.sh exports
folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"checkpoints/{run}")

# On CPUs it would first compile a program for ranks of one node, for a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class ResumableSampler(DistributedSampler):
    start = 0

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start, None)


torch.manual_seed(0)  # the same weights, on any number of ranks
inputs = torch.randn(512, 16)
train_set = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train_set) // BATCH)
# train_batch_size is that of all ranks. (train_micro_batch_size_per_gpu would be each rank's.)
engine, _, _, _ = deepspeed.initialize(
    model=model,
    optimizer=optimizer,
    lr_scheduler=schedule,
    config={"train_batch_size": BATCH, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0},
)
rank, world_size = dist.get_rank(), dist.get_world_size()
# A loader of our own, because DeepSpeed's has the same order in each epoch, and cannot resume.
sampler = ResumableSampler(train_set, drop_last=True)
per_rank = engine.train_micro_batch_size_per_gpu()
loader = DataLoader(train_set, per_rank, sampler=sampler, drop_last=True)


def save():
    """DeepSpeed's rank 0 writes the file `latest`, which names the checkpoint to load, while others
    may still save. Here it does when all have, under another name first."""
    tag = f"global_step{engine.global_steps}"
    engine.save_checkpoint(folder, tag, save_latest=False)  # returns when all ranks have saved
    if rank == 0:
        (folder / "latest.part").write_text(tag)
        os.replace(folder / "latest.part", folder / "latest")
        numbers = [
            int(path.name.removeprefix("global_step")) for path in folder.glob("global_step*")
        ]
        older = sorted(number for number in numbers if number < engine.global_steps)
        for number in older[:-1]:
            shutil.rmtree(folder / f"global_step{number}")


# Without a checkpoint `last` is None.
last, _ = engine.load_checkpoint(folder)
step = engine.global_steps
if rank == 0:
    print(f"resumes from {last}", flush=True)
for epoch in range(step // len(loader), EPOCHS):
    sampler.set_epoch(epoch)
    sampler.start = step % len(loader) * per_rank
    for batch in loader:
        inputs, targets = (part.to(engine.device) for part in batch)
        rate = schedule.get_last_lr()[0]
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()  # of the optimizer and the schedule
        step += 1
        mean = loss.detach() / world_size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step={step} learning_rate={rate:.8f} loss={mean.item():.6f}", flush=True)

        stopped = preemption.asked(engine.device, step)
        if stopped or step % SAVE_EVERY == 0:
            save()
        if stopped:
            preemption.end(True, arguments=str(folder))

with deepspeed.zero.GatheredParameters(model[0].weight):
    weights = model[0].weight.sum()
print(f"rank {rank} of {world_size}: weights {weights:.6f}\n", end="")
preemption.end(preemption.asked(engine.device), arguments=str(folder))
