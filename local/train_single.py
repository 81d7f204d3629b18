"""Train a ConvNet on MNIST, in one process on one device.

    python aux/prepare_data.py mnist        # once, before any job
    python local/train_single.py --epochs 3

EDIT marks the lines to change for your own data and model.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))
import mnist  # EDIT: your data

# --- arguments ---
parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
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
# One process needs none.
device = torch.device("cpu")
# CUDA, ROCm or XPU. A Mac trains on its CPU, as with many ranks.
if args.device == "auto" and torch.accelerator.is_available() and sys.platform != "darwin":
    device = torch.accelerator.current_accelerator()
elif args.device == "auto" and os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0":
    sys.exit("Slurm granted GPUs, but torch sees none: check nvidia-smi, or pass --device cpu")


def log(text: str):
    print(text, flush=True)


# --- data ---
# EDIT: your two data sets. collate_fn is only for those of mnist.py, which return whole batches.
train_set, test_set = mnist.load(args.data_dir)
options = {"collate_fn": mnist.collate, "pin_memory": device.type != "cpu"}
if args.batch_size > len(train_set):
    sys.exit(f"--batch-size {args.batch_size} is more than the {len(train_set)} images")
sampler = RandomSampler(train_set, generator=torch.Generator())
train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **options)
test_loader = DataLoader(test_set, batch_size=1000, **options)

# --- model ---
torch.manual_seed(args.seed)
# EDIT: your model
model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(),
    nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Linear(128, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), args.learning_rate, momentum=0.9, fused=True)
autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16")

# --- checkpoint ---
path, epochs_done = args.checkpoint_dir / "checkpoint.pt", 0
args.checkpoint_dir.mkdir(parents=True, exist_ok=True)
if path.name in os.listdir(path.parent):
    # On the CPU, because the GPU has no room for the weights twice.
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
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
    sampler.generator.manual_seed(args.seed + epoch)
    losses, start = [], time.perf_counter()
    for step, (images, labels) in enumerate(train_loader, start=1):
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        # EDIT: your loss
        with autocast:
            loss = cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # .item() here would make the CPU wait for the GPU at every step.
        losses.append(loss.detach())

        if step % args.log_every == 0 or step == len(train_loader):
            mean_loss = torch.stack(losses).mean()
            if not mean_loss.isfinite():
                sys.exit(f"the loss is {mean_loss.item()}: try a lower --learning-rate")
            seconds = (time.perf_counter() - start) / len(losses)
            steps_left = (args.epochs - epoch + 1) * len(train_loader) - step
            line = f"epoch={epoch} step={step}/{len(train_loader)} loss={mean_loss.item():.6f}"
            line += f" images_per_second={args.batch_size / seconds:.0f}"
            log(f"{line} time_left={timedelta(seconds=round(seconds * steps_left))}")
            losses, start = [], time.perf_counter()

    model.eval()
    # EDIT: your metrics. The sum of the losses, and the number of correct predictions.
    sums = torch.zeros(2, device=device)
    with torch.inference_mode(), autocast:
        for images, labels in test_loader:
            logits, labels = model(images.to(device)).float(), labels.to(device)
            sums[0] += cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(1) == labels).sum()
    test_loss, accuracy = (sums / len(test_set)).tolist()
    log(f"epoch={epoch} test_loss={test_loss:.6f} test_accuracy={accuracy:.4f}")

    # Bad weights must not replace good ones.
    if not all(weight.isfinite().all() for weight in model.parameters()):
        what = f"the weights are not finite after epoch {epoch}"
        sys.exit(f"{what}: {path} stays as it was, try a lower --learning-rate")
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    # Written under another name and renamed, so a job that ends here leaves the old file whole.
    with open(f"{path}.part", "wb") as file:
        torch.save(checkpoint | {"epochs_done": epoch}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.part", path)

log(f"Finished: epoch={args.epochs}, checkpoint in {path}")
