"""The private names of torch that this repository uses, all in one place, because they may change
in any version."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

# The shape of this rank's part of a DTensor, and where it begins. Tried on torch 2.9 to 2.14.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: F401


def set_timeout(seconds: float, group: dist.ProcessGroup | None = None):
    """The timeout of a process group's collectives from now on."""
    # torch 2.14 and newer have a public function. The private one was tried on 2.9 to 2.13.
    public = getattr(dist, "set_timeout", None)
    function = public or dist.distributed_c10d._set_pg_timeout
    function(timedelta(seconds=seconds), group)


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The mesh with all its dimensions in one, of that name. Tried on torch 2.9 to 2.14."""
    return mesh._flatten(name)
