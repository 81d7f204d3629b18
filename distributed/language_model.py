"""What train_fsdp.py and train_tp.py do alike, and is not what they teach: nanoGPT's recipe, precision, samples."""

import datetime
import math
from argparse import Namespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import characters
from char_transformer import CharTransformer
from resilience import checkpoint, sharded_checkpoint, step_zero


def limit_waiting(mesh: DeviceMesh | None, seconds: float):
    """Makes the groups of a mesh give up, too: what init_process_group was told does not hold for them."""
    for name in mesh.mesh_dim_names if mesh else ():
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), mesh.get_group(name))


def make_optimizer(args: Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW as nanoGPT sets it up. Fused: one kernel for a group's weights instead of a dozen for each weight."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.99), fused=True)


def learning_rate(args: Namespace, step: int) -> float:
    """Linear warm-up, then a cosine from the highest rate down to a tenth of it."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / (args.warmup_steps + 1)
    done = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def choose_precision(args: Namespace, device: torch.device, world_size: int) -> str:
    """ "bf16" where every rank's device is faster with it, else "fp32". A CPU is only with instructions for it.

    Those are AMX tiles or AVX512-BF16 (1.7 times as fast as float32 there: aux/bench/language_model.py).
    """
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        known = torch.cpu.get_capabilities() if device.type == "cpu" else {}
        fast = any(known.get(name, False) for name in ("amx_bf16", "avx512_bf16"))
    ranks = torch.tensor(float(fast), device=device)
    if world_size > 1:
        dist.all_reduce(ranks)
    return args.precision if args.precision != "auto" else "bf16" if ranks.item() == world_size else "fp32"


def identity(args: Namespace) -> dict:
    """What makes a run the same run when it is resumed, whatever the number of ranks and however the model is split."""
    names = "layers heads width context dropout batch_size steps learning_rate warmup_steps weight_decay clip"
    names += " seed precision"
    data = characters.read_vocabulary(args.data_dir)["sha256"][:12]
    return {name: vars(args)[name] for name in names.split()} | {"data": data}


def facts_of(args: Namespace) -> dict:
    """What every checkpoint says of its run, besides the step: enough to build the model again and to know the run."""
    facts = {"characters": characters.read_vocabulary(args.data_dir)["characters"], "val_loss": math.nan}
    facts["sizes"] = {name: getattr(args, name) for name in ("layers", "heads", "width", "context")}
    return facts | {"run": identity(args)}


def take_up(args: Namespace, rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, facts: dict) -> int:
    """Takes over the folder for checkpoints and, if --resume says so, goes on from the newest whole one. By all ranks.

    Returns the step it is of, or 0; its loss goes into `facts`. A checkpoint of another run ends all ranks.
    """
    checkpoint.take_over(args.checkpoint_dir, rank)
    step = 0
    if args.resume and (found := sharded_checkpoint.newest(args.checkpoint_dir)):
        path, before = found
        if fault := checkpoint.changes(args.checkpoint_dir, before["run"], facts["run"]):
            step_zero.stop(fault, rank, speak=rank == 0)
        sharded_checkpoint.load(path, model, optimizer)
        step, facts["val_loss"] = before["step"], before["val_loss"]
    elif args.resume and rank == 0 and (fault := checkpoint.lost(args.checkpoint_dir)):
        step_zero.stop(fault)
    if args.resume and rank == 0:
        print(f"Resumed after step {step}" if step else f"No whole checkpoint in {args.checkpoint_dir}", flush=True)
    return step


def sample(args: Namespace, device: torch.device):
    """Prints --sample characters from the newest checkpoint, in one process, however many ranks wrote it."""
    found = sharded_checkpoint.newest(args.checkpoint_dir)
    if found is None:
        step_zero.stop(f"no whole checkpoint in {args.checkpoint_dir} to sample from")
    path, facts = found
    if unknown := set(args.prompt) - set(facts["characters"]):
        step_zero.stop(f"--prompt has {sorted(unknown)}, of which {path} knows nothing")
    torch.manual_seed(args.seed)
    model = CharTransformer(len(facts["characters"]), **facts["sizes"]).to(device)
    sharded_checkpoint.load(path, model)
    prompt = torch.tensor([[facts["characters"].index(character) for character in args.prompt]], device=device)
    written = model.generate(prompt, args.sample)[0].tolist()
    print(f"Sample from {path}:", "".join(facts["characters"][number] for number in written), sep="\n")
