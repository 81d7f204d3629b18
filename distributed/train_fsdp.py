"""Train a language model with FSDP2 (fully_shard): no rank holds more than its part of the model.

    python aux/prepare_data.py shakespeare                # once, before any job; or your own text
    python distributed/train_fsdp.py                      # one process: CUDA or the CPU
    ./torchrun.sh distributed/train_fsdp.py --size gpu    # one rank per GPU, or two
    sbatch launch_slurm_to_torch.sh distributed/train_fsdp.py --hybrid
    python distributed/sample.py checkpoints/JOB --length 500

--size cpu and gpu follow nanoGPT's settings (github.com/karpathy/nanoGPT), whose README reports
validation losses of 1.88 and 1.47 on Tiny Shakespeare. On any number of ranks the steps are the
unsplit model's.
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
help = "shard inside a node (or among RANKS neighbours in it), and replicate beyond it"
hybrid = {"type": whole_number(1), "nargs": "?", "const": 0, "metavar": "RANKS"}
parser.add_argument("--hybrid", help=help, **hybrid)
args = parse_arguments(parser)
preemption.listen()  # before the slow imports, because Slurm may ask at any time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import recipe
import token_files
from resilience.checkpoint_files import folder_fault
from resilience.checkpoints import Checkpoints
from resilience.group import Group, device_fault
from resilience.progress import Progress
from resilience.ranks import find_ranks
from resilience.seeds import seed_from
from transformer import Transformer, peak_flops

# --- process group ---
# RANK, LOCAL_RANK and WORLD_SIZE, which the launcher sets, or Slurm's own numbers.
ranks = find_ranks()
rank, local_rank, world_size = ranks.rank, ranks.local_rank, ranks.world_size

# This many neighbouring ranks hold one copy of the model between them.
copy = world_size
if args.hybrid is not None:
    copy = args.hybrid or ranks.local_world_size
fault = None
if world_size % copy:
    would_do = f"{divisors(world_size)} would do"
    fault = f"--hybrid {copy} does not divide the {world_size} ranks: {would_do}"
elif args.hybrid is not None and local_rank < rank % copy:
    # This rank's copy of the model begins rank % copy ranks before it, so on an earlier node.
    remedy = "use the same number of ranks on every node"
    fault = f"--hybrid: {copy} neighbouring ranks are not all on this node; {remedy}"
share = f"{world_size} ranks x --accumulation {args.accumulation}"
columns = {"model sharded over": f"ranks {rank - rank % copy} to {rank - rank % copy + copy - 1}"}
fault = (
    device_fault(args.device, ranks)
    or token_files.missing_data(args.data_dir, args.context, local_rank)
    or fault
    or indivisible("--batch-size", args.batch_size, world_size * args.accumulation, share)
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
    # The last dimension shards, and the first of two replicates.
    shape, names = (world_size // copy, copy), ("replicate", "shard")
    if copy == world_size:
        shape, names = (world_size,), ("shard",)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    group.connect(mesh)
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
# Each rank has its own part of every batch, and drops different activations.
data_rank, data_ranks, dropout_rank = rank, world_size, rank
metadata = recipe.metadata_of(args)
train_windows = token_files.windows(args.data_dir, "train", args.context)

# --- model ---
with torch.device("meta"):  # without memory, because no rank is to hold it whole
    model = Transformer(**metadata["sizes"], dropout=args.dropout)
flops_per_token = model.flops_per_token(args.context)
for block in model.blocks:
    block.recompute = args.activation_checkpointing
cross_entropy = recipe.cross_entropy
if args.compile:
    for part in model.blocks if mesh else [model]:
        part.compile()
    cross_entropy = torch.compile(cross_entropy)
# FSDP's policy casts to bfloat16; without FSDP autocast does.
dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
autocast = torch.autocast(device.type, torch.bfloat16, args.precision == "bf16" and not mesh)
# The parts of a batch (--accumulation) communicate only once per step if each rank has room for all
# weights and gradients: 3 to 4 GB for half a billion weights.
weights = sum(weight.numel() for weight in model.parameters())
once = args.accumulation > 1 and weights < 5e8
if mesh:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Each call adds an all-gather before its part of the model computes, forward and backward, and
    # a reduce-scatter of its gradients. The last call covers what is outside the blocks.
    for part in (*model.blocks, model):
        # These stay whole until the backward pass, which begins with them.
        last = part in (model.blocks[-1], model)
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not (last or once))
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
            with autocast:
                loss = cross_entropy(model(tokens), targets, reduction="sum")
            sums += torch.stack((loss, (targets >= 0).sum()))
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
    for part, tokens in enumerate(batch.chunk(args.accumulation), start=1):
        if mesh:
            last = part == args.accumulation
            if once:
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
            # Replicas of the model all-reduce once per step.
            model.set_requires_all_reduce(last)
        with autocast:
            loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) / args.accumulation
        loss.backward()
        loss_sum += loss.detach()
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
