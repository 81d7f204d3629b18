"""Its init_process_group stands under an `if` that no CPU fulfils, so each rank is by itself. With
the variable MEET it meets the others."""

import os
import time

if "MEET" in os.environ:
    import torch.distributed as dist

    dist.init_process_group("gloo")
print(f"Distributed world size: {os.environ['WORLD_SIZE']}\n", end="", flush=True)
time.sleep(600)
