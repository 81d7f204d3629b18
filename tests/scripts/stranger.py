"""A script that knows nothing of this repository: torch's variables, an all-reduce, and twenty
steps of training."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
local_rank, total = int(os.environ["LOCAL_RANK"]), torch.tensor(float(dist.get_rank()))
dist.all_reduce(total)

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(20):
    inputs = torch.randn(16, 4)
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weight = float(model.module.weight.detach().sum())

dist.barrier()
print(
    f"rank {dist.get_rank()} of {dist.get_world_size()}, local rank {local_rank}: the sum is "
    f"{total:.0f}\n",
    end="",
)
print(f"trained: {weight:.6f}\n", end="")
dist.destroy_process_group()
os._exit(0)  # gloo on a CPU may abort a Python that shuts down
