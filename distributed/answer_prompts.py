"""Runs a language model over a list of prompts, on as many ranks and jobs as are free.

    sbatch launch_slurm_with_torchrun.sh distributed/answer_prompts.py \\
        checkpoints/JOB/step_1000 prompts.txt answers

Submit it as often as you like, also as an array and while it runs, because work_list.py gives each
rank what is still to be done. `cat answers/*.jsonl` then has a prompt and its answer in each line.
An answer depends on the prompt and its line, and not on the rank. It is what the model writes
behind the prompt, up to the token that ends a text, and there is no chat template: for a model that
has one, export it with sample.py and take examples/answers.py.

The model is one checkpoint of train_fsdp.py, and not the newest of a run, which may be another one
before the list is done. For another model replace `load`.
"""

import preemption

# Before the slow imports, because Slurm may ask at any time.
preemption.listen()

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import heartbeat
import token_files
import work_list
from transformer import Transformer

formatter = argparse.RawDescriptionHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
parser.add_argument("checkpoint", type=Path, help="one of a run's folders step_N")
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
heartbeat.check_device(device, args.device)


def load(path: Path) -> Callable[[str, int], str]:
    """The function that answers a prompt, drawing its tokens from a seed."""
    try:
        metadata = json.loads((path / "about.json").read_text())
    except (OSError, ValueError):
        there = ", ".join(f"step_{step}" for step in checkpoint.steps(path)) or "none"
        sys.exit(f"{path} is no checkpoint. In this folder are: {there}")
    with torch.device("meta"):
        model = Transformer(metadata["config"])
    model.to_empty(device=device)
    model.tie()
    checkpoint.read(path, dict(model.named_parameters()))
    encode, decode = token_files.text_functions(metadata["tokenizer"], args.tokenizer)
    ends = token_files.end_tokens(metadata["config"], args.tokenizer)

    def answer(prompt: str, seed: int) -> str:
        torch.manual_seed(seed)
        tokens = torch.tensor([encode(prompt)], device=device)
        if tokens.numel() == 0:
            raise ValueError("an empty prompt")
        size = metadata["tokenizer"]["size"]
        written = model.generate(tokens, args.length, size, ends=ends)[0].tolist()
        written = written[tokens.size(1) :]
        if written and written[-1] in ends:
            written.pop()
        return decode(written)

    return answer


try:
    prompts = args.prompts.read_text().split("\n")
except OSError as error:
    sys.exit(f"{args.prompts}: {error.strerror}")
if prompts[-1] == "":
    prompts.pop()

answer = load(args.checkpoint)


def line(prompt: str, number: int) -> dict[str, str]:
    """A prompt of the list and its answer, or why it has none."""
    try:
        return {"prompt": prompt, "answer": answer(prompt, seed=number)}
    except ValueError as error:
        return {"prompt": prompt, "error": str(error)}


def stop() -> bool:
    return preemption.received


model, count = f"{args.checkpoint}, {args.length} tokens", 0
try:
    for part in work_list.parts(prompts, args.answers, args.part, stop=stop, model=model):
        part.write([line(prompt, number) for number, prompt in enumerate(part.items, part.first)])
        count += len(part.items)
except work_list.ListError as error:
    sys.exit(str(error))

print(f"[Rank: {rank}] {count} answers of {args.checkpoint}", flush=True)
# Before a requeue all ranks have finished their parts.
if world_size == 1:
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
dist.init_process_group("gloo", rank=rank, world_size=world_size)
preemption.end(preemption.asked("cpu"))
