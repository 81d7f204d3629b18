"""Write text from a checkpoint of train_fsdp.py or train_tp.py, however many ranks wrote it.

    python distributed/sample.py checkpoints/JOB --length 500 --prompt "ROMEO:"

With --export it writes the model into a folder instead: model.pt for torch.load, with this
repository's names, and model.safetensors with config.json, which transformers reads as GPT-2.

    python distributed/sample.py checkpoints/JOB --export my-gpt2
"""

import argparse
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import checkpoint
import gpt2
import token_files
from transformer import Transformer

text = argparse.RawDescriptionHelpFormatter
parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
parser.add_argument("checkpoint_dir", type=Path, help="a run's folder; reads its newest checkpoint")
parser.add_argument("--length", type=int, default=500, help="how many tokens to write")
parser.add_argument("--prompt", default="\n", help="the text to continue (default: a line break)")
parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
help = "the data's tokenizer.json, if they use a Hugging Face tokenizer"
parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=help)
parser.add_argument("--export", type=Path, metavar="FOLDER", help="write the model to this folder")
parser.add_argument("--seed", type=int, default=0, help="seed of the drawn tokens")
parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
args = parser.parse_args()

device = torch.device("cpu")
if args.device == "auto" and torch.accelerator.is_available():
    device = torch.accelerator.current_accelerator()
found = checkpoint.steps(args.checkpoint_dir)
if not found:
    sys.exit(f"no whole checkpoint in {args.checkpoint_dir}")
path = args.checkpoint_dir / f"step_{found[0]}"
try:
    about = json.loads((path / "about.json").read_text())
except (OSError, ValueError) as error:
    sys.exit(f"{path} cannot be read, move it away to take the one before: {error}")
with torch.device("meta"):
    model = Transformer(**about["sizes"])
model.to_empty(device=device)
model.tie()
# dcp warns that there is only this process.
warnings.filterwarnings("ignore", "torch.distributed is disabled")
try:
    dcp.load({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
except (Exception, dcp.CheckpointException) as error:
    what = f"{path} cannot be read, move it away to take the one before"
    sys.exit(f"{what}: {checkpoint.cause(error)}")

if args.export:
    args.export.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), **about}, args.export / "model.pt")
    try:
        gpt2.write(args.export, model)
    except ImportError:
        sys.exit(f"{args.export} has model.pt only: pip install safetensors for the others")
    print(f"{path} is in {args.export}: model.pt, model.safetensors and config.json")
    sys.exit()

try:
    encode, decode = token_files.text_functions(about["tokenizer"], args.tokenizer)
    prompt = torch.tensor([encode(args.prompt)], device=device)
except ValueError as error:
    sys.exit(str(error))
torch.manual_seed(args.seed)
known = about["tokenizer"]["size"]
written = model.generate(prompt, args.length, known, args.temperature)[0].tolist()
print(f"Sample from {path}:", decode(written), sep="\n")
