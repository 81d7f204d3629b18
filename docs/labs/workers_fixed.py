"""As many loader workers as this rank has CPUs: its share of the node's, by env.sh."""

import os

import torch
from torch.utils.data import DataLoader

env, cpus = os.environ, len(os.sched_getaffinity(0))
# By hand there is no env.sh, and the ranks share what torchrun may use.
ranks = env.get("NPROC_PER_NODE", env.get("LOCAL_WORLD_SIZE", 1))
share = int(env.get("CPUS_PER_NODE", cpus)) // int(ranks)
loader = DataLoader(torch.arange(100), num_workers=min(cpus, share))
print(f"{loader.num_workers} workers", flush=True)
