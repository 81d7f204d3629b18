"""What train_fsdp.py and train_tp.py do alike, and is not what they teach: nanoGPT's recipe,
precision, samples."""

import functools
import gc
import importlib.util
import math
import os
import shutil
import sysconfig
import timeit
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import characters
from char_transformer import CharTransformer
from resilience import sharded_checkpoints
from resilience.place import Place
from resilience.samplers import seed_from
from resilience.sharded_checkpoints import ShardedCheckpoints


def prepare(args: Namespace, place: Place, mesh: DeviceMesh | None):
    """Names the mesh's groups to `place`, chooses precision and compilation, and prints both."""
    place.groups = [mesh.get_group(name) for name in mesh.mesh_dim_names] if mesh else []
    place.set_timeout(place.timeout)
    args.precision, args.compile = choose_precision(args, place), choose_compile(args, place)
    if place.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, where a GPU has it
    gc.freeze()  # what is there by now stays
    gc.disable()  # main() collects, every --gc-every steps
    if place.rank == 0:
        print(
            f"Data: {characters.describe(args.data_dir)}. Checkpoints: {args.checkpoint_dir}",
            flush=True,
        )
        print(
            f"Precision: {args.precision}. Compiled: {args.compile}. Device mesh: {mesh}",
            flush=True,
        )


def choose_precision(args: Namespace, place: Place) -> str:
    """ "bf16" where every rank's device is faster with it, else "fp32"."""
    if place.device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = args.precision == "auto" and place.device.type == "cpu" and bfloat16_is_faster()
    [ranks] = place.all_reduced([fast])
    return (
        args.precision
        if args.precision != "auto"
        else "bf16"
        if ranks == place.world_size
        else "fp32"
    )


