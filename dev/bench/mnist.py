"""The speed of training on MNIST on a CPU: ratios, which hold on other machines too, and the gates they must pass.

    python dev/bench/mnist.py                   # some ten minutes on two quiet cores
    python dev/bench/mnist.py --only accuracy   # to 99 % test accuracy: train_fast.py
    python dev/bench/mnist.py --check           # exit code 1 and one sentence when a gate is missed

"Ours" is train_ddp.py itself: run in this process, or launched; in the race to 99 % it is train_fast.py. "Theirs" is
the way of mnist/main.py in github.com/pytorch/examples on a CPU, written fresh: images one by one through PIL, ToTensor
and Normalize, Adadelta, float32; outside the race the same network and batch size. The two take turns, on one thread
each, and are judged by CPU seconds, which on a quiet machine are seconds and on a busy one are still right. Two ranks
against one are timed by the clock, as a share of the ideal, and not judged on a busy machine. In the race to 99 % both
have all CPUs. It begins when Python and torch are there, before the files are read, and ends with the first evaluation,
after an epoch, that says so; theirs ends with its 14th epoch in any case. rows.py says what the columns are.
"""

import contextlib
import importlib.util
import io
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT, FAST = REPOSITORY / "distributed/train_ddp.py", REPOSITORY / "distributed/train_fast.py"
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("distributed", "aux")]  # mnist: distributed/'s

import rows
from resilience.arguments import ArgumentParser, whole_number
from rows import Row

KINDS = ("loading", "step", "ranks", "accuracy")

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a gate is missed")
    parser.add_argument("--data-dir", type=Path, help="files in MNIST's format (default: digits drawn for this run)")
    parser.add_argument("--only", choices=KINDS, help="which rows (default: all)")
    parser.add_argument("--rounds", type=whole_number(1), default=11, help="turns of one process, after a first one")
    parser.add_argument("--steps", type=whole_number(1), default=75, help="steps in a turn")
    parser.add_argument("--launches", type=whole_number(1), default=7, help="turns of one rank and of two ranks")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()  # before torch: a typing mistake costs no second

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import draw_digits
import mnist
import prepare_data
from language_model import bfloat16_is_faster
from resilience.samplers import RunSampler
from torchvision_on_cpu import torchvision

THEIRS = "pytorch/examples-style loop"
LEASTS = {
    "images alone, train_ddp.py": 40,
    "images alone, train_preemptible.py": 40,
    "MNIST step, fp32": 1.2,
    "MNIST step, bf16": 2,
    "MNIST on two ranks, fp32": 0.75,
    "MNIST to 99 %, real files": 20,
    "MNIST to 99 %, synthetic digits": 20,
}
GOAL = 0.99

# --- data -------------------------------------------------------------------------------------------------------------


