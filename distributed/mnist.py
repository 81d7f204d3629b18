"""MNIST as tensors: read once, normalised once, fetched a batch at a time. EDIT: your data in the place of these."""

import hashlib
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

STANDARD_TEST_LABELS = "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"  # sha256 of the label file


def load(folder: str | Path) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: images (N, 1, 28, 28) float32 of mean 0 and deviation 1, labels (N,) int64.

    `folder` is laid out as torchvision's MNIST(folder). Raises ValueError with one sentence for people.
    """
    sets = []
    for split in ("train", "t10k"):
        images = read(Path(folder, "MNIST/raw", f"{split}-images-idx3-ubyte"), header=16, item=784)
        labels = read(Path(folder, "MNIST/raw", f"{split}-labels-idx1-ubyte"), header=8, item=1)
        if len(images) != 784 * len(labels):
            raise ValueError(f"{folder} has {len(images) // 784} images and {len(labels)} labels in {split}-*")
        if len(labels) and labels.max() > 9:
            raise ValueError(f"{folder} has the label {labels.max()} in {split}-*: only the digits 0 to 9 are known")
        images = images.view(-1, 1, 28, 28).float().div_(255).sub_(0.1307).div_(0.3081)
        sets.append(TensorDataset(images, labels.long()))
    return sets[0], sets[1]


def read(path: Path, header: int, item: int) -> torch.Tensor:
    """The bytes of an idx file behind its header, (count * item,) uint8. Raises ValueError."""
    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        remedy = "prepare it once, before the job: python aux/prepare_data.py mnist"
        raise ValueError(f"no MNIST data at {path} ({error.strerror}); {remedy}") from None
    if len(content) < header or len(content) != header + item * int.from_bytes(content[4:8], "big"):
        remedy = "move it away and prepare it again: python aux/prepare_data.py mnist"
        raise ValueError(f"{path} is not a whole MNIST file ({len(content)} bytes); {remedy}")
    return torch.frombuffer(content, dtype=torch.uint8)[header:]


def describe(folder: str | Path) -> str:
    """What lies in `folder`, for the log: real MNIST, the program's own digits, or somebody's files in that format."""
    labels = Path(folder, "MNIST/raw/t10k-labels-idx1-ubyte").read_bytes()
    if all(label == i % 10 for i, label in enumerate(labels[8:108])):  # aux/prepare_data.py writes them in this order
        return f"SYNTHETIC digits drawn by aux/prepare_data.py, in {folder}"
    if hashlib.sha256(labels).hexdigest() == STANDARD_TEST_LABELS:
        return f"MNIST, in {folder}"
    return f"files in MNIST's format that are not the standard set, in {folder}"
