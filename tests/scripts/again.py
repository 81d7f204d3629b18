"""Runs train_ddp.py many times in one job and prints how its ranks ended: argv[1] times, with
the arguments behind it.

A process that has imported torch forks each run's rank, under srun in every task, which saves
the import. Each run has a port of its own, and starts when the one before it has ended on this
node.
"""

import collections
import os
import runpy
import sys

import torch
import torch._dynamo
import torch.distributed
import torch.nn.parallel
import torch.utils.data

torch.set_num_threads(1)
times, arguments = int(sys.argv[1]), sys.argv[2:]
sys.path[0] = os.path.abspath("distributed")
port, ends = int(os.environ["MASTER_PORT"]), collections.Counter()
for i in range(times):
    rank = os.fork()
    if rank == 0:
        os.environ["MASTER_PORT"] = str(port - 1 - i)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv = ["train_ddp.py", *arguments, "--checkpoint-dir", f"{os.environ['FOLDER']}/{i}"]
        runpy.run_path("distributed/train_ddp.py", run_name="__main__")
        os._exit(77)  # it should not have come back
    ends[os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])] += 1
print(f"rank {os.environ['RANK']} ended with {dict(ends)}\n", end="")
