"""Run by two_programs.sh: ranks whose heartbeats are in the step that is given."""

import os
import sys
import time

import torch.distributed as dist

import heartbeat

dist.init_process_group("gloo")
heartbeat.start()
print(f"RUN {os.environ['RUN']}\n", end="", flush=True)
heartbeat.step = int(sys.argv[1])
time.sleep(600)
