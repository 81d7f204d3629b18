"""What gpu_per_task_broken.sh and gpu_per_task_fixed.sh start: each task takes the GPU of its
local rank."""

import os
import sys

import torch

local_rank, visible = int(os.environ["SLURM_LOCALID"]), os.environ["CUDA_VISIBLE_DEVICES"]
count = len(visible.split(","))
if torch.cuda.is_available():  # not with the pretended GPUs of the local cluster
    torch.cuda.set_device(local_rank)
elif local_rank >= count:
    sys.exit(
        f"task {local_rank} sees {count} GPU (CUDA_VISIBLE_DEVICES={visible}): there is no "
        f"cuda:{local_rank}"
    )
print(f"task {local_rank} takes cuda:{local_rank} of {count}", flush=True)
