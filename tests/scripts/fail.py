"""Ranks reduce for a minute; rank 1 fails as argv[1] says: exit, kill, exception or sentence."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import torch
import torch.distributed as dist

from resilience.place import end_after

dist.init_process_group("gloo")
sys.excepthook = end_after(sys.excepthook)
for step in range(600):
    if step == 5 and dist.get_rank() == 1:
        if sys.argv[1] == "exit":
            os._exit(3)
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), 9)
        if sys.argv[1] == "exception":
            raise ValueError("boom on purpose")
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
