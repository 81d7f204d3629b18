"""What train_fsdp.py and train_tp.py do alike, and is not what they teach: nanoGPT's recipe, precision, samples."""

import math
from argparse import Namespace

import torch
from torch.distributed.device_mesh import DeviceMesh

import characters
from char_transformer import CharTransformer
from resilience import sharded_checkpoints
from resilience.place import Place


def prepare(args: Namespace, place: Place, mesh: DeviceMesh | None):
    """Names the mesh's groups to `place`, chooses args.precision, and prints what the run is set to."""
    place.groups = [mesh.get_group(name) for name in mesh.mesh_dim_names] if mesh else []
    place.set_timeout(place.timeout)
    args.precision = choose_precision(args, place)
    if place.rank == 0:
        print(f"Data: {characters.describe(args.data_dir)}. Checkpoints: {args.checkpoint_dir}", flush=True)
        print(f"Precision: {args.precision}. Device mesh: {mesh}", flush=True)


def choose_precision(args: Namespace, place: Place) -> str:
    """ "bf16" where every rank's device is faster with it, else "fp32". A CPU is only with instructions for it.

    Those are AMX tiles or AVX512-BF16 (1.7 times as fast as float32 there: aux/bench/language_model.py).
    """
    if place.device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.8 and older have no such function
        known = capabilities if place.device.type == "cpu" else {}
        fast = any(known.get(name, False) for name in ("amx_bf16", "avx512_bf16"))
    [ranks] = place.all_reduced([fast])
    return args.precision if args.precision != "auto" else "bf16" if ranks == place.world_size else "fp32"


def autocast(args: Namespace, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")


def metadata_of(args: Namespace) -> dict:
    """What every checkpoint holds besides the weights, enough to build the model again: characters and sizes."""
    sizes = {name: getattr(args, name) for name in ("layers", "heads", "width", "context")}
    return {"characters": characters.read_vocabulary(args.data_dir)["characters"], "sizes": sizes}


def make_model(metadata: dict, dropout: float = 0.0) -> CharTransformer:
    return CharTransformer(len(metadata["characters"]), **metadata["sizes"], dropout=dropout)


def make_optimizer(args: Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW as nanoGPT sets it up. Fused: one kernel for a group's weights instead of a dozen for each weight."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.99), fused=True)


def learning_rate(args: Namespace, step: int) -> float:
    """Linear warm-up, then a cosine from the highest rate down to a tenth of it. Steps count from 0."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / (args.warmup_steps + 1)
    done = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def sample(args: Namespace, place: Place):
    """Prints --sample characters from the newest checkpoint, in one process, however many ranks wrote it."""
    found = sharded_checkpoints.newest(args.checkpoint_dir, place)
    if found is None:
        return place.stop(f"no whole checkpoint in {args.checkpoint_dir} to sample from")
    path, metadata = found
    if unknown := set(args.prompt) - set(metadata["characters"]):
        place.stop(f"--prompt has {sorted(unknown)}, which are not among the characters of {path}")
    torch.manual_seed(args.seed)
    model = make_model(metadata).to(place.device)
    sharded_checkpoints.load(path, place, model)
    prompt = torch.tensor([[metadata["characters"].index(letter) for letter in args.prompt]], device=place.device)
    written = model.generate(prompt, args.sample)[0].tolist()
    print(f"Sample from {path}:", "".join(metadata["characters"][number] for number in written), sep="\n")
