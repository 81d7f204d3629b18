"""Run under torchrun by tests/test_hugging_face.py: reads a folder's model in parts.

    torchrun ... read_rows.py FOLDER tensor|fsdp|both

Ends with an error if a rank's part is not that of the whole, or if reading it takes three quarters
of the memory of a whole copy in float32.
"""

import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import hugging_face
import parallel_plan
import transformer

folder, how = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
config = hugging_face.read_config(folder)
with torch.device("meta"):
    model = transformer.Transformer(config)
shape = {"tensor": (1, 2), "fsdp": (2, 1), "both": (2, 2)}[how]
mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
if how != "fsdp":
    parallel_plan.split_layers(model, mesh["tensor"], sequence_parallel=False, compiled=False)
if how != "tensor":
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh["data"])

whole = 4 * sum(weight.numel() for weight in model.parameters())
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
limit = 1024 * int(status["VmData"].split()[0]) + 3 * whole // 4
# Of memory of its own. What is mapped of a file is not.
resource.setrlimit(resource.RLIMIT_DATA, (limit, -1))
values = hugging_face.open_weights(folder, model)
model.init_weights(torch.device("cpu"), seed=0, pretrained=values)
resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
for name, weight in model.named_parameters():
    its = weight.full_tensor() if isinstance(weight, DTensor) else weight
    assert torch.equal(its, values[name].narrow(0, 0, len(weight)).float()), name

resource.setrlimit(resource.RLIMIT_DATA, (limit, -1))
try:
    copies = [torch.ones(weight.shape) for weight in model.parameters()]
except RuntimeError as error:
    assert "allocate memory" in str(error)
else:
    raise AssertionError("a whole copy fits into that memory")
os._exit(0)
