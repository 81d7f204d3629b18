"""Train a language model that is too large for one GPU: FSDP2 leaves each rank a part of it.

    python aux/prepare_data.py shakespeare                # once, before any job; or your own text
    ./torchrun.sh distributed/train_fsdp.py               # one rank per GPU, or two
    sbatch launch_slurm_with_torchrun.sh distributed/train_fsdp.py --size 0.6b --accumulation 8
    sbatch launch_slurm_with_torchrun.sh distributed/train_fsdp.py --init-from qwen --data-dir mine
    python distributed/sample.py checkpoints/JOB          # writes text

A run that was stopped and resumed on as many ranks has the weights of one that was not, bit for bit
(on GPUs with --deterministic). On any number of ranks the steps are the unsplit model's, up to
rounding. --init-from fine-tunes a Qwen3 or Llama 3 of any size, and leaves a folder of that kind.
Grown from distributed/train_preemptible.py: arguments, data, model, checkpoint, training.
"""

import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import argparse
import gc
import math
import os
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import checkpoint
import heartbeat
import sizes
import token_files  # EDIT: your data
import transformer  # EDIT: your model


# --- arguments ---
def at_least_1(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
add, by_name = parser.add_argument, sizes.SIZES
add("--size", choices=by_name, default="cpu", help="sets the defaults of these, in this order:")
for name, value in by_name["cpu"].items():
    by_size = ", ".join(str(size[name]) for size in by_name.values())
    kind = at_least_1 if type(value) is int and name != "warmup_steps" else type(value)
    if kind is not bool:
        add(f"--{name.replace('_', '-')}", type=kind, help=by_size)
add("--init-from", type=Path, metavar="FOLDER", help="fine-tune a Qwen3 or Llama of Hugging Face")
help = "how many share one copy of the model (default: all; 1 is DDP)"
add("--shard", type=at_least_1, metavar="RANKS", help=help)
add("--accumulation", type=at_least_1, default=1, help="split each step into so many parts")
help = "less memory, a third more work; default: if the GPU's would not do"
add("--activation-checkpointing", action=argparse.BooleanOptionalAction, help=help)
add("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU with a C compiler")
add("--precision", choices=["fp32", "bf16"], help="default: bf16 on a GPU, fp32 on a CPU")
add("--deterministic", action="store_true", help="equal resumes on GPUs; slower")
add("--seed", type=int, default=0, help="seed of the weights and the data's order")
add("--device", choices=["auto", "cpu"], default="auto")
add("--data-dir", type=Path, default="data/shakespeare", help="where prepare_data.py wrote it")
add("--log-every", type=at_least_1, default=50, metavar="STEPS")
add("--eval-every", type=at_least_1, default=250, metavar="STEPS")
add("--eval-windows", type=int, default=500, help="validate on so many; 0: on all")
add("--save-every", type=at_least_1, default=1000, metavar="STEPS")
add("--keep", type=at_least_1, default=2, help="how many checkpoints to keep")
add("--checkpoint-dir", type=Path, help="default: checkpoints/RUN, or the time")
# A requeued job runs the same command again, so it resumes without being told.
requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
add("--resume", action="store_true", default=requeued, help="the run in --checkpoint-dir")
chosen = parser.parse_known_args()[0]
parser.set_defaults(**by_name[chosen.size])
if chosen.init_from:
    import hugging_face

    hf_config = hugging_face.read_config(chosen.init_from)
    # No other key sets an option, because the file may be a stranger's.
    shape = {name: hf_config[name] for name in sizes.SHAPE}
    parser.set_defaults(**sizes.TUNING | shape)
args = parser.parse_args()
if args.init_from:  # other sizes than the folder's are a fault when it is read
    hf_config |= {name: vars(args)[name] for name in sizes.SHAPE}
if args.resume and not args.checkpoint_dir and "RUN" not in os.environ:
    parser.error("--resume needs --checkpoint-dir, or the variable RUN, which env.sh sets in a job")
if args.deterministic:
    torch.use_deterministic_algorithms(True)
    # Otherwise cuBLAS and NCCL choose among algorithms that sum in different orders.
    fixed = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    os.environ.update(fixed | {"NCCL_NVLS_ENABLE": "0"} | dict(os.environ))

# --- process group ---
# A launcher sets RANK, LOCAL_RANK (the number on this node) and WORLD_SIZE, a bare srun its own.
# Any other process is alone: srun sets SLURM_STEP_NUM_TASKS, and env.sh unsets an inherited one.
env = os.environ
rank = int(env.get("RANK", env.get("SLURM_PROCID", 0)))
local_rank = int(env.get("LOCAL_RANK", env.get("SLURM_LOCALID", 0)))
world_size = int(env.get("WORLD_SIZE", env.get("SLURM_STEP_NUM_TASKS", 1)))
if world_size == 1:
    env.setdefault("MASTER_ADDR", "localhost")
    env.setdefault("MASTER_PORT", "0")  # any free port

device = torch.device("cpu")
# CUDA, ROCm or XPU, but not Apple's MPS, which has no collectives.
if args.device == "auto" and torch.accelerator.is_available() and sys.platform != "darwin":
    # GPU number local_rank. If Slurm shows each rank only its own, that is number 0.
    number = local_rank if torch.accelerator.device_count() > 1 else 0
    torch.accelerator.set_device_index(number)
    device = torch.device(torch.accelerator.current_accelerator().type, number)

# The ranks meet at MASTER_ADDR:MASTER_PORT. NCCL communicates between GPUs, gloo between CPUs.
backend = dist.get_default_backend_for_device(device)
bound = device if device.type == "cuda" else None
with heartbeat.meeting(local_rank, device, args.device):
    dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=bound)


