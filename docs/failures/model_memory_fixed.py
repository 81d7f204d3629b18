"""Each of two ranks holds half of weights, gradients and moments, and gathers one layer at a time."""

import os
import resource

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
resource.setrlimit(resource.RLIMIT_DATA, (2**31, 2**31))  # bytes, in place of a GPU's memory
model = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(28)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 2000)).mean().backward()
optimizer.step()
print(f"rank {dist.get_rank()}: one step of 112 million weights", flush=True)
dist.barrier()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
