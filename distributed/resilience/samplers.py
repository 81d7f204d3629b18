"""The order of the data over a whole run, so that to resume is to begin later in it."""

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class RunSampler(Sampler[torch.Tensor]):
    """This rank's indices, (batch_size / world_size,) int64, for each of `steps`, which count from 0 over all epochs.

    For a map-style dataset that takes a tensor of indices, as TensorDataset does:
    `DataLoader(train_set, sampler=RunSampler(...), batch_size=None)`. `sampler.steps = range(first, last)` is a resume.

    Step i of an epoch takes images i * batch_size to (i + 1) * batch_size of a permutation that depends on seed and
    epoch alone: the same global batch on any number of ranks. Epochs count from 1, and each drops its last partial
    batch. It is what DistributedSampler(drop_last=True) gives after set_epoch(epoch). Raises ValueError when the
    dataset is smaller than a batch.
    """

    def __init__(self, size: int, batch_size: int, steps: range, seed: int, rank: int, world_size: int):
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
            yield permutation[i * self.batch_size : (i + 1) * self.batch_size][self.rank :: self.world_size]

    def __len__(self) -> int:
        return len(self.steps)
