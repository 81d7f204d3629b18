"""Runs a train script (argv[1]) with its arguments as it stands, except that one rank does what several ranks do.

So the process group, DistributedDataParallel, fully_shard, DTensor and the collectives around a checkpoint are gone
through on one GPU. Several ranks are left as they are. After every step of the optimizer a line DEVICE says, in JSON,
the backend, the kind of the weights, their bytes on this rank, and the bytes of its device: now, and at most so far.
On a CPU, which has no counters for that, the variable COUNT says that tensors are to be counted.
"""

import json
import os
import runpy
import sys
import weakref
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "distributed"))

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from resilience import place


class Several(int):
    """1 as a world size that is not `== 1` and is `> 1`: what a script does for several ranks, it does for this one."""

    __hash__ = int.__hash__

    def __eq__(self, other):
        return isinstance(other, Several)

    def __ne__(self, other):
        return not isinstance(other, Several)

    def __gt__(self, other):
        return other <= 1


def as_several(world_size: int) -> int:
    return Several(1) if int(world_size) == 1 else world_size


class Bytes(TorchDispatchMode):
    """Counts the bytes of the tensors that have been made inside the with block and still live."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = WeakIdKeyDictionary(), 0, 0
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int):  # so fully_shard frees what it has gathered
            resize(storage, size)
            self.note(storage)

        torch.UntypedStorage.resize_ = resize_

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its parts come through here again, as plain tensors
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().device.type != "meta":  # without memory
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
    now, peak = counted.now, counted.peak
    if local[0].is_cuda:
        now, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    line = {"backend": dist.get_backend() if dist.is_initialized() else None, "device": local[0].device.type}
    line |= {"kind": type(weights[0]).__name__, "weights": sum(x.numel() * x.element_size() for x in local)}
    os.write(1, f"DEVICE {json.dumps(line | {'now': now, 'peak': peak})}\n".encode())


counted = Bytes()
if "COUNT" in os.environ:
    counted.__enter__()
find_ranks, get_world_size = place.find_ranks, dist.get_world_size
if "RANK" in os.environ:
    place.find_ranks = lambda: (*find_ranks()[:3], as_several(find_ranks()[3]))
    dist.get_world_size = lambda group=None: as_several(get_world_size(group))
register_optimizer_step_post_hook(report)
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
