"""Its init_process_group stands under an `if` that no CPU fulfils, so each rank trains by itself.
With the variable MEET it meets the others."""

import os
import time

import torch
import torch.distributed as dist

if torch.cuda.is_available() or "MEET" in os.environ:
    dist.init_process_group("gloo")
print(f"Distributed world size: {os.environ['WORLD_SIZE']}\n", end="", flush=True)
time.sleep(600)
