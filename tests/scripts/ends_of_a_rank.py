"""Run by test_spawn_ranks.py: a rank with loader workers and an atexit function."""

import atexit
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


def say(*words):
    os.write(1, (" ".join(map(str, ("RANK", os.environ["RANK"], *words))) + "\n").encode())


atexit.register(say, "atexit")
dist.init_process_group("gloo")
loader = DataLoader(torch.arange(100), batch_size=10, num_workers=2)
say("loaded", sum(int(batch.sum()) for batch in loader))
dist.destroy_process_group()
