"""Train a language model with tensor parallelism: every rank computes a part of every layer.

    python aux/prepare_data.py shakespeare                # once, before any job; or your own text
    python distributed/train_tp.py                        # one process: CUDA or the CPU
    ./torchrun.sh distributed/train_tp.py --size gpu      # one rank per GPU, or two
    sbatch launch_slurm_to_torch.sh distributed/train_tp.py --tensor-parallel 2 --sequence-parallel

Each group of --tensor-parallel ranks holds one model and sees the same sequences. The groups are
replicas of each other and share out the batch, with fully_shard across them. The scheme is
Megatron-LM's (arxiv.org/abs/1909.08053), which tensor_parallel_by_hand.py does by hand. Checkpoints
are those of train_fsdp.py, so either script resumes the other's.

Grown from distributed/train_fsdp.py: arguments, process group, data, model, training.

    git diff --no-index distributed/train_fsdp.py distributed/train_tp.py
"""

import faulthandler
import math
from datetime import timedelta

import heartbeat
import preemption
from recipe_arguments import add_recipe_arguments, divisors, parse_arguments
from resilience.arguments import ArgumentParser, indivisible, whole_number

# --- arguments ---
parser = ArgumentParser(description=__doc__)
add_recipe_arguments(parser)
help = "how many ranks hold one model between them (default: 2, or 1 in one process)"
parser.add_argument("--tensor-parallel", type=whole_number(1), metavar="RANKS", help=help)
help = "also split the tokens between the linears"
parser.add_argument("--sequence-parallel", action="store_true", help=help)
help = "let a tensor-parallel group span nodes, which is slow"
parser.add_argument("--across-nodes", action="store_true", help=help)
args = parse_arguments(parser)
preemption.listen()  # before the slow imports, because Slurm may ask at any time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import recipe
import token_files
from parallel_plan import parallel_plan, sum_partial_gradients, whole, with_own_dropout
from resilience.checkpoint_files import folder_fault
from resilience.checkpoints import Checkpoints
from resilience.group import Group, device_fault
from resilience.progress import Progress
from resilience.ranks import find_ranks
from resilience.seeds import seed_from
from resilience.torch_private import flattened
from transformer import Transformer, peak_flops

# --- process group ---
# RANK, LOCAL_RANK and WORLD_SIZE, which the launcher sets, or Slurm's own numbers.
ranks = find_ranks()
rank, local_rank, world_size = ranks.rank, ranks.local_rank, ranks.world_size

# This many neighbouring ranks are a tensor-parallel group.
size = args.tensor_parallel or min(world_size, 2)
replicas, common = world_size // size, math.gcd(world_size, args.heads)
neighbours = f"ranks {rank - rank % size} to {rank - rank % size + size - 1}"
fault = None
if common % size:
    parts = f"{world_size} ranks and --heads {args.heads}"
    would_do = f"{divisors(common)} would do"
    fault = f"--tensor-parallel {size} does not divide both {parts}: {would_do}"
elif args.sequence_parallel and args.context % size:
    fault = indivisible("--context", args.context, size, f"--tensor-parallel {size}")
elif local_rank < rank % size and not args.across_nodes:
    # This rank's group begins rank % size ranks before it, so on an earlier node.
    remedy = "choose a divisor of every node's number of ranks, or accept slow steps with "
    remedy += "--across-nodes"
    fault = f"--tensor-parallel {size}: {neighbours} are not all on this node; {remedy}"
share = f"{replicas} replicas x --accumulation {args.accumulation}"
where = "may span nodes" if args.across_nodes else "inside this node"
columns = {"tensor-parallel group": f"{neighbours}, {where}", "replica": rank // size}
fault = (
    device_fault(args.device, ranks)
    or token_files.missing_data(args.data_dir, args.context, local_rank)
    or fault
    or indivisible("--batch-size", args.batch_size, replicas * args.accumulation, share)
    or folder_fault(args.checkpoint_dir, args.resume)
)
use_cuda = args.device != "cpu" and torch.cuda.is_available() and not fault
device = torch.device("cpu")
if use_cuda:
    # GPU number local_rank. If Slurm shows each rank only its own, that is number 0.
    device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # TF32, if the GPU has it

if args.deterministic:
    recipe.be_deterministic()

group, mesh = Group(ranks, device, args.init_timeout), None
# A rank that does not reach the others prints where it waits, and ends. It does so 10 seconds after
# torch's own errors would come, because they say more.
faulthandler.dump_traceback_later(args.init_timeout + 10, exit=True)
if world_size > 1:
    # The ranks meet at MASTER_ADDR:MASTER_PORT. NCCL communicates between GPUs, gloo between CPUs.
    backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
    wait = timedelta(seconds=args.init_timeout)
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=wait)
# A fault on any rank ends all of them.
group.compare(fault, **columns)
if world_size > 1:
    # A row is a tensor-parallel group, a column has the same part of every replica.
    mesh = init_device_mesh(device.type, (replicas, size), mesh_dim_names=("data", "tensor"))
    meshes = [mesh]
    if 1 < size < world_size:
        # DTensor then sums the gradient's norm over both dimensions at once.
        meshes.append(flattened(mesh, "all"))
    group.connect(*meshes)
    heartbeat.start(after=min(60, args.timeout / 2))
