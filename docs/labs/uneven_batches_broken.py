"""Five batches for two ranks: rank 0 has three, rank 1 has two, and the third step of rank 0
waits for nobody."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
batches = torch.ones(5, 4, 8)
for step, batch in enumerate(batches[rank::world_size], start=1):
    time.sleep(2)  # in place of reading the batch from a disk
    model(batch).sum().backward()  # averages the gradients of all ranks
    print(f"rank {rank}: step {step}", flush=True)
print(f"rank {rank}: finished", flush=True)
os._exit(0)  # threads of gloo's can abort Python while it shuts down
