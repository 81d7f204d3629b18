"""Five batches for two ranks: the same number on each, and the fifth is left out (or take a
DistributedSampler)."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
batches = torch.ones(5, 4, 8)
whole = len(batches) // world_size * world_size
for step, batch in enumerate(batches[:whole][rank::world_size], start=1):
    time.sleep(2)  # in place of reading the batch from a disk
    model(batch).sum().backward()  # averages the gradients of all ranks
    print(f"rank {rank}: step {step}", flush=True)
print(f"rank {rank}: finished", flush=True)
dist.barrier()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
