"""Train a language model of any size: copies of it (DDP), shards (FSDP2), tensor parallelism.

    python aux/prepare_data.py shakespeare                # once, before any job; or your own text
    ./torchrun.sh distributed/train_fsdp.py               # one rank per GPU, or two
    sbatch launch_slurm_with_torchrun.sh distributed/train_fsdp.py --size 0.6b --accumulation 8
    sbatch launch_slurm_with_torchrun.sh distributed/train_fsdp.py --init-from qwen --data-dir mine
    python aux/sample.py checkpoints/JOB                  # writes text

A run that was stopped and resumed on as many ranks has the weights of one that was not, bit for bit
(on GPUs with --deterministic). However the ranks share out the model, the steps are those of one
rank, up to rounding. --init-from fine-tunes a Qwen3 or Llama 3, and leaves a folder of that kind.
Grown from distributed/train_preemptible.py: arguments, data, model, checkpoint, training.
"""

import preemption

preemption.listen()  # before the slow imports, because Slurm may ask at any time

import argparse
import gc
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

import checkpoint
import heartbeat
import hugging_face
import parallel_plan
import sizes
import token_files  # EDIT: your data
import transformer  # EDIT: your model
from parallel_plan import full_tensor

# --- arguments ---
parser = heartbeat.ArgumentParser(description=__doc__.split("\n")[0])
add, positive, yes_or_no = parser.add_argument, sizes.positive, argparse.BooleanOptionalAction
add("--shard", type=positive, metavar="N", help="N ranks hold a copy (default: all; 1 is DDP)")
help = "N ranks share each layer, and are one for --shard"
add("--tensor-parallel", type=positive, default=1, metavar="N", help=help)
add("--sequence-parallel", action="store_true", help="they also share the tokens between layers")
add("--accumulation", type=positive, default=1, help="split each step into so many parts")
help = "less memory, a third more work; default: if the GPU's would not do"
add("--activation-checkpointing", action=yes_or_no, help=help)
add("--compile", action=yes_or_no, help="default: on a GPU with a C compiler")
help = "default: bf16 if the GPU has it, else fp32. tf32 rounds the factors of fp32, and is faster"
add("--precision", choices=["fp32", "tf32", "bf16"], help=help)
add("--deterministic", action="store_true", help="equal resumes on GPUs; slower")
add("--seed", type=int, default=0, help="seed of the weights and the data's order")
add("--device", choices=["auto", "cpu"], default="auto")
add("--data-dir", default="data/shakespeare", help="where prepare_data.py wrote it")
add("--log-every", type=positive, default=50, metavar="STEPS")
add("--eval-every", type=positive, default=250, metavar="STEPS")
add("--eval-windows", type=int, default=500, help="validate on so many; 0: on all")
add("--save-every", type=positive, default=1000, metavar="STEPS")
checkpoint.add_arguments(parser)  # --checkpoint-dir, --resume, --keep
args = sizes.parse(parser)  # --size or --init-from, and the shape and schedule that they set
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
# CUDA, ROCm or XPU, but not Apple's mps, which has no collectives.
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
parallel_plan.check(args, world_size)
# The ranks that share each layer are neighbours, and read the same sequences.
tensor = args.tensor_parallel
data_rank, data_ranks = rank // tensor, world_size // tensor
micro_batch_size = args.batch_size // data_ranks // args.accumulation
dataset = token_files.TokenDataset(args.data_dir, args.context, args.batch_size, args.seed)

# --- model ---
heartbeat.alive(600)  # to draw or read it, and to compile the first step
config = sizes.config_of(args, dataset.vocab_size)
precision = args.precision or sizes.best_precision(device)
compiled = sizes.can_compile(device, config) if args.compile is None else args.compile
bf16, shard = precision == "bf16", args.shard or data_ranks
torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")  # high: TF32
needed = (config, micro_batch_size, args.context, shard * tensor, tensor)
activation_checkpointing, line = sizes.plan_memory(
    device, args.activation_checkpointing, *needed, bf16=bf16
)
log(line)
with torch.device("meta"):  # without memory, because no rank is to hold it whole
    model = transformer.Transformer(config, activation_checkpointing)  # EDIT: your model
