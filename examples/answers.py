"""A Hugging Face model over a list of prompts: argv has its folder, the prompts, and the folder for
the answers."""

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, "distributed")
import work_list

device = torch.device("cpu")
if torch.accelerator.is_available():
    device = torch.device(
        torch.accelerator.current_accelerator().type, int(os.environ["LOCAL_RANK"])
    )
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").to(device)
# Not splitlines(), which also splits at form feeds.
prompts = Path(sys.argv[2]).read_text().removesuffix("\n").split("\n")

for part in work_list.parts(prompts, sys.argv[3], size=64):
    inputs = tokenizer(part.items, return_tensors="pt", padding=True).to(device)
    written = model.generate(**inputs, max_new_tokens=100)
    part.write(tokenizer.batch_decode(written, skip_special_tokens=True))
