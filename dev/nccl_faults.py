"""What the last rank can do to the others, for dev/nccl_report.sh.

    sbatch launch_slurm_to_torch.sh dev/nccl_faults.py hangs        # it stays in a loop of its own
    sbatch launch_slurm_to_torch.sh dev/nccl_faults.py dies         # kill -9
    sbatch launch_slurm_to_torch.sh dev/nccl_faults.py stays-away   # from the first collective
    sbatch launch_slurm_to_torch.sh dev/nccl_faults.py differs      # it calls another collective

The others lose patience after 20 seconds, and heartbeat.py reports after 8.
"""

import faulthandler
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))
import heartbeat

fault, rank, world_size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
last = rank == world_size - 1
if fault == "stays-away" and last:
    # It comes to the meeting point, but not to the first collective.
    dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, False)
    time.sleep(60)

faulthandler.dump_traceback_later(20, exit=True)
dist.init_process_group(
    dist.get_default_backend_for_device(device),
    timeout=timedelta(seconds=20),
    device_id=None if device.type == "cpu" else device,
)
total = torch.ones(1, device=device)
dist.all_reduce(total)
print(f"[Rank: {rank} | sum: {total.item():.0f} | device: {device}]\n", end="", flush=True)
faulthandler.cancel_dump_traceback_later()
heartbeat.start(8)

ddp = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).to(device))
for step in range(1, 1000):
    ddp(torch.randn(16, 64, device=device)).sum().backward()
    heartbeat.step = step
    if step == 20:
        print(f"rank {rank} has done step 20 at {time.strftime('%X')}\n", end="", flush=True)
    if step == 20 and last and fault == "hangs":
        while True:
            pass
    if step == 20 and last and fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 20 and fault == "differs":
        numbers = torch.ones(1000 if last else 10, device=device)
        dist.broadcast(numbers, 0) if last else dist.all_reduce(numbers)
        print(f"rank {rank} has a sum of {numbers.sum().item()}\n", end="", flush=True)
    time.sleep(0.05)
