"""MNIST as tensors: read once, normalised once, fetched a batch at a time."""

import hashlib
import itertools
import zlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset, Sampler

from resilience import checksums

try:
    import torchvision
except RuntimeError as error:
    # torchvision's wheel is built for CUDA. Beside a CPU build of torch its compiled part does not load, and so its
    # import trips over two operators that nobody calls here. Declaring the two lets it go through.
    if "torchvision::nms does not exist" not in str(error):
        raise
    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

STANDARD_TEST_LABELS = "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"  # sha256 of the label file


class MNIST(Dataset):
    """Images (N, 1, 28, 28) float32 with mean 0 and deviation 1, labels (N,) int64, in torchvision's folders."""

    def __init__(self, folder: str | Path, train: bool):
        files = torchvision.datasets.MNIST(folder, train=train)
        self.images = files.data.unsqueeze(1).float().div_(255).sub_(0.1307).div_(0.3081)
        self.labels = files.targets

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """A whole batch in one indexing, some 50 times faster than image by image; DataLoader calls this by itself."""
        return self.images[indices], self.labels[indices]


class ResumableSampler(Sampler):
    """The indices that another sampler gives, without the first `done` of them: those before a run was stopped."""

    def __init__(self, whole: Sampler):
        self.whole, self.done = whole, 0

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.whole, self.done, None)

    def __len__(self) -> int:
        """Of a whole epoch."""
        return len(self.whole)


def whole_batch(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The collate function for `__getitems__`: there is nothing left to collate."""
    return batch


def missing_data(folder: str | Path) -> str | None:
    """What is wrong with the data in `folder` as one sentence, or None: files, sizes, labels and checksums."""
    raw = Path(folder) / "MNIST" / "raw"
    remedy = "prepare it once, before the job: python aux/prepare_data.py mnist"
    for split in ("train", "t10k"):
        for kind, header, item in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            path = raw / f"{split}-{kind}-ubyte"
            try:
                with path.open("rb") as file:
                    start = file.read(header)
                size = path.stat().st_size
            except OSError as error:
                return f"no MNIST data at {path} ({error.strerror}); {remedy}"
            if len(start) < header or size != header + item * int.from_bytes(start[4:8], "big"):
                return f"{path} is not a whole MNIST file ({size} bytes); move it away and {remedy}"
        if (label := max(path.read_bytes()[header:], default=0)) > 9:
            return f"{path} has the label {label}: only the digits 0 to 9 are known"
    damage = checksums.damaged(raw)
    return damage and f"{damage}; move it away and {remedy}"


def identity(args: Namespace) -> dict:
    """What makes a run the same run when it is resumed, on any number of ranks."""
    raw = Path(args.data_dir) / "MNIST" / "raw"
    data = [zlib.crc32((raw / f"train-{kind}-ubyte").read_bytes()) for kind in ("images-idx3", "labels-idx1")]
    names = ("batch_size", "learning_rate", "dropout", "seed", "precision")
    return {name: vars(args)[name] for name in names} | {"data": data}


def describe(folder: str | Path) -> str:
    """What lies in `folder`, for the log: real MNIST, the program's own digits, or somebody's files in that format."""
    raw = Path(folder) / "MNIST" / "raw"
    labels = (raw / "t10k-labels-idx1-ubyte").read_bytes()
    if all(label == i % 10 for i, label in enumerate(labels[8:108])):  # aux/prepare_data.py writes them in this order
        return f"SYNTHETIC digits drawn by aux/prepare_data.py, in {folder}"
    if hashlib.sha256(labels).hexdigest() == STANDARD_TEST_LABELS:
        return f"MNIST, in {folder}"
    return f"files in MNIST's format that are not the standard set, in {folder}"
