"""Runs a language model over a list of prompts, on as many ranks and jobs as are free.

    sbatch launch_slurm_with_torchrun.sh distributed/answer_prompts.py \\
        checkpoints/JOB prompts.txt answers

Submit it as often as you like, also as an array and while it runs, because work_list.py gives each
rank what is still to be done. `cat answers/*.jsonl` then has a prompt and its answer in each line.
An answer depends on the prompt and its line, and not on the rank. The model is the newest
checkpoint of train_fsdp.py or train_tp.py in a run's folder. For another model replace `load`.
"""

import preemption

# Before the slow imports, because Slurm may ask at any time.
preemption.listen()

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import token_files
import work_list
from transformer import Transformer

formatter = argparse.RawDescriptionHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
parser.add_argument("checkpoint_dir", type=Path, help="a run's folder; reads its newest checkpoint")
parser.add_argument("prompts", type=Path, help="a text file with a prompt in each line")
parser.add_argument("answers", type=Path, help="the folder for the answers")
parser.add_argument("--length", type=int, default=100, help="how many tokens to write")
parser.add_argument("--part", type=int, default=100, help="prompts of a part, for about a minute")
help = "the data's tokenizer.json, if they use a Hugging Face tokenizer"
parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=help)
parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
args = parser.parse_args()

# No rank waits for another one until its end, so there is no process group yet.
env = os.environ
rank, local_rank = (int(env.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
world_size = int(env.get("WORLD_SIZE", 1))
device = torch.device("cpu")
if args.device == "auto" and torch.accelerator.is_available():
    # A rank that sees one GPU takes that one.
    number = local_rank % torch.accelerator.device_count()
    device = torch.device(torch.accelerator.current_accelerator().type, number)


def load(folder: Path) -> Callable[[str, int], str]:
    """The function that answers a prompt, drawing its tokens from a seed."""
    path, metadata = checkpoint.newest(folder)
    with torch.device("meta"):
        model = Transformer(metadata["config"])
    model.to_empty(device=device)
    model.tie()
    checkpoint.read(path, dict(model.named_parameters()))
    encode, decode = token_files.text_functions(metadata["tokenizer"], args.tokenizer)

    def answer(prompt: str, seed: int) -> str:
        torch.manual_seed(seed)
        tokens = torch.tensor([encode(prompt)], device=device)
        if tokens.numel() == 0:
            raise ValueError("an empty prompt")
        written = model.generate(tokens, args.length, metadata["tokenizer"]["size"])[0]
        return decode(written[tokens.size(1) :].tolist())

    return answer


try:
    prompts = args.prompts.read_text().split("\n")
except OSError as error:
    sys.exit(f"{args.prompts}: {error.strerror}")
if prompts[-1] == "":
    prompts.pop()

answer = load(args.checkpoint_dir)
count = 0
for part in work_list.parts(prompts, args.answers, args.part, stop=lambda: preemption.received):
    answers = []
    for number, prompt in enumerate(part.items, part.first):
        try:
            answers.append({"prompt": prompt, "answer": answer(prompt, seed=number)})
        except ValueError as error:
            answers.append({"prompt": prompt, "error": str(error)})
    part.write(answers)
    count += len(answers)

print(f"[Rank: {rank}] {count} answers", flush=True)
# Before a requeue all ranks have finished their parts.
if world_size == 1:
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
dist.init_process_group("gloo", rank=rank, world_size=world_size)
preemption.end(preemption.asked("cpu"))
