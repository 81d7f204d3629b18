"""Run by test_preemption.py: which rank ends first, and with what status, when rank 0 requeues,
or still saves."""

import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

import preemption

dist.init_process_group("gloo")
rank, leave = dist.get_rank(), os._exit


def requeue(arguments):
    time.sleep(1)
    Path("requeued").write_text(arguments)
    return False


def end(status):
    os.write(1, f"{rank} {status:d} {Path('requeued').exists()}\n".encode())
    leave(0)


how = sys.argv[1]
if how == "finished" and rank == 0:  # as if it still wrote the last checkpoint
    requeue("")
preemption.requeue, os._exit = requeue, end
preemption.end(how != "finished", how == "failed", "--resume")
