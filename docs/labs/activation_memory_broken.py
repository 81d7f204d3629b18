"""Twenty blocks keep what is between their layers until the backward pass comes."""

import resource

import torch
from torch import nn

resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))  # bytes, in place of a GPU's memory
blocks = [nn.Sequential(nn.Linear(16, 2048), nn.GELU(), nn.Linear(2048, 16)) for _ in range(20)]
x = torch.ones(4096, 16)
for block in blocks:
    x = block(x)
x.mean().backward()
print("One step of 20 blocks", flush=True)
