"""Run by test_frameworks.py: the order in which DeepSpeed's loader reads."""

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
model = torch.nn.Linear(1, 1)
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    training_data=list(range(64)),
    config={"train_batch_size": 8},
)
for _ in range(2):
    print("ORDER", [sample for batch in loader for sample in batch.tolist()])
