"""With no_grad an evaluation keeps its sum alone."""

import resource

import torch
from torch import nn

resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))  # bytes, in place of a GPU's memory
model = nn.Sequential(nn.Linear(10, 1000), nn.ReLU(), nn.Linear(1000, 1))


@torch.no_grad()
def evaluate() -> torch.Tensor:
    model.eval()
    return sum(model(torch.ones(10_000, 10)).square().mean() for _ in range(30)) / 30


print(f"test loss {evaluate():.3f}", flush=True)
