"""Run by test_programs.py beside a server. It saves when asked to; requeued, it only has to end."""

import os
import sys
import time

sys.path.insert(0, "distributed")
import preemption

preemption.listen()
start = os.environ.get("SLURM_RESTART_COUNT", "0")
print(f"Start {start} with a server on {os.environ['SERVER']}", flush=True)
for _ in range(300 if start == "0" else 1):
    time.sleep(0.1)
    if preemption.received:
        time.sleep(2)  # longer than the server takes to end
        print("Saved", flush=True)
        preemption.requeue()
        break
    if "QUICK" in os.environ:
        break
