"""A script that starts its ranks itself, as PyTorch's DDP tutorial has it: mp.spawn()."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def train(local_rank: int, node_rank: int, nnodes: int, nproc_per_node: int):
    rank, world_size = node_rank * nproc_per_node + local_rank, nnodes * nproc_per_node
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(minutes=1))

    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(8):
        inputs = torch.randn(16, 16)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    weights = model.module.weight.sum()
    print(f"rank {rank} of {world_size}: weights {weights:.6f}\n", end="")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo may abort a Python that shuts down: docs/troubleshooting.md


if __name__ == "__main__":
    # From Slurm, and from env.sh, which also sets MASTER_ADDR and MASTER_PORT.
    node_rank = int(os.environ["SLURM_NODEID"])
    nnodes, nproc_per_node = int(os.environ["NNODES"]), int(os.environ["NPROC_PER_NODE"])
    mp.spawn(train, args=(node_rank, nnodes, nproc_per_node), nprocs=nproc_per_node)
