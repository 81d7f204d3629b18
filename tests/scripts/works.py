"""Run by test_heartbeat.py under torchrun: ranks that work for so much work in each step."""

import os
import sys
import time

import torch
import torch.distributed as dist

import heartbeat

dist.init_process_group("gloo")
heartbeat.start(after=10)
work, x = int(sys.argv[1 + dist.get_rank()]), torch.randn(200, 200)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(200, 200))
start, step = time.monotonic(), 0
done = torch.zeros(1)
while not done.item():
    for _ in range(work):
        x = torch.nn.functional.normalize(x @ x)
    time.sleep(0.002 * work)
    model(x).sum().backward()
    step += 1
    heartbeat.step = step
    done.fill_(time.monotonic() - start > 25)
    dist.all_reduce(done, dist.ReduceOp.MAX)
os._exit(0)