def draw_data(folder: Path):
    """A set as large as MNIST, from 10,000 drawn digits; 4,000 others to test on."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, seed, drawn, count in (("train", 0, 10_000, 60_000), ("t10k", 1, 4000, 4000)):
        digits = draw_digits.draw_digits(drawn, seed)
        header = b"".join(number.to_bytes(4, "big") for number in (0x803, count, 28, 28))
        (raw / f"{split}-images-idx3-ubyte").write_bytes(header + digits * (count // drawn))
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(prepare_data.synthetic_labels(count))


# --- theirs -----------------------------------------------------------------------------------------------------------


def their_loader(data_dir: Path) -> DataLoader:
    """In the order of the files and in this process: pytorch/examples shuffles and has a worker on a GPU only."""
    return DataLoader(their_images(data_dir), batch_size=64)


def their_images(data_dir: Path, train: bool = True) -> Dataset:
    transforms = torchvision.transforms
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    return torchvision.datasets.MNIST(data_dir, train, transform=transform)


def their_network() -> nn.Module:
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    linears = [nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1)]
    return nn.Sequential(*convolutions, *linears)


def their_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable):
    """One step for each batch; the loss is read at every tenth."""
    model.train()
    for i, (images, labels) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            loss.item()


def their_race(data_dir: Path) -> float:
    """Trains until the test accuracy is 99 %, at most their 14 epochs. Returns the accuracy."""
    model, batches = their_network(), their_loader(data_dir)
    tests = DataLoader(their_images(data_dir, train=False), batch_size=1000)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(14):
        their_steps(model, optimizer, batches)
        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in tests:
                correct += (model(images).argmax(1) == labels).sum().item()
        if correct >= GOAL * len(tests.dataset):
            break
        scheduler.step()
    return correct / len(tests.dataset)


def their_training(model: nn.Module, loader: DataLoader, steps: int) -> Callable[[], None]:
    """A function that trains `steps` steps more."""
    optimizer, batches = torch.optim.Adadelta(model.parameters(), lr=1.0), iter(loader)

    def train():
        their_steps(model, optimizer, islice(batches, steps))

    return train


# --- ours -------------------------------------------------------------------------------------------------------------


class Enough(BaseException):
    """Ends train_ddp.py, which would train on."""


def run_train_ddp(data_dir: Path, precision: str, watch: Callable[[DataLoader, Iterator], Iterator]) -> dict:
    """Runs train_ddp.py as it is, 64 images a step, on one thread, until `watch` raises Enough. Returns its variables.

    `watch` gets the loader that the script trains from and its batches, and gives the script what it returns.
    """
    spec = importlib.util.spec_from_file_location("train_ddp", SCRIPT)
    script, trained_from, fetch = importlib.util.module_from_spec(spec), [], DataLoader.__iter__

    def watched(loader: DataLoader) -> Iterator:
        trained_from.append(loader)  # the first one is that of the training images
        return watch(loader, fetch(loader)) if loader is trained_from[0] else fetch(loader)

    command = [str(SCRIPT), "--device", "cpu", "--batch-size", "64", "--data-dir", str(data_dir)]
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(sys, "argv", [*command, "--precision", precision, "--checkpoint-dir", folder]),
        alone(),
        patch.object(DataLoader, "__iter__", watched),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(Enough),
    ):
        spec.loader.exec_module(script)
    return vars(script)


def alone():
    """Without what would tell a script of other ranks."""
    kept = {name: value for name, value in os.environ.items() if not re.match("(LOCAL_)?RANK|WORLD_SIZE|SLURM", name)}
    return patch.dict(os.environ, kept, clear=True)


def our_race(data_dir: Path, epochs: int) -> tuple[tuple[float, float], float]:
    """(wall, CPU) seconds until a line of train_fast.py's log says 99 %, or until its end; and the accuracy."""
    start, lines = rows.now(), []

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            if said := re.search(r"test_accuracy=([\d.]+)", text):
                lines.append((rows.since(start), float(said[1])))
                if lines[-1][1] >= GOAL:
                    raise Enough
            return len(text)

    def end(status: int):
        raise Enough

    command = [str(FAST), "--device", "cpu", "--data-dir", str(data_dir), "--epochs", str(epochs)]
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(sys, "argv", [*command, "--checkpoint-dir", folder]),
        alone(),
        patch.object(os, "_exit", end),  # with which it ends
        contextlib.redirect_stdout(Log()),
        contextlib.suppress(Enough),
    ):
        runpy.run_path(str(FAST), run_name="__main__")
    if not lines:
        sys.exit("mnist.py: train_fast.py has failed")
    return lines[-1]


def our_loader(data_dir: Path) -> DataLoader:
    """The loader that train_ddp.py makes of its training images."""

    def end(loader: DataLoader, batches: Iterator) -> Iterator:
        loaders.append(loader)
        raise Enough

    loaders: list[DataLoader] = []
    run_train_ddp(data_dir, "fp32", end)
    return loaders[0]


# --- measures ---------------------------------------------------------------------------------------------------------


def loading(data_dir: Path, rounds: int) -> Iterator[Row]:
    """The loaders alone: train_ddp.py's, whose batches of indices are lists, and train_preemptible.py's, whose batches
    of indices are tensors, over the whole set; of theirs 20 batches. Seconds a batch, after a first round."""
    lists, theirs = our_loader(data_dir), their_loader(data_dir)
    batches = RunSampler(len(lists.dataset), 64, range(len(lists)), seed=0, rank=0, world_size=1)
    tensors = DataLoader(lists.dataset, sampler=batches, batch_size=None)
    taken = []
    for _ in range(1 + rounds):
        sides = []
        for loader, count in ((lists, len(lists)), (tensors, len(tensors)), (theirs, 20)):
            sides.append(rows.seconds(lambda loader=loader, count=count: list(map(len, islice(loader, count))), count))
        taken.append(sides)
    *ours, other = (list(side) for side in zip(*taken[1:], strict=True))
    images, labels = (torch.stack([torch.as_tensor(theirs.dataset[i][k]) for i in range(100)]) for k in (0, 1))
    same = torch.allclose(lists.dataset.tensors[0][:100], images, atol=1e-6)
    same &= torch.equal(lists.dataset.tensors[1][:100], labels)
    quality = f"{'the same' if same else 'OTHER'} images"
    for name, mine in zip(LEASTS, ours, strict=False):
        yield Row(name, "per-image DataLoader", LEASTS[name], mine, other, quality=quality, good=same, by_cpu=True)


