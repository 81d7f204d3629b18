"""The speed of training on MNIST on a CPU: ratios, which hold on other machines too, and the gates they must pass.

    python aux/bench/mnist.py             # about 150 s on two quiet cores
    python aux/bench/mnist.py --check     # exit code 1 and one sentence when a gate is missed

"Ours" is train_ddp.py itself: run in this process, or launched. "Theirs" is the way of mnist/main.py in
github.com/pytorch/examples on a CPU, written fresh: images one by one through PIL, ToTensor and Normalize, Adadelta,
float32; the same network and batch size. The two take turns, on one thread each, and are timed in CPU seconds, which on
a quiet machine are seconds and on a busy one are still right. Two ranks against twice one are timed by the clock, and
not judged on a busy machine.
"""

import contextlib
import importlib.util
import io
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from unittest.mock import patch

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "distributed/train_ddp.py"
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("distributed", "aux", "aux/figures")]  # mnist: distributed/'s

from resilience.arguments import ArgumentParser, whole_number

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a gate is missed")
    parser.add_argument("--data-dir", type=Path, help="files in MNIST's format (default: digits drawn for this run)")
    parser.add_argument("--rounds", type=whole_number(1), default=7, help="turns of one process, after a first one")
    parser.add_argument("--steps", type=whole_number(1), default=10, help="training steps in a turn")
    parser.add_argument("--launches", type=whole_number(1), default=7, help="turns of one rank and of two ranks")
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()  # before torch: a typing mistake costs no second

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import draw_digits
import mnist
import prepare_data
from resilience.samplers import RunSampler
from torchvision_on_cpu import torchvision

GATES = {"feeding": 25, "RunSampler": 40, "step, fp32": 1.1, "step, bf16": 2, "two ranks, fp32": 0.75}

# --- data -------------------------------------------------------------------------------------------------------------


def draw_data(folder: Path):
    """A set as large as MNIST, from 1,000 drawn digits; 100 images to test on, so that evaluation takes no time."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    digits = draw_digits.draw_digits(1000, seed=0)
    for split, count in (("train", 60_000), ("t10k", 100)):
        header = b"".join(number.to_bytes(4, "big") for number in (0x803, count, 28, 28))
        (raw / f"{split}-images-idx3-ubyte").write_bytes(header + (digits * 60)[: count * 784])
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(prepare_data.synthetic_labels(count))


# --- theirs -----------------------------------------------------------------------------------------------------------


def their_loader(data_dir: Path) -> DataLoader:
    """In the order of the files and in this process: pytorch/examples shuffles and has a worker on a GPU only."""
    datasets, transforms = torchvision.datasets, torchvision.transforms
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    return DataLoader(datasets.MNIST(data_dir, transform=transform), batch_size=64)


def their_network() -> nn.Module:
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    linears = [nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10), nn.LogSoftmax(1)]
    return nn.Sequential(*convolutions, *linears)


def their_training(loader: DataLoader, steps: int) -> Callable[[], int]:
    """A function that trains `steps` steps more and returns their number."""
    model = their_network()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)

    def train() -> int:
        for i, (images, labels) in enumerate(islice(loader, steps)):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            if i % 10 == 0:
                loss.item()
        return steps

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

    alone = {name: value for name, value in os.environ.items() if not re.match("(LOCAL_)?RANK|WORLD_SIZE|SLURM", name)}
    command = [str(SCRIPT), "--device", "cpu", "--batch-size", "64", "--data-dir", str(data_dir)]
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(sys, "argv", [*command, "--precision", precision, "--checkpoint-dir", folder]),
        patch.dict(os.environ, alone, clear=True),
        patch.object(DataLoader, "__iter__", watched),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(Enough),
    ):
        spec.loader.exec_module(script)
    return vars(script)


def our_loader(data_dir: Path) -> DataLoader:
    """The loader that train_ddp.py makes of its training images."""

    def end(loader: DataLoader, batches: Iterator) -> Iterator:
        loaders.append(loader)
        raise Enough

    loaders: list[DataLoader] = []
    run_train_ddp(data_dir, "fp32", end)
    return loaders[0]


# --- measures ---------------------------------------------------------------------------------------------------------


def speed(work: Callable[[], int]) -> float:
    """Images per CPU second of `work`, which returns how many batches of 64 it did."""
    start = time.process_time()
    batches = work()
    return 64 * batches / (time.process_time() - start)


def feeding(data_dir: Path, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Images per CPU second of the loaders alone, round by round after a first one: train_ddp.py's, whose batches of
    indices are lists, train_preemptible.py's, whose batches of indices are tensors, and theirs."""
    ours, theirs = our_loader(data_dir), their_loader(data_dir)
    batches = RunSampler(len(ours.dataset), 64, range(len(ours)), seed=0, rank=0, world_size=1)
    tensors = DataLoader(ours.dataset, sampler=batches, batch_size=None)
    speeds = []
    for _ in range(1 + rounds):
        mine = [speed(lambda loader=loader: len(list(map(len, loader)))) for loader in (ours, tensors)]  # whole epochs
        speeds.append((*mine, speed(lambda: len(list(map(len, islice(theirs, 20)))))))
    return tuple(zip(*speeds[1:], strict=True))


