"""Write text from a checkpoint of train_fsdp.py or train_tp.py, however many ranks wrote it.

    python distributed/sample.py checkpoints/JOB --length 500 --prompt "ROMEO:"

With --export it writes the model into a folder instead: model.pt for torch.load, with this
repository's names, and model.safetensors with config.json, which transformers reads as GPT-2.

    python distributed/sample.py checkpoints/JOB --export my-gpt2
"""

from pathlib import Path

from resilience.arguments import ArgumentParser, number, whole_number

parser = ArgumentParser(description=__doc__)
parser.add_argument("checkpoint_dir", type=Path, help="a run's folder; reads its newest checkpoint")
parser.add_argument("--length", type=whole_number(1), default=500, help="how many tokens to write")
parser.add_argument("--prompt", default="\n", help="the text to continue (default: a line break)")
parser.add_argument("--temperature", type=number(0), default=0.8, help="0 takes the likeliest")
help = "the data's tokenizer.json, if they use a Hugging Face tokenizer"
parser.add_argument("--tokenizer", type=Path, metavar="FILE", help=help)
parser.add_argument("--export", type=Path, metavar="FOLDER", help="write the model to this folder")
parser.add_argument("--seed", type=whole_number(0), default=0, help="seed of the drawn tokens")
help = "auto takes CUDA if there is a GPU"
parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help=help)
args = parser.parse_args()

import torch

import gpt2
import token_files
from recipe import initialize
from resilience.checkpoint_files import newest, read_manifest
from resilience.checkpoints import load_folder
from resilience.group import Group, device_fault
from resilience.ranks import find_ranks
from transformer import Transformer

ranks = find_ranks()
if ranks.world_size > 1:
    parser.error("takes one process: start it with python, without a launcher")
if fault := device_fault(args.device, ranks):
    parser.error(fault)
use_cuda = args.device != "cpu" and torch.cuda.is_available()
device = torch.device("cuda" if use_cuda else "cpu")

path = newest(args.checkpoint_dir, Group(ranks, device, timeout=60))
if path is None:
    parser.error(f"no whole checkpoint in {args.checkpoint_dir}")
metadata = read_manifest(path)
with torch.device("meta"):
    model = Transformer(**metadata["sizes"])
initialize(model, device, args.seed)
load_folder(path, model)

if args.export:
    args.export.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), **metadata}, args.export / "model.pt")
    try:
        gpt2.write(args.export, model)
    except ImportError:
        parser.error(f"{args.export} has model.pt only: pip install safetensors for the others")
    print(f"{path} is in {args.export}: model.pt, model.safetensors and config.json")
    raise SystemExit

try:
    encode, decode = token_files.text_functions(metadata["tokenizer"], args.tokenizer)
    prompt = torch.tensor([encode(args.prompt)], device=device)
except ValueError as error:
    parser.error(str(error))
torch.manual_seed(args.seed)
known = metadata["tokenizer"]["size"]
written = model.generate(prompt, args.length, known, args.temperature)[0].tolist()
print(f"Sample from {path}:", decode(written), sep="\n")
