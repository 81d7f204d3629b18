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
    "layers": (whole_number(1), "transformer blocks"),
    "heads": (whole_number(1), "attention heads, a divisor of --width"),
    "width": (whole_number(1), "channels between the layers"),
    "context": (whole_number(1), "tokens that the model sees at once"),
    "dropout": (number(0, below=1), "share of the activations that are set to 0"),
    "batch_size": (whole_number(1), "sequences per step, over all ranks"),
    "steps": (whole_number(1), "training steps; the learning rate falls until the last one"),
    "learning_rate": (number(0), "highest learning rate"),
    "warmup_steps": (whole_number(0), "steps in which the learning rate rises"),
    "beta2": (number(0, below=1), "AdamW's momentum of the squared gradients"),
}


def add_recipe_arguments(parser: ArgumentParser):
    add, count, positive = parser.add_argument, whole_number(0), whole_number(1)
    help = "sets the defaults of the next ten options, which show them in this order"
    add("--size", choices=SIZES, default="cpu", help=help)
    for name, (kind, help) in SIZED.items():
        help += f" ({', '.join(str(size[name]) for size in SIZES.values())})"
        add(f"--{name.replace('_', '-')}", type=kind, help=help)
    help = "start from a GPT-2: config.json and model.safetensors as transformers saves them"
    add("--init-from", type=Path, metavar="FOLDER", help=help)
    help = "parts of a rank's share, computed one after the other: less memory for activations, "
    help += "but each adds communication (with FSDP from half a billion weights on)"
    add("--accumulation", type=positive, default=1, help=help)
    add("--weight-decay", type=number(0), default=0.1, help="for matrices; vectors have none")
    add("--clip", type=number(0), default=1.0, help="largest norm of the gradient; 0 for no limit")
    help = "less memory for a third more computation"
    add("--activation-checkpointing", action="store_true", help=help)
    help = "torch.compile (default: on CUDA with Triton and a C compiler)"
    add("--compile", action=argparse.BooleanOptionalAction, help=help)
    help = "add tokens that never occur, up to a multiple of 64: faster matmuls on GPUs (default "
    help += "from --size gpt2 on)"
    add("--pad-vocabulary", action=argparse.BooleanOptionalAction, help=help)
    help = "dtype of the matmuls (default: bf16 on CUDA, fp32 on a CPU)"
    add("--precision", choices=["fp32", "bf16"], help=help)
    add("--seed", type=count, default=0, help="of weights, windows and dropout")
    help = "auto: CUDA if there is a GPU"
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help=help)
    help = "written by aux/prepare_data.py"
    add("--data-dir", type=Path, default="data/shakespeare", help=help)
    steps = {"type": positive, "metavar": "STEPS"}
    add("--log-every", default=50, help="steps between two log lines", **steps)
    add("--eval-every", default=250, help="steps between two validation losses", **steps)
    add("--eval-windows", type=count, default=500, help="windows to validate on; 0: all")
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
