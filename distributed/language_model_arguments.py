"""The arguments that train_fsdp.py and train_tp.py have in common, and what follows from one
another. Without torch."""

import contextlib
import importlib.metadata
import os
from argparse import BooleanOptionalAction, Namespace
from pathlib import Path

from resilience.arguments import ArgumentParser, device_name, number, whole_number

# nanoGPT's, except the small model's learning rate, 1e-3 there: with 2e-3 it learns more.
SIZES = {
    "cpu": dict(
        layers=4,
        heads=4,
        width=128,
        context=64,
        dropout=0.0,
        batch_size=12,
        steps=2000,
        learning_rate=2e-3,
    ),
    "gpu": dict(
        layers=6,
        heads=6,
        width=384,
        context=256,
        dropout=0.2,
        batch_size=64,
        steps=5000,
        learning_rate=1e-3,
    ),
}


def either(name: str, what: str) -> str:
    """The help for an argument whose default depends on --size."""
    return f"{what} (default: {SIZES['cpu'][name]}, or {SIZES['gpu'][name]} for --size gpu)"


class LanguageModelParser(ArgumentParser):
    """A script adds what is its own; `parse_args` fills in the size's values and refuses what
    cannot be."""

    def __init__(self, **options):
        super().__init__(**options)
        self.add_argument(
            "--size", choices=SIZES, default="cpu", help="which defaults the next eight have"
        )
        self.add_argument(
            "--layers", type=whole_number(1), help=either("layers", "blocks of attention and MLP")
        )
        self.add_argument(
            "--heads",
            type=whole_number(1),
            help=either("heads", "of attention, a divisor of --width"),
        )
        self.add_argument(
            "--width", type=whole_number(1), help=either("width", "channels between the layers")
        )
        self.add_argument(
            "--context",
            type=whole_number(1),
            help=either("context", "characters that it looks back on"),
        )
        self.add_argument(
            "--dropout",
            type=number(0, below=1),
            help=either("dropout", "share of activations dropped"),
        )
        self.add_argument(
            "--batch-size",
            type=whole_number(1),
            help=either("batch_size", "sequences over all ranks"),
        )
        self.add_argument(
            "--steps",
            type=whole_number(1),
            help=either("steps", "the learning rate falls to the last"),
        )
        self.add_argument(
            "--learning-rate",
            type=number(0),
            help=either("learning_rate", "the highest of all steps"),
        )
        help = (
            "parts in which a rank does its share: activations of one at a time, and with FSDP a "
            "reduce-scatter each"
        )
        self.add_argument("--accumulation", type=whole_number(1), default=1, help=help)
        self.add_argument(
            "--warmup-steps",
            type=whole_number(0),
            default=100,
            help="in which the learning rate rises",
        )
        self.add_argument(
            "--weight-decay", type=number(0), default=0.1, help="of matrices; vectors have none"
        )
        self.add_argument(
            "--clip", type=number(0), default=1.0, help="greatest norm of the gradient, 0: any"
        )
        self.add_argument(
            "--activation-checkpointing",
            action="store_true",
            help="less memory, a third more computing",
        )
        help = (
            "torch.compile: pays after some 1,000 steps on a CPU (default: on CUDA with Triton and "
            "a C compiler)"
        )
        self.add_argument("--compile", action=BooleanOptionalAction, help=help)
        help = (
            "add characters that never occur, up to a multiple of 64: GPUs multiply such matrices "
            "faster"
        )
        self.add_argument("--pad-vocabulary", action="store_true", help=help)
        self.add_argument(
            "--precision",
            choices=("auto", "fp32", "bf16"),
            default="auto",
            help="auto: bf16 where fast",
        )
        self.add_argument(
            "--seed", type=whole_number(0), default=0, help="of weights, windows and dropout"
        )
        device = os.environ.get("TRAIN_DEVICE", "auto")
        self.add_argument(
            "--device", type=device_name, default=device, help="auto, cpu or cuda; or TRAIN_DEVICE"
        )
        self.add_argument(
            "--data-dir", type=Path, default="data/shakespeare", help="of aux/prepare_data.py"
        )
        steps = {"type": whole_number(1), "metavar": "STEPS"}
        self.add_argument("--log-every", default=50, help="from log line to log line", **steps)
        self.add_argument(
            "--eval-every", default=250, help="between two validation losses", **steps
        )
        self.add_argument(
            "--gc-every", default=50, help="between two of Python's garbage collections", **steps
        )
        help = "stretches of text to validate on, 0: all"
        self.add_argument("--eval-windows", type=whole_number(0), default=500, help=help)
        self.add_argument(
            "--sample",
            type=whole_number(1),
            metavar="N",
            help="write N characters from a checkpoint",
        )
        self.add_argument(
            "--prompt", default="\n", help="what the sample begins with (default: a line break)"
        )
        self.add_checkpoint_arguments()
        self.add_timeout_arguments()

    def parse_args(self) -> Namespace:
        args = super().parse_args()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a torch in PYTHONPATH
            # Importing torch would take seconds. NVIDIA's is 2.10.0a0+f70bd71a48.nv24.06.
            version = importlib.metadata.version("torch")
            if tuple(int(part) for part in version.split(".")[:2]) < (2, 9):
                self.error(
                    f"needs torch 2.9 or newer, and this is {version}: take a newer torch, or a "
                    "newer image"
                )
        for name, value in SIZES[args.size].items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        if args.width % args.heads:
            self.error(
                f"--heads {args.heads} does not divide --width {args.width}: "
                f"{divisors(args.width)} would do"
            )
        return args


def divisors(number: int) -> str:
    """The values that would do, for people: divisors(12) is "1, 2, 3, 4, 6 or 12"."""
    return " or ".join(
        ", ".join(str(i) for i in range(1, number + 1) if number % i == 0).rsplit(", ", 1)
    )
