"""MNIST as tensors: read by torchvision, normalised once, fetched a batch at a time."""

import hashlib
from pathlib import Path

import torch
import torchvision
from torch.utils.data import TensorDataset

from heartbeat import fail

TEST_LABELS_SHA256 = "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"


class BatchDataset(TensorDataset):
    """A TensorDataset that a DataLoader indexes once for a whole batch, not image by image."""

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, ...]:
        return self[indices]


def collate(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The DataLoader's collate_fn for a BatchDataset: its batches are tensors already."""
    return batch


def load(folder: str | Path) -> tuple[BatchDataset, BatchDataset]:
    """The training and the test set, of images (N, 1, 28, 28) float32 and labels (N,) int64.

    The images have mean 0 and standard deviation 1. `folder` is the root of
    torchvision.datasets.MNIST. Raises SystemExit with one sentence if it has no such files.
    """
    return read(folder, train=True), read(folder, train=False)


def read(folder: str | Path, train: bool) -> BatchDataset:
    """One of the two sets. Raises SystemExit with one sentence."""
    raw = Path(folder, "MNIST/raw")
    if not raw.is_dir():
        prepare = "prepare it once, before the job: python aux/prepare_data.py mnist"
        fail(f"no MNIST data in {folder}: {prepare}")

    again = "move it away and prepare it again: python aux/prepare_data.py mnist"
    try:
        digits = torchvision.datasets.MNIST(folder, train=train)
    except (RuntimeError, ValueError, TypeError, AssertionError, LookupError, OSError) as error:
        fail(f"{raw} is incomplete or damaged ({error!r}): {again}")
    images, labels = digits.data, digits.targets
    if len(images) != len(labels) or images.shape[1:] != (28, 28) or labels.max() > 9:
        fail(f"{raw} does not hold a label from 0 to 9 for each image: {again}")

    images = images.unsqueeze(1).float().div_(255).sub_(0.1307).div_(0.3081)
    return BatchDataset(images, labels)


def describe(folder: str | Path) -> str:
    """For the log: whether `folder` has MNIST, synthetic digits, or something else. Raises
    OSError."""
    labels = Path(folder, "MNIST/raw/t10k-labels-idx1-ubyte").read_bytes()
    if hashlib.sha256(labels).hexdigest() == TEST_LABELS_SHA256:
        return f"MNIST, in {folder}"
    # No real data set has its labels in this order.
    if all(label == i % 10 for i, label in enumerate(labels[8:108])):
        return f"SYNTHETIC digits drawn by aux/prepare_data.py, in {folder}"
    return f"files in MNIST's format that are not the standard set, in {folder}"
