"""Train a language model with tensor parallelism: each rank of a group computes a part of a layer.

    ./torchrun.sh distributed/train_tp.py                 # one rank per GPU, or two
    sbatch launch_slurm_with_torchrun.sh distributed/train_tp.py --size gpt2 --tensor-parallel 2

The ranks of a group hold one model between them, and see the same sequences. The groups are copies
of each other and share out the batch, with fully_shard across them. The scheme is Megatron-LM's
(arxiv.org/abs/1909.08053), which tensor_parallel_by_hand.py does by hand. Checkpoints are those of
train_fsdp.py, so either script resumes the other's. It also needs parallel_plan.py.
Grown from distributed/train_fsdp.py: arguments, data, model, training.
"""

import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import argparse
import faulthandler
import gc
import math
import os
import shutil
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy

import checkpoint
import heartbeat
import token_files  # EDIT: your data
from parallel_plan import parallel_plan, sum_partial_gradients, whole_loss, with_own_dropout
from transformer import SIZES, Transformer, peak_flops  # EDIT: your model

# --- arguments ---
parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
help = "sets the defaults of the options below, whose help lists them in this order"
parser.add_argument("--size", choices=SIZES, default="cpu", help=help)
for name, value in SIZES["cpu"].items():
    by_size = ", ".join(str(size[name]) for size in SIZES.values())
    parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=by_size)
help = "go on from GPT-2's weights: config.json and model.safetensors as transformers saves them"
parser.add_argument("--init-from", type=Path, metavar="FOLDER", help=help)
help = "so many neighbouring ranks of a node are a group (default: 2, or 1 in one process)"
parser.add_argument("--tensor-parallel", type=int, metavar="RANKS", help=help)
help = "also split the tokens between the linears"
parser.add_argument("--sequence-parallel", action="store_true", help=help)
help = "compute a rank's share of the batch in so many parts, which takes less memory"
parser.add_argument("--accumulation", type=int, default=1, metavar="PARTS", help=help)
help = "compute activations again in the backward pass: less memory, a third more work"
parser.add_argument("--activation-checkpointing", action="store_true", help=help)
help = "default: on a GPU, if the node has a C compiler"
parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help=help)
help = "default: bf16 on a GPU, fp32 on a CPU"
parser.add_argument("--precision", choices=["fp32", "bf16"], help=help)
parser.add_argument("--deterministic", action="store_true", help="equal resumes on GPUs; slower")
parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the data's order")
parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
help = "where prepare_data.py wrote the text"
parser.add_argument("--data-dir", type=Path, default=Path("data/shakespeare"), help=help)
parser.add_argument("--log-every", type=int, default=50, metavar="STEPS")
parser.add_argument("--eval-every", type=int, default=250, metavar="STEPS")
parser.add_argument("--eval-windows", type=int, default=500, help="validate on so many; 0: on all")
parser.add_argument("--save-every", type=int, default=1000, metavar="STEPS")
parser.add_argument("--keep", type=int, default=2, help="how many checkpoints to keep")
parser.add_argument("--checkpoint-dir", type=Path, help="default: checkpoints/RUN, or the time")
# A requeued job runs the same command again, so it resumes without being told.
requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
parser.add_argument(
    "--resume", action="store_true", default=requeued, help="go on with the run in --checkpoint-dir"
)
chosen = parser.parse_known_args()[0]
parser.set_defaults(**SIZES[chosen.size])
if chosen.init_from:
    import gpt2

    parser.set_defaults(**gpt2.sizes(chosen.init_from))
args = parser.parse_args()
if chosen.init_from and args.context > parser.get_default("context"):
    parser.error(f"--init-from knows a --context of {parser.get_default('context')} at most")
if args.resume and not args.checkpoint_dir and "RUN" not in os.environ:
    parser.error("--resume needs --checkpoint-dir, or the variable RUN, which env.sh sets in a job")
counts = (args.layers, args.heads, args.width, args.context, args.pad_vocabulary, args.steps)
counts += (args.batch_size, args.accumulation, args.log_every, args.eval_every, args.save_every)
if min(*counts, args.keep) < 1:
    parser.error("sizes, --steps, --accumulation, --keep and all --..-every must be 1 or more")
if args.width % args.heads != 0:
    parser.error(f"--width must be a multiple of {args.heads} (--heads)")
if args.deterministic:
    torch.use_deterministic_algorithms(True)
    # Otherwise cuBLAS and NCCL choose among algorithms that sum in different orders.
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    os.environ.update(fixed | {"NCCL_NVLS_ENABLE": "0"} | dict(os.environ))

