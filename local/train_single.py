"""Train a ConvNet on MNIST: one process, one device, no torch.distributed. The baseline that train_ddp.py grew from.

    python aux/prepare_data.py mnist
    python local/train_single.py --epochs 3

See what data parallelism adds:

    git diff --no-index local/train_single.py distributed/train_ddp.py
"""

import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from resilience import stop_request
from resilience.arguments import ArgumentParser, device_name, number, whole_number

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=whole_number(1), default=3, help="passes over the images")
    parser.add_argument("--max-steps", type=whole_number(1), help="stop after this many steps in all (default: never)")
    parser.add_argument("--batch-size", type=whole_number(1), default=64, help="images per step")
    parser.add_argument("--learning-rate", type=number(0), default=0.02, help="of SGD with momentum")
    parser.add_argument("--dropout", type=number(0, below=1), default=0.25, help="share of activations dropped")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="of weights, order and dropout")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of autocast")
    device = os.environ.get("TRAIN_DEVICE", "auto")
    parser.add_argument("--device", type=device_name, default=device, help="auto, cpu, cuda or mps; or TRAIN_DEVICE")
    parser.add_argument("--data-dir", type=Path, default="data/mnist", help="of aux/prepare_data.py")
    parser.add_argument("--num-workers", type=whole_number(0), default=0, help="loader processes")
    parser.add_argument("--log-every", type=whole_number(1), default=100, help="steps between two log lines")
    parser.add_checkpoint_arguments()
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()  # before torch: a typing mistake costs no second
    stop_request.listen()

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import mnist
from resilience import checkpoint
from resilience.progress import Progress

# --- device -----------------------------------------------------------------------------------------------------------


def choose_device(name: str) -> torch.device:
    """CUDA, else Apple's MPS, else the CPU, unless `name` says which."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return torch.device(name)


# --- data -------------------------------------------------------------------------------------------------------------


def make_loaders(args: Namespace, device: torch.device) -> tuple[DataLoader, DataLoader]:
    """The training and the test batches: images (n, 1, 28, 28) float32, labels (n,) int64."""
    train_set, test_set = mnist.MNIST(args.data_dir, train=True), mnist.MNIST(args.data_dir, train=False)
    options = {"collate_fn": mnist.whole_batch, "num_workers": args.num_workers, "pin_memory": device.type == "cuda"}
    options["worker_init_fn"] = stop_request.ignore
    sampler = mnist.ResumableSampler(RandomSampler(train_set, generator=torch.Generator()))
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)
    test_loader = DataLoader(test_set, batch_size=1000, **options)
    return train_loader, test_loader


# --- model ------------------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Images (n, 1, 28, 28) to logits (n, 10): two convolutions, two linears, 1.2 million parameters."""

    def __init__(self, dropout: float):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.linear1 = nn.Linear(64 * 12 * 12, 128)
        self.linear2 = nn.Linear(128, 10)
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv2(F.relu(self.conv1(images))), 2))
        x = self.dropout(x.permute(0, 2, 3, 1).flatten(1))  # as channels_last lies in memory: no copy
        return self.linear2(self.dropout(F.relu(self.linear1(x))))


def make_model(args: Namespace, device: torch.device) -> tuple[ConvNet, torch.optim.Optimizer]:
    """The network and its optimizer in their fastest forms, but on MPS, where channels_last is not to be trusted.

    github.com/pytorch/pytorch/issues/175189: gradients on MPS that were wrong, and silently so.
    """
    fast = device.type != "mps"
    model = ConvNet(args.dropout).to(device, memory_format=torch.channels_last if fast else None)
    options = {"lr": args.learning_rate, "momentum": 0.9, "nesterov": True, "fused": fast}
    return model, torch.optim.SGD(model.parameters(), **options)


def autocast(args: Namespace, device: torch.device) -> torch.autocast:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
    return torch.autocast(device.type, dtype, enabled=args.precision != "fp32")


# --- steps ------------------------------------------------------------------------------------------------------------


