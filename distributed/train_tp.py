"""Train a character-level transformer with tensor parallelism: every rank computes a part of every layer.

    python aux/prepare_data.py shakespeare                # once, before any job
    python distributed/train_tp.py                        # one process: CUDA, Apple's MPS or the CPU
    ./torchrun.sh distributed/train_tp.py --size gpu      # all GPUs of this machine, or two CPU ranks
    sbatch launch_slurm_to_torch.sh distributed/train_tp.py --tensor-parallel 2 --sequence-parallel

Every --tensor-parallel ranks hold one model between them and see the same sequences; such groups are replicas of each
other and share out the batch, with fully_shard over them. The scheme is Megatron-LM's (arxiv.org/abs/1909.08053), by
hand in tensor_parallel_by_hand.py. Checkpoints are those of train_fsdp.py: either script goes on from the other's.

Grown from distributed/train_fsdp.py: arguments, device mesh, model, steps.

    git diff --no-index distributed/train_fsdp.py distributed/train_tp.py
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
    help = "ranks that hold one model between them (default: 2, and 1 in one process alone)"
    parser.add_argument("--tensor-parallel", type=whole_number(1), metavar="RANKS", help=help)
    parser.add_argument("--sequence-parallel", action="store_true", help="split the tokens, too, between the linears")
    parser.add_argument("--across-nodes", action="store_true", help="let such a group span nodes: slow")
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
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import characters
from char_transformer import CharTransformer, peak_flops
from language_model import choose_precision, facts_of, learning_rate, limit_waiting, make_optimizer, sample, take_up
from parallel_plan import parallel_plan, sum_partial_gradients, whole
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


def group_size(args: Namespace, world_size: int) -> int:
    """How many neighbouring ranks are a tensor-parallel group."""
    return args.tensor_parallel or min(world_size, 2)


def bad_sizes(args: Namespace, rank: int, local_rank: int, world_size: int) -> str | None:
    """What cannot be split evenly, with the values that could, in one sentence; or None."""
    size, common = group_size(args, world_size), math.gcd(world_size, args.heads)
    if common % size:
        parts = f"{world_size} ranks and --heads {args.heads}"
        return f"--tensor-parallel {size} does not divide both {parts}: {divisors(common)} would do"
    if args.sequence_parallel and args.context % size:
        return uneven("--context", args.context, size, f"--tensor-parallel {size}")
    if local_rank < rank % size and not args.across_nodes:
        return (
            f"--tensor-parallel {size}: ranks {rank - rank % size} to {rank - rank % size + size - 1} are not all on "
            f"this node; choose a divisor of every node's number of ranks, or say --across-nodes if slow is meant"
        )
    share = f"{world_size // size} replicas x --accumulation {args.accumulation}"
    return uneven("--batch-size", args.batch_size, world_size // size * args.accumulation, share)


def step_zero_facts(args: Namespace) -> dict[str, str]:
    """What the Step 0 table shows of this rank besides."""
    _, rank, _, world_size = find_ranks()
    size = group_size(args, world_size)
    where = "may span nodes" if args.across_nodes else "inside this node"  # bad_sizes has seen to it
    first = rank - rank % size
    return {"tensor-parallel group": f"ranks {first} to {first + size - 1}, {where}", "replica": str(rank // size)}


def make_mesh(args: Namespace, device: torch.device, world_size: int) -> DeviceMesh | None:
    """A rectangle of ranks: a row is a tensor-parallel group, a column has the same part of every replica."""
    size = group_size(args, world_size)
    if world_size == 1:
        return None
    mesh = init_device_mesh(device.type, (world_size // size, size), mesh_dim_names=("data", "tensor"))
    if 1 < size < world_size:
        mesh._flatten("all")  # DTensor then sums the gradient's norm over both dimensions at once
    return mesh


def data_place(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Which of how many parts of a batch is this rank's: the same for all ranks of a tensor-parallel group."""
    return (mesh["data"].get_local_rank(), mesh["data"].size()) if mesh else (0, 1)


def dropout_place(args: Namespace, mesh: DeviceMesh | None) -> int:
    """Ranks with the same number drop the same activations.

    A tensor-parallel group has the same activations between its layers: dropped differently, copies of the norms'
    weights would drift apart. With sequence parallelism every activation that is dropped is some rank's own.
    """
    return mesh.get_rank() if mesh and args.sequence_parallel else data_place(mesh)[0]


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
    """Leaves this rank its part of every weight: of its group's model, and of that again its replica's share."""
    for block in model.blocks:
        block.recompute = args.activation_checkpointing
    if mesh:
        parallelize_module(model, mesh["tensor"], parallel_plan(args.sequence_parallel))
        model.tie()  # parallelize_module has made two parameters of the one
    for part in model.blocks if mesh else [model]:
        if args.compile:
            part.compile()
    if mesh and mesh["data"].size() > 1:
        dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh["data"], mp_policy=policy)


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
        with loss_parallel():  # the backward pass, too
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / args.accumulation
            loss.backward()
        loss_sum += whole(loss.detach())
    sum_partial_gradients(model)
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
        with loss_parallel():
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        sums += torch.stack((whole(loss), (targets >= 0).sum()))
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
