"""Accelerate on many GPUs: the batch and the schedule of one, and a job that may be stopped.

    sbatch launch_slurm_with_torchrun.sh examples/with_accelerate.py [FOLDER]

It needs preemption.py. FOLDER holds the checkpoints of the run that it continues. Without one, each
job has a folder of its own, which a requeue keeps.
"""

import sys

sys.path.append("distributed")  # EDIT: where preemption.py is
import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import os
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, SAVE_EVERY = 3, 32, 10
run = os.environ.get("RUN", "by_hand")  # the job's number, which env.sh exports
folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"checkpoints/{run}")

# split_batches: the loader's batch is that of all ranks, and a schedule steps once a step.
# The order of the samples comes from the seed and the epoch, so that a run can resume within one.
data = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=0)
# On CPUs Accelerate has to be told, or each rank trains by itself, also on a Mac.
on_cpu = not torch.accelerator.is_available() or sys.platform == "darwin"
accelerator = Accelerator(cpu=on_cpu, dataloader_config=data)

torch.manual_seed(0)  # the same weights, on any number of ranks
inputs = torch.randn(512, 16)
train_set = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(train_set, BATCH, shuffle=True, drop_last=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)


def checkpoints() -> list[Path]:
    """Those that are whole, the oldest first."""
    found = [folder / name for name in os.listdir(folder) if name.startswith("step_")]
    return sorted(found, key=lambda path: int(path.name.split("_")[1]))


def save(step: int):
    """Under another name first, because a kill may come in between."""
    accelerator.save_state(folder / "part")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.replace(folder / "part", folder / f"step_{step}")
        for old in checkpoints()[:-2]:
            shutil.rmtree(old)


# On NFS, a node that has looked for it in vain would otherwise not see it for a minute.
folder.mkdir(parents=True, exist_ok=True)
step = 0
if checkpoints():
    last = checkpoints()[-1]
    accelerator.load_state(last)
    step = int(last.name.split("_")[1])
    if accelerator.is_main_process:  # accelerator.print() would print it once on each node
        print(f"Resumed after step {step}", flush=True)
for epoch in range(step // len(loader), EPOCHS):
    rest = accelerator.skip_first_batches(loader, step % len(loader))
    rest.set_epoch(epoch)
    for inputs, targets in rest:
        rate = schedule.get_last_lr()[0]
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        mean = accelerator.reduce(loss.detach(), "mean").item()
        if accelerator.is_main_process:
            print(f"step={step} learning_rate={rate:.8f} loss={mean:.6f}", flush=True)

        stopped = preemption.asked(accelerator.device, step)
        if stopped or step % SAVE_EVERY == 0:
            save(step)
        if stopped:
            preemption.end(True, arguments=str(folder))

weights = accelerator.unwrap_model(model)[0].weight.sum()
rank, world_size = accelerator.process_index, accelerator.num_processes
print(f"rank {rank} of {world_size}: weights {weights:.6f}\n", end="")
preemption.end(preemption.asked(accelerator.device), arguments=str(folder))
