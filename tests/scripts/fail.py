"""Ranks reduce for a minute; rank 1 fails."""

import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(600):
    if step == 5 and dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
