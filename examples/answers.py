"""Has a language model answer a list of prompts, on as many ranks and jobs as are free.

    sbatch launch_slurm_with_torchrun.sh examples/answers.py MODEL prompts.txt answers

Submit it as often as you like, also as an array and while it runs, because work_list.py gives each
rank what is still to be done. `cat answers/*.jsonl` then has a prompt and its answer in each line.
At SIGTERM each rank finishes its part, and the job is requeued.

MODEL is a folder from the hub. If the model has a chat template, it gets each prompt as a question,
and otherwise it continues the prompt. With --checkpoint, MODEL is one checkpoint of train_fsdp.py,
checkpoints/JOB/step_1000, and not the newest of a run, which may be another one before the list is
done. It continues the prompt up to the token that ends a text. Answers do not depend on the rank.
For a model of your own write a third function beside `from_hub` and `from_checkpoint`.
"""

import sys

sys.path.append("distributed")  # EDIT: where preemption.py, heartbeat.py and work_list.py are
import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import heartbeat
import work_list

formatter = argparse.RawDescriptionHelpFormatter
parser = heartbeat.ArgumentParser(description=__doc__, formatter_class=formatter)
parser.add_argument("model", help="a folder from the hub")
parser.add_argument("prompts", type=Path, help="a text file with a prompt in each line")
parser.add_argument("answers", type=Path, help="the folder for the answers")
parser.add_argument("--length", type=int, default=100, help="how many tokens to write")
parser.add_argument("--part", type=int, default=64, help="prompts of a part, for about a minute")
help = "MODEL is a checkpoint of train_fsdp.py, a folder step_N that no stranger wrote"
parser.add_argument("--checkpoint", action="store_true", help=help)
help = "with --checkpoint: the data's tokenizer.json, if they use a Hugging Face tokenizer"
parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=help)
parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
args = parser.parse_args()
if min(args.length, args.part) < 1:
    parser.error("--length and --part must be at least 1")

# No rank waits for another one until its end, so there is no process group yet.
rank, local_rank = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
device = torch.device("cpu")
if args.device == "auto" and torch.accelerator.is_available():
    # A rank that sees one GPU takes that one.
    number = local_rank % torch.accelerator.device_count()
    device = torch.device(torch.accelerator.current_accelerator().type, number)
heartbeat.check_device(device, args.device)

Answer = Callable[[work_list.Part], list[dict[str, str]]]


def from_hub() -> Answer:
    """The function that answers a part's prompts, as one batch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        # Llama 3 and GPT-2 have none, and what is written there is masked.
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device)
    except (OSError, ValueError) as error:
        heartbeat.fail(f"no model from the hub (one of train_fsdp.py needs --checkpoint): {error}")
    chat = tokenizer.chat_template is not None

    def as_chat(prompt: str) -> str:
        """The text that the model continues with its answer."""
        question = [{"role": "user", "content": prompt}]
        # Qwen3 would think first, and for longer than 100 tokens.
        options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        return tokenizer.apply_chat_template(question, **options)

    def answer(part: work_list.Part) -> list[dict[str, str]]:
        torch.manual_seed(part.first)
        texts = [as_chat(prompt) if chat else prompt for prompt in part.items]
        # A template has put the special tokens where they belong.
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not chat)
        written = model.generate(**inputs.to(device), max_new_tokens=args.length)
        written = written[:, inputs["input_ids"].size(1) :]
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        both = zip(part.items, texts, strict=True)
        return [{"prompt": prompt, "answer": text} for prompt, text in both]

    return answer


def from_checkpoint() -> Answer:
    """The function that answers a part's prompts, each from the seed of its line."""
    import checkpoint
    import token_files
    from transformer import Transformer

    path = Path(args.model)
    try:
        metadata = json.loads((path / "about.json").read_text())
    except (OSError, ValueError):
        there = ", ".join(f"step_{step}" for step in checkpoint.steps(path)) or "none"
        heartbeat.fail(f"{path} is no checkpoint. In this folder are: {there}")
    with torch.device("meta"):
        model = Transformer(metadata["config"])
    model.to_empty(device=device)
    model.tie()
    checkpoint.read(path, dict(model.named_parameters()))
    encode, decode = token_files.text_functions(metadata["tokenizer"], args.tokenizer)
    ends = token_files.end_tokens(metadata["config"], args.tokenizer)

    def line(prompt: str, seed: int) -> dict[str, str]:
        torch.manual_seed(seed)
        try:
            tokens = torch.tensor([encode(prompt)], device=device)
        except ValueError as error:
            return {"prompt": prompt, "error": str(error)}
        size = metadata["tokenizer"]["size"]
        written = model.generate(tokens, args.length, size, ends=ends)[0].tolist()
        written = written[tokens.size(1) :]
        if written and written[-1] in ends:
            written.pop()
        return {"prompt": prompt, "answer": decode(written)}

    def answer(part: work_list.Part) -> list[dict[str, str]]:
        return [line(prompt, number) for number, prompt in enumerate(part.items, part.first)]

    return answer


def stop() -> bool:
    return preemption.received


try:
    # Not splitlines(), which also splits at form feeds.
    prompts = [prompt for prompt in args.prompts.read_text().split("\n") if prompt.strip()]
except (OSError, ValueError) as error:  # not there, or not UTF-8
    heartbeat.fail(f"{args.prompts}: {error}")
answer = from_checkpoint() if args.checkpoint else from_hub()
model, count = f"{args.model}, {args.length} tokens", 0
try:
    for part in work_list.parts(prompts, args.answers, args.part, stop=stop, model=model):
        part.write(answer(part))
        count += len(part.items)
except work_list.ListError as error:
    heartbeat.fail(str(error))

print(f"[Rank: {rank}] {count} answers of {args.model}", flush=True)
# Before a requeue all ranks have finished their parts.
if int(os.environ.get("WORLD_SIZE", 1)) > 1:
    dist.init_process_group("gloo")
preemption.end(preemption.asked("cpu"))
