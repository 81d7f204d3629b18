"""Train a ConvNet on MNIST with DistributedDataParallel. Every process (rank) runs this whole file.

    python aux/prepare_data.py mnist                      # once, before any job
    ./torchrun.sh distributed/train_ddp.py --epochs 3     # one rank per GPU, or two on the CPU
    sbatch launch_slurm_with_torchrun.sh distributed/train_ddp.py --epochs 3

Any launcher gives the same losses. On another number of ranks they differ by rounding, which grows
with the steps. EDIT marks the lines to change for your own data and model.
Grown from local/train_single.py: arguments, process group, data, model, checkpoint, training.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import heartbeat
import mnist  # EDIT: your data

# --- arguments ---
parser = heartbeat.ArgumentParser(description=__doc__.split("\n")[0])
add = parser.add_argument
add("--epochs", type=int, default=3)
add("--batch-size", type=int, default=64, help="images per step, over all ranks")
add("--learning-rate", type=float, default=0.02, help="for SGD with momentum 0.9")
add("--seed", type=int, default=0, help="seed of the weights and the images' order")
add("--precision", choices=["fp32", "bf16"], default="fp32", help="on GPUs fp32 convolves in TF32")
add("--device", choices=["auto", "cpu"], default="auto")
add("--data-dir", default="data/mnist", help="where prepare_data.py wrote MNIST")
add("--log-every", type=int, default=100, metavar="STEPS")
# env.sh names a job's runs in RUN, so that a requeued job finds its folder, and resumes.
run = os.environ.get("RUN", time.strftime("%Y-%m-%d_%H-%M-%S"))
add("--checkpoint-dir", type=Path, default=Path("checkpoints", run), help="resumes the run in it")
args = parser.parse_args()
if min(args.epochs, args.batch_size, args.log_every) < 1:
    parser.error("--epochs, --batch-size and --log-every must be 1 or more")

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
# EDIT: your two data sets. In options, instead of collate_fn (for mnist.py's whole batches):
# "num_workers": N, "multiprocessing_context": "fork". N is a rank's CPUs less one, or 0 at first.
train_set, test_set = mnist.load(args.data_dir)
options = {"collate_fn": mnist.collate, "pin_memory": device.type != "cpu"}
if args.batch_size % world_size != 0 or args.batch_size > len(train_set):
    multiple = f"a multiple of {world_size} (ranks), up to {len(train_set)}"
    heartbeat.fail(f"--batch-size must be {multiple}")
# Each rank gets an equal part of the shuffled images, and every world_size-th test image.
sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
test_sampler = range(rank, len(test_set), world_size)
batch_size = args.batch_size // world_size
train_loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **options)
test_loader = DataLoader(test_set, batch_size=1000, sampler=test_sampler, **options)

# --- model ---
torch.manual_seed(args.seed)
# EDIT: your model. If it has dropout, put torch.manual_seed(rank) below it, so that ranks differ.
model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(),
    nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10),
).to(device)  # fmt: skip
# ddp takes rank 0's weights, and its backward() averages the gradients over all ranks.
ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9, fused=True)
autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

# --- checkpoint ---
# Rank 0 reads the file, and sends the others what it has read.
path, epochs_done, found = args.checkpoint_dir / "checkpoint.pt", 0, [None]
if rank == 0:
    args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    if path.name in os.listdir(path.parent):
        found = [torch.load(path, map_location="cpu", weights_only=True)]
dist.broadcast_object_list(found)
if checkpoint := found[0]:
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    # The learning rate is in that state, but the command line's takes precedence.
    optimizer.param_groups[0]["lr"] = args.learning_rate
    epochs_done = checkpoint["epochs_done"]
    log(f"Resumed after epoch {epochs_done}")
log(f"Data: {mnist.describe(args.data_dir)}. Checkpoint: {path}")  # EDIT

# --- training ---
for epoch in range(epochs_done + 1, args.epochs + 1):
    model.train()
    # A new order in every epoch, the same after a resume.
    sampler.set_epoch(epoch)
    losses, start = [], time.perf_counter()
    for step, (images, labels) in enumerate(train_loader, start=1):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        # EDIT: your loss
        with autocast:
            loss = cross_entropy(ddp(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # .item() here would make the CPU wait for the GPU at every step.
        losses.append(loss.detach())
        heartbeat.step = (epoch - 1) * len(train_loader) + step

        if step % args.log_every == 0 or step == len(train_loader):
            # The mean over all ranks is the sum of their means, each divided by world_size.
            mean_loss = torch.stack(losses).mean() / world_size
            dist.all_reduce(mean_loss)
            if not mean_loss.isfinite():
                heartbeat.fail(f"the loss is {mean_loss.item()}: try a lower --learning-rate")
            seconds = (time.perf_counter() - start) / len(losses)
            steps_left = (args.epochs - epoch + 1) * len(train_loader) - step
            line = f"epoch={epoch} step={step}/{len(train_loader)} loss={mean_loss.item():.6f}"
            line += f" images_per_second={args.batch_size / seconds:.0f}"
            log(f"{line} time_left={timedelta(seconds=round(seconds * steps_left))}")
            losses, start = [], time.perf_counter()

    model.eval()
    # EDIT: your metrics. The sum of the losses, and the number of correct predictions. It calls
    # model, because ddp may wait for all ranks in each batch, and a rank may have one batch less.
    sums = torch.zeros(2, device=device)
    with torch.inference_mode(), autocast:
        for images, labels in test_loader:
            heartbeat.alive()
            logits, labels = model(images.to(device)).float(), labels.to(device)
            sums[0] += cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(1) == labels).sum()
    dist.all_reduce(sums)
    test_loss, accuracy = (sums / len(test_set)).tolist()
    log(f"epoch={epoch} test_loss={test_loss:.6f} test_accuracy={accuracy:.4f}")

    # Bad weights must not replace good ones. All ranks have the same.
    if not all(weight.isfinite().all() for weight in model.parameters()):
        what = f"the weights are not finite after epoch {epoch}"
        heartbeat.fail(f"{what}: {path} stays as it was, try a lower --learning-rate")
    heartbeat.alive(600)  # a large file may take ten minutes, for which NCCL waits as well
    if rank == 0:
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        # Written under another name and renamed, so a job that ends here leaves the old file whole.
        with open(f"{path}.part", "wb") as file:
            torch.save(checkpoint | {"epochs_done": epoch}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.part", path)
    # No rank leaves, or waits in a step, while rank 0 saves.
    dist.barrier()

log(f"Finished: epoch={args.epochs}, checkpoint in {path}")
heartbeat.leave(device)
