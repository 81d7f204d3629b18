"""Train a character-level transformer with FSDP2 (fully_shard): no rank holds more than its part of the model.

    python aux/prepare_data.py shakespeare                # once, before any job
    python distributed/train_fsdp.py                      # one process: CUDA, Apple's MPS or the CPU
    ./torchrun.sh distributed/train_fsdp.py --size gpu    # all GPUs of this machine, or two CPU ranks
    sbatch launch_slurm_to_torch.sh distributed/train_fsdp.py --hybrid
    python distributed/train_fsdp.py --sample 500 --checkpoint-dir checkpoints/JOB

Settings and result are nanoGPT's (github.com/karpathy/nanoGPT): on Tiny Shakespeare a validation loss of 1.88 for
--size cpu, minutes on two cores, and 1.47 for --size gpu. On any number of ranks the steps are the unsplit model's.
"""

import datetime
import math
import os
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator

from language_model_arguments import LanguageModelParser, divisors
from resilience import stop_request
from resilience.arguments import uneven, whole_number

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = LanguageModelParser(description=__doc__)
    help = "shard inside a node (or among RANKS neighbours in it), replicate beyond"
    parser.add_argument("--hybrid", type=whole_number(1), nargs="?", const=0, metavar="RANKS", help=help)
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()  # before torch: a typing mistake costs no second
    stop_request.listen()

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import characters
from char_transformer import CharTransformer, peak_flops
from language_model import choose_precision, facts_of, learning_rate, limit_waiting, make_optimizer, sample, take_up
from resilience import checkpoint, heartbeat, sharded_checkpoint, step_zero
from resilience.progress import Progress

# --- process group ----------------------------------------------------------------------------------------------------


