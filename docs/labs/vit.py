"""A vision transformer on one GPU, as people have it, to be ported to two nodes: see grade_port.py.

python docs/labs/vit.py --epochs 4 --exact     # float64, nothing random: for comparisons
"""

import argparse
import copy
import math
import os
import sys

import torch
from exam_data import KINDS, Drawings
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--train-drawings", type=int, default=512)
parser.add_argument("--checkpoint", default="vit.pt", help="resumes from it, if it is there")
parser.add_argument("--exact", action="store_true", help="float64, and nothing random")
options = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
torch.set_default_dtype(torch.float64 if options.exact else torch.float32)


class ViT(nn.Module):
    """Images (batch, 1, 16, 16) to logits (batch, KINDS)."""

    def __init__(self, width: int = 32, dropout: float = 0.1):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, KINDS)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.blocks(tokens).mean(1))


def mixed(images: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixup: each image with another one of the batch, and their labels in the same shares."""
    labels = nn.functional.one_hot(kinds, KINDS).to(images.dtype)
    if options.exact:
        return images, labels
    share, other = torch.rand(()).item(), torch.randperm(len(images), device=images.device)
    return images.lerp(images[other], share), labels.lerp(labels[other], share)


train_set = Drawings(options.train_drawings, train=True, augment=not options.exact)
test_set = Drawings(101, train=False)
workers = {"num_workers": 1, "multiprocessing_context": "fork"}
train_loader = DataLoader(train_set, options.batch_size, shuffle=True, drop_last=True, **workers)
test_loader = DataLoader(test_set, options.batch_size, **workers)

model = ViT(dropout=0.0 if options.exact else 0.1).to(device)
averaged = copy.deepcopy(model).requires_grad_(False)  # EMA
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
steps = options.epochs * len(train_loader)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1, (step + 1) / 10) * (1 + math.cos(math.pi * step / steps)) / 2
)
scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda" and not options.exact)
parts = {"model": model, "averaged": averaged, "optimizer": optimizer}
parts |= {"schedule": schedule, "scaler": scaler}
step, best, epochs_done = 0, -1.0, 0
if os.path.exists(options.checkpoint):
    saved = torch.load(options.checkpoint, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    step, best, epochs_done = saved["step"], saved["best"], saved["epochs_done"]
    print(f"Resumed after step {step}")

for epoch in range(epochs_done, options.epochs):
    model.train()
    for images, kinds in train_loader:
        images, labels = mixed(images.to(device, torch.get_default_dtype()), kinds.to(device))
        with torch.autocast(device.type, torch.bfloat16, enabled=not options.exact):
            logits = model(images)
        loss = nn.functional.cross_entropy(logits.to(images.dtype), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = schedule.get_last_lr()[0]
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        with torch.no_grad():
            for mean, weight in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.05)
        step += 1
        print(f"step={step} loss={loss.item():.9f} learning_rate={rate:.9f}")
    averaged.eval()
    correct = 0
    with torch.no_grad():
        for images, kinds in test_loader:
            logits = averaged(images.to(device, torch.get_default_dtype()))
            correct += (logits.argmax(1) == kinds.to(device)).sum().item()
    accuracy = correct / len(test_set)
    if not math.isfinite(loss.item()):
        sys.exit(f"the loss is {loss.item()} in step {step}")
    if accuracy > best:
        best = accuracy
        torch.save(averaged.state_dict(), options.checkpoint + ".best")
    print(f"epoch={epoch + 1} accuracy={accuracy:.4f} best={best:.4f}")
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save(state | {"step": step, "best": best, "epochs_done": epoch + 1}, options.checkpoint)
