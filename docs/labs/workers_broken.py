"""A number of loader workers from another machine."""

import torch
from torch.utils.data import DataLoader

loader = DataLoader(torch.arange(100), num_workers=64)
print(f"{loader.num_workers} workers", flush=True)
