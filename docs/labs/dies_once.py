"""What restart_broken.sh and restart_fixed.sh start: the last rank is killed in its first start."""

import datetime
import os
import signal

import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
restarts = [os.environ.get(f"{who}_RESTART_COUNT", "0") for who in ("SLURM", "TORCHELASTIC")]
print(f"rank {rank} starts, after {restarts[0]} restarts by Slurm, {restarts[1]} by torchrun")
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
dist.barrier()
if rank == world_size - 1 and restarts == ["0", "0"]:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
print(f"rank {rank} of {world_size} has finished", flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
