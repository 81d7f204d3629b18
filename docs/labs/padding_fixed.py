"""Each test image is on one rank: rank 0 has 3 of 5, rank 1 has 2. Sums and counts are added up,
not means."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
right = torch.tensor([1, 1, 0, 1, 1])  # which test images the model knows
mine = list(range(dist.get_rank(), len(right), dist.get_world_size()))
sums = torch.tensor([right[mine].sum(), len(mine)])
dist.all_reduce(sums)
if dist.get_rank() == 0:
    print(f"test_accuracy={sums[0] / sums[1]:.4f} of {sums[1]} images", flush=True)
dist.barrier()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
