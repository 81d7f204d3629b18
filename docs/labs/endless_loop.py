"""With heartbeats. In step 50 one rank, which the job's number decides, enters an endless loop."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import heartbeat

dist.init_process_group("gloo")
heartbeat.start()
rank, stuck = dist.get_rank(), int(os.environ.get("SLURM_JOB_ID", 1)) % dist.get_world_size()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(1, 1001):
    loss = model(torch.randn(16, 4)).square().mean()
    while step == 50 and rank == stuck:
        pass
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    heartbeat.step = step
os._exit(0)
