"""Runs a script (argv[2]) with its arguments as it stands, on a torch that shows it nothing
newer than 2.4 or 2.6.

argv[1] says which of the two. The names are what 2.13.0 has and 2.4.1 or 2.6.0 lacks, in the
modules that jobs import. torch itself still has them.
"""

import os
import runpy
import sys
from importlib import import_module
from types import ModuleType

import torch
import torch.distributed.checkpoint as dcp

NEWER_THAN_2_4 = {
    "torch": "accelerator AcceleratorError hash_tensor sym_sum thread_safe_generator while_loop",
    "torch.cpu": "get_capabilities is_initialized",
    "torch.cuda": (
        "AcceleratorError GreenContext MemPool "
        "device_memory_used host_memory_stats is_tf32_supported"
    ),
    "torch.nn": "Buffer LinearCrossEntropyLoss LinearCrossEntropyOptions",
    "torch.nn.functional": "grouped_mm linear_cross_entropy scaled_grouped_mm scaled_mm",
    "torch.nn.utils": "clip_grads_with_norm_ get_total_norm",
    "torch.optim": "Adafactor Muon",
    "torch.serialization": (
        "get_unsafe_globals_in_checkpoint safe_globals set_crc32_options skip_data"
    ),
    "torch.distributed": (
        "all_gather_single get_default_backend_for_device reduce_scatter_single split_group"
    ),
    "torch.distributed.fsdp": (
        "CPUOffloadPolicy FSDPModule MixedPrecisionPolicy OffloadPolicy fully_shard"
    ),
    "torch.distributed.tensor": (
        "DTensor Partial Placement Replicate Shard distribute_module distribute_tensor"
    ),
    "torch.utils.checkpoint": "CheckpointPolicy SelectiveCheckpointContext",
}
NEWER_THAN_2_6 = {
    "torch": "AcceleratorError hash_tensor thread_safe_generator",
    "torch.cpu": "get_capabilities is_initialized",
    "torch.cuda": "AcceleratorError GreenContext host_memory_stats is_tf32_supported",
    "torch.nn": "LinearCrossEntropyLoss LinearCrossEntropyOptions",
    "torch.nn.functional": "grouped_mm linear_cross_entropy scaled_grouped_mm scaled_mm",
    "torch.optim": "Muon",
    "torch.distributed": "all_gather_single record_comm reduce_scatter_single shrink_group",
    "torch.distributed.fsdp": "DataParallelMeshDims share_comm_ctx",
    "torch.distributed.tensor.parallel": "PrepareModuleInputOutput",
    "torch.distributed.checkpoint": "HuggingFaceStorageReader HuggingFaceStorageWriter",
    "torch.distributed.checkpoint.staging": "DefaultStager StagingOptions",
}
VERSION = sys.argv[1]
NEWER = {"2.4": NEWER_THAN_2_4, "2.6": NEWER_THAN_2_6}[VERSION]
TORCH = os.path.dirname(torch.__file__)


class Older(ModuleType):
    def __getattribute__(self, name: str):
        get = super().__getattribute__
        if name in NEWER.get(get("__name__"), "").split() and not sys._getframe(
            1
        ).f_code.co_filename.startswith(TORCH):
            raise AttributeError(f"torch {VERSION} has no {get('__name__')}.{name}")
        return get(name)


def older_load(state, *, checkpoint_id=None, load=dcp.load):
    """dcp.load as 2.4 and 2.6 have it: without no_dist."""
    load(state, checkpoint_id=checkpoint_id)


dcp.load = older_load
torch.__version__ = f"{VERSION}.0"
for module in NEWER:
    import_module(module).__class__ = Older
sys.argv = sys.argv[2:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
