"""Run by test_train_fsdp.py: a training as it is, and what it does in lines of its own.

Step 4's evaluation takes eight seconds. In that of step TERM rank 1 gets a signal. With LOST no
checkpoint gets its name. ROOM is the memory.
"""

import gc
import os
import runpy
import signal
import sys
import time

sys.path.insert(0, "distributed")
import torch
from torch.distributed import fsdp

import checkpoint
import heartbeat
import sizes
import token_files
import transformer

sizes.peak_flops = lambda device: 1e9
sizes.total_memory = lambda device: float(os.environ.get("ROOM", "inf"))
alive, collect = heartbeat.alive, gc.collect
eval_batches, forward = token_files.TokenDataset.eval_batches, transformer.Transformer.forward


def say(text):
    print(f"{text}\n", end="", flush=True)


def seen_alive(seconds=0):
    say(f"alive {heartbeat.step} {seconds}")
    alive(seconds)


def seen_collect(*generation):
    say(f"collected {heartbeat.step}")
    return collect(*generation)


def seen_batches(self, count, size, rank, ranks):
    say(f"evaluated {size} at once")
    time.sleep(8 if heartbeat.step == 4 else 0)
    if str(heartbeat.step) == os.environ.get("TERM") and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return eval_batches(self, count, size, rank, ranks)


def seen_forward(self, *inputs):
    assert self.training == torch.is_grad_enabled()
    if heartbeat.step is None:
        say(f"recompute {self.model.layers[0].activation_checkpointing}")
    return forward(self, *inputs)


def seen_policy(**policy):
    say(f"policy {policy}")
    return made_policy(**policy)


made_policy, fsdp.MixedPrecisionPolicy = fsdp.MixedPrecisionPolicy, seen_policy
heartbeat.alive, gc.collect = seen_alive, seen_collect
token_files.TokenDataset.eval_batches, transformer.Transformer.forward = seen_batches, seen_forward


def lost(self, written, *_):
    written.result()
    return os.environ.get("RANK") != "0"


if "LOST" in os.environ:
    checkpoint.Folder.publish = lost
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
