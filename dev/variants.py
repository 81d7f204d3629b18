"""train_fsdp.py with one thing changed, on one rank: rows of cluster_report.py.

    python dev/variants.py one_rank ARGUMENTS     # FSDP over the one rank, as if it were several
    python dev/variants.py float8 ARGUMENTS       # matmuls in float8, by torchao

It exchanges a function of a module, and not the script's text, so the script may be yours.
"""

import runpy
import sys

sys.path.insert(0, "distributed")
from torch.distributed.device_mesh import init_device_mesh

import parallel_plan
import transformer


def one_rank(device, shard, tensor):
    """As parallel_plan.meshes, but with a mesh for one rank as well."""
    return init_device_mesh(device.type, (1,)), None


class Float8(transformer.Transformer):
    def __init__(self, *arguments):
        from torchao.float8 import convert_to_float8_training

        super().__init__(*arguments)
        convert_to_float8_training(self, module_filter_fn=lambda _, name: name != "lm_head")


match sys.argv.pop(1):
    case "one_rank":
        parallel_plan.meshes = one_rank
    case "float8":
        transformer.Transformer = Float8
    case _:
        sys.exit(__doc__)
runpy.run_path("distributed/train_fsdp.py", run_name="__main__")