def bfloat16_is_faster() -> bool:
    """Of this CPU, measured by a product of matrices: with AVX512-BF16 some CPUs take half of
    float32's time for it, others twice."""
    matrices = [torch.ones(512, 512, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    fp32, bf16 = (
        min(timeit.repeat("x @ x", globals={"x": x}, number=1, repeat=10)) for x in matrices
    )
    return bf16 < 0.8 * fp32


def choose_compile(args: Namespace, place: Place) -> bool:
    """--compile or --no-compile; else where torch.compile pays at once, on CUDA with all that
    Triton needs."""
    if args.compile is not None:
        return args.compile
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(
        sysconfig.get_path("include", "posix_prefix"), "Python.h"
    ).exists()  # Triton compiles C against them
    able = (
        place.device.type == "cuda"
        and None not in (importlib.util.find_spec("triton"), compiler)
        and headers
    )
    able = able and torch.cuda.get_device_capability(place.device) >= (7, 0)  # Triton's least
    [ranks] = place.all_reduced([able])
    return ranks == place.world_size


def autocast(args: Namespace, model: torch.nn.Module, device: torch.device) -> torch.autocast:
    """bfloat16 by autocast, unless FSDP has split the model: its MixedPrecisionPolicy does the
    casts then."""
    return torch.autocast(
        device.type, torch.bfloat16, args.precision == "bf16" and not isinstance(model, FSDPModule)
    )


def cross_entropy(
    args: Namespace, logits: torch.Tensor, targets: torch.Tensor, reduction="mean"
) -> torch.Tensor:
    """The loss in float32, of logits (B, T, V) and targets (B, T); those that are -100 do not
    count.

    Compiled with --compile, but not of logits that are split over V: torch 2.13 takes ranks with
    parts of unequal length for equal, and what it has compiled for one of them out of its cache
    for another.
    """
    return loss_function(bool(args.compile) and not isinstance(logits, DTensor))(
        logits, targets, reduction
    )


@functools.cache
def loss_function(compiled: bool) -> Callable:
    def loss(logits, targets, reduction):
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)

    return torch.compile(loss) if compiled else loss


def log_values(
    args: Namespace, step: int, norm: torch.Tensor, device: torch.device
) -> dict[str, float]:
    """For the log line of a step, which counts from 0: its learning rate and the norm of its
    gradient. By all ranks."""
    norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
    return {"learning_rate": learning_rate(args, step), "grad_norm": norm, **peak_memory(device)}


def peak_memory(device: torch.device) -> dict[str, float]:
    """For a log line on CUDA: the most that this rank's tensors have taken so far, in GiB."""
    return (
        {"peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30}
        if device.type == "cuda"
        else {}
    )


def metadata_of(args: Namespace) -> dict:
    """What every checkpoint holds besides the weights, enough to build the model again:
    characters and sizes."""
    known = characters.read_vocabulary(args.data_dir)["characters"]
    multiple = 64 if args.pad_vocabulary else 1
    sizes = {"vocabulary": math.ceil(len(known) / multiple) * multiple}
    sizes |= {name: getattr(args, name) for name in ("layers", "heads", "width", "context")}
    return {"characters": known, "sizes": sizes}


def make_model(metadata: dict, dropout: float = 0.0) -> CharTransformer:
    """The model on the meta device, without memory. It is split there, if at all; then comes
    `initialize`."""
    with torch.device("meta"):
        return CharTransformer(**metadata["sizes"], dropout=dropout)


@torch.no_grad()
def initialize(model: CharTransformer, device: torch.device, seed: int) -> CharTransformer:
    """Allocates this rank's part of a model on `device`, and draws its weights as GPT-2 does.

    They depend on `seed` and their names alone, not on the ranks or the split. Each is drawn
    whole on the CPU, one at a time, and this rank's part of it is copied: the device never has
    more than that.
    """
    model.to_empty(device=device)
    model.tie()  # to_empty has made two weights of the one
    # The more layers add to the residual stream, the smaller.
    residual = 0.02 / math.sqrt(2 * len(model.blocks))
    for name, weight in model.named_parameters():
        whole = torch.ones(weight.shape)  # of a norm
        if weight.dim() >= 2:
            std = residual if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
            whole.normal_(std=std, generator=torch.Generator().manual_seed(seed_from(seed, name)))
        if isinstance(weight, DTensor):
            size, start = compute_local_shape_and_global_offset(
                weight.shape, weight.device_mesh, weight.placements
            )
            part = tuple(
                slice(first, first + count) for first, count in zip(start, size, strict=True)
            )
            weight, whole = weight.to_local(), whole[part]
        weight.copy_(whole)
    return model


def make_optimizer(args: Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW as nanoGPT sets it up. Fused: one kernel for a group's weights instead of a dozen
    for each weight."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.99), fused=True)


def learning_rate(args: Namespace, step: int) -> float:
    """Linear warm-up, then a cosine from the highest rate down to a tenth of it. Steps count
    from 0."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / (args.warmup_steps + 1)
    done = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def open_checkpoints(args: Namespace, place: Place) -> ShardedCheckpoints:
    """Those of this run: equal in the following, whatever the number of ranks and however the
    model is split."""
    names = (
        "layers heads width context dropout batch_size steps learning_rate warmup_steps "
        "weight_decay clip"
    )
    names += " seed precision pad_vocabulary"
    data = characters.read_vocabulary(args.data_dir)["sha256"][:12]
    run = {name: vars(args)[name] for name in names.split()} | {"data": data}
    return ShardedCheckpoints(args, place, run, args.steps)


def sample(args: Namespace, place: Place):
    """Prints --sample characters from the newest checkpoint, in one process, however many ranks
    wrote it."""
    found = sharded_checkpoints.newest_folder(args.checkpoint_dir, place)
    if found is None:
        return place.stop(f"no whole checkpoint in {args.checkpoint_dir} to sample from")
    path, metadata = found
    if unknown := set(args.prompt) - set(metadata["characters"]):
        place.stop(f"--prompt has {sorted(unknown)}, which are not among the characters of {path}")
    model = initialize(make_model(metadata), place.device, args.seed)
    sharded_checkpoints.load_folder(path, model)
    prompt = torch.tensor(
        [[metadata["characters"].index(letter) for letter in args.prompt]], device=place.device
    )
    torch.manual_seed(args.seed)
    written = model.generate(prompt, args.sample, len(metadata["characters"]))[0].tolist()
    print(
        f"Sample from {path}:",
        "".join(metadata["characters"][number] for number in written),
        sep="\n",
    )
