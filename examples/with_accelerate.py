"""Accelerate, as its documentation has it: prepare(), backward(), end_training()."""

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

# On CPUs Accelerate has to be told, or each rank trains by itself.
accelerator = Accelerator(cpu=not torch.cuda.is_available())

images = torch.randn(256, 16)
train_set = TensorDataset(images, images.sum(1, keepdim=True))
loader = DataLoader(train_set, batch_size=16, shuffle=True)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for inputs, targets in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()

rank, world_size = accelerator.process_index, accelerator.num_processes
weights = accelerator.unwrap_model(model).weight.sum()
print(f"rank {rank} of {world_size}: weights {weights:.6f}\n", end="")
accelerator.wait_for_everyone()
accelerator.end_training()
os._exit(0)  # gloo may abort a Python that shuts down: docs/troubleshooting.md
