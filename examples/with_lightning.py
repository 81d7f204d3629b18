"""Lightning, as its documentation has it: a LightningModule, and a Trainer that fits it.

Arguments: a folder for checkpoints, and the number of epochs.
"""

import os
import sys

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


inputs = torch.randn(256, 16)
train_set = TensorDataset(inputs, inputs.sum(1, keepdim=True))
loader = DataLoader(train_set, batch_size=16, shuffle=True)
model = Regression()
trainer = L.Trainer(
    devices=int(os.environ["NPROC_PER_NODE"]),
    num_nodes=int(os.environ["NNODES"]),
    default_root_dir=sys.argv[1],
    callbacks=[ModelCheckpoint(dirpath=sys.argv[1], save_last=True)],
    max_epochs=int(sys.argv[2]),
    enable_progress_bar=False,  # in a log it would write over the other ranks' lines
)
trainer.fit(model, loader, ckpt_path="last")

rank, world_size, weights = trainer.global_rank, trainer.world_size, model.layer.weight.sum()
print(f"rank {rank} of {world_size}: weights {weights:.6f}\n", end="")
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo may abort a Python that shuts down: docs/troubleshooting.md
