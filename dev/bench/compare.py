"""The speed of our scripts relative to plain loops. `make bench` runs this.

    python dev/bench/compare.py                    # some 25 minutes on two quiet cores
    python dev/bench/compare.py --only launch      # the rows with that word in their name
    python dev/bench/compare.py --publish          # and write docs/benchmarks.jsonl and .md

Both sides of a row are processes that log `..._per_second=`. They take turns; each turn is the
median of its log lines without the first. A ratio is the median over the rounds.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median

import launch

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE, DATA = REPOSITORY / "docs/benchmarks.md", REPOSITORY / "docs/benchmarks.jsonl"
BEGIN, END = "<!-- begin: written by dev/bench/compare.py -->\n", "<!-- end -->\n"
HEAD = "| row | other side | times as fast | rounds | result |\n|---|---|---|---|---|\n"

EXAMPLES, NANOGPT = "pytorch/examples-style loop", "nanoGPT-style loop"
PLAIN_MNIST, PLAIN_TEXT = "dev/bench/plain_mnist.py", "dev/bench/plain_text.py"
DDP = "distributed/train_ddp.py --device cpu --log-every 60 --data-dir MNIST"
FSDP = "distributed/train_fsdp.py --eval-windows 0 --log-every 40 --data-dir TEXT --dropout 0"
SIZES = {
    "nanoGPT's CPU settings": "--layers 4 --heads 4 --width 128 --context 64 --batch-size 12",
    "10.65 million parameters": "--layers 6 --heads 6 --width 384 --context 256 --batch-size 16",
}
LARGE_STEPS = "--steps 40 --log-every 8"


@dataclass
class Row:
    """Seconds for the same work, one per round. `missing` says why it was not measured."""

    name: str
    other: str
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    result: str = ""
    missing: str = ""

    def ratio(self) -> float:
        return median(self.ratios())

    def ratios(self) -> list[float]:
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    def line(self) -> str:
        if self.missing:
            return f"| {self.name} | {self.other} |  |  | {self.missing} |"
        found = self.ratios()
        spread = f"{min(found):.2f} to {max(found):.2f}"
        return f"| {self.name} | {self.other} | {self.ratio():.2f} | {spread} | {self.result} |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="rows with it in their name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lines", type=int, default=5, help="log lines of a turn, 2 or more")
    parser.add_argument(
        "--publish", action="store_true", help="write docs/benchmarks.jsonl and .md"
    )
    parser.add_argument("--mnist-dir", default="data/mnist")
    parser.add_argument("--text-dir", default="data/shakespeare")
    args = parser.parse_args()
    if args.rounds < 1 or args.lines < 2:
        parser.error("--rounds takes 1 or more, --lines 2 or more")
    if args.publish and args.only:
        parser.error("--publish is for a run of all rows: leave out --only")
    for folder, content in ((args.mnist_dir, "MNIST/raw"), (args.text_dir, "train.bin")):
        if not (REPOSITORY / folder / content).exists():
            parser.error(f"no data in {folder}: python aux/prepare_data.py, or make data text")
    return args


# --- what is compared ---


def rows_to_measure() -> list[tuple]:
    """(name, other side, our command, their command, threads of a rank)"""
    load = f"{PLAIN_MNIST} --only-load --data-dir MNIST"
    tensors = f"{PLAIN_MNIST} --loader tensors --data-dir MNIST"
    found = [("images, the loader", "per-image DataLoader", f"{load} --ours --steps 900", load, 1)]
    for precision in ("fp32", "bf16"):
        name = f"MNIST step, {precision}"
        found += [(name, EXAMPLES, f"{DDP} --precision {precision}", tensors, 1)]
    for size, threads, precision in (
        ("nanoGPT's CPU settings", 1, "fp32"),
        ("nanoGPT's CPU settings", 1, "bf16"),
        ("nanoGPT's CPU settings", 2, "fp32"),
        ("nanoGPT's CPU settings", 2, "bf16"),
        ("10.65 million parameters", 2, "fp32"),
        ("10.65 million parameters", 2, "bf16"),
    ):
        name = f"language model, {size}, {threads} thread{'s' * (threads > 1)}, {precision}"
        ours = f"{FSDP} --device cpu --precision {precision} {SIZES[size]}"
        theirs = f"{PLAIN_TEXT} --data-dir TEXT {SIZES[size]}"
        if "million" in size:
            ours, theirs = f"{ours} {LARGE_STEPS}", f"{theirs} --steps 40"
        found += [(name, NANOGPT, ours, theirs, threads)]
    two = "NPROC_PER_NODE=2 ./torchrun.sh"
    found += [("MNIST on two ranks, fp32", "one rank", f"{two} {DDP}", DDP, 1)]
    small = SIZES["nanoGPT's CPU settings"]
    text = f"{FSDP} --device cpu --precision fp32 {small} --batch-size 64"
    found += [("language model on two ranks, fp32", "one rank", f"{two} {text}", text, 1)]
    saves = f"{FSDP} --device cpu --steps 1000 --eval-every 1000 --checkpoint-every"
    found += [("a checkpoint every 200 steps", "none", f"{saves} 200", f"{saves} 100000", 2)]
    return found


# --- measuring ---


def seconds(args: argparse.Namespace, command: str, threads: int) -> tuple[float, str]:
    """Seconds of one image or token, and the last loss. The process ends after args.lines lines."""
    words = {"MNIST": args.mnist_dir, "TEXT": args.text_dir}
    command = [words.get(word, word) for word in command.split()]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "VIRTUAL_ENV": sys.prefix}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    if command[0].startswith("NPROC"):
        env["NPROC_PER_NODE"] = command.pop(0).partition("=")[2]
    else:
        command = [sys.executable, *command]
    whole = "--checkpoint-every" in command
    log, rates, arrivals = "", [], []
    with tempfile.TemporaryDirectory() as folder:
        if "distributed/" in " ".join(command):
            command += ["--checkpoint-dir", f"{folder}/out"]
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=env, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            for line in process.stdout:
                log += line
                rate = re.search(r"_per_second=([\d.e+]+)", line)
                if rate:
                    rates.append(float(rate[1]))
                    arrivals.append(time.monotonic())
                if len(rates) == args.lines and not whole:
                    break
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    losses = re.findall(r" loss=(\S+)", log)
    if len(rates) < 2 or not losses:
        sys.exit(f"compare.py: {' '.join(command)} failed:\n{log}")
    if whole:
        # The time from line to line includes the checkpoints, which the logged rate leaves out.
        return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1), losses[-1]
    return 1 / median(rates[1:]), losses[-1]


def measure(args: argparse.Namespace) -> list[Row]:
    found = []
    print(HEAD, end="", flush=True)
    for name, other, ours, theirs, threads in rows_to_measure():
        if args.only not in name:
            continue
        row = Row(name, other)
        found.append(row)
        if "bf16" in name and not machine()["extensions"]:
            row.missing = "no fast bfloat16 on this CPU"
            print(row.line(), flush=True)
            continue
        for _ in range(args.rounds):
            mine, loss = seconds(args, ours, threads)
            others, their_loss = seconds(args, theirs, threads)
            row.ours.append(float(f"{mine:.5g}"))
            row.theirs.append(float(f"{others:.5g}"))
        row.result = "" if "loader" in name else f"loss {loss}, theirs {their_loss}"
        print(row.line(), flush=True)
    if args.only in "launch to first step":
        for values in launch.measure(args.rounds):
            found.append(Row(**values))
            print(found[-1].line(), flush=True)
    return found


def machine() -> dict:
    """The machine and the versions of a run."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.*)$", info, re.M)
    fast = [name for name in ("avx512_bf16", "amx_bf16") if re.search(rf"\b{name}\b", info)]
    git = ["git", "describe", "--always", "--exclude=*", "--dirty= + changes"]
    commit = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "cpu": model[1] if model else platform.machine(),
        "cpus": os.cpu_count(),
        "extensions": fast,
        "torch": version("torch"),
        "load_before": round(os.getloadavg()[0], 1),
    }


def table(run: dict, rows: list[Row]) -> str:
    """The page's block: where it was measured, and the rows."""
    where = (
        f"{run['cpus']} CPUs of {run['cpu']} with {', '.join(run['extensions']) or 'no bfloat16'}"
    )
    first = f"Measured on {where}, with torch {run['torch']}:\n\n"
    return first + HEAD + "".join(f"{row.line()}\n" for row in rows)


def read(path: Path) -> tuple[dict, list[Row]]:
    run, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    return run, [Row(**row) for row in rows]


def main(args: argparse.Namespace):
    run = machine()
    rows = measure(args)
    text = "".join(f"{json.dumps(values)}\n" for values in (run, *map(asdict, rows)))
    file = REPOSITORY / "log/benchmarks.jsonl"
    file.parent.mkdir(exist_ok=True)
    for path in (file, DATA) if args.publish else (file,):
        path.write_text(text)
    if args.publish:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{table(run, rows)}{END}{rest.split(END, 1)[1]}")
    print(f"Data: {file}")


if __name__ == "__main__":
    main(parse_arguments())
