"""Write text from a checkpoint of train_fsdp.py, however many ranks wrote it.

    python aux/sample.py checkpoints/JOB --length 500 --prompt "ROMEO:"

With --export it writes the model into a folder instead, for transformers and vLLM: safetensors,
config.json, and the tokenizer with all that lies beside it. It holds one weight at a time.

    python aux/sample.py checkpoints/JOB --export my-model --tokenizer qwen/tokenizer.json
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))
import checkpoint
import hugging_face
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
path, metadata = checkpoint.newest(args.checkpoint_dir)
if "config" not in metadata:
    sys.exit(f"{path} is not of this version's train_fsdp.py")
with torch.device("meta"):
    model = Transformer(metadata["config"])


def value_of(name: str) -> torch.Tensor:
    value = torch.empty(model.get_parameter(name).shape)
    checkpoint.read(path, {name: value})
    return value


if args.export:
    if args.export.exists():
        sys.exit(f"{args.export} exists: choose another folder")
    like = args.tokenizer.parent if args.tokenizer else None
    try:
        hugging_face.write(args.export, model, value_of, like)
    except ValueError as error:
        sys.exit(f"{like}: {error}")
    print(f"{path} is in {args.export}")
    sys.exit()
model.to_empty(device=device)
model.tie()
checkpoint.read(path, dict(model.named_parameters()))

encode, decode = token_files.text_functions(metadata["tokenizer"], args.tokenizer)
try:
    prompt = torch.tensor([encode(args.prompt)], device=device)
except ValueError as error:
    sys.exit(str(error))
torch.manual_seed(args.seed)
vocab_size = metadata["tokenizer"]["size"]
written = model.generate(prompt, args.length, vocab_size, args.temperature)[0].tolist()
print(f"Sample from {path}:", decode(written), sep="\n")
