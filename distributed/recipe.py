"""nanoGPT's recipe: weight initialisation, optimizer, learning rate, precision and loss."""

import importlib.util
import math
import os
import shutil
import sysconfig
from argparse import Namespace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import gpt2
import token_files
from resilience.seeds import seed_from
from resilience.torch_private import compute_local_shape_and_global_offset
from transformer import Transformer


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile pays off: on CUDA, with all that Triton needs."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (7, 0):
        return False
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    # Triton compiles C against Python's headers.
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    return bool(importlib.util.find_spec("triton") and compiler and headers.exists())


def be_deterministic():
    """Makes sums come out the same every time. Variables that are set already stay as they are.

    Call it before the first use of CUDA or NCCL.
    """
    torch.use_deterministic_algorithms(True)
    # Otherwise cuBLAS chooses among algorithms that sum in different orders
    # (docs.pytorch.org/docs/stable/notes/randomness.html), and so does NCCL
    # (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NCCL_PROTO", "Simple")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def metadata_of(args: Namespace) -> dict:
    """The tokenizer and the sizes, which every checkpoint holds besides the weights: enough to
    rebuild the model and to turn its tokens into text."""
    tokenizer = token_files.read_vocabulary(args.data_dir)["tokenizer"]
    multiple = 64 if args.pad_vocabulary else 1
    sizes = {"vocabulary": math.ceil(tokenizer["size"] / multiple) * multiple}
    sizes |= {name: vars(args)[name] for name in ("layers", "heads", "width", "context")}
    if args.init_from:
        sizes |= {"vocabulary": args.vocabulary, "gpt2": True}
    return {"tokenizer": tokenizer, "sizes": sizes}


@torch.no_grad()
def initialize(
    model: Transformer, device: torch.device, seed: int, init_from: Path | None = None
) -> Transformer:
    """Allocates this rank's part of a model on `device`, and draws its weights as GPT-2 does, or
    reads them from a Hugging Face folder.

    They depend only on `seed` and their names, not on the ranks or the split. Each is made whole on
    the CPU, one at a time, and this rank's part is copied, so the device never holds more.
    """
    given = gpt2.Weights(init_from, model) if init_from else None
    model.to_empty(device=device)
    model.tie()  # to_empty made two weights out of one
    # The more layers add to the residual stream, the less each is to add.
    residual = 0.02 / math.sqrt(2 * len(model.blocks))
    for name, weight in model.named_parameters():
        whole = torch.ones(weight.shape)  # a norm's weight
        if given:
            whole = given.read(name, weight.shape)
        elif weight.dim() >= 2:
            std = residual if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
            whole.normal_(std=std, generator=torch.Generator().manual_seed(seed_from(seed, name)))
        if isinstance(weight, DTensor):
            size, start = compute_local_shape_and_global_offset(
                weight.shape, weight.device_mesh, weight.placements
            )
            part = tuple(slice(i, i + count) for i, count in zip(start, size, strict=True))
            weight, whole = weight.to_local(), whole[part]
        weight.copy_(whole)
    return model


def make_optimizer(args: Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW as nanoGPT sets it up, with a learning rate of 0: the loop sets it before every step.

    Fused: one kernel for a group's weights instead of a dozen for each weight.
    """
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, args.beta2), fused=True)


def learning_rate(args: Namespace, step: int) -> float:
    """Linear warm-up, then a cosine from the highest rate down to a tenth of it. Steps count
    from 0."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / (args.warmup_steps + 1)
    done = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def clip_gradients(args: Namespace, model: torch.nn.Module) -> torch.Tensor:
    """Clips the gradient to the norm args.clip. Returns its norm before that."""
    weights = list(model.parameters())
    # A few kernels for all weights. With None torch chooses this by itself, but only on CUDA.
    foreach = True if weights[0].device.type == "cpu" else None
    return torch.nn.utils.clip_grad_norm_(weights, args.clip or math.inf, foreach=foreach)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, reduction="mean") -> torch.Tensor:
    """The loss in float32, of logits (B, T, V) and targets (B, T); those that are -100 do not
    count."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


def log_values(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> dict[str, float]:
    """For a log line: learning rate, norm of the gradient and, on CUDA, the most memory that this
    rank's tensors have taken so far, in GiB. All ranks call it together."""
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    values = {"learning_rate": optimizer.param_groups[0]["lr"], "grad_norm": norm.item()}
    if norm.device.type == "cuda":
        values["peak_memory_gib"] = torch.cuda.max_memory_allocated(norm.device) / 2**30
    return values


def run_of(args: Namespace) -> dict:
    """The values that a resumed run must share, whatever its ranks and however it is split."""
    names = ("layers", "heads", "width", "context", "dropout", "batch_size", "steps")
    names += ("learning_rate", "warmup_steps", "weight_decay", "clip", "seed", "precision")
    names += ("pad_vocabulary",)
    data = token_files.read_vocabulary(args.data_dir)["id"]
    return {name: vars(args)[name] for name in names} | {"data": data}
