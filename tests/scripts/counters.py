"""Runs a train script (argv[1]) with its arguments as it stands; then every rank prints what it
has cost, in JSON.

The hook is what train_ddp.py ends with: destroy_process_group. A line COUNTERS has how many
files this process has opened and how often it has named one to the file system
(tests/scripts/opened counts both), the processes of this session in a training step, the kernels
of the optimizer's last step, and bytes of memory: those that this rank has written to and shares
with no other process, and the most that it had at any time, its share of files included.
"""

import json
import os
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import torch.distributed as dist
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

destroy, counters = dist.destroy_process_group, {}


class Kernels(TorchDispatchMode):
    """Counts what is called inside the with block."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function._schema.name] += 1
        return function(*args, **(kwargs or {}))


def before(optimizer, args: tuple, kwargs: dict):
    counters["kernels"] = Kernels()
    counters["kernels"].__enter__()


def after(optimizer, args: tuple, kwargs: dict):
    counters["kernels"].__exit__(None, None, None)
    if "processes" not in counters:
        counters["processes"] = sum(map(is_ours, Path("/proc").glob("[0-9]*/stat")))


def is_ours(stat: Path) -> bool:
    """Whether a process is of this session: what started the ranks, a rank, or what they have
    started."""
    try:
        return stat.read_text().rpartition(")")[2].split()[3] == str(os.getsid(0))
    except OSError:
        return False  # it has ended meanwhile


def destroy_process_group():
    written = re.search(
        r"^Private_Dirty: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M
    )
    # Without this program's own look at processes; a module is one file, whether or not it had to
    # be compiled.
    files = {
        re.sub(r"__pycache__/(\w+)\..*", r"\1.py", name)
        for name in sys.opened
        if not name.startswith("/proc/")
    }
    counters.update(
        files=len(files),
        operations=sys.operations,
        torchvision=any("/torchvision/" in name for name in files),
    )
    most = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    counters["peak"] = 1024 * int(most[1])
    counters.update(kernels=dict(counters["kernels"].counts), memory=1024 * int(written[1]))
    line = f"COUNTERS {json.dumps(counters)}\n".encode()
    assert len(line) < 4096, "a longer line and another rank's could mix in a pipe"
    os.write(1, line)
    destroy()


register_optimizer_step_pre_hook(before)
register_optimizer_step_post_hook(after)
dist.destroy_process_group = destroy_process_group
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
