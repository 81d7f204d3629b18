"""Runs a script (argv[1]) with its arguments as it stands, except that one rank does what
several ranks do.

So the process group, DistributedDataParallel, fully_shard, DTensor and the collectives around a
checkpoint are gone through on one GPU, where NCCL takes no second rank. Wherever the script asks
whether `world_size` or `shard` is 1, or more, the answer is more, and with --tensor-parallel also
of `tensor`. Several ranks are left as they are, and so is one that no launcher has started.

After every step of the optimizer a line DEVICE says, in JSON, the backend, the kind of the
weights and their bytes on this rank. On CUDA the line has the bytes of its device, now and at
most so far, and the GPUs on which this process has a context.
"""

import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook


def report(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict):
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
    line = {"device": local[0].device.type, "kind": type(weights[0]).__name__}
    line["backend"] = dist.get_backend() if dist.is_initialized() else None
    line["weights"] = sum(x.numel() * x.element_size() for x in local)
    if local[0].is_cuda:
        gpus = range(torch.cuda.device_count())
        line["contexts"] = [gpu for gpu in gpus if torch._C._cuda_hasPrimaryContext(gpu)]
        line["now"], line["peak"] = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    os.write(1, f"DEVICE {json.dumps(line)}\n".encode())


register_optimizer_step_post_hook(report)
del sys.argv[0]
script = Path(sys.argv[0]).resolve()
sys.path[0] = str(script.parent)
code = script.read_text()
if os.environ.get("WORLD_SIZE") == "1":
    splits = ["shard", *(["tensor"] if "--tensor-parallel" in sys.argv else [])]
    question = rf"\b(?:world_size|{'|'.join(splits)}) (==|>) 1\b"
    code = re.sub(question, lambda found: str(found[1] == ">"), code)

    def meshes(device: torch.device, *_) -> list:
        mesh = init_device_mesh(device.type, (1,) * len(splits), mesh_dim_names=tuple(splits))
        return [mesh[name] for name in splits] + [None] * (2 - len(splits))

    if "parallel_plan" in code:
        import parallel_plan

        parallel_plan.meshes = meshes
exec(compile(code, script, "exec"), {"__name__": "__main__", "__file__": str(script)})
