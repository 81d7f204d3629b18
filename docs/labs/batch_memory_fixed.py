"""The step in 16 parts: each one adds its gradients, and the sum is that of the whole batch."""

import resource

import torch
from torch import nn

resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))  # bytes, in place of a GPU's memory
model = nn.Sequential(nn.Linear(10, 1000), nn.ReLU(), nn.Linear(1000, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = torch.ones(200_000, 10)
for part in images.chunk(16):
    (model(part).mean() / 16).backward()
optimizer.step()
print("One step of 200000 images", flush=True)
