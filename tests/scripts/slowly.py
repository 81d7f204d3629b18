"""Runs a train script (argv[2]) with its arguments as it stands, argv[1] seconds slower at each
step.

The hook is Checkpoints.due, which train_preemptible.py, train_fsdp.py and train_tp.py ask after
every step. A requeued job is as fast as it can, unless the variable ALWAYS is set: what was to
happen has happened. The variable LATE says how many seconds the ranks sleep once they listen for
signals, and MISSING which one never comes. With SLOW_SAVE a checkpoint takes so many seconds more
to write, and with LONG_STEP step number N takes five. With HOLD the checkpoint of step N of
train_fsdp.py or train_tp.py is not written as long as there is a file HOLD/N. The rank that STUCK
names stays for ever in step 8; the one that HUNGRY names takes memory without end.
"""

import os
import re
import runpy
import sys
import threading
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "distributed"))

from resilience import stop_request
from resilience.job import RESTART_COUNT


def wait_for_ever():
    threading.Event().wait()


if os.environ.get("MISSING") == os.environ.get("RANK", ""):
    wait_for_ever()
stop_request.listen()  # as the script itself does, before torch
if "LATE" in os.environ and RESTART_COUNT == "0":
    print("Listening\n", end="", flush=True)
    time.sleep(float(os.environ["LATE"]))

from resilience.checkpoints import Checkpoints

seconds = float(sys.argv[1]) if RESTART_COUNT == "0" or "ALWAYS" in os.environ else 0
due, memory = Checkpoints.due, []


def slower(self, step):
    if str(step) == os.environ.get("LONG_STEP") and RESTART_COUNT == "0":
        print(f"In step {step}\n", end="", flush=True)
        time.sleep(5)
    time.sleep(seconds)
    if step == 8 and str(self.place.rank) == os.environ.get("STUCK"):
        wait_for_ever()
    if step >= 8 and str(self.place.rank) == os.environ.get("HUNGRY"):
        memory.append(b"\1" * 500_000_000)
    return due(self, step)


Checkpoints.due = slower
if "SLOW_SAVE" in os.environ and RESTART_COUNT == "0":
    write = Checkpoints.save_files

    def slow_write(self, *arguments):
        if self.place.rank == 0:
            time.sleep(float(os.environ["SLOW_SAVE"]))
        return write(self, *arguments)

    Checkpoints.save_files = slow_write
if "HOLD" in os.environ:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    write_data = FileSystemWriter.write_data

    def held(self, *arguments):
        while Path(os.environ["HOLD"], re.search(r"_step_(\d+)", str(self.path))[1]).is_file():
            time.sleep(0.05)
        return write_data(self, *arguments)

    FileSystemWriter.write_data = held
del sys.argv[:2]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
