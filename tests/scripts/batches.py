"""Runs a plain train script (argv[1]) with its arguments as it stands, but for the batches that
its loader gives.

The variable SLOW says how many seconds later each comes; a requeued job is as fast as it can.
The variable RAISE says in which step an exception comes instead, on rank 1.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from torch.utils.data import DataLoader

seconds = (
    float(os.environ.get("SLOW", 0)) if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" else 0
)
batches = DataLoader.__iter__


def hooked(self):
    for step, batch in enumerate(batches(self), start=1):
        time.sleep(seconds)
        if str(step) == os.environ.get("RAISE") and os.environ["RANK"] == "1":
            print(f"raised at {time.time():.0f}", flush=True)
            raise ValueError("boom on purpose")
        yield batch


DataLoader.__iter__ = hooked
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