# --- process group ---
# A launcher sets RANK, LOCAL_RANK (the number on this node) and WORLD_SIZE, a bare srun its own.
# Any other process is alone: SLURM_STEP_NUM_TASKS is set in srun's tasks, and nowhere else.
env = os.environ
rank = int(env.get("RANK", env.get("SLURM_PROCID", 0)))
local_rank = int(env.get("LOCAL_RANK", env.get("SLURM_LOCALID", 0)))
world_size = int(env.get("WORLD_SIZE", env.get("SLURM_STEP_NUM_TASKS", 1)))

device = torch.device("cpu")
# CUDA, ROCm or XPU, but not Apple's MPS, which has no collectives.
if args.device == "auto" and torch.accelerator.is_available() and sys.platform != "darwin":
    # GPU number local_rank. If Slurm shows each rank only its own, that is number 0.
    number = local_rank if torch.accelerator.device_count() > 1 else 0
    torch.accelerator.set_device_index(number)
    device = torch.device(torch.accelerator.current_accelerator().type, number)
elif args.device == "auto" and env.get("SLURM_GPUS_ON_NODE", "0") != "0":
    sys.exit("Slurm granted GPUs, but torch sees none: check nvidia-smi, or pass --device cpu")

if world_size == 1:
    env.setdefault("MASTER_ADDR", "localhost")
    env.setdefault("MASTER_PORT", "0")  # any free port
# A rank that does not reach the others within 300 seconds prints where it waits, and ends.
faulthandler.dump_traceback_later(300, exit=True)
# The ranks meet at MASTER_ADDR:MASTER_PORT. NCCL communicates between GPUs, gloo between CPUs.
backend = dist.get_default_backend_for_device(device)
dist.init_process_group(
    backend,
    rank=rank,
    world_size=world_size,
    timeout=timedelta(minutes=30),  # for the others, while rank 0 saves
    device_id=device if device.type == "cuda" else None,
)
# A first sum over all ranks shows whether their connections work. .item() waits for it.
total = torch.ones(1, device=device)
dist.all_reduce(total)
total.item()
faulthandler.cancel_dump_traceback_later()
heartbeat.start()
place = f"world size: {world_size} | local rank: {local_rank} | device: {device}"
# One write with its line break, so that the lines of two ranks do not mix.
print(f"[Rank: {rank} | {os.uname().nodename} | {place}]\n", end="", flush=True)


def log(text: str):
    if rank == 0:
        print(text, flush=True)


# --- data ---
if fault := token_files.missing_data(args.data_dir, args.context):
    sys.exit(fault)
size = args.tensor_parallel or min(world_size, 2)
copies = world_size // size
if world_size % size or args.heads % size or (args.sequence_parallel and args.context % size):
    also = ", and --context with --sequence-parallel"
    sys.exit(f"--tensor-parallel must divide {world_size} (ranks) and {args.heads} (--heads){also}")
if args.batch_size % (copies * args.accumulation) != 0:
    parts = f"{copies} (copies) x {args.accumulation} (--accumulation)"
    sys.exit(f"--batch-size must be a multiple of {parts}")
vocabulary = token_files.read_vocabulary(args.data_dir)
train_windows = token_files.windows(args.data_dir, "train", args.context)
val_windows = token_files.windows(args.data_dir, "val", args.context)
# The ranks of a group have the same sequences, and the same activations between the layers. There
# they must drop the same ones, or copies of the norms' weights would drift apart. Attention's
# dropout is each rank's own (with_own_dropout), and with --sequence-parallel all dropout is.
data_rank, data_ranks = rank // size, copies
dropout_rank = rank if args.sequence_parallel else data_rank


def seed_of(*values: int) -> int:
    """From the run's seed, a step and a rank, so that no random state has to be saved."""
    return zlib.crc32(repr(values).encode())


def batch_of(step: int) -> torch.Tensor:
    """This rank's sequences of a step, (batch_size / data_ranks, context + 1) int64.

    All ranks draw the places of the whole batch, so their order depends neither on the number of
    ranks nor on a restart.
    """
    generator = torch.Generator().manual_seed(seed_of(args.seed, step - 1))
    starts = torch.randint(len(train_windows), (args.batch_size,), generator=generator)
    return token_files.read(train_windows, starts.chunk(data_ranks)[data_rank], device)


