"""The sampler shuffles by seed and epoch, and nobody tells it the epoch."""

import os

from torch.utils.data import DistributedSampler

sampler = DistributedSampler(range(1000), int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
for epoch in range(1, 4):
    order = list(sampler)
    if os.environ["RANK"] == "0":
        print(f"epoch {epoch} begins with images {order[:5]}", flush=True)
