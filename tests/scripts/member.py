"""Run by tests/test_recipes.py as one user of a group: a step of a run in checkpoints/7, which
resumes it if somebody has begun it, with heartbeats in log/JOB."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import checkpoint
import heartbeat

dist.init_process_group("gloo")
heartbeat.start()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
checkpoints = checkpoint.Folder("checkpoints/7")
step = checkpoints.load(model, optimizer) + 1
model(torch.ones(4)).sum().backward()
optimizer.step()
heartbeat.step = step
checkpoints.save(step, model, optimizer)
print("saved", checkpoints.wait())
