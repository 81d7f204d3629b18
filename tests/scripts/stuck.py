"""A script without heartbeats in which rank 2 leaves the others waiting."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(20):
    loss = model(torch.randn(16, 4)).sum()
    if step == 10:
        print(f"rank {dist.get_rank()} is in step 10\n", end="")
    while step == 10 and dist.get_rank() == 2:
        time.sleep(0.1)
    loss.backward()