@torch.inference_mode()
def accuracy(model: nn.Module, data_dir: Path) -> float:
    """Of a network on all test images."""
    images, labels = mnist.load(data_dir)[1].tensors
    predicted = torch.cat([model(part).argmax(1) for part in images.split(1000)])
    return (predicted == labels).float().mean().item()


def training(data_dir: Path, precision: str, rounds: int, steps: int) -> Row:
    """Seconds of so many steps, ours and theirs in turn, round by round after a first one.

    All of them are one epoch, of 900 steps by default: after 300 it is chance which side's accuracy is ahead.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = first_images(data_dir, Path(folder, "data"), 64 * (1 + rounds) * steps)
        return train_in_turn(data, precision, rounds, steps)


def train_in_turn(data_dir: Path, precision: str, rounds: int, steps: int) -> Row:
    torch.manual_seed(0)
    their_model, loader, ours, theirs = their_network(), their_loader(data_dir), [], []
    train = their_training(their_model, loader, steps)

    def in_turn(loader: DataLoader, batches: Iterator) -> Iterator:
        for _ in range(1 + rounds):
            theirs.append(rows.seconds(train))
            start = rows.now()
            for _ in range(steps):
                yield next(batches)
            ours.append(rows.since(start))  # the script wants the next batch
        raise Enough

    our_model = run_train_ddp(data_dir, precision, in_turn)["model"]
    found = [accuracy(model.eval(), data_dir) for model in (our_model, their_model)]
    quality, good = "accuracy {:.3f}, theirs {:.3f}".format(*found), found[0] > found[1] - 0.01
    step = their_training(their_model, loader, 1)
    name, notes = f"MNIST step, {precision}", {"accuracy": found[0], **rows.parts_of(lambda _: step(), "theirs")}
    return Row(name, THEIRS, LEASTS[name], ours[1:], theirs[1:], quality=quality, good=good, by_cpu=True, notes=notes)


def first_images(data_dir: Path, folder: Path, count: int) -> Path:
    """The folder, with `count` training images: the first of those in `data_dir`, or all of them again and again."""
    shutil.copytree(data_dir, folder, ignore=shutil.ignore_patterns("*.gz", "train-*"))
    for name, header, item in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
        content = Path(data_dir, f"MNIST/raw/train-{name}-ubyte").read_bytes()
        items = content[header:] * math.ceil(count * item / (len(content) - header))
        start = content[:4] + count.to_bytes(4, "big") + content[8:header]
        Path(folder, f"MNIST/raw/train-{name}-ubyte").write_bytes(start + items[: count * item])
    return folder


def launch(ranks: int, batch: int, data_dir: Path, steps: int) -> tuple[float, float, float]:
    """Wall seconds an image of train_ddp.py with `batch` images a step: the median of its log lines without the first.
    CPU seconds an image, those of the launch included. The loss in the last line."""
    with tempfile.TemporaryDirectory() as folder:
        data = first_images(data_dir, Path(folder, "data"), 4 * steps * batch)
        command = ["./torchrun.sh", "distributed/train_ddp.py", "--device", "cpu", "--data-dir", str(data)]
        command += ["--checkpoint-dir", f"{folder}/out", "--batch-size", str(batch)]
        command += ["--epochs", "1", "--log-every", str(steps)]
        env = os.environ | {"NNODES": "", "NPROC_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1"}
        env |= {"VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        cpu = rows.cpu_seconds()
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
        cpu = rows.cpu_seconds() - cpu
        found = re.findall(r" loss=(\S+) images_per_second=([\d.]+)", done.stdout)
        if done.returncode or len(found) < 2:
            sys.exit(f"mnist.py: train_ddp.py failed on {ranks} ranks:\n{done.stdout}{done.stderr}")
        wall = median(1 / float(speed) for _, speed in found[1:])
        return wall, cpu / (4 * steps * batch), float(found[-1][0])


def two_ranks(data_dir: Path, launches: int, steps: int) -> Row:
    """One rank and two in turn, with 64 images a rank. The loss of two: as that of one rank with the same batches."""
    name, busy, taken = "MNIST on two ranks, fp32", [], []
    for _ in range(launches):
        with rows.watched(busy):
            taken.append([launch(ranks, 64 * ranks, data_dir, steps) for ranks in (1, 2)])
    ones, twos = zip(*taken, strict=True)
    found = median(loss for *_, loss in twos), launch(1, 128, data_dir, steps)[-1]
    quality = "loss {:.3f}, of one rank with the same batches {:.3f}".format(*found)
    good = found[0] < 1.05 * found[1]
    one, two = ([(wall, cpu) for wall, cpu, _ in side] for side in (ones, twos))
    return Row(name, "one rank, as a share of 2", LEASTS[name], two, one, 2.0, quality, good, busy=busy)


def race(name: str, data_dir: Path, epochs: int, rounds: int) -> Row:
    """Theirs once, which takes a minute or more; ours in rounds, after a first one."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    busy, ours, theirs = [], [our_race(data_dir, epochs)], []
    with rows.watched(busy):
        seconds = rows.seconds(lambda: theirs.append(their_race(data_dir)))
        ours = [our_race(data_dir, epochs) for _ in range(rounds)]
    torch.set_num_threads(1)
    least = min(accuracy for _, accuracy in ours)
    images = f"{len(mnist.load(data_dir)[0]):,} images"
    quality = f"{images}: accuracy {least:.4f}, theirs {theirs[0]:.4f}" + " after 14 epochs" * (theirs[0] < GOAL)
    row = Row(name, THEIRS, LEASTS[name], [taken for taken, _ in ours], [seconds] * rounds, quality=quality)
    row.good, row.busy = least >= GOAL, busy * rounds
    return row


