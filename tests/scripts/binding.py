"""The scripts' own device function with pretended GPUs: torch is made to see what CUDA_VISIBLE_DEVICES grants."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import torch

import train_ddp
from resilience import step_zero

visible = os.environ.get("CUDA_VISIBLE_DEVICES")
granted = visible.split(",") if visible else []
torch.cuda.is_available = lambda: bool(granted)
torch.cuda.device_count = lambda: len(granted)
torch.cuda.set_device = lambda index: None
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"uuid-{granted[device.index]}")

launcher, rank, local_rank, world_size = train_ddp.find_ranks()
device, fault = step_zero.choose_device("auto", local_rank, world_size)
if "join" in sys.argv:
    train_ddp.init_process_group(SimpleNamespace(device="auto", init_timeout=300, timeout=120))
else:
    print(visible, device, fault)
