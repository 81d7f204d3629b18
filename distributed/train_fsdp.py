"""Train a character-level transformer with FSDP2 (fully_shard): no rank holds more than its part
of the model.

    python aux/prepare_data.py shakespeare                # once, before any job
    python distributed/train_fsdp.py                      # one process: CUDA or the CPU
    ./torchrun.sh distributed/train_fsdp.py --size gpu    # one rank per GPU, or two
    sbatch launch_slurm_to_torch.sh distributed/train_fsdp.py --hybrid
    python distributed/train_fsdp.py --sample 500 --checkpoint-dir checkpoints/JOB

Settings and result are nanoGPT's (github.com/karpathy/nanoGPT): on Tiny Shakespeare a validation
loss of 1.88 for --size cpu, minutes on two cores, and 1.47 for --size gpu. On any number of
ranks the steps are the unsplit model's.
"""

import gc
import math
import os
from argparse import Namespace
from collections.abc import Iterator
from datetime import timedelta

from language_model_arguments import LanguageModelParser, divisors
from resilience import stop_request
from resilience.arguments import indivisible, whole_number


# --- arguments ---
def parse_arguments() -> Namespace:
    parser = LanguageModelParser(description=__doc__)
    help = "shard inside a node (or among RANKS neighbours in it), replicate beyond"
    parser.add_argument(
        "--hybrid", type=whole_number(1), nargs="?", const=0, metavar="RANKS", help=help
    )
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()  # before torch: a typing mistake costs no second
    stop_request.listen()

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import characters
import language_model
from char_transformer import CharTransformer, peak_flops
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


def ranks_per_copy(args: Namespace, world_size: int) -> int:
    """How many neighbouring ranks hold one copy of the model between them."""
    if args.hybrid != 0:  # None: all of them share one copy
        return args.hybrid or world_size
    nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", 1))
    # Set by torchrun and spawn_ranks.py, not by srun.
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size // nodes))


def bad_sizes(args: Namespace, rank: int, local_rank: int, world_size: int) -> str | None:
    """What cannot be split evenly, with the values that could, in one sentence; or None."""
    copy = ranks_per_copy(args, world_size)
    if world_size % copy:
        return (
            f"--hybrid {copy} does not divide the {world_size} ranks: {divisors(world_size)} would "
            "do"
        )
    if args.hybrid is not None and local_rank < rank % copy:
        return (
            f"--hybrid: {copy} neighbouring ranks are not all on this node; use as many ranks on "
            "every node"
        )
    share = f"{world_size} ranks x --accumulation {args.accumulation}"
    return indivisible("--batch-size", args.batch_size, world_size * args.accumulation, share)


def step_zero_columns(args: Namespace, ranks: Ranks) -> dict[str, str]:
    """What the Step 0 table shows of this rank besides."""
    rank, world_size = ranks.rank, ranks.world_size
    copy = ranks_per_copy(args, world_size)
    return {"model sharded over": f"ranks {rank - rank % copy} to {rank - rank % copy + copy - 1}"}


def make_mesh(args: Namespace, device: torch.device, world_size: int) -> DeviceMesh | None:
    """The ranks as fully_shard sees them: the last dimension shards, and the first of two
    replicates."""
    copy = ranks_per_copy(args, world_size)
    if world_size == 1:
        return None
    if copy == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(
        device.type, (world_size // copy, copy), mesh_dim_names=("replicate", "shard")
    )


# --- data ---
def data_place(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Which of how many parts of a batch is this rank's."""
    return (mesh.get_rank(), mesh.size()) if mesh else (0, 1)


def dropout_place(args: Namespace, mesh: DeviceMesh | None) -> int:
    """Ranks with the same number drop the same activations: here no two do."""
    return mesh.get_rank() if mesh else 0


# --- model ---
def split(args: Namespace, model: CharTransformer, mesh: DeviceMesh | None):
    """Leaves this rank its part of every weight; the whole ones of a block are there only while
    it computes.

    Each fully_shard is one all-gather before its part of the model computes, forward and
    backward, and one reduce-scatter of its gradients: one set of them per block, and one for
    what the root has besides (FSDP2:
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
            # These stay whole until the backward pass, which begins with them.
            last = part in (model.blocks[-1], model)
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not last)


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
    for part, tokens in enumerate(batch.chunk(args.accumulation), start=1):
        if isinstance(model, FSDPModule):
            # Between replicas of the model: once a step.
            model.set_requires_all_reduce(part == args.accumulation)
        with language_model.autocast(args, model, batch.device):
            loss = (
                language_model.cross_entropy(args, model(tokens[:, :-1]), tokens[:, 1:])
                / args.accumulation
            )
        loss.backward()
        loss_sum += loss.detach()
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
        with language_model.autocast(args, model, place.device):
            loss = language_model.cross_entropy(args, model(tokens), targets, reduction="sum")
        sums += torch.stack((loss, (targets >= 0).sum()))
    model.train()
    loss, count = place.all_reduced(sums)
    return loss / count


if __name__ == "__main__":
    main(args)
