"""The Trainer of transformers, as its documentation has it: a model, arguments, a data set.

Arguments: a folder for checkpoints, and the number of epochs.
"""

import os
import sys

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
model = GPT2LMHeadModel(config)
train_set = [{"input_ids": row, "labels": row} for row in torch.randint(32, (256, 16))]

arguments = TrainingArguments(
    output_dir=sys.argv[1],
    num_train_epochs=int(sys.argv[2]),
    save_strategy="epoch",
    save_total_limit=2,
    report_to="none",
    # On CPUs it has to be told, or each rank trains by itself.
    use_cpu=not torch.cuda.is_available(),
)
folder = arguments.output_dir
last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
print(f"resumes from {last}")
trainer = Trainer(model=model, args=arguments, train_dataset=train_set)
trainer.train(resume_from_checkpoint=last)

rank, world_size = arguments.process_index, arguments.world_size
weights = model.lm_head.weight.sum()
print(f"rank {rank} of {world_size}: weights {weights:.6f}\n", end="")
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo may abort a Python that shuts down: docs/troubleshooting.md
