"""Each of two ranks holds half of weights, gradients and moments, and gathers layer by layer."""

import ctypes
import os
import resource

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: what is freed goes back to the system
# Bytes, in place of a GPU's memory.
resource.setrlimit(resource.RLIMIT_DATA, (5 * 2**28, 5 * 2**28))
model = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(16)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 2000)).mean().backward()
optimizer.step()
print(f"rank {dist.get_rank()}: one step of 64 million weights", flush=True)
dist.barrier()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
