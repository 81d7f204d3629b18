"""Has a Hugging Face model answer a list of prompts, on as many ranks and jobs as are free.

    sbatch launch_slurm_with_torchrun.sh examples/answers.py MODEL prompts.txt answers

A model that has a chat template gets each prompt as a question, and any other model continues it.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, "distributed")
import heartbeat
import work_list

formatter = argparse.RawDescriptionHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
parser.add_argument("model", help="a folder from the hub")
parser.add_argument("prompts", type=Path, help="a text file with a prompt in each line")
parser.add_argument("answers", type=Path, help="the folder for the answers")
parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
args = parser.parse_args()

device = torch.device("cpu")
if args.device == "auto" and torch.accelerator.is_available():
    # A rank that sees one GPU takes that one.
    number = int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count()
    device = torch.device(torch.accelerator.current_accelerator().type, number)
heartbeat.check_device(device, args.device)

tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device)
chat = tokenizer.chat_template is not None
# Not splitlines(), which also splits at form feeds.
prompts = args.prompts.read_text().removesuffix("\n").split("\n")


def as_chat(prompt: str) -> str:
    """The text that the model continues with its answer."""
    question = [{"role": "user", "content": prompt}]
    # Qwen3 would think first, and for longer than 100 tokens.
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    return tokenizer.apply_chat_template(question, **options)


for part in work_list.parts(prompts, args.answers, size=64, model=args.model):
    texts = [as_chat(prompt) if chat else prompt for prompt in part.items]
    # A template has put the special tokens where they belong.
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not chat)
    written = model.generate(**inputs.to(device), max_new_tokens=100)
    answers = written[:, inputs["input_ids"].size(1) :]
    part.write(tokenizer.batch_decode(answers, skip_special_tokens=True))
