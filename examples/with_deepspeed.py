"""DeepSpeed, as its documentation has it: initialize(), then backward() and step() of its engine.

Arguments: a folder for checkpoints, and the number of epochs.
"""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

# On CPUs it would first compile a program for ranks of one node, for a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

inputs = torch.randn(256, 16)
train_set = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

config = {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 3}}
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    training_data=train_set,
    config=config,
)

folder, epochs = sys.argv[1], int(sys.argv[2])
# Without a checkpoint `last` is None.
last, saved = engine.load_checkpoint(folder)
first = saved["epoch"] + 1 if last else 0
print(f"resumes from {last}")

for epoch in range(first, epochs):
    for batch in loader:
        inputs, targets = (part.to(engine.device) for part in batch)
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(folder, client_state={"epoch": epoch})

rank, world_size = dist.get_rank(), dist.get_world_size()
with deepspeed.zero.GatheredParameters(model[0].weight):
    weights = model[0].weight.sum()
print(f"rank {rank} of {world_size}: weights {weights:.6f}\n", end="")
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo may abort a Python that shuts down: docs/troubleshooting.md
