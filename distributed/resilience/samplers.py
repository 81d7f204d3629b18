"""The order of the data over a whole run, so that a resumed run begins later in it; and seeds."""

import zlib
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


def seed_from(*numbers: int) -> int:
    """One 32-bit seed from several numbers, because torch's CPU generator uses no more bits.

    Seeded by (seed, step, rank) at every step, dropout needs no random state in a checkpoint.
    """
    return zlib.crc32(repr(numbers).encode())


class RunSampler(Sampler[torch.Tensor]):
    """This rank's indices, (batch_size / world_size,) int64, for each step of `steps`.

    Steps count from 0 over all epochs; `sampler.steps = range(first, last)` is a resume. For a
    dataset that takes a tensor of indices, as TensorDataset does, with batch_size=None.

    Step i of an epoch takes images i * batch_size to (i + 1) * batch_size of a permutation that
    depends on seed and epoch only: the same global batch on any number of ranks, and what
    DistributedSampler(drop_last=True) gives after set_epoch(epoch). Epochs count from 1. Raises
    ValueError if the dataset is smaller than a batch.
    """

    def __init__(
        self, size: int, batch_size: int, steps: range, seed: int, rank: int, world_size: int
    ):
        if size < batch_size:
            raise ValueError(f"a batch of {batch_size} is larger than the data set of {size}")
        self.size, self.batch_size, self.steps = size, batch_size, steps
        self.seed, self.rank, self.world_size = seed, rank, world_size

    def __iter__(self) -> Iterator[torch.Tensor]:
        steps_per_epoch, permuted_epoch = self.size // self.batch_size, None
        for step in self.steps:
            epoch, i = 1 + step // steps_per_epoch, step % steps_per_epoch
            if epoch != permuted_epoch:
                generator = torch.Generator().manual_seed(self.seed + epoch)
                permutation, permuted_epoch = torch.randperm(self.size, generator=generator), epoch
            batch = permutation[i * self.batch_size : (i + 1) * self.batch_size]
            yield batch[self.rank :: self.world_size]

    def __len__(self) -> int:
        return len(self.steps)
