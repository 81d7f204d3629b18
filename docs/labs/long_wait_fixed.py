"""Rank 0 prepares the data, the other ranks wait in a barrier: long enough."""

import datetime
import os
import time

import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
if dist.get_rank() == 0:
    time.sleep(20)  # in place of the preparation
dist.barrier()
print(f"rank {dist.get_rank()}: the data are ready", flush=True)
dist.destroy_process_group()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
