"""The speed of training on MNIST on a CPU: ratios, which hold on other machines too, and the gates they must pass.

    python aux/bench/mnist.py             # about 150 s on two quiet cores
    python aux/bench/mnist.py --check     # exit code 1 and one sentence when a gate is missed

"Ours" is train_ddp.py itself, imported or launched. "Theirs" is the way of mnist/main.py in github.com/pytorch/examples
on a CPU, written fresh: images one by one through PIL, ToTensor and Normalize, Adadelta, float32; the same network and
batch size. The two take turns, on one thread each, and are timed in CPU seconds, which on a quiet machine are seconds
and on a busy one are still right. Two ranks against twice one are timed by the clock, and not judged on a busy machine.
"""

import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("distributed", "aux")]  # `mnist` is the one in distributed/

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
import train_ddp
from resilience.progress import Progress

GATES = {"feeding": 40, "step, fp32": 1.1, "step, bf16": 2, "two ranks, fp32": 0.75}
CPU = torch.device("cpu")

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
    datasets, transforms = mnist.torchvision.datasets, mnist.torchvision.transforms
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


def our_arguments(data_dir: Path, precision: str) -> Namespace:
    """The defaults of train_ddp.py, 64 images a step among them."""
    sys.argv = ["train_ddp.py", "--data-dir", str(data_dir), "--precision", precision]
    return train_ddp.parse_arguments()


def our_training(args: Namespace, loader: DataLoader, steps: int) -> Callable[[], int]:
    """A function that trains `steps` steps more and returns their number."""
    model, optimizer = train_ddp.make_model(args, CPU)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def train() -> int:
        progress = Progress(None, "images", 0, steps)
        training = train_ddp.train_epoch(args, 0, model, optimizer, scaler, loader, 0, 1, CPU, progress)
        return sum(1 for _ in itertools.islice(training, steps))

    return train


# --- measures ---------------------------------------------------------------------------------------------------------


def take_turns(works: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Images per CPU second of `works`, which return how many batches they did, round by round after a first one."""
    speeds = {name: [] for name in works}
    for _ in range(1 + rounds):
        for name, work in works.items():
            start = time.process_time()
            batches = work()
            speeds[name].append(64 * batches / (time.process_time() - start))
    return {name: values[1:] for name, values in speeds.items()}


def launch(ranks: int, precision: str, data_dir: Path, steps: int) -> float:
    """Images per second of train_ddp.py with 64 images a rank: the median of its log events without the first one."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["./torchrun.sh", "distributed/train_ddp.py", "--device", "cpu", "--precision", precision]
        command += ["--data-dir", str(data_dir.resolve()), "--checkpoint-dir", folder, "--batch-size", str(64 * ranks)]
        command += ["--max-steps", str(4 * steps), "--log-every", str(steps)]
        env = os.environ | {"NNODES": "", "NPROC_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1"}
        env |= {"VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"mnist.py: train_ddp.py failed on {ranks} ranks:\n{done.stdout}{done.stderr}")
        events = map(json.loads, Path(folder, "metrics.jsonl").read_text().splitlines())
        return median([event["images_per_second"] for event in events if "loss" in event][1:])


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
    if fault := mnist.missing_data(data_dir):
        sys.exit(f"mnist.py: {fault}")
    torch.set_num_threads(1)
    tiles = torch.cpu.get_capabilities().get("amx_bf16", False)
    print(f"torch {torch.__version__}, {os.cpu_count()} CPUs, {'with' if tiles else 'without'} bfloat16 tiles")
    print(f"{'images/s':16} {'ours':>12} {'theirs':>12}   {'ratio (rounds)':23} gate")

    fp32, bf16 = our_arguments(data_dir, "fp32"), our_arguments(data_dir, "bf16")
    ours, theirs = train_ddp.make_loaders(fp32, 0, 1, CPU)[0], their_loader(data_dir)
    feeding = {"ours": lambda: len(list(map(len, ours)))}  # a whole epoch, with its permutation
    feeding["theirs"] = lambda: len(list(map(len, islice(theirs, 20))))
    missed = [report("feeding", *take_turns(feeding, args.rounds).values())]
    training = {"theirs": their_training(theirs, args.steps)}
    training |= {options.precision: our_training(options, ours, args.steps) for options in (fp32, bf16)}
    speeds = take_turns(training, args.rounds)
    missed.append(report("step, fp32", speeds["fp32"], speeds["theirs"]))
    missed.append(report("step, bf16", speeds["bf16"], speeds["theirs"], "" if tiles else "no gate without tiles"))

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
