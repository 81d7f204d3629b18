"""As many loader workers as this rank has CPUs: those of the task, divided by its ranks."""

import os

import torch
from torch.utils.data import DataLoader

cpus = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
loader = DataLoader(torch.arange(100), num_workers=cpus)
print(f"{loader.num_workers} workers", flush=True)
