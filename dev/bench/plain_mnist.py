"""Train on MNIST in the style of pytorch/examples, on the CPU: the other side of compare.py.

    python dev/bench/plain_mnist.py                      # batches are slices, to time the steps
    python dev/bench/plain_mnist.py --only-load          # the loader by itself, image by image
    python dev/bench/plain_mnist.py --only-load --ours   # the loader of train_ddp.py

It leaves out the example's dropout, because train_ddp.py has none.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import mnist

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--data-dir", default="data/mnist")
parser.add_argument("--only-load", action="store_true")
parser.add_argument("--ours", action="store_true")
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()
if args.steps < 30:
    parser.error("--steps takes 30 or more")
if not Path(args.data_dir, "MNIST/raw").is_dir():
    parser.error(f"no MNIST data in {args.data_dir}: python aux/prepare_data.py mnist")

transforms = torchvision.transforms
normalize = transforms.Normalize((0.1307,), (0.3081,))
dataset = torchvision.datasets.MNIST(
    args.data_dir, transform=transforms.Compose([transforms.ToTensor(), normalize])
)
loader = DataLoader(dataset, batch_size=64, shuffle=True)
if args.ours:
    loader = DataLoader(mnist.load(args.data_dir)[0], 64, shuffle=True, collate_fn=mnist.collate)


def batches():
    """Images and labels, 64 at a time, over and over."""
    found = loader
    if not args.only_load:
        tensors = mnist.load(args.data_dir)[0].tensors
        found = list(zip(*(tensor.split(64) for tensor in tensors), strict=True))
    while True:
        yield from found


torch.manual_seed(0)
layers = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
layers += [nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10), nn.LogSoftmax(1)]
model = nn.Sequential(*layers)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

start, images_seen, loss = time.perf_counter(), 0, torch.zeros(())
for step, (images, labels) in enumerate(batches(), start=1):
    images_seen += len(images)
    if not args.only_load:
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            loss.item()
    if step % (args.steps // 5) == 0:
        rate = images_seen / (time.perf_counter() - start)
        print(f"step={step} loss={loss.item():.4f} images_per_second={rate:.0f}", flush=True)
        start, images_seen = time.perf_counter(), 0
    if step == args.steps:
        break
