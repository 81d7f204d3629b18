"""What the job scripts here start: a process group, one all-reduce, and a line on who was there."""

import datetime
import os
import socket

import torch
import torch.distributed as dist

rank = int(os.environ.get("RANK", os.environ["SLURM_PROCID"]))
world_size = int(os.environ.get("WORLD_SIZE", os.environ["SLURM_NTASKS"]))
patience = datetime.timedelta(seconds=30)  # by default 30 minutes with gloo, 10 with NCCL
dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=patience)
ones = torch.ones(1)
dist.all_reduce(ones)
print(
    f"rank {rank} of {world_size} on {socket.gethostname()}, all ranks together are "
    f"{ones.item():.0f}",
    flush=True,
)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