def log(text: str):
    if rank == 0:
        print(text, flush=True)


# --- data ---
shard, on_gpu = args.shard or world_size, device.type != "cpu"
if world_size % shard != 0:
    sys.exit(f"--shard must divide {world_size} (ranks)")
if args.batch_size % (world_size * args.accumulation) != 0:
    parts = f"{world_size} (ranks) x {args.accumulation} (--accumulation)"
    sys.exit(f"--batch-size must be a multiple of {parts}")
micro_batch_size = args.batch_size // world_size // args.accumulation
dataset = token_files.TokenDataset(args.data_dir, args.context, args.batch_size, args.seed)

# --- model ---
heartbeat.alive(600)  # to draw or read it, and to compile the first step
vocab_size = dataset.vocabulary["tokenizer"]["size"]
config = hf_config if args.init_from else sizes.new_config(vars(args), args.context, vocab_size)
if vocab_size > config["vocab_size"] or args.context > config["max_position_embeddings"]:
    limits = f"{config['vocab_size']} tokens, and --context {config['max_position_embeddings']}"
    sys.exit(f"{args.init_from} knows {limits} at most")
bf16 = args.precision == "bf16" or (args.precision is None and on_gpu)
activation_checkpointing, line = sizes.plan_memory(
    device, args.activation_checkpointing, config, micro_batch_size, args.context, shard, bf16=bf16
)
log(line)
with torch.device("meta"):  # without memory, because no rank is to hold it whole
    model = transformer.Transformer(config, activation_checkpointing)  # EDIT: your model
layers = model.model.layers  # EDIT: the parts of your model that are gathered one by one
compiled = args.compile
if compiled is None:  # Triton needs a compiler on the node
    compiled = on_gpu and any(map(shutil.which, ("gcc", "clang")))
torch.set_float32_matmul_precision("high")  # TF32, if the GPU has it


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over all targets, in float32. Those of -100 do not count."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


if compiled:
    loss_of = torch.compile(loss_of)
    for part in layers if shard > 1 else [model]:
        part.compile()
if shard > 1:
    # Neighbours share a model. The other dimension of the mesh has the copies.
    dimensions, names = (world_size // shard, shard), ("replicate", "shard")
    mesh = init_device_mesh(device.type, dimensions, mesh_dim_names=names)
    mesh = mesh["shard"] if shard == world_size else mesh
    # A rank keeps its part of weights, gradients and AdamW's moments in float32.
    dtype = torch.bfloat16 if bf16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Each call adds an all-gather before its part of the model computes, forward and backward, and
    # a reduce-scatter of its gradients. The last call covers what is outside the layers.
    for part in (*layers, model):
        # These stay whole until the backward pass, which begins with them.
        last = part in (layers[-1], model)
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not last)

pretrained = hugging_face.open_weights(args.init_from, model) if args.init_from else None
model.init_weights(device, args.seed, pretrained)  # each rank its own part
forward = model
if shard == 1 and world_size > 1:
    forward = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
# FSDP's policy casts to bfloat16; without FSDP autocast does.
autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16 and shard == 1)
# fused: one kernel updates all weights.
optimizer = torch.optim.AdamW(model.parameters(), fused=True)


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
# These stay as they are in a resumed run. All else is as the command line says now.
metadata = {"config": config, "context": args.context, "batch_size": args.batch_size}
metadata |= {"seed": args.seed, "data": dataset.vocabulary["id"]}
metadata |= {"tokenizer": dataset.vocabulary["tokenizer"]}
checkpoints = checkpoint.Folder(folder, args.keep, metadata, resume=args.resume)
first = checkpoints.load(model, optimizer)
[group] = optimizer.param_groups
# The checkpoint has these as well, but the command line's take precedence.
group |= {"betas": (0.9, args.beta2), "weight_decay": args.weight_decay}
log(f"Data: {dataset}. Checkpoints: {checkpoints.path}")
log(f"Precision: {'bf16' if bf16 else 'fp32'}. Compiled: {compiled}")

