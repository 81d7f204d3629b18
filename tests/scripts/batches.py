"""Runs a plain train script (argv[1]) with its arguments as it stands, but for the batches that
its loaders give.

The variable SLOW says how many seconds later each comes. TERM_AT says in which step rank 1, and no
other, gets SIGTERM. With KILL=1 an evaluation kills its process. Into the folder READS each rank
writes a line for each batch: the numbers of its images.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "distributed"))

import preemption

if "preemptible" in sys.argv[1]:
    preemption.listen()  # as the script itself does, before torch

from torch.utils.data import DataLoader

import mnist

env = os.environ
seconds = float(env.get("SLOW", 0))
batches = DataLoader.__iter__


def hooked(self):
    if env.get("KILL") == "1" and self.batch_size == 1000:
        os.kill(os.getpid(), signal.SIGKILL)
    for step, batch in enumerate(batches(self), start=1):
        time.sleep(seconds)
        if str(step) == env.get("TERM_AT") and env["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        yield batch


def recorded(self, numbers):
    with open(f"{env['READS']}/{env['RANK']}", "a") as file:
        print(numbers, file=file)
    return self[numbers]


DataLoader.__iter__ = hooked
if "READS" in env:
    mnist.BatchDataset.__getitems__ = recorded
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
