"""An array is one object, whose texts are read without a write."""

import re
from pathlib import Path

import numpy as np
from torch.utils.data import DataLoader, Dataset


def own_memory() -> int:
    """MB that this process shares with no other."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"Private_Dirty: +(\d+)", text)[1]) // 1000


class Images(Dataset):
    def __init__(self):
        self.paths = np.array([f"images/{number:01000}.jpg" for number in range(50_000)], dtype="S")

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        if index == 0:
            self.before = own_memory()
        path = self.paths[index].decode()
        copied = own_memory() - self.before if index == len(self) - 1 else 0
        if copied > 20:
            print(f"The worker has copied {copied} MB of the list", flush=True)
        return path


loader = DataLoader(Images(), batch_size=1000, num_workers=1, multiprocessing_context="fork")
print(f"{sum(map(len, loader))} images", flush=True)