def training(data_dir: Path, precision: str, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Images per CPU second of training, ours and theirs in turn, round by round after a first one."""
    theirs, speeds = their_training(their_loader(data_dir), steps), []

    def in_turn(loader: DataLoader, batches: Iterator) -> Iterator:
        for _ in range(1 + rounds):
            other, start = speed(theirs), time.process_time()
            for _ in range(steps):
                yield next(batches)
            speeds.append((64 * steps / (time.process_time() - start), other))  # the script is back for the next batch
        raise Enough

    run_train_ddp(data_dir, precision, in_turn)
    return tuple(zip(*speeds[1:], strict=True))


def first_images(data_dir: Path, folder: Path, count: int) -> Path:
    """The folder, with the first `count` training images of those in `data_dir`: an epoch as long as a measurement."""
    shutil.copytree(data_dir, folder, ignore=shutil.ignore_patterns("*.gz", "train-*"))
    for name, header, item in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
        content = Path(data_dir, f"MNIST/raw/train-{name}-ubyte").read_bytes()[: header + count * item]
        count_there = ((len(content) - header) // item).to_bytes(4, "big")
        Path(folder, f"MNIST/raw/train-{name}-ubyte").write_bytes(content[:4] + count_there + content[8:])
    return folder


def launch(ranks: int, precision: str, data_dir: Path, steps: int) -> float:
    """Images per second of train_ddp.py with 64 images a rank: the median of its log lines without the first one."""
    with tempfile.TemporaryDirectory() as folder:
        data = first_images(data_dir, Path(folder, "data"), 4 * steps * 64 * ranks)
        command = ["./torchrun.sh", "distributed/train_ddp.py", "--device", "cpu", "--precision", precision]
        command += ["--data-dir", str(data), "--checkpoint-dir", f"{folder}/out", "--batch-size", str(64 * ranks)]
        command += ["--epochs", "1", "--log-every", str(steps)]
        env = os.environ | {"NNODES": "", "NPROC_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1"}
        env |= {"VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
        speeds = [float(number) for number in re.findall(r"images_per_second=([\d.]+)", done.stdout)]
        if done.returncode or len(speeds) < 2:
            sys.exit(f"mnist.py: train_ddp.py failed on {ranks} ranks:\n{done.stdout}{done.stderr}")
        return median(speeds[1:])


def used_by_others() -> float:
    """CPU seconds that other programs, and other virtual machines, have used up to now; 0 where nothing tells."""
    if not Path("/proc/stat").exists():
        return 0
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    everything = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return everything - sum(usage.ru_utime + usage.ru_stime for usage in usages)


# --- main -------------------------------------------------------------------------------------------------------------


def report(name: str, ours: list[float], theirs: list[float], no_gate: str = "") -> str:
    """Prints a row, with `no_gate` in place of a verdict. Returns a sentence when a gate is missed, else nothing."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio, gate = median(ratios), GATES.get(name)
    missed = not no_gate and ratio < gate
    shown = f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    verdict = no_gate or f"at least {gate}: {'MISSED' if missed else 'passed'}"
    print(f"{name:16} {median(ours):12,.0f} {median(theirs):12,.0f}   {shown:23} {verdict}", flush=True)
    return f"{name} reaches {ratio:.2f}, and at least {gate} is promised" if missed else ""


def main(args: Namespace, data_dir: Path):
    try:
        images, needed = len(mnist.load(data_dir)[0]), 64 * args.steps * (1 + args.rounds)
    except ValueError as error:
        sys.exit(f"mnist.py: {error}")
    if images < needed:
        sys.exit(f"mnist.py: {data_dir} has {images} images, and --steps {args.steps} in every turn take {needed}")
    torch.set_num_threads(1)
    tiles = torch.cpu.get_capabilities().get("amx_bf16", False)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {'with' if tiles else 'without'} bfloat16 tiles")
    print(f"{'images/s':16} {'ours':>12} {'theirs':>12}   {'ratio (rounds)':23} gate")

    lists, tensors, theirs = feeding(data_dir, args.rounds)
    missed = [report("feeding", lists, theirs), report("RunSampler", tensors, theirs)]
    missed.append(report("step, fp32", *training(data_dir, "fp32", args.rounds, args.steps)))
    bf16 = training(data_dir, "bf16", args.rounds, args.steps)
    missed.append(report("step, bf16", *bf16, "" if tiles else "no gate without tiles"))

    for precision, launches in (("fp32", args.launches), ("bf16", 1)):
        rounds = []
        for _ in range(launches):
            clock, used = time.monotonic(), used_by_others()
            one, two = (launch(ranks, precision, data_dir, args.steps) for ranks in (1, 2))
            free = os.cpu_count() - (used_by_others() - used) / (time.monotonic() - clock)
            rounds.append((two, 2 * one, free))  # twice one rank is what "theirs" means here
        quiet = [row for row in rounds if row[2] > 1.8]
        twos, ones, free = zip(*quiet or rounds, strict=True)
        busy = "" if quiet else f"NOT JUDGED, {median(free):.1f} CPUs free"
        missed.append(report(f"two ranks, {precision}", twos, ones, "no gate" if precision == "bf16" else busy))
    if args.check and any(missed):
        sys.exit("mnist.py: " + "; ".join(filter(None, missed)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        if args.data_dir is None:
            draw_data(Path(folder))
        main(args, args.data_dir or Path(folder))
