"""Rank 0 keeps the weights of every save in main memory. watch_job.py names it in the end."""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

import heartbeat

dist.init_process_group("gloo")
heartbeat.start()
model = torch.nn.Linear(5000, 2500)  # 50 MB
kept = []
for step in range(1, 121):
    time.sleep(0.1)  # in place of a step
    heartbeat.step = step
    if step % 10 == 0:
        heartbeat.alive(60)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        if dist.get_rank() == 0:
            kept.append(weights)
        time.sleep(0.3)  # in place of a save
if dist.get_rank() == 0:
    subprocess.run([sys.executable, "aux/watch_job.py", "local"])
dist.barrier()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