faulthandler.cancel_dump_traceback_later()
if args.precision is None:
    args.precision = "bf16" if use_cuda else "fp32"
if args.compile is None:
    # All ranks or none, because a node may lack the compiler.
    args.compile = group.all_reduced([recipe.can_compile(device)]) == [world_size]


def log(text: str):
    if rank == 0:
        print(text, flush=True)


# --- data ---
# The ranks of a group have the same sequences, and the same activations between the layers. There
# they must drop the same ones, or copies of the norms' weights would drift apart. Attention's
# dropout is each rank's own (with_own_dropout), and with --sequence-parallel all dropout is.
data_rank, data_ranks = rank // size, replicas
dropout_rank = rank if args.sequence_parallel else data_rank
metadata = recipe.metadata_of(args)
train_windows = token_files.windows(args.data_dir, "train", args.context)

# --- model ---
with torch.device("meta"):  # without memory, because no rank is to hold it whole
    model = Transformer(**metadata["sizes"], dropout=args.dropout)
flops_per_token = model.flops_per_token(args.context)
for block in model.blocks:
    block.recompute = args.activation_checkpointing
    # What is recomputed is compiled, because torch 2.13 cannot compile a checkpoint of DTensors.
    if args.compile:
        block.layer = torch.compile(block.layer)
cross_entropy = recipe.cross_entropy
if args.compile and not mesh:
    # Split logits are left out, because torch 2.13 assumes that all ranks' parts are equally long.
    cross_entropy = torch.compile(cross_entropy)
if mesh:
    parallelize_module(model, mesh["tensor"], parallel_plan(args.sequence_parallel))
    model.tie()  # parallelize_module made two parameters out of one
if mesh and args.dropout:
    for block in model.blocks:
        block.attention.attend = with_own_dropout(block.attention.attend, rank % size)
# FSDP's policy casts to bfloat16; without FSDP autocast does.
dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
autocast = torch.autocast(device.type, torch.bfloat16, args.precision == "bf16" and replicas == 1)
if replicas > 1:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        # These stay whole until the backward pass, which begins with them.
        last = part in (model.blocks[-1], model)
        fully_shard(part, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=not last)
recipe.initialize(model, device, args.seed, args.init_from)
optimizer = recipe.make_optimizer(args, model)

# --- checkpoint ---
log(f"Data: {token_files.describe(args.data_dir)}. Checkpoints: {args.checkpoint_dir}")
log(f"Precision: {args.precision}. Compiled: {args.compile}. Device mesh: {mesh}")
checkpoints = Checkpoints(args, group, recipe.run_of(args), args.steps)
first = checkpoints.resume(model, optimizer)

# --- training ---
tokens_per_step = args.batch_size * args.context
flops = flops_per_token / (peak_flops(device) * world_size)
progress = Progress(args, group, "tokens", tokens_per_step, first, args.steps, flops)


def evaluate(step: int) -> float:
    """The mean loss over the validation windows after that step, which is also logged."""
    model.eval()
    sums = torch.zeros(2, device=device)  # loss, tokens
    with torch.no_grad(), group.longer_timeout(args.save_timeout):
        for tokens, targets in token_files.fixed_batches(args, data_rank, data_ranks, device):
            with loss_parallel(), autocast:
                loss = cross_entropy(model(tokens), targets, reduction="sum")
            sums += torch.stack((whole(loss), (targets >= 0).sum()))
        loss, count = group.all_reduced(sums)
    epoch = step * tokens_per_step // len(train_windows)
    progress.log_evaluation(step, epoch, val_loss=loss / count)
    model.train()
    return loss / count


val_loss = math.nan
# The job's earlier start may have had no time for this evaluation.
if first and (first % args.eval_every == 0 or first == args.steps):
    val_loss = evaluate(first)
model.train()
for step in range(first + 1, args.steps + 1):
    torch.manual_seed(seed_from(args.seed, step - 1, dropout_rank))
    batch = token_files.random_batch(args, train_windows, step - 1, data_rank, data_ranks, device)
    loss_sum = torch.zeros((), device=device)
    for tokens in batch.chunk(args.accumulation):
        with loss_parallel():  # also around the backward pass
            with autocast:
                loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) / args.accumulation
            loss.backward()
        loss_sum += whole(loss.detach())
    sum_partial_gradients(model)
    # The ranks' shares are equally large, so their average is the mean over all tokens.
    norm = recipe.clip_gradients(args, model)
    for param_group in optimizer.param_groups:
        param_group["lr"] = recipe.learning_rate(args, step - 1)
    optimizer.step()
    optimizer.zero_grad()
    epoch = step * tokens_per_step // len(train_windows)
    if progress.add(step, loss_sum):
        progress.log(step, epoch, **recipe.log_values(optimizer, norm))

    save, stop = checkpoints.due(step)
    if save:
        progress.check_loss(step)  # weights that are not finite are not to replace good ones
        checkpoints.save(step, model, optimizer, **metadata)
    # It stops before the evaluation, because Slurm may not leave time for both.
    if stop and step < args.steps:
        break
    if step % args.eval_every == 0 or step == args.steps:
        val_loss = evaluate(step)

checkpoints.finish(f"step={checkpoints.step} val_loss={val_loss:.4f}")
group.shutdown()
