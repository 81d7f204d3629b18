"""Ranks reduce for a minute; rank 1 fails as argv[1] says: exit, kill, exception or sentence."""

import os
import sys
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import torch
import torch.distributed as dist

from resilience.place import init_process_group

place = init_process_group(Namespace(device="cpu", init_timeout=300, timeout=120))
for step in range(600):
    if step == 5 and place.rank == 1:
        if sys.argv[1] == "exit":
            os._exit(3)
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), 9)
        if sys.argv[1] == "exception":
            raise ValueError("boom on purpose")
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
