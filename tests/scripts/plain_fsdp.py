"""FSDP2, as PyTorch's tutorial has it: fully_shard() on each layer, then on the model."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

if torch.accelerator.is_available():
    device = torch.device(
        torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"])
    )
    torch.accelerator.set_device_index(device.index)
else:
    device = torch.device("cpu")
dist.init_process_group(backend=dist.get_default_backend_for_device(device))
rank, world_size = dist.get_rank(), dist.get_world_size()

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

for _ in range(8):
    inputs = torch.randn(16, 16, device=device)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

weights = model[0].weight.full_tensor().sum()
print(f"rank {rank} of {world_size}: weights {weights:.6f}\n", end="")
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo may abort a Python that shuts down: docs/troubleshooting.md
