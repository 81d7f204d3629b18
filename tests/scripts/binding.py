"""The scripts' choice of a device with pretended GPUs, as many as CUDA_VISIBLE_DEVICES names."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import torch
import torch.distributed as dist

from resilience.group import Group, device_fault
from resilience.ranks import find_ranks

visible = os.environ.get("CUDA_VISIBLE_DEVICES")
granted = visible.split(",") if visible else []
torch.cuda.is_available = lambda: bool(granted)
torch.cuda.device_count = lambda: len(granted)
torch.cuda.set_device = lambda index: None
torch.cuda.get_device_properties = lambda device: SimpleNamespace(
    uuid=f"uuid-{granted[device.index]}"
)

ranks = find_ranks()
fault, device = device_fault("auto", ranks), torch.device("cpu")
if torch.cuda.is_available() and not fault:
    device = torch.device("cuda", ranks.local_rank if torch.cuda.device_count() > 1 else 0)
if "join" in sys.argv:
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    dist.init_process_group("gloo", rank=ranks.rank, world_size=ranks.world_size)
    Group(ranks, device, timeout=60).compare(fault)
else:
    print(visible, device, fault)
