"""A script with all that Python does when a process ends, and with threads of torch's and
numpy's: each rank says it.

It returns; after the word "exit" rank 1 ends with status 3.
"""

import atexit
import os
import sys
import tempfile
import threading
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

rank = os.environ["RANK"]


def say(*words: object):
    os.write(1, (" ".join(map(str, ("RANK", rank, *words))) + "\n").encode())  # in one piece


def later():
    time.sleep(0.3)
    say("thread")


scratch = tempfile.TemporaryDirectory()
atexit.register(say, "atexit")
dist.init_process_group("gloo")
total = torch.ones(()) * dist.get_rank()
dist.all_reduce(total)
loader = DataLoader(torch.arange(100), batch_size=10, num_workers=2, multiprocessing_context="fork")
loaded = sum(int(batch.sum()) for batch in loader)
products = sum(float((ones @ ones).sum()) for ones in (torch.ones(512, 512), np.ones((512, 512))))
draws = torch.tensor(np.random.rand(), dtype=torch.float64).repeat(2)
dist.all_reduce(draws[:1])  # the sum of two ranks' draws; draws[1] is this rank's own
say(
    "sees",
    int(total),
    loaded,
    int(products),
    torch.get_num_threads(),
    bool(draws[0] != 2 * draws[1]),
)
say("folder", scratch.name)
dist.barrier()
dist.destroy_process_group()
threading.Thread(target=later).start()
if sys.argv[1:] == ["exit"] and rank == "1":
    time.sleep(1)  # the others have ended by then
    sys.exit(3)