# --- training ---
peak = sizes.peak_flops(device) * world_size
flops_per_token = sizes.flops_per_token(config, args.context)


def evaluate(step: int):
    model.eval()
    sums = torch.zeros(2, device=device)  # loss, tokens
    for inputs, targets in dataset.eval_batches(
        args.eval_windows, micro_batch_size, rank, world_size
    ):
        heartbeat.alive(600)  # the first one compiles
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.no_grad(), autocast:
            loss = loss_of(model(inputs), targets)
        sums += torch.stack((loss, (targets >= 0).sum()))
    dist.all_reduce(sums)
    log(f"step={step}/{args.steps} val_loss={(sums[0] / sums[1]).item():.6f}")
    model.train()


# Evaluate first what comes from --init-from, or from a job that was stopped before it could.
if (first or args.init_from) and (first % args.eval_every == 0 or first >= args.steps):
    evaluate(first)
# A rank that collects garbage keeps the others waiting, so all of them do it in the same steps.
gc.disable()
batch = dataset.batch(first + 1, rank, world_size, device)
step, stopped, losses, start = first, False, [], time.perf_counter()
for step in range(first + 1, args.steps + 1):
    inputs, targets, count = batch
    step_loss = torch.zeros((), device=device)
    parts = zip(inputs.chunk(args.accumulation), targets.chunk(args.accumulation), strict=True)
    for number, (inputs, targets) in enumerate(parts, start=1):
        # Copies of the model communicate only once per step.
        is_last = number == args.accumulation
        if shard > 1:
            model.set_requires_all_reduce(is_last)
        elif world_size > 1:
            forward.require_backward_grad_sync = is_last
        with autocast:
            loss = loss_of(forward(inputs), targets) / count
        # FSDP and DDP take the mean over all ranks.
        (loss * world_size).backward()
        step_loss += loss.detach()
    losses.append(step_loss)
    # Read while the GPU still computes.
    batch = dataset.batch(step + 1, rank, world_size, device)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    group["lr"] = learning_rate(step - 1)
    optimizer.step()
    optimizer.zero_grad()
    heartbeat.step = step
    # All ranks have the same norm. Once weights are bad, it is nan in every later step.
    if step % 10 == 0 and not norm.isfinite():
        what = f"the gradient's norm is {norm.item()} in step {step}"
        sys.exit(f"{what}: try a lower --learning-rate")

    if step % args.log_every == 0 or step == args.steps:
        mean_loss = torch.stack(losses).mean()
        dist.all_reduce(mean_loss)  # each rank has its part of the sum
        seconds = (time.perf_counter() - start) / len(losses)
        rate = args.batch_size * args.context / seconds
        line = f"step={step}/{args.steps} loss={mean_loss.item():.6f} grad_norm={norm.item():.6f}"
        line += f" learning_rate={group['lr']:.4g} tokens_per_second={rate:.0f}"
        if not math.isnan(peak):
            line += f" mfu={flops_per_token * rate / peak:.3f}"
        if on_gpu:
            line += f" peak_memory_gib={torch.accelerator.max_memory_allocated() / 2**30:.1f}"
        log(f"{line} time_left={timedelta(seconds=round(seconds * (args.steps - step)))}")
        losses, start = [], time.perf_counter()
    # `asked` waits for the GPU. After the last step it looks in any case, before the evaluation.
    stopped = preemption.asked(device, step if step < args.steps else None)
    pause = time.perf_counter()
    if stopped or step % args.save_every == 0 or step == args.steps:
        heartbeat.alive(600)
        checkpoints.save(step, model, optimizer)
    if stopped:
        break  # before the evaluation, because Slurm may not leave time for both
    if step % args.eval_every == 0 or step == args.steps:
        evaluate(step)
    if step % 1000 == 0:
        gc.collect()
    # Neither saves nor evaluations count as training.
    start += time.perf_counter() - pause

saved = checkpoints.from_rank_0(checkpoints.wait())
# Under torchrun a signal during the last save or evaluation would end the job as FAILED.
stopped = stopped or preemption.asked(device)
if saved and not stopped and args.init_from:
    heartbeat.alive(600)
    # An evaluation has left some weights gathered and rounded. In the state_dict they are not.
    value_of = model.state_dict().__getitem__
    hugging_face.write(checkpoints.path / "model", model, value_of, args.init_from)
    stopped = preemption.asked(device)
if not saved:
    log("The last steps are not saved")
elif stopped:
    log(f"Stopped after step {step}, saved")
else:
    log(f"Finished: step={step}, checkpoint in {checkpoints.path}")
preemption.end(stopped, not saved, f"--resume --checkpoint-dir {checkpoints.path}")
