"""The data of the exam's scripts. grade_port.py grades through it, so leave it."""

import os
import time

import torch
from torch.utils.data import Dataset

KINDS = 4  # of drawings: a bar across, a bar down, both, a square
TOKENS, LONGEST = 32, 16  # token 0 is padding


class Drawings(Dataset):
    """Drawing i is the same each time, but for its augmentation: a flip and noise.

    An item is (image, kind): float32, (1, 16, 16), and a number from 0 to KINDS - 1.
    """

    def __init__(self, count: int, train: bool, augment: bool = False):
        self.count, self.train, self.augment = count, train, augment

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i >= self.count:
            raise IndexError(i)
        if self.train:
            watched(i)
        drawing = torch.Generator().manual_seed(i if self.train else 1_000_000 + i)
        image = 0.3 * torch.randn(16, 16, generator=drawing)
        kind, x, y = i % KINDS, *torch.randint(3, 12, (2,), generator=drawing).tolist()
        if kind in (0, 2):
            image[y - 1 : y + 1] += 1
        if kind in (1, 2):
            image[:, x - 1 : x + 1] += 1
        if kind == 3:
            image[y - 3 : y + 3, x - 3 : x + 3] += 1
        if self.augment:
            if torch.rand(()) < 0.5:
                image = image.flip(1)
            image = image + 0.1 * torch.randn(16, 16)
        return image[None], kind


class Sequences(Dataset):
    """256 sequences that count from some number on.

    An item has 3 to LONGEST tokens from 1 to TOKENS - 1. The first 128 items have nine, so that the
    grader sees whether all losses go wrong, or only those of batches of different lengths.
    """

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> torch.Tensor:
        if i >= len(self):
            raise IndexError(i)
        watched(i)
        draws = torch.Generator().manual_seed(i)
        first = torch.randint(TOKENS, (), generator=draws)
        length = torch.randint(3, LONGEST + 1, (), generator=draws) if i >= 128 else 9
        return (first + torch.arange(length)) % (TOKENS - 1) + 1


def watched(i: int):
    """What the grader asks for: a list of what is read, a slow first start, an item that fails."""
    if folder := os.environ.get("PORT_READ"):
        # One short line, which is appended whole, although the workers of a rank share the file.
        with open(f"{folder}/{os.environ.get('RANK', 0)}", "a") as list_of_items:
            list_of_items.write(f"{i}\n")
    if "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(float(os.environ.get("PORT_SLOW", 0)))
    if os.environ.get("PORT_FAIL") == str(i):
        raise ValueError(f"sample {i} cannot be read")
