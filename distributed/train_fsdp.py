"""Train a language model with FSDP2 (fully_shard): no rank holds more than its part of the model.

    python aux/prepare_data.py shakespeare                # once, before any job; or your own text
    python distributed/train_fsdp.py                      # one process: CUDA or the CPU
    ./torchrun.sh distributed/train_fsdp.py --size gpu    # one rank per GPU, or two
    sbatch launch_slurm_to_torch.sh distributed/train_fsdp.py --hybrid
    python distributed/sample.py checkpoints/JOB --length 500

Settings and results are nanoGPT's (github.com/karpathy/nanoGPT): on Tiny Shakespeare a validation
loss of 1.88 for --size cpu, after minutes on two cores, and 1.47 for --size gpu. On any number of
ranks the steps are the unsplit model's.
"""

import math
from datetime import timedelta

from recipe_arguments import add_recipe_arguments, divisors, parse_arguments
from resilience import stop_request
from resilience.arguments import ArgumentParser, indivisible, whole_number

# --- arguments ---
parser = ArgumentParser(description=__doc__)
add_recipe_arguments(parser)
help = "shard inside a node (or among RANKS neighbours in it), and replicate beyond it"
hybrid = {"type": whole_number(1), "nargs": "?", "const": 0, "metavar": "RANKS"}
parser.add_argument("--hybrid", help=help, **hybrid)
args = parse_arguments(parser)
stop_request.listen()  # before the slow imports: Slurm may ask at any time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import recipe
import token_files
from resilience.checkpoint_files import folder_fault
from resilience.place import Place
from resilience.progress import Progress
from resilience.ranks import find_ranks
from resilience.samplers import seed_from
from resilience.sharded_checkpoints import ShardedCheckpoints
from resilience.step_zero import device_fault, step_zero
from transformer import Transformer, peak_flops

# --- process group ---
# RANK, LOCAL_RANK and WORLD_SIZE, which the launcher sets, or Slurm's own numbers
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
    remedy = "use the same number of ranks on every node"
    fault = f"--hybrid: {copy} neighbouring ranks are not all on this node; {remedy}"
share = f"{world_size} ranks x --accumulation {args.accumulation}"
columns = {"model sharded over": f"ranks {rank - rank % copy} to {rank - rank % copy + copy - 1}"}
fault = (
    device_fault(args.device, ranks)
    or token_files.missing_data(args.data_dir, args.context, local_rank)
    or fault
    or indivisible("--batch-size", args.batch_size, world_size * args.accumulation, share)
    or folder_fault(args.checkpoint_dir, args.resume, "")
)
use_cuda = args.device != "cpu" and torch.cuda.is_available() and not fault
device = torch.device("cpu")
if use_cuda:
    # GPU number local_rank, but number 0 if Slurm shows this rank a single GPU.
    device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")  # TF32, if the GPU has it

# Step 0: the ranks compare what they know. A fault on any rank ends all of them.
store = step_zero(args, ranks, device, fault, **columns)
place = Place(ranks, device, args.init_timeout)
mesh = None
if world_size > 1:
    backend = "nccl" if use_cuda else "gloo"
    wait = timedelta(seconds=args.init_timeout)
    place.beat.start()
    # The last dimension shards, and the first of two replicates.
    shape, names = (world_size // copy, copy), ("replicate", "shard")
    if copy == world_size:
        shape, names = (world_size,), ("shard",)
    with place.connecting(backend, store):
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=wait
        )
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        place.connect(mesh)
    # Else the mesh's collectives would keep a timeout of their own.
    place.set_timeout(place.timeout)
if args.deterministic:
    torch.use_deterministic_algorithms(True)
if args.precision is None:
    args.precision = "bf16" if use_cuda else "fp32"
if args.compile is None:
    # All ranks or none: a node may lack the compiler.
    args.compile = place.all_reduced([recipe.can_compile(device)]) == [world_size]


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
if mesh:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Each call adds an all-gather before its part of the model computes, forward and backward, and
    # a reduce-scatter of its gradients. The last call covers what is outside the blocks.
    for part in (*model.blocks, model):
        # These stay whole until the backward pass, which begins with them.
        last = part in (model.blocks[-1], model)
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not last)
recipe.initialize(model, device, args.seed, args.init_from)
optimizer = recipe.make_optimizer(args, model)

# --- checkpoint ---
log(f"Data: {token_files.describe(args.data_dir)}. Checkpoints: {args.checkpoint_dir}")
log(f"Precision: {args.precision}. Compiled: {args.compile}. Device mesh: {mesh}")
state = {"model": model, "optimizer": optimizer}
checkpoints = ShardedCheckpoints(args, place, recipe.run_of(args), args.steps)
first = checkpoints.resume(state)
val_loss = checkpoints.values.get("val_loss", math.nan)

# --- training ---
tokens_per_step = args.batch_size * args.context
flops = flops_per_token / (peak_flops(device) * world_size)
progress = Progress(args, place, "tokens", tokens_per_step, first, args.steps, flops)
model.train()
for step in range(first + 1, args.steps + 1):
    torch.manual_seed(seed_from(args.seed, step - 1, dropout_rank))
    batch = token_files.random_batch(args, train_windows, step - 1, data_rank, data_ranks, device)
    loss_sum = torch.zeros((), device=device)
    for part, tokens in enumerate(batch.chunk(args.accumulation), start=1):
        if mesh:
            # Replicas of the model all-reduce once per step.
            model.set_requires_all_reduce(part == args.accumulation)
        with autocast:
            loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) / args.accumulation
        loss.backward()
        loss_sum += loss.detach()
    # The ranks' shares are equally large, so their average is the mean over all tokens.
    norm = recipe.clip_gradients(args, model)
    for group in optimizer.param_groups:
        group["lr"] = recipe.learning_rate(args, step - 1)
    optimizer.step()
    optimizer.zero_grad()
    epoch = step * tokens_per_step // len(train_windows)
    if progress.add(step, loss_sum):
        progress.log(step, epoch, **recipe.log_values(optimizer, norm))

    if step % args.eval_every == 0 or step == args.steps:
        model.eval()
        sums = torch.zeros(2, device=device)  # loss, tokens
        with torch.no_grad(), place.longer_timeout(args.save_timeout):
            for tokens, targets in token_files.fixed_batches(args, data_rank, data_ranks, device):
                with autocast:
                    loss = cross_entropy(model(tokens), targets, reduction="sum")
                sums += torch.stack((loss, (targets >= 0).sum()))
            loss, count = place.all_reduced(sums)
        val_loss = loss / count
        progress.log_evaluation(step, epoch, val_loss=val_loss)
        model.train()

    save, stop = checkpoints.due(step)
    if save:
        progress.check_loss(step)  # weights that are not finite must not replace good ones
        checkpoints.save(step, state, val_loss=val_loss, **metadata)
    if stop:
        break

checkpoints.finish(f"step={checkpoints.step} val_loss={val_loss:.4f}")
place.shutdown()
