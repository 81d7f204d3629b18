"""A script that knows nothing of this repository: torch's own variables, and one all-reduce. `fail`: rank 1 raises."""

import os
import sys

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
if rank == 1 and "fail" in sys.argv:
    raise ValueError("boom on purpose")
local_rank, total = int(os.environ["LOCAL_RANK"]), torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)
dist.barrier()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, local rank {local_rank}: the sum is {total:.0f}\n", end="")
dist.destroy_process_group()
os._exit(0)  # gloo on a CPU may abort a Python that shuts down