def races(given: Path | None, rounds: int) -> Iterator[Row]:
    """With real files, where they were given, and with digits drawn by aux/prepare_data.py, as many as MNIST has."""
    real, synthetic = (name for name in LEASTS if "99 %" in name)
    if given is None or mnist.describe(given).startswith("SYNTHETIC"):
        yield Row(real, THEIRS, LEASTS[real], missing="not judged: no real files (--data-dir)")
    else:
        steps = len(mnist.load(given)[0]) // 256
        yield race(real, given, max(2, math.ceil(520 / steps)), rounds)
    with tempfile.TemporaryDirectory() as folder:
        prepare_data.prepare_mnist(Path(folder), synthetic=True)
        yield race(synthetic, Path(folder), 1, rounds)


# --- main -------------------------------------------------------------------------------------------------------------


def main(args: Namespace, data_dir: Path):
    try:
        mnist.load(data_dir)
    except ValueError as error:
        sys.exit(f"mnist.py: {error}")
    torch.set_num_threads(1)
    rows.print_heads()
    missed = [rows.report(row) for row in measure(args, data_dir)]
    if args.check and any(missed):
        sys.exit("mnist.py: " + "; ".join(filter(None, missed)))


def measure(args: Namespace, data_dir: Path) -> Iterator[Row]:
    if args.only in (None, "loading"):
        yield from loading(data_dir, args.rounds)
    if args.only in (None, "step"):
        fp32 = training(data_dir, "fp32", args.rounds, args.steps)
        yield fp32
        yield in_bfloat16(data_dir, args, fp32)
    if args.only in (None, "ranks"):
        yield two_ranks(data_dir, args.launches, max(1, args.steps // 3))  # four times as many a launch
    if args.only in (None, "accuracy"):
        yield from races(args.data_dir, args.rounds)


def in_bfloat16(data_dir: Path, args: Namespace, fp32: Row) -> Row:
    """The step in bfloat16, where the scripts that choose by themselves would take it."""
    if not bfloat16_is_faster():
        name = "MNIST step, bf16"
        return Row(name, THEIRS, LEASTS[name], missing="no fast bfloat16 on this CPU")
    row = training(data_dir, "bf16", args.rounds, args.steps)
    row.good &= row.notes["accuracy"] > fp32.notes["accuracy"] - 0.02
    if not getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16", False):
        row.quality += ", no bfloat16 tiles"  # of AMX: with them the ratio is higher
    return row


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if args.data_dir is None:
            draw_data(Path(folder))
        main(args, args.data_dir or Path(folder))
