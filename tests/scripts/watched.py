"""Runs a train script with its arguments as it stands, and prints one line of JSON at its end:
whether its timer of faulthandler still runs, what it has passed to heartbeat.alive, the step that
heartbeat.py knows last, where its checkpoint was loaded to, whether what it saved was synced before
it got its name, and whether the checkpoint was there when this rank ended.

With SLOW_SAVE rank 0 takes so many seconds more for each checkpoint. With ACCELERATOR, for example
cuda:8, torch sees so many of these devices, and the script ends where it would meet the others.
"""

import faulthandler
import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

env = os.environ
facts: dict = {"timer": False, "loaded_to": [], "synced": [], "alive": []}
saved_since_sync: set[str] = set()


def say():
    # One write, so that lines of several ranks do not mix.
    os.write(1, f"WATCHED {json.dumps(facts)}\n".encode())


def start_timer(seconds: float, exit: bool = False):
    facts["timer"] = seconds == 300 + int(env.get("NNODES", 1)) and exit


def cancel_timer():
    facts["timer"] = False


def meet(backend: str, rank: int, world_size: int, device_id):
    facts.update(backend=backend, rank=rank, world_size=world_size, device=str(device_id))
    names = ("MASTER_ADDR", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE")
    names += ("CUBLAS_WORKSPACE_CONFIG",)
    facts["variables"] = {name: env.get(name) for name in names}
    say()
    leave(0)


def save(state, file, *arguments, **options):
    if isinstance(state, dict):  # and no tensor on its way to another rank
        if env.get("RANK", "0") == "0":
            time.sleep(float(env.get("SLOW_SAVE", 0)))
        saved_since_sync.add("a file")
    torch_save(state, file, *arguments, **options)


def sync(number: int):
    saved_since_sync.clear()
    os_sync(number)


def rename(old, new):
    facts["synced"].append(not saved_since_sync)
    os_rename(old, new)


def load(path, map_location=None, **options):
    if isinstance(path, Path):  # and no tensor from another rank
        facts["loaded_to"].append(str(map_location))
    return torch_load(path, map_location=map_location, **options)


def end(status: int):
    folder = sys.argv[sys.argv.index("--checkpoint-dir") + 1]
    facts["saved"] = Path(folder, "checkpoint.pt").exists()
    if "heartbeat" in sys.modules:
        facts["step"] = sys.modules["heartbeat"].step
    say()
    leave(status)


leave, torch_save, torch_load = os._exit, torch.save, torch.load
os_sync, os_rename = os.fsync, os.replace
faulthandler.dump_traceback_later = start_timer
faulthandler.cancel_dump_traceback_later = cancel_timer
os._exit, torch.save, torch.load, os.fsync, os.replace = end, save, load, sync, rename
if "ACCELERATOR" in env:
    kind, count = env["ACCELERATOR"].split(":")
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: int(count)
    torch.accelerator.current_accelerator = lambda: torch.device(kind)
    torch.accelerator.set_device_index = lambda index: facts.update(set=index)
    dist.init_process_group = meet

del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
if (Path(sys.path[0]) / "heartbeat.py").exists():
    import heartbeat

    heartbeat.alive = lambda seconds=0: facts["alive"].append(seconds)
runpy.run_path(sys.argv[0], run_name="__main__")
