"""The loader worker of rank 1 hangs in a line of the Dataset, and rank 0 waits for that rank."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        while index == 10 and dist.get_rank() == 1:
            time.sleep(0.1)
        return torch.ones(1)


def main():
    dist.init_process_group("gloo")
    for batch in DataLoader(Slow(), num_workers=1, multiprocessing_context="fork"):
        dist.all_reduce(batch)


main()