def train_epoch(args, step, model, optimizer, scaler, loader, device, progress) -> Iterator[int]:
    """Trains on every image once, or on those after `step` if that is inside the epoch; yields each new step number."""
    model.train()
    epoch, done = step // len(loader) + 1, step % len(loader)
    loader.sampler.whole.generator.manual_seed(args.seed + epoch)
    loader.sampler.done = done * args.batch_size
    loss_sum, count = torch.zeros((), device=device), 0  # since the last log line; read only there
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if args.dropout:
            torch.manual_seed(checkpoint.seed_from(args.seed, step))
        with autocast(args, device):
            logits = model(images)
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")
        optimizer.zero_grad()
        scaler.scale(loss / len(images)).backward()
        scaler.step(optimizer)
        scaler.update()
        loss_sum += loss.detach()
        count += len(images)
        step += 1
        if step % args.log_every == 0 or step == args.max_steps:
            progress.step(step, epoch, count, loss=loss_sum.item() / count)
            loss_sum, count = torch.zeros((), device=device), 0
        yield step


@torch.inference_mode()
def evaluate(args: Namespace, model: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Average loss and accuracy over all test images, each counted once."""
    model.eval()
    sums = torch.zeros(2, device=device)  # loss, right answers
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with autocast(args, device):
            logits = model(images).float()
        sums += torch.stack((F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()))
    loss, right = (sums / len(loader.dataset)).tolist()
    return loss, right


# --- main -------------------------------------------------------------------------------------------------------------


def main(args: Namespace):
    if fault := mnist.missing_data(args.data_dir) or checkpoint.in_the_way(args.checkpoint_dir, args.resume, ".pt"):
        sys.exit(f"train_single.py: {fault}")
    device = choose_device(args.device)
    print(f"Data: {mnist.describe(args.data_dir)}. Device: {device}. Checkpoints: {args.checkpoint_dir}")

    facts = mnist.identity(args)

    torch.manual_seed(args.seed)
    train_loader, test_loader = make_loaders(args, device)
    model, optimizer = make_model(args, device)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    step, loss, accuracy, stop, saved = 0, math.nan, math.nan, False, True
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    checkpoint.take_over(args.checkpoint_dir, 0)
    if args.resume and (state := checkpoint.load_on_all_ranks(args.checkpoint_dir, 0, 1, device)):
        if fault := checkpoint.changes(args.checkpoint_dir, state["run"], facts):
            sys.exit(f"train_single.py: {fault}")
        step, loss, accuracy = (state[name] for name in ("step", "test_loss", "test_accuracy"))
        for name, part in parts.items():
            part.load_state_dict(state[name])
    if args.resume:
        print(f"Resumed after step {step}" if step else f"No whole checkpoint in {args.checkpoint_dir}", flush=True)

    total_steps = min(args.epochs * len(train_loader), args.max_steps or sys.maxsize)
    progress = Progress(args.checkpoint_dir, "images", step, total_steps)
    boundary = checkpoint.Boundary(args, step, 0, 1, device)
    while step < total_steps and not stop:
        steps = train_epoch(args, step, model, optimizer, scaler, train_loader, device, progress)
        for step in steps:
            save, stop = boundary(step)
            if step % len(train_loader) == 0 or step == total_steps:
                loss, accuracy = evaluate(args, model, test_loader, device)
                progress.epoch(step, math.ceil(step / len(train_loader)), test_loss=loss, test_accuracy=accuracy)
                save = True
            if save:
                state = {"run": facts, "step": step, "test_loss": loss, "test_accuracy": accuracy}
                state |= {name: part.state_dict() for name, part in parts.items()}
                saved = checkpoint.save(state, args.checkpoint_dir, step, args.keep_checkpoints)
            if stop or step == total_steps:
                break
    epoch = math.ceil(step / len(train_loader))
    result = f"epoch={epoch} average_loss={loss:.4f} accuracy={accuracy:.4f}"
    checkpoint.finish(step, total_steps, saved, 0, result)


if __name__ == "__main__":
    main(args)
