"""Run by test_preemption.py: SIGTERM comes to a loader worker that has just begun."""

import os
import signal

import preemption

preemption.listen()
import torch
from torch.utils.data import DataLoader

set_num_threads = torch.set_num_threads


def slowly(number):  # a worker calls it after torch's own handler, and before worker_init_fn
    os.kill(os.getpid(), signal.SIGTERM)
    set_num_threads(number)


torch.set_num_threads = slowly
workers = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 20}
loader = DataLoader(range(8), 2, worker_init_fn=preemption.ignore, **workers)
print(sum(batch.sum().item() for batch in loader), preemption.received)
