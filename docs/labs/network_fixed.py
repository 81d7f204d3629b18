"""Gradients of eight parts are added up, and DDP averages them over the ranks once, after the
last part."""

import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

sent = []  # bytes


def measured(group, bucket):
    sent.append(bucket.buffer().nbytes)
    return allreduce_hook(group, bucket)


dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2000, 2000))
model.register_comm_hook(None, measured)
start = time.perf_counter()
for number, part in enumerate(torch.ones(8, 4, 2000), start=1):
    with model.no_sync() if number < 8 else contextlib.nullcontext():
        model(part).mean().backward()
if dist.get_rank() == 0:
    seconds = time.perf_counter() - start
    print(
        f"One step: {len(sent)} all-reduces, {sum(sent) / 1e6:.0f} MB, {seconds:.2f} s", flush=True
    )
dist.barrier()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