layers = model.model.layers  # EDIT: the parts of your model that are gathered one by one


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The sum over all targets, in float32. Those of -100 do not count."""
    loss = cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
    return full_tensor(loss)


fsdp_mesh, tensor_mesh = parallel_plan.meshes(device, shard, tensor)
if tensor > 1:
    parallel_plan.split_layers(model, tensor_mesh, args.sequence_parallel, compiled)
elif compiled:
    loss_of = torch.compile(loss_of)
    for part in [model] if fsdp_mesh is None else layers:
        part.compile()
if fsdp_mesh is not None:
    # A rank keeps its part of weights, gradients and AdamW's moments in float32.
    dtype = torch.bfloat16 if bf16 else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # Each call adds an all-gather before its part of the model computes, forward and backward, and
    # a reduce-scatter of its gradients. The last call covers what is outside the layers.
    for part in (*layers, model):
        # These stay whole until the backward pass, which begins with them.
        last = part in (layers[-1], model)
        fully_shard(part, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=not last)
pretrained = args.init_from and hugging_face.open_weights(args.init_from, model)
model.init_weights(device, args.seed, pretrained)  # each rank its own part
forward = model
if data_ranks > 1 and fsdp_mesh is None:
    forward = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
# FSDP's policy casts to bfloat16; without FSDP autocast does.
autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16 and fsdp_mesh is None)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)

# --- checkpoint ---
# These stay as they are in a resumed run. All else is as the command line says now.
metadata = {"config": config} | dataset.metadata
checkpoints = checkpoint.Folder(args.checkpoint_dir, args.keep, metadata, args.resume)
first = checkpoints.load(model, optimizer)
# The checkpoint has these as well, but the command line's take precedence.
[group] = optimizer.param_groups
group |= {"betas": (0.9, args.beta2), "weight_decay": args.weight_decay}
log(f"Data: {dataset}. Checkpoints: {checkpoints.path}")
log(f"Precision: {precision}. Compiled: {compiled}")


# --- training ---
def evaluate(step: int):
    model.eval()
    sums = torch.zeros(2, device=device)  # loss, tokens
    batches = dataset.eval_batches(args.eval_windows, micro_batch_size, data_rank, data_ranks)
    for inputs, targets in batches:
        heartbeat.alive(600)  # the first one compiles
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.no_grad(), loss_parallel(), autocast:
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
batch = dataset.batch(first + 1, data_rank, data_ranks, device)
step, stopped, losses, speed = first, False, [], sizes.Speed(config, args, device, first)
for step in range(first + 1, args.steps + 1):
    inputs, targets, count = batch
    step_loss = torch.zeros((), device=device)
    parts = zip(inputs.split(micro_batch_size), targets.split(micro_batch_size), strict=True)
    for part, (inputs, targets) in enumerate(parts, start=1):
        parallel_plan.sum_over_copies(forward, part == args.accumulation)  # once per step
        with loss_parallel():  # for logits that are split over the vocabulary, backward as well
            with autocast:
                loss = loss_of(forward(inputs), targets) / count
            balance = model.balance() / args.accumulation  # of experts, if there are any
            # FSDP and DDP take the mean over the ranks that read different data.
            ((loss + balance) * data_ranks).backward()
        step_loss += loss.detach()
    losses.append(step_loss)
    batch = dataset.batch(step + 1, data_rank, data_ranks, device)  # while the GPU computes
    if tensor > 1:
        parallel_plan.sum_partial_gradients(model)
    norm = full_tensor(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True))
    # A linear warm-up, then a cosine down to a tenth
    rise = min(1, step / (args.warmup_steps + 1))
    done = max(0, step - 1 - args.warmup_steps) / max(1, args.steps - args.warmup_steps)
    group["lr"] = args.learning_rate * rise * (0.55 + 0.45 * math.cos(math.pi * done))
    optimizer.step()
    optimizer.zero_grad()
    heartbeat.step = step
    # All ranks have the same norm. Once weights are bad, it is nan in every later step.
    if step % 10 == 0 and not norm.isfinite():
        heartbeat.fail(f"the gradient's norm is {norm} in step {step}: try a lower --learning-rate")

    if step % args.log_every == 0 or step == args.steps:
        mean_loss = torch.stack(losses).mean() / tensor
        dist.all_reduce(mean_loss)  # each rank has its part of the sum
        line = f"step={step}/{args.steps} loss={mean_loss.item():.6f} grad_norm={norm.item():.6f}"
        log(f"{line} learning_rate={group['lr']:.4g} {speed.since_last(step)}")
        losses = []
    # `asked` waits for the GPU. After the last step it looks in any case, before the evaluation.
    stopped = preemption.asked(device, step if step < args.steps else None)
    with speed.pause():  # neither saves nor evaluations count as training
        if stopped or step % args.save_every == 0 or step == args.steps:
            heartbeat.alive(600)
            checkpoints.save(step, model, optimizer)
        if stopped:
            break  # before the evaluation, because Slurm may not leave time for both
        if step % args.eval_every == 0 or step == args.steps:
            evaluate(step)
    if step % 1000 == 0:
        gc.collect()

saved = checkpoints.from_rank_0(checkpoints.wait())
# Under torchrun a signal during the last save or evaluation would end the job as FAILED.
stopped = stopped or preemption.asked(device)
if saved and not stopped and args.init_from:
    heartbeat.alive(600)
    hugging_face.write(checkpoints.path / "model", model, like=args.init_from)
    stopped = preemption.asked(device)
log(checkpoints.outcome(step, stopped))
preemption.end(stopped, not saved, f"--resume --checkpoint-dir {checkpoints.path}")
