"""Read shards as a stream: each rank its own files, in an order that a resumed run finds again."""

import os
import sys

from datasets import load_dataset
from datasets.distributed import split_dataset_by_node

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
epoch, done = int(sys.argv[2]), int(sys.argv[3])  # a checkpoint holds both numbers

stream = load_dataset("parquet", data_files=f"{sys.argv[1]}/*.parquet", streaming=True)["train"]
# Another order in each epoch. A resumed run would miss the samples that are in a larger buffer.
stream = stream.shuffle(seed=epoch, buffer_size=1)
stream = split_dataset_by_node(stream, rank, world_size)
for sample in stream.skip(done):
    print(sample["x"])
