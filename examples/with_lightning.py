"""Lightning on many GPUs: the batch of one, and a job that may be stopped within an epoch.

    sbatch launch_slurm_with_torchrun.sh examples/with_lightning.py [FOLDER]

It needs preemption.py. FOLDER holds the checkpoints of the run that it continues. Without one, each
job has a folder of its own, which a requeue keeps.
"""

import sys

sys.path.append("distributed")  # EDIT: where preemption.py is
import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import itertools
import os
import zipfile
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 3, 32
run = os.environ.get("RUN", "by_hand")  # the job's number, which env.sh exports
folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"checkpoints/{run}")


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        self.layers = torch.nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item()
        if self.trainer.is_global_zero:
            step, rate = self.trainer.global_step + 1, self.lr_schedulers().get_last_lr()[0]
            print(f"step={step} learning_rate={rate:.8f} loss={mean:.6f}", flush=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        # Without "interval" it would step once an epoch.
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ResumableSampler(DistributedSampler):
    start = 0

    def __iter__(self):
        start, self.start = self.start, 0
        return itertools.islice(super().__iter__(), start, None)


class Stop(L.Callback):
    """When Slurm asks, all ranks save after the same step, and rank 0 requeues the job."""

    def on_train_start(self, trainer, module):
        preemption.listen()  # again, because fit() has put handlers of its own in their place

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if preemption.asked(module.device, trainer.global_step):
            trainer.save_checkpoint(folder / "stopped.ckpt")
            preemption.end(True, arguments=str(folder))

    def on_load_checkpoint(self, trainer, module, checkpoint):
        # Lightning continues within the epoch, but its loader would begin with the first sample.
        epoch, batches = divmod(checkpoint["global_step"], len(loader))
        sampler.set_epoch(epoch)
        sampler.start = batches * loader.batch_size


trainer = L.Trainer(
    devices=int(os.environ["NPROC_PER_NODE"]),
    num_nodes=int(os.environ["NNODES"]),
    default_root_dir=folder,
    callbacks=[Stop(), ModelCheckpoint(dirpath=folder, save_last=True)],
    max_epochs=EPOCHS,
    use_distributed_sampler=False,
    enable_progress_bar=False,  # in a log it would write over the other ranks' lines
)
rank, world_size = trainer.global_rank, trainer.world_size
if BATCH % world_size != 0:
    sys.exit(f"{world_size} ranks cannot share a batch of {BATCH}")

torch.manual_seed(0)  # the same weights, on any number of ranks
inputs = torch.randn(512, 16)
train_set = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = ResumableSampler(train_set, world_size, rank, drop_last=True)
loader = DataLoader(train_set, BATCH // world_size, sampler=sampler, drop_last=True)
model = Regression()

# On NFS, a node that has looked for it in vain would otherwise not see it for a minute.
folder.mkdir(parents=True, exist_ok=True)
# The newest that is whole: the list of contents is at a file's end.
found = [folder / name for name in os.listdir(folder) if name.endswith(".ckpt")]
whole = [path for path in found if zipfile.is_zipfile(path)]
last = max(whole, key=os.path.getmtime, default=None)
trainer.fit(model, loader, ckpt_path=last)

weights = model.layers[0].weight.sum()
print(f"rank {rank} of {world_size}: weights {weights:.6f}\n", end="")
preemption.end(preemption.asked(trainer.strategy.root_device), arguments=str(folder))
