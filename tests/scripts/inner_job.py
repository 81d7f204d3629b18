"""Submitted by outer_job.sh: a job that is requeued when it is told to stop."""

import os
import sys
import time

import preemption

preemption.listen()
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    print("first start", flush=True)
    while not preemption.received:
        time.sleep(0.1)
    sys.exit(not preemption.requeue())
print("second start")