def find_ranks() -> tuple[str, int, int, int]:
    """Who started this process, and its place: (launcher, rank, local_rank, world_size)."""
    env = os.environ
    # Children of torchrun and spawn_ranks.py inherit Slurm's variables, so their own marks are looked at first. The
    # batch shell has SLURM_PROCID, too, always 0: ranks exist only in a step that srun numbers, not in one near 2**32.
    if "TORCHELASTIC_RUN_ID" in env or "SPAWN_RANKS" in env:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "mp"
    elif "SLURM_PROCID" in env and int(env.get("SLURM_STEP_ID", 2**32)) < 2**31:
        if "MASTER_ADDR" not in env:  # `srun python train_ddp.py`, typed by hand
            hosts = subprocess.run(["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]], capture_output=True)
            env["MASTER_ADDR"] = hosts.stdout.decode().split("\n")[0]
        job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
        env.setdefault("MASTER_PORT", str(61000 + (job + 1009 * step) % 4536))
        if "OMP_NUM_THREADS" not in env:
            torch.set_num_threads(int(env.get("SLURM_CPUS_PER_TASK", 1)))  # else every rank would use the whole node
        return "srun", int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), int(env["SLURM_NTASKS"])
    elif all(name in env for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        launcher = "environment"
    else:
        return "none", 0, 0, 1
    return launcher, int(env["RANK"]), int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"])


def init_process_group(args: Namespace, fault: str | None = None, **facts) -> tuple[int, int, torch.device]:
    """Finds this rank's place, meets the others, prints Step 0 (with `facts`) and starts NCCL or gloo.

    Returns (rank, world_size, device). A fault on any rank stops all of them, with one sentence.
    """
    launcher, rank, local_rank, world_size = find_ranks()
    store = step_zero.meet(launcher, rank, local_rank, world_size, datetime.timedelta(seconds=args.init_timeout))
    device, device_fault = step_zero.choose_device(args.device, local_rank, world_size)
    facts = {"world size": world_size, "local rank": local_rank, "device": str(device), "launcher": launcher, **facts}
    step_zero.check(store, rank, world_size, device, facts, device_fault or fault)
    if world_size > 1:
        backend, timeout = "nccl" if device.type == "cuda" else "gloo", datetime.timedelta(seconds=args.timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        assert dist.get_world_size() == world_size
        heartbeat.start(rank, world_size, args.timeout)
    return rank, world_size, device


# --- device mesh ------------------------------------------------------------------------------------------------------


def ranks_per_copy(args: Namespace, world_size: int) -> int:
    """How many neighbouring ranks hold one copy of the model between them."""
    if args.hybrid != 0:  # None: all of them share one copy
        return args.hybrid or world_size
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size // nodes))  # torchrun and spawn_ranks.py set it, srun not


def bad_sizes(args: Namespace, rank: int, local_rank: int, world_size: int) -> str | None:
    """What cannot be split evenly, with the values that could, in one sentence; or None."""
    copy = ranks_per_copy(args, world_size)
    if world_size % copy:
        return f"--hybrid {copy} does not divide the {world_size} ranks: {divisors(world_size)} would do"
    if args.hybrid is not None and local_rank < rank % copy:
        return f"--hybrid: {copy} neighbouring ranks are not all on this node; use as many ranks on every node"
    share = f"{world_size} ranks x --accumulation {args.accumulation}"
    return uneven("--batch-size", args.batch_size, world_size * args.accumulation, share)


def step_zero_facts(args: Namespace) -> dict[str, str]:
    """What the Step 0 table shows of this rank besides."""
    _, rank, _, world_size = find_ranks()
    copy = ranks_per_copy(args, world_size)
    return {"model sharded over": f"ranks {rank - rank % copy} to {rank - rank % copy + copy - 1}"}


def make_mesh(args: Namespace, device: torch.device, world_size: int) -> DeviceMesh | None:
    """The ranks as fully_shard sees them: the last dimension shards, and the first of two replicates."""
    copy = ranks_per_copy(args, world_size)
    if world_size == 1:
        return None
    if copy == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (world_size // copy, copy), mesh_dim_names=("replicate", "shard"))


def data_place(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Which of how many parts of a batch is this rank's."""
    return (mesh.get_rank(), mesh.size()) if mesh else (0, 1)


def dropout_place(args: Namespace, mesh: DeviceMesh | None) -> int:
    """Ranks with the same number drop the same activations: here no two do."""
    return mesh.get_rank() if mesh else 0


# --- data -------------------------------------------------------------------------------------------------------------


def draw_batch(args, windows, step: int, data_rank: int, data_ranks: int, device: torch.device) -> torch.Tensor:
    """This rank's sequences of a step, (batch_size / data_ranks, context + 1) int64: input and, one on, target.

    All ranks draw the whole batch, from seed and step alone, and take their part of it: the order of the data depends
    neither on the number of ranks nor on a restart.
    """
    generator = torch.Generator().manual_seed(checkpoint.seed_from(args.seed, step))
    starts = torch.randint(len(windows), (args.batch_size,), generator=generator)
    return characters.read(windows, starts.chunk(data_ranks)[data_rank], device)


# --- model ------------------------------------------------------------------------------------------------------------


def autocast(args: Namespace, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")


def split(args: Namespace, model: CharTransformer, mesh: DeviceMesh | None):
    """Leaves this rank its part of every weight; the whole ones of a block are there only while it computes.

    Each fully_shard is one all-gather before its part of the model computes, forward and backward, and one
    reduce-scatter of its gradients: one set of them per block, and one for what the root has besides (FSDP2:
    docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html).
    """
    for block in model.blocks:
        block.recompute = args.activation_checkpointing
    for part in model.blocks if mesh else [model]:
        if args.compile:
            part.compile()
    if mesh:
        dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy)


# --- steps ------------------------------------------------------------------------------------------------------------


def all_reduced(values: torch.Tensor, world_size: int) -> list[float]:
    """The sums of `values` over all ranks."""
    if world_size > 1:
        dist.all_reduce(values)
    return values.tolist()


def train_step(args, step: int, model, optimizer, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Trains on this rank's sequences (n, context + 1). Returns their average loss and the norm of the whole gradient.

    Gradients are averaged over the ranks; their shares are equally large, so that is the mean over all tokens.
    """
    loss_sum = torch.zeros((), device=batch.device)
    for part, tokens in enumerate(batch.chunk(args.accumulation), start=1):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(part == args.accumulation)  # reduced once a step, with the last part
        with autocast(args, batch.device):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / args.accumulation
        loss.backward()
        loss_sum += loss.detach()
    foreach = batch.device.type == "cpu" or None  # a few kernels for all weights; elsewhere torch does so by itself
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf, foreach=foreach)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(args, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum, norm


@torch.no_grad()
def evaluate(args, model, batches: Iterator[torch.Tensor], world_size: int, device: torch.device) -> float:
    """Average loss in nats per character over the fixed set, every character counted once."""
    model.eval()
    sums = torch.zeros(2, device=device)  # loss, characters
    for tokens, targets in batches:
        with autocast(args, device):
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        sums += torch.stack((loss, (targets >= 0).sum()))
    model.train()
    loss, count = all_reduced(sums, world_size)
    return loss / count


# --- main -------------------------------------------------------------------------------------------------------------


def find_fault(args: Namespace) -> str | None:
    """What is wrong with the arguments or the files on this node, in one sentence, or None."""
    _, rank, local_rank, world_size = find_ranks()
    if args.sample:
        return "--sample takes one process: start it with python, without a launcher" if world_size > 1 else None
    fault = characters.missing_data(args.data_dir, args.context) or bad_sizes(args, rank, local_rank, world_size)
    return fault or checkpoint.in_the_way(args.checkpoint_dir, args.resume, "")


def main(args: Namespace):
    rank, world_size, device = init_process_group(args, find_fault(args), **step_zero_facts(args))
    if args.sample:
        return sample(args, device)
    mesh = make_mesh(args, device, world_size)
    limit_waiting(mesh, args.timeout)
    data_rank, data_ranks = data_place(mesh)
    args.precision = choose_precision(args, device, world_size)
    facts = facts_of(args)
    if rank == 0:
        print(f"Data: {characters.describe(args.data_dir)}. Checkpoints: {args.checkpoint_dir}", flush=True)
        print(f"Precision: {args.precision}. Device mesh: {mesh}", flush=True)

    torch.manual_seed(args.seed)  # the same weights on every rank, before they are split
    model = CharTransformer(len(facts["characters"]), **facts["sizes"], dropout=args.dropout).to(device)
    flops = model.flops_per_token(args.context) / (peak_flops(device) * world_size)  # a token's share of a second
    split(args, model, mesh)
    optimizer = make_optimizer(args, model)

    step, stop, saved = take_up(args, rank, model, optimizer, facts), False, True
    windows = characters.windows(args.data_dir, "train", args.context)
    progress = Progress(args.checkpoint_dir if rank == 0 else None, "tokens", step, args.steps)
    boundary = checkpoint.Boundary(args, step, rank, world_size, device)
    loss_sum, logged = torch.zeros((), device=device), step  # since the last log line; read only there
    while step < args.steps and not stop:
        if args.dropout:
            torch.manual_seed(checkpoint.seed_from(args.seed, step, dropout_place(args, mesh)))
        batch = draw_batch(args, windows, step, data_rank, data_ranks, device)
        loss, norm = train_step(args, step, model, optimizer, batch)
        loss_sum += loss
        step += 1
        epoch = step * args.batch_size * args.context // len(windows)
        if step % args.log_every == 0 or step == args.steps:
            [loss] = all_reduced(loss_sum.view(1), world_size)
            values = {"loss": loss / world_size / (step - logged)}
            values["grad_norm"] = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
            tokens = (step - logged) * args.batch_size * args.context
            if not math.isnan(flops):
                values["mfu"] = flops * tokens / (time.perf_counter() - progress.last_time)
            progress.step(step, epoch, tokens, learning_rate=learning_rate(args, step - 1), **values)
            loss_sum, logged = torch.zeros((), device=device), step
        if step % args.eval_every == 0 or step == args.steps:
            batches = characters.fixed_batches(args, data_rank, data_ranks, device)
            facts["val_loss"] = evaluate(args, model, batches, world_size, device)
            progress.epoch(step, epoch, val_loss=facts["val_loss"])
        save, stop = boundary(step)
        if save or step == args.steps:
            saved = sharded_checkpoint.save(args.checkpoint_dir, step, model, optimizer, facts, args.keep_checkpoints)
    checkpoint.finish(step, args.steps, saved, rank, f"step={step} val_loss={facts['val_loss']:.4f}")


if __name__ == "__main__":
    main(args)
    step_zero.leave()
