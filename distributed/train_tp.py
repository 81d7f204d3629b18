"""Train a character-level transformer with tensor parallelism: every rank computes a part of
every layer.

    python aux/prepare_data.py shakespeare                # once, before any job
    python distributed/train_tp.py                        # one process: CUDA or the CPU
    ./torchrun.sh distributed/train_tp.py --size gpu      # one rank per GPU, or two
    sbatch launch_slurm_to_torch.sh distributed/train_tp.py --tensor-parallel 2 --sequence-parallel

Every --tensor-parallel ranks hold one model between them and see the same sequences; such groups
are replicas of each other and share out the batch, with fully_shard over them. The scheme is
Megatron-LM's (arxiv.org/abs/1909.08053), by hand in tensor_parallel_by_hand.py. Checkpoints are
those of train_fsdp.py: either script resumes the other's.

Grown from distributed/train_fsdp.py: arguments, process group, data, model, training.

    git diff --no-index distributed/train_fsdp.py distributed/train_tp.py
"""

import gc
import math
from argparse import Namespace
from collections.abc import Iterator
from datetime import timedelta

from language_model_arguments import LanguageModelParser, divisors
from resilience import stop_request
from resilience.arguments import indivisible, whole_number


# --- arguments ---
def parse_arguments() -> Namespace:
    parser = LanguageModelParser(description=__doc__)
    help = "ranks that hold one model between them (default: 2, and 1 in one process alone)"
    parser.add_argument("--tensor-parallel", type=whole_number(1), metavar="RANKS", help=help)
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="split the tokens, too, between the linears",
    )
    parser.add_argument(
        "--across-nodes", action="store_true", help="let such a group span nodes: slow"
    )
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()  # before torch: a typing mistake costs no second
    stop_request.listen()

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

import characters
import language_model
from char_transformer import CharTransformer, peak_flops
from parallel_plan import parallel_plan, sum_partial_gradients, whole, with_own_dropout
from resilience.checkpoint_files import folder_fault
from resilience.place import Place
from resilience.progress import Progress
from resilience.ranks import Ranks, find_ranks
from resilience.sharded_checkpoints import ShardedCheckpoints
from resilience.step_zero import device_fault, step_zero


def main(args: Namespace):
    # RANK, LOCAL_RANK and WORLD_SIZE, which the launcher sets, or Slurm's own numbers
    ranks = find_ranks()
    fault = device_fault(args.device, ranks) or find_fault(args, ranks)
    use_cuda = args.device != "cpu" and torch.cuda.is_available() and not fault
    device = torch.device("cpu")
    if use_cuda:
        # GPU number local_rank, but number 0 if Slurm shows this rank a single GPU.
        device = torch.device("cuda", ranks.local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)

    # Step 0: the ranks compare what they know. A fault of any rank ends all of them.
    store = step_zero(args, ranks, device, fault, **step_zero_columns(args, ranks))
    place = Place(ranks, device, args.init_timeout)
    if ranks.world_size > 1:
        backend, wait = "nccl" if use_cuda else "gloo", timedelta(seconds=args.init_timeout)
        place.beat.start()
        with place.connecting(backend):
            dist.init_process_group(
                backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=wait
            )
            place.all_reduced([1])  # NCCL connects in its first collective
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
    if args.sample:
        return language_model.sample(args, place)
    mesh = make_mesh(args, place.device, place.world_size)
    language_model.prepare(args, place, mesh)
    share = data_place(mesh)

    metadata = language_model.metadata_of(args)
    # Without memory: no rank is to hold it whole.
    model = language_model.make_model(metadata, args.dropout)
    flops = model.flops_per_token(args.context) / (peak_flops(place.device) * place.world_size)
    split(args, model, mesh)
    language_model.initialize(model, place.device, args.seed)
    optimizer = language_model.make_optimizer(args, model)

    checkpoints, parts = (
        language_model.open_checkpoints(args, place),
        {"model": model, "optimizer": optimizer},
    )
    first = checkpoints.resume(parts)
    val_loss = checkpoints.values.get("val_loss", math.nan)
    progress = Progress(
        args, place, "tokens", args.batch_size * args.context, first, args.steps, flops
    )
    for step, epoch, batch in characters.batches(
        args, first, share, dropout_place(args, mesh), place.device
    ):
        loss, norm = train_step(args, step - 1, model, optimizer, batch)
        if progress.add(step, loss):
            progress.log(
                step, epoch, **language_model.log_values(args, step - 1, norm, place.device)
            )
        if step % args.eval_every == 0 or step == args.steps:
            with place.longer_timeout(args.save_timeout):
                val_loss = evaluate(
                    args, place, model, characters.fixed_batches(args, *share, place.device)
                )
            progress.log_evaluation(step, epoch, val_loss=val_loss)
        if save_and_stop(checkpoints, progress, step, parts, val_loss=val_loss, **metadata):
            break
        if step % args.gc_every == 0:
            gc.collect()  # on all ranks at once: they wait for each other
    checkpoints.finish(f"step={checkpoints.step} val_loss={val_loss:.4f}")
    place.shutdown()


