"""DistributedSampler fills up 5 test images to 6, so that both ranks have 3: the first one is
counted twice."""

import os

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

dist.init_process_group("gloo")
right = torch.tensor([1, 1, 0, 1, 1])  # which test images the model knows
mine = list(DistributedSampler(right, shuffle=False))
sums = torch.tensor([right[mine].sum(), len(mine)])
dist.all_reduce(sums)
if dist.get_rank() == 0:
    print(f"test_accuracy={sums[0] / sums[1]:.4f} of {sums[1]} images", flush=True)
dist.barrier()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
