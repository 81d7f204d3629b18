"""Runs a script (argv[1]) with its arguments as it stands, except that one rank does what
several ranks do.

So the process group, DistributedDataParallel, fully_shard, DTensor and the collectives around a
checkpoint are gone through on one GPU, where NCCL takes no second rank. Wherever the script or a
module of ours asks whether `world_size` or `shard` is 1, or more, the answer is more. Several
ranks are left as they are, and so is one that no launcher has started.

After every step of the optimizer a line DEVICE says, in JSON, the backend, the kind of the
weights, their bytes on this rank, and the bytes of its device: now, and at most so far. On a
CPU, which has no counters for that, the variable COUNT says that tensors are to be counted. On
CUDA the line has the GPUs on which this process has a context.
"""

import json
import os
import re
import runpy
import sys
import weakref
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = (str(REPOSITORY / "distributed"),)


class AsSeveral(SourceFileLoader):
    """A module in which `world_size > 1` is True, and `world_size == 1` False; `shard` as well."""

    def get_code(self, fullname: str):
        path = Path(self.get_filename(fullname))
        question = r"\b(?:(?:\w+\.)*world_size|shard) (==|>) 1\b"
        answered = re.sub(question, lambda found: str(found[1] == ">"), path.read_text())
        return compile(answered, path, "exec")


def find_ours(folder: str) -> FileFinder:
    """For sys.path_hooks."""
    if not folder.startswith(FOLDERS):
        raise ImportError
    return FileFinder(folder, (AsSeveral, [".py"]))


class Bytes(TorchDispatchMode):
    """Counts the bytes of the tensors that have been made inside the with block and still live."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = WeakIdKeyDictionary(), 0, 0
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int):
            """So fully_shard frees what it has gathered."""
            resize(storage, size)
            self.note(storage)

        torch.UntypedStorage.resize_ = resize_

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its parts come through here again, as plain tensors
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # Without memory.
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().device.type != "meta":
                self.note(tensor.untyped_storage())
        return result

    def note(self, storage: torch.UntypedStorage):
        if storage not in self.sizes:
            self.sizes[storage] = [0]
            weakref.finalize(storage, self.resized, self.sizes[storage], 0)
        self.resized(self.sizes[storage], storage.nbytes())

    def resized(self, size: list[int], to: int):
        self.now += to - size[0]
        self.peak = max(self.peak, self.now)
        size[0] = to


def report(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict):
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    line = {"device": local[0].device.type, "kind": type(weights[0]).__name__}
    line["backend"] = dist.get_backend() if dist.is_initialized() else None
    line["weights"] = sum(x.numel() * x.element_size() for x in local)
    line |= {"now": counted.now, "peak": counted.peak}
    if local[0].is_cuda:
        gpus = range(torch.cuda.device_count())
        line["contexts"] = [gpu for gpu in gpus if torch._C._cuda_hasPrimaryContext(gpu)]
        line["now"], line["peak"] = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    os.write(1, f"DEVICE {json.dumps(line)}\n".encode())


counted = Bytes()
if "COUNT" in os.environ:
    counted.__enter__()
if os.environ.get("WORLD_SIZE") == "1":
    sys.path_hooks.insert(0, find_ours)
    sys.path_importer_cache.clear()
register_optimizer_step_post_hook(report)
script = Path(sys.argv[1]).resolve()
del sys.argv[0]
sys.path[0] = str(script.parent)
runpy.run_module(script.stem, run_name="__main__", alter_sys=True)
