"""The arguments of train_fsdp.py and train_tp.py, without torch, so that errors come at once."""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
from pathlib import Path

from resilience.arguments import ArgumentParser, number, whole_number

# nanoGPT's, except the small model's learning rate: with 2e-3 instead of 1e-3 it learns more.
CPU = {"layers": 4, "heads": 4, "width": 128, "context": 64, "dropout": 0.0}
CPU |= {"batch_size": 12, "steps": 2000, "learning_rate": 2e-3, "warmup_steps": 100, "beta2": 0.99}
CPU |= {"pad_vocabulary": False}
GPU = {"layers": 6, "heads": 6, "width": 384, "context": 256, "dropout": 0.2}
GPU |= {"batch_size": 64, "steps": 5000, "learning_rate": 1e-3, "warmup_steps": 100, "beta2": 0.99}
GPU |= {"pad_vocabulary": False}
GPT2 = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "dropout": 0.0}
GPT2 |= {"batch_size": 480, "steps": 600_000, "learning_rate": 6e-4}
GPT2 |= {"warmup_steps": 2000, "beta2": 0.95, "pad_vocabulary": True}
# Learning rates and batch sizes of GPT-3's models (arxiv.org/abs/2005.14165, table 2.1)
MEDIUM = GPT2 | {"layers": 24, "heads": 16, "width": 1024, "learning_rate": 3e-4}
ONE_B = GPT2 | {"layers": 24, "heads": 16, "width": 2048, "context": 2048, "learning_rate": 2e-4}
ONE_B |= {"batch_size": 512, "steps": 286_000}
SIZES = {"cpu": CPU, "gpu": GPU, "gpt2": GPT2, "gpt2-medium": MEDIUM, "1b": ONE_B}

SIZED = {
    "layers": (whole_number(1), "how many transformer blocks the model has"),
    "heads": (whole_number(1), "how many attention heads a block has, a divisor of --width"),
    "width": (whole_number(1), "how many channels there are between the layers"),
    "context": (whole_number(1), "how many tokens the model sees at once"),
    "dropout": (number(0, below=1), "which share of the activations to set to 0"),
    "batch_size": (whole_number(1), "how many sequences a step has, over all ranks"),
    "steps": (whole_number(1), "how many steps to train; the learning rate falls until the last"),
    "learning_rate": (number(0), "the highest learning rate"),
    "warmup_steps": (whole_number(0), "in how many steps the learning rate rises"),
    "beta2": (number(0, below=1), "momentum of the squared gradients in AdamW"),
}


def add_recipe_arguments(parser: ArgumentParser):
    """Model, recipe, data and devices, and how often the run logs, validates and saves."""
    add, count, positive = parser.add_argument, whole_number(0), whole_number(1)
    help = "set the defaults of the next ten options, whose help lists them in this order"
    add("--size", choices=SIZES, default="cpu", help=help)
    for name, (kind, help) in SIZED.items():
        help += f"; by --size: {', '.join(str(size[name]) for size in SIZES.values())}"
        add(f"--{name.replace('_', '-')}", type=kind, help=help)
    help = "start from a GPT-2: config.json and model.safetensors as transformers saves them"
    add("--init-from", type=Path, metavar="FOLDER", help=help)
    help = "compute a rank's share in so many parts: less memory for activations, but each part "
    help += "adds communication (with FSDP from half a billion weights on)"
    add("--accumulation", type=positive, default=1, help=help)
    add("--weight-decay", type=number(0), default=0.1, help="of matrices; vectors have none")
    add("--clip", type=number(0), default=1.0, help="the gradient's largest norm; 0: no limit")
    help = "compute activations again in the backward pass: less memory, a third more computation"
    add("--activation-checkpointing", action="store_true", help=help)
    help = "use torch.compile (default: on CUDA with Triton and a C compiler)"
    add("--compile", action=argparse.BooleanOptionalAction, help=help)
    help = "add tokens that never occur, up to a multiple of 64: faster matmuls on GPUs (default "
    help += "from --size gpt2 on)"
    add("--pad-vocabulary", action=argparse.BooleanOptionalAction, help=help)
    help = "compute matmuls in this dtype (default: bf16 on CUDA, fp32 on a CPU)"
    add("--precision", choices=["fp32", "bf16"], help=help)
    add("--seed", type=count, default=0, help="seed of weights, windows and dropout")
    help = "auto takes CUDA if there is a GPU"
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help=help)
    help = "where aux/prepare_data.py wrote the token files"
    add("--data-dir", type=Path, default="data/shakespeare", help=help)
    steps = {"type": positive, "metavar": "STEPS"}
    add("--log-every", default=50, help="log after so many steps", **steps)
    add("--eval-every", default=250, help="validate after so many steps", **steps)
    add("--eval-windows", type=count, default=500, help="validate on so many; 0: on all")
    parser.add_checkpoint_arguments()
    parser.add_timeout_arguments()


def parse_arguments(parser: ArgumentParser) -> argparse.Namespace:
    """Fills in what depends on --size. Stops with a sentence on an old torch, or on bad heads."""
    args = parser.parse_args()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a torch in PYTHONPATH
        version = importlib.metadata.version("torch")
        if tuple(int(part) for part in version.split(".")[:2]) < (2, 9):
            remedy = "take a newer torch, or a newer image"
            parser.error(f"needs torch 2.9 or newer, and this is {version}: {remedy}")
    if args.init_from:
        try:
            sizes_of_gpt2(args)
        except (OSError, ValueError, KeyError) as error:
            parser.error(f"--init-from {args.init_from} is not a GPT-2 to start from: {error}")
    for name, value in SIZES[args.size].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.width % args.heads:
        would_do = f"{divisors(args.width)} would do"
        parser.error(f"--heads {args.heads} does not divide --width {args.width}: {would_do}")
    return args


def sizes_of_gpt2(args: argparse.Namespace):
    """Takes the sizes from config.json. Raises OSError, ValueError or KeyError."""
    config = json.loads((args.init_from / "config.json").read_text())
    if config["model_type"] != "gpt2" or config["activation_function"] != "gelu_new":
        raise ValueError("config.json describes a different model")
    if not importlib.util.find_spec("safetensors"):
        raise ValueError("it needs the package safetensors: pip install safetensors")
    if not (args.init_from / "model.safetensors").exists():
        raise ValueError("it has no model.safetensors")
    args.vocabulary, args.context = config["vocab_size"], args.context or config["n_positions"]
    if args.context > config["n_positions"]:
        raise ValueError(f"--context {args.context} is beyond its {config['n_positions']}")
    args.layers, args.heads, args.width = config["n_layer"], config["n_head"], config["n_embd"]
    described = Path(args.data_dir, "vocabulary.json")
    if described.exists():
        size = json.loads(described.read_text())["tokenizer"]["size"]
        if size > args.vocabulary:
            raise ValueError(f"it knows {args.vocabulary} tokens, but {args.data_dir} has {size}")


def divisors(number: int) -> str:
    """The values that would do, for people: divisors(12) is "1, 2, 3, 4, 6 or 12"."""
    found = [str(i) for i in range(1, number + 1) if number % i == 0]
    return " or ".join(", ".join(found).rsplit(", ", 1))
