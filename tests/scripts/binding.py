"""The package's device function with pretended GPUs: torch is made to see what
CUDA_VISIBLE_DEVICES grants."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import torch

from resilience.place import choose_device, find_ranks, init_process_group

visible = os.environ.get("CUDA_VISIBLE_DEVICES")
granted = visible.split(",") if visible else []
torch.cuda.is_available = lambda: bool(granted)
torch.cuda.device_count = lambda: len(granted)
torch.cuda.set_device = lambda index: None
torch.cuda.get_device_properties = lambda device: SimpleNamespace(
    uuid=f"uuid-{granted[device.index]}"
)

launcher, rank, local_rank, world_size = find_ranks()
device, fault = choose_device("auto", local_rank, world_size)
if "join" in sys.argv:
    init_process_group(SimpleNamespace(device="auto", init_timeout=300, timeout=120))
else:
    print(visible, device, fault)