# --- process group ---
def find_fault(args: Namespace, ranks: Ranks) -> str | None:
    """What is wrong with the arguments or the files on this node, in one sentence, or None."""
    rank, local_rank, world_size = ranks.rank, ranks.local_rank, ranks.world_size
    if args.sample:
        return (
            "--sample takes one process: start it with python, without a launcher"
            if world_size > 1
            else None
        )
    fault = characters.missing_data(args.data_dir, args.context, local_rank)
    fault = fault or bad_sizes(args, rank, local_rank, world_size)
    return fault or folder_fault(args.checkpoint_dir, args.resume, "")


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
        return indivisible("--context", args.context, size, f"--tensor-parallel {size}")
    if local_rank < rank % size and not args.across_nodes:
        return (
            f"--tensor-parallel {size}: ranks {rank - rank % size} to "
            f"{rank - rank % size + size - 1} are not all on "
            "this node; choose a divisor of every node's number of ranks, or say --across-nodes "
            "if slow is meant"
        )
    share = f"{world_size // size} replicas x --accumulation {args.accumulation}"
    return indivisible(
        "--batch-size", args.batch_size, world_size // size * args.accumulation, share
    )


def step_zero_columns(args: Namespace, ranks: Ranks) -> dict[str, str]:
    """What the Step 0 table shows of this rank besides."""
    rank, world_size = ranks.rank, ranks.world_size
    size = group_size(args, world_size)
    where = "may span nodes" if args.across_nodes else "inside this node"  # or bad_sizes refuses
    first = rank - rank % size
    return {
        "tensor-parallel group": f"ranks {first} to {first + size - 1}, {where}",
        "replica": str(rank // size),
    }


def make_mesh(args: Namespace, device: torch.device, world_size: int) -> DeviceMesh | None:
    """A rectangle of ranks: a row is a tensor-parallel group, a column has the same part of
    every replica."""
    size = group_size(args, world_size)
    if world_size == 1:
        return None
    mesh = init_device_mesh(
        device.type, (world_size // size, size), mesh_dim_names=("data", "tensor")
    )
    if 1 < size < world_size:
        mesh._flatten("all")  # DTensor then sums the gradient's norm over both dimensions at once
    return mesh


# --- data ---
def data_place(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Which of how many parts of a batch is this rank's: the same for all ranks of a tensor-
    parallel group."""
    return (mesh["data"].get_local_rank(), mesh["data"].size()) if mesh else (0, 1)


def dropout_place(args: Namespace, mesh: DeviceMesh | None) -> int:
    """Ranks with the same number drop the same activations.

    A tensor-parallel group has the same activations between its layers: dropped differently,
    copies of the norms' weights would drift apart. Attention's are each rank's own
    (with_own_dropout), with --sequence-parallel all are.
    """
    return mesh.get_rank() if mesh and args.sequence_parallel else data_place(mesh)[0]


# --- model ---
def split(args: Namespace, model: CharTransformer, mesh: DeviceMesh | None):
    """Leaves this rank its part of every weight: of its group's model, and of that again its
    replica's share."""
    for block in model.blocks:
        block.recompute = args.activation_checkpointing
        if args.compile:  # what is recomputed: torch 2.13 cannot compile a checkpoint of DTensors
            block.layer = torch.compile(block.layer)
    if mesh:
        parallelize_module(model, mesh["tensor"], parallel_plan(args.sequence_parallel))
        model.tie()  # parallelize_module has made two parameters of the one
        for block in model.blocks if args.dropout else []:
            block.attention.attend = with_own_dropout(
                block.attention.attend, mesh["tensor"].get_local_rank()
            )
    if mesh and mesh["data"].size() > 1:
        dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for part in (*model.blocks, model):
            # These stay whole until the backward pass, which begins with them.
            last = part in (model.blocks[-1], model)
            fully_shard(part, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=not last)


# --- checkpoint ---
def save_and_stop(
    checkpoints: ShardedCheckpoints, progress: Progress, step: int, parts: dict, **values
) -> bool:
    """Saves if a checkpoint is due after this step. Returns whether to stop then: the same on
    all ranks."""
    save, stop = checkpoints.due(step)
    if save:
        progress.check_loss(step)  # weights that are not finite must not replace good ones
        checkpoints.save(step, parts, **values)
    return stop


# --- training ---
def train_step(
    args, step: int, model, optimizer, batch: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trains on this rank's sequences (n, context + 1). Returns their average loss and the norm
    of the whole gradient.

    Gradients are averaged over the ranks; their shares are equally large, so that is the mean
    over all tokens.
    """
    loss_sum = torch.zeros((), device=batch.device)
    for tokens in batch.chunk(args.accumulation):
        with loss_parallel():  # the backward pass, too
            with language_model.autocast(args, model, batch.device):
                loss = (
                    language_model.cross_entropy(args, model(tokens[:, :-1]), tokens[:, 1:])
                    / args.accumulation
                )
            loss.backward()
        loss_sum += whole(loss.detach())
    sum_partial_gradients(model)
    # A few kernels for all weights; elsewhere torch does so by itself.
    foreach = batch.device.type == "cpu" or None
    norm = torch.nn.utils.clip_grad_norm_(
        model.parameters(), args.clip or math.inf, foreach=foreach
    )
    for group in optimizer.param_groups:
        group["lr"] = language_model.learning_rate(args, step)
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum, norm


@torch.no_grad()
def evaluate(args: Namespace, place: Place, model, batches: Iterator[tuple]) -> float:
    """Average loss in nats per character over the fixed set, every character counted once."""
    model.eval()
    sums = torch.zeros(2, device=place.device)  # loss, characters
    for tokens, targets in batches:
        with loss_parallel(), language_model.autocast(args, model, place.device):
            loss = language_model.cross_entropy(args, model(tokens), targets, reduction="sum")
        sums += torch.stack((whole(loss), (targets >= 0).sum()))
    model.train()
    loss, count = place.all_reduced(sums)
    return loss / count


if __name__ == "__main__":
    main(args)
