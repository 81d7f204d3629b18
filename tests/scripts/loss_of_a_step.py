"""Run by test_fine_tune.py: the loss of a saved model on the batch of a step."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = AutoTokenizer.from_pretrained(sys.argv[1])(Path(sys.argv[2]).read_text()).input_ids
sequences = torch.tensor(tokens[: len(tokens) // 32 * 32]).view(-1, 32)
generator = torch.Generator().manual_seed(int(sys.argv[3]))
batch = sequences[torch.randint(len(sequences), (8,), generator=generator)]
with torch.no_grad():
    print(model(batch, labels=batch).loss.item())
