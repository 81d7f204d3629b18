"""Runs a train script (argv[2]) with its arguments as it stands, argv[1] seconds slower at each
step.

In a script with checkpoint.py the delay comes before `heartbeat.step = step`. In any other a step
is a batch of the DataLoader that has a DistributedSampler, and the delay comes before the batch.
Steps are counted over the whole run, so a resumed script goes on where it stopped.

A requeued job is as fast as it can, unless the variable ALWAYS is set, because what was to happen
has happened. LATE says how many seconds the ranks sleep once they listen for signals. With
SLOW_SAVE rank 0 takes so many seconds more for each checkpoint, and with LONG_STEP step number N
takes five, and every rank prints "In step N" before. TERM_AT says in which step rank 1, and no
other, gets SIGTERM, and KILL_AT in which step of the run it is killed. With HOLD checkpoint.py's
checkpoint of step N is not written as long as there is a file HOLD/N. The rank that STUCK names
stays for ever in step 8. With KILL=SIGKILL rank 1 gets that signal in the evaluation of
train_preemptible.py. Into the folder READS each rank writes a line for each batch of MNIST: the
numbers of its images.
"""

import os
import re
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "distributed"))

import preemption

env = os.environ
first_start = env.get("SLURM_RESTART_COUNT", "0") == "0"
seconds = float(sys.argv[1]) if first_start or "ALWAYS" in env else 0


def delay(step: int):
    rank = env.get("RANK", env.get("SLURM_PROCID", "0"))
    if str(step) == env.get("LONG_STEP") and first_start:
        print(f"In step {step}\n", end="", flush=True)
        time.sleep(5)
    time.sleep(seconds)
    if str(step) == env.get("TERM_AT") and rank == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    if step == 8 and rank == env.get("STUCK"):
        threading.Event().wait()


def slow_save(save):
    def saved(*arguments, **options):
        if env.get("RANK", env.get("SLURM_PROCID", "0")) == "0":
            time.sleep(float(env["SLOW_SAVE"]))
        return save(*arguments, **options)

    return saved if "SLOW_SAVE" in env and first_start else save


def slow_down_by_steps():
    import types

    from torch.distributed.checkpoint import FileSystemWriter

    import checkpoint
    import heartbeat

    class Slowed(types.ModuleType):
        def __setattr__(self, name: str, value: object):
            if name == "step":
                delay(value)
            super().__setattr__(name, value)

    write_data = FileSystemWriter.write_data

    def held(self, *arguments):
        while Path(env["HOLD"], re.search(r"\.step_(\d+)", str(self.path))[1]).is_file():
            time.sleep(0.05)
        return write_data(self, *arguments)

    heartbeat.__class__ = Slowed
    checkpoint.Folder.save = slow_save(checkpoint.Folder.save)
    if "HOLD" in env:
        FileSystemWriter.write_data = held


def hold_up_the_loader(slow: bool):
    from torch.utils.data import DataLoader, DistributedSampler

    import mnist

    load = DataLoader.__iter__

    def batches(self):
        done = 0
        if trains := isinstance(self.sampler, DistributedSampler):
            skipped = getattr(self.sampler, "start", 0) // self.batch_size
            done = (self.sampler.epoch - 1) * len(self) + skipped
        elif "KILL" in env and env.get("RANK") == "1":
            os.kill(os.getpid(), signal.Signals[env["KILL"]])
        for step, batch in enumerate(load(self), start=done + 1):
            if trains:
                if slow:
                    delay(step)
                if str(step) == env.get("KILL_AT") and env.get("RANK") == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    def recorded(self, numbers):
        with open(f"{env['READS']}/{env['RANK']}", "a") as file:
            print(numbers, file=file)
        return self[numbers]

    DataLoader.__iter__ = batches
    if "READS" in env:
        mnist.BatchDataset.__getitems__ = recorded


# As the script itself does, before torch.
preemption.listen()
if "LATE" in env and first_start:
    print("Listening\n", end="", flush=True)
    time.sleep(float(env["LATE"]))
script = Path(sys.argv[2]).read_text()
if "import checkpoint" in script:
    slow_down_by_steps()
if "DataLoader" in script:
    hold_up_the_loader(slow="import checkpoint" not in script)
del sys.argv[:2]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
