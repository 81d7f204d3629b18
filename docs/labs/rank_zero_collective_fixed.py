"""All ranks call the collective, and rank 0 alone prints what comes out."""

import datetime
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=10))
rank, world_size = dist.get_rank(), dist.get_world_size()
loss = torch.tensor([1.0 + rank])
dist.all_reduce(loss)
if rank == 0:
    print(f"mean loss {loss.item() / world_size}", flush=True)
print(f"rank {rank}: next epoch", flush=True)
order = torch.randperm(8)
dist.broadcast(order, 0)  # all ranks take rank 0's order of the images
print(f"rank {rank}: {order.tolist()}", flush=True)
dist.barrier()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