# --- model ---
# To draw or load it, and to compile the first step, may take ten minutes.
heartbeat.alive(600)
sizes = {name: vars(args)[name] for name in ("context", "layers", "heads", "width")}
multiple = args.pad_vocabulary
sizes["vocabulary"] = math.ceil(vocabulary["tokenizer"]["size"] / multiple) * multiple
if args.init_from:
    sizes |= gpt2.sizes(args.init_from) | {"context": args.context, "gpt2": True}
if vocabulary["tokenizer"]["size"] > sizes["vocabulary"]:
    sys.exit(f"the text has more than the {sizes['vocabulary']} tokens that {args.init_from} knows")
with torch.device("meta"):  # without memory, because no rank is to hold it whole
    model = Transformer(**sizes, dropout=args.dropout)  # EDIT: your model
for block in model.blocks:
    block.recompute = args.activation_checkpointing
flops_per_token = model.flops_per_token(args.context)
on_gpu = device.type != "cpu"
bf16 = args.precision == "bf16" or (args.precision is None and on_gpu)
# Triton needs a compiler on the node.
can_compile = on_gpu and any(map(shutil.which, ("gcc", "clang")))
compiled = can_compile if args.compile is None else args.compile
torch.set_float32_matmul_precision("high")  # TF32, if the GPU has it


