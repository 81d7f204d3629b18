"""Write text from a checkpoint of train_fsdp.py or train_tp.py, however many ranks wrote it.

python distributed/sample.py checkpoints/JOB --length 500 --prompt "ROMEO:"
"""

from pathlib import Path

from resilience.arguments import ArgumentParser, device_name, whole_number

parser = ArgumentParser(description=__doc__)
parser.add_argument("checkpoint_dir", type=Path, help="a run's folder: its newest checkpoint")
parser.add_argument("--length", type=whole_number(1), default=500, help="characters to write")
parser.add_argument("--prompt", default="\n", help="what they follow (default: a line break)")
parser.add_argument("--seed", type=whole_number(0), default=0, help="of what is drawn")
parser.add_argument("--device", type=device_name, default="auto", help="auto, cpu or cuda")
args = parser.parse_args()

import torch

from char_transformer import CharTransformer
from recipe import initialize
from resilience import sharded_checkpoints
from resilience.place import Place
from resilience.ranks import find_ranks
from resilience.step_zero import device_fault

ranks = find_ranks()
if ranks.world_size > 1:
    parser.error("takes one process: start it with python, without a launcher")
if fault := device_fault(args.device, ranks):
    parser.error(fault)
use_cuda = args.device != "cpu" and torch.cuda.is_available()
device = torch.device("cuda" if use_cuda else "cpu")

found = sharded_checkpoints.newest_folder(args.checkpoint_dir, Place(ranks, device, timeout=60))
if found is None:
    parser.error(f"no whole checkpoint in {args.checkpoint_dir} to sample from")
path, metadata = found
letters = metadata["characters"]
if unknown := set(args.prompt) - set(letters):
    parser.error(f"--prompt has {sorted(unknown)}, which are not among the characters of {path}")

with torch.device("meta"):
    model = CharTransformer(**metadata["sizes"])
initialize(model, device, args.seed)
sharded_checkpoints.load_folder(path, model)

torch.manual_seed(args.seed)
prompt = torch.tensor([[letters.index(letter) for letter in args.prompt]], device=device)
written = model.generate(prompt, args.length, len(letters))[0].tolist()
print(f"Sample from {path}:", "".join(letters[number] for number in written), sep="\n")
