"""Run by test_preemption.py: the end of a rank whose loader workers are still there."""

import os
import time

import preemption

preemption.listen()
from torch.utils.data import DataLoader

workers = {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}
batches = iter(DataLoader(range(8), 2, worker_init_fn=preemption.ignore, **workers))
next(batches)
leave = os._exit


def leave_slowly(status):
    """As on a busy machine: the workers, which `end` has killed, have died before."""
    time.sleep(0.5)
    leave(status)


os._exit = leave_slowly
preemption.end(False)
