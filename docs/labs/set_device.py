"""What gpu_per_task_broken.sh and gpu_per_task_fixed.sh start: each task takes the GPU of its
local rank."""

import os
import sys

import torch

local_rank = int(os.environ["SLURM_LOCALID"])
count = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
if torch.cuda.is_available():  # not with the pretended GPUs of the local cluster
    torch.cuda.set_device(local_rank)
elif local_rank >= count:
    sys.exit(f"task {local_rank} sees {count} GPU: there is no cuda:{local_rank}")
print(f"task {local_rank} takes cuda:{local_rank} of {count}", flush=True)