def loss_of(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """In float32. Targets of -100 do not count."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


layers = model.blocks
if compiled:
    # What is recomputed is compiled, because torch 2.13 cannot compile a checkpoint of DTensors.
    # Split logits are left out, because it assumes that all ranks' parts are equally long.
    for block in layers:
        block.layer = torch.compile(block.layer)
# A row of the mesh is a group. A column has the same part of every copy of the model.
mesh = init_device_mesh(device.type, (copies, size), mesh_dim_names=("data", "tensor"))
log(f"Device mesh: {mesh}")
if 1 < size < world_size:
    mesh._flatten("all")  # so that DTensor sums the gradient's norm over both dimensions at once
parallelize_module(model, mesh["tensor"], parallel_plan(args.sequence_parallel))
model.tie()  # parallelize_module made two parameters out of one
if args.dropout:
    for block in layers:
        block.attention.attend = with_own_dropout(block.attention.attend, rank % size)
if copies > 1:
    dtype = torch.bfloat16 if bf16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*layers, model):
        # These stay whole until the backward pass, which begins with them.
        last = part in (layers[-1], model)
        fully_shard(part, mesh=mesh["data"], mp_policy=policy, reshard_after_forward=not last)

# Memory for this rank's part. Each weight is drawn whole on the CPU, one at a time, and copied.
model.to_empty(device=device)
model.tie()
given = gpt2.Weights(args.init_from, model) if args.init_from else None
for name, weight in model.named_parameters():
    whole = given.read(name, weight.shape) if given else model.draw(name, args.seed)
    whole = whole.to(device)
    if isinstance(weight, DTensor):
        whole = DTensor.from_local(whole, weight.device_mesh, run_check=False)
    with torch.no_grad():
        weight.copy_(whole)
# FSDP's policy casts to bfloat16; without FSDP autocast does.
autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16 and copies == 1)
matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
vectors = [weight for weight in model.parameters() if weight.dim() < 2]
decay = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
# fused: one kernel updates all weights.
optimizer = torch.optim.AdamW(decay, args.learning_rate, betas=(0.9, args.beta2), fused=True)


def learning_rate(step: int) -> float:
    """A linear warm-up, then a cosine down to a tenth. Steps count from 0."""
    if step < args.warmup_steps:
        return args.learning_rate * (step + 1) / (args.warmup_steps + 1)
    done = (step - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    return args.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


# --- checkpoint ---
# env.sh names a job's runs in RUN, so that a requeued one finds its folder.
run = os.environ.get("RUN", time.strftime("%Y-%m-%d_%H-%M-%S"))
folder = args.checkpoint_dir or Path("checkpoints", run)
if not args.resume and checkpoint.steps(folder):
    sys.exit(f"{folder} has checkpoints: pass --resume, or choose another --checkpoint-dir")
# These stay as they are in a resumed run. All else is as the command line says now.
about = {"sizes": sizes, "batch_size": args.batch_size, "seed": args.seed}
about |= {"data": vocabulary["id"], "tokenizer": vocabulary["tokenizer"]}
runs = checkpoint.Folder(folder, args.keep, about)
first = runs.load(model, optimizer)
for group in optimizer.param_groups:
    group["betas"] = (0.9, args.beta2)
if args.resume:
    log(f"Resumed after step {first}" if first else f"No checkpoint in {runs.path}")
log(f"Data: {token_files.describe(args.data_dir)}. Checkpoints: {runs.path}")
log(f"Precision: {'bf16' if bf16 else 'fp32'}. Compiled: {compiled}")

# --- training ---
peak = peak_flops(device) * world_size


def evaluate(step: int):
    model.eval()
    sums = torch.zeros(2, device=device)  # loss, tokens
    rows = args.batch_size // data_ranks // args.accumulation
    batches = token_files.fixed_batches(val_windows, args.eval_windows, rows, data_rank, data_ranks)
    for tokens, targets in batches:
        heartbeat.alive(600)  # the first one compiles
        tokens, targets = tokens.to(device), targets.to(device)
        with torch.no_grad(), loss_parallel(), autocast:
            loss = loss_of(model(tokens), targets, reduction="sum")
        sums += torch.stack((whole_loss(loss), (targets >= 0).sum()))
    dist.all_reduce(sums)
    log(f"step={step}/{args.steps} val_loss={(sums[0] / sums[1]).item():.6f}")
    model.train()


# The earlier job may have had no time for this evaluation.
if first and (first % args.eval_every == 0 or first >= args.steps):
    evaluate(first)
# A rank that collects garbage keeps the others waiting, so all of them do it in the same steps.
gc.disable()
step, stopped, losses, batch, start = first, False, [], batch_of(first + 1), time.perf_counter()
for step in range(first + 1, args.steps + 1):
    torch.manual_seed(seed_of(args.seed, step - 1, dropout_rank))
    step_loss = torch.zeros((), device=device)
    for tokens in batch.chunk(args.accumulation):
        with loss_parallel():  # also around the backward pass
            with autocast:
                loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:]) / args.accumulation
            loss.backward()
        step_loss += whole_loss(loss.detach())
    sum_partial_gradients(model)
    losses.append(step_loss)
    # Read while the GPU still computes.
    batch = batch_of(step + 1)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step - 1)
    optimizer.step()
    optimizer.zero_grad()
    heartbeat.step = step

    if step % args.log_every == 0 or step == args.steps:
        # The mean over all ranks is the sum of their means, each divided by world_size.
        mean_loss = torch.stack(losses).mean() / world_size
        dist.all_reduce(mean_loss)
        line = f"step={step}/{args.steps} loss={mean_loss.item():.6f} grad_norm={norm.item():.6f}"
        seconds = (time.perf_counter() - start) / len(losses)
        rate = args.batch_size * args.context / seconds
        line += f" learning_rate={group['lr']:.4g} tokens_per_second={rate:.0f}"
        if not math.isnan(peak):
            line += f" mfu={flops_per_token * rate / peak:.3f}"
        if on_gpu:
            line += f" peak_memory_gib={torch.accelerator.max_memory_allocated() / 2**30:.1f}"
        log(f"{line} time_left={timedelta(seconds=round(seconds * (args.steps - step)))}")
        losses, start = [], time.perf_counter()
    # Not after every step, because each answer is an all-reduce, and a wait for the GPU.
    if step % 10 == 0 or step == args.steps:
        # All ranks have the same norm. Once weights are bad, it is nan in every later step.
        if not norm.isfinite():
            what = f"the gradient's norm is {norm.item()} in step {step}"
            sys.exit(f"{what}: try a lower --learning-rate")
        stopped = preemption.asked(device)
    pause = time.perf_counter()
    if stopped or step % args.save_every == 0 or step == args.steps:
        heartbeat.alive(600)
        runs.save(step, model, optimizer)
    # Before the evaluation, because Slurm may not leave time for both.
    if stopped:
        break
    if step % args.eval_every == 0 or step == args.steps:
        evaluate(step)
    if step % 1000 == 0:
        gc.collect()
    # Neither saves nor evaluations count as training.
    start += time.perf_counter() - pause

failed = not runs.wait()
# Under torchrun a signal during the last save or evaluation would end the job as FAILED.
stopped = stopped or preemption.asked(device)
if rank == 0 and failed:
    print("the last steps could not be saved", file=sys.stderr, flush=True)
elif stopped:
    log(f"Stopped after step {step}, saved")
    failed = rank == 0 and not preemption.requeue(f"--resume --checkpoint-dir {runs.path}")
else:
    log(f"Finished: step={max(first, args.steps)}, checkpoint in {runs.path}")
# After a SIGTERM torchrun fails when its ranks have ended, and then srun would end those that still
# save, or ask Slurm.
dist.barrier()
dist.destroy_process_group()
if device.type == "cpu":
    # A thread of gloo can outlive the group and crash Python's shutdown, which this skips.
    os._exit(failed)
sys.exit(failed)
