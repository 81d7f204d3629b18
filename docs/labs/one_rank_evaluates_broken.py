"""Rank 0 evaluates while the others wait in their next step. Its heartbeats say so."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import heartbeat

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
heartbeat.start(after=10)
for step in range(1, 501):
    time.sleep(0.02)  # in place of a step
    model(torch.ones(16, 4)).mean().backward()
    heartbeat.step = step
    if step % 20 == 0 and rank == 0:
        time.sleep(0.5)  # in place of an evaluation
dist.barrier()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
