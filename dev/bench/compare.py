"""Measure the speed of our scripts relative to plain loops. `make bench` runs this.

    python dev/bench/compare.py                    # some 25 minutes on two quiet cores
    python dev/bench/compare.py --only MNIST       # the rows with that word in their name

Both sides of a row take turns, and a ratio is the median over the rounds. The other sides always
compute in float32. Our loss is the mean since the previous log line, and theirs that of the last
step. A training logs `..._per_second=`; it counts with the median of its log lines without the
first. A launch counts from the first line of the batch script to the first step of four ranks, so
that queueing does not; the jobs run on a cluster that local/cluster/namespaces.sh starts for them
(root, Slurm).

benchmarks.jsonl beside this file has the machine, the commit and the seconds of each round of the
last published run. Chapter 9 shows some of its ratios.
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
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "log/bench"
LIMIT = ["timeout", "300"]  # for a launch, which takes seconds
HEAD = "| row | other side | times as fast | rounds | result |\n|---|---|---|---|---|\n"
LAUNCHERS = {
    "srun": "launch_slurm_to_torch.sh",
    "torchrun": "launch_slurm_with_torchrun.sh",
    "spawn": "launch_slurm_with_mp.sh",
}
FIRST_STEP = """
import os, time
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
done = time.time()
if dist.get_rank() == 0:
    print(f"FIRST STEP {done:.3f} of {dist.get_world_size()}", flush=True)
dist.barrier()
os._exit(0)
"""
EXAMPLES, NANOGPT = "pytorch/examples-style loop", "nanoGPT-style loop"
PLAIN_MNIST, PLAIN_TEXT = "dev/bench/plain_mnist.py", "dev/bench/plain_text.py"
DDP = "distributed/train_ddp.py --device cpu --log-every 60"
FSDP = "distributed/train_fsdp.py --device cpu --dropout 0 --eval-windows 0"
SMALL = "--layers 4 --heads 4 --width 128 --context 64 --batch-size 12"
LARGE = "--layers 6 --heads 6 --width 384 --context 256 --batch-size 16 --steps 40"


def rows() -> list[tuple[str, str, Callable, Callable]]:
    """(name, other side, a turn of ours, a turn of theirs)"""
    load, two = f"{PLAIN_MNIST} --only-load", "NPROC_PER_NODE=2 ./torchrun.sh "
    ours, theirs = partial(train, f"{load} --ours --steps 900"), partial(train, load)
    found = [("images, the loader", "per-image DataLoader", ours, theirs)]
    for precision in ("fp32", "bf16"):
        ours = partial(train, f"{DDP} --precision {precision}")
        theirs = partial(train, PLAIN_MNIST)
        found += [(f"MNIST step, {precision}", EXAMPLES, ours, theirs)]
    for size, arguments, every, threads, precision in (
        ("nanoGPT's CPU settings", SMALL, 40, 1, "fp32"),
        ("nanoGPT's CPU settings", SMALL, 40, 2, "fp32"),
        ("10.65 million parameters", LARGE, 8, 2, "fp32"),
        ("10.65 million parameters", LARGE, 8, 2, "bf16"),
    ):
        name = f"language model, {size}, {threads} thread{'s' * (threads > 1)}, {precision}"
        ours = f"{FSDP} --log-every {every} --precision {precision} {arguments}"
        ours = partial(train, ours, threads)
        found += [(name, NANOGPT, ours, partial(train, f"{PLAIN_TEXT} {arguments}", threads))]

    ours, theirs = partial(train, two + DDP), partial(train, DDP)
    found += [("MNIST on two ranks, fp32", "one rank", ours, theirs)]
    text = f"{FSDP} --log-every 40 --precision fp32 {SMALL} --batch-size 64"
    ours, theirs = partial(train, two + text), partial(train, text)
    found += [("language model on two ranks, fp32", "one rank", ours, theirs)]
    saves = f"{FSDP} --log-every 40 --steps 1000 --eval-every 1000 --save-every"
    ours, theirs = (partial(train, f"{saves} {every}", 2) for every in (200, 100_000))
    found += [("a checkpoint every 200 steps", "none", ours, theirs)]
    for launcher in LAUNCHERS:
        name = f"launch to first step, {launcher}, 4 ranks"
        found += [(name, "bare torchrun", partial(launch, launcher), bare)]
    return found


# --- a turn: its seconds, and its last loss ---


def train(command: str, threads: int = 1, lines: int = 5) -> tuple[float, str]:
    """Seconds of one image or token. The process ends after so many log lines."""
    command = command.split()
    env = environment(OMP_NUM_THREADS=threads)
    if command[0].startswith("NPROC"):
        env["NPROC_PER_NODE"] = command.pop(0).partition("=")[2]
    else:
        command = [sys.executable, *command]
    whole = "--save-every" in command
    log, rates, arrivals = "", [], []
    with tempfile.TemporaryDirectory() as folder:
        if "distributed/" in " ".join(command):
            command += ["--checkpoint-dir", f"{folder}/out"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        options = {"cwd": REPOSITORY, "env": env, "start_new_session": True}
        process = subprocess.Popen(command, **pipes, **options)
        try:
            for line in process.stdout:
                log += line
                if rate := re.search(r"_per_second=([\d.e+]+)", line):
                    rates.append(float(rate[1]))
                    arrivals.append(time.monotonic())
                if len(rates) == lines and not whole:
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


def launch(name: str) -> tuple[float, str]:
    """Seconds from a launcher's first line to the first step of four ranks."""
    # A copy that says when it begins.
    text = (REPOSITORY / LAUNCHERS[name]).read_text()
    begin = 'set -euo pipefail; echo "BEGAN $EPOCHREALTIME"\n'
    launcher, log = FOLDER / LAUNCHERS[name], FOLDER / "log"
    launcher.write_text(text.replace("set -euo pipefail\n", begin, 1))
    log.unlink(missing_ok=True)
    size = ["--nodes=1", "--gpus-per-node=4", f"--output={log}"]
    size += ["--ntasks-per-node=4"] if name == "srun" else ["--cpus-per-task=4"]
    sbatch = [*LIMIT, "sbatch", "--wait", *size, launcher, FOLDER / "first_step.py"]
    done = on_cluster("exec", *sbatch)
    said = log.read_text() if log.exists() else done.stderr
    began = re.search(r"^BEGAN (\S+)$", said, re.M)
    return first_step(said, float(began[1]) if began else 0.0)


def bare() -> tuple[float, str]:
    """The same without a job and a launcher."""
    start = time.time()
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node=4", FOLDER / "first_step.py"]
    done = subprocess.run([*LIMIT, *command], capture_output=True, text=True)
    return first_step(done.stdout + done.stderr, start)


def first_step(log: str, start: float) -> tuple[float, str]:
    found = re.search(r"^FIRST STEP (\S+) of 4$", log, re.M)
    if not found:
        sys.exit(f"compare.py: no first step of four ranks:\n{log}")
    return float(found[1]) - start, ""


def on_cluster(*command: object) -> subprocess.CompletedProcess:
    """A command of namespaces.sh."""
    words = [str(word) for word in (REPOSITORY / "local/cluster/namespaces.sh", *command)]
    env = environment(CLUSTER=f"bench-{os.getpid()}")
    return subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True)


def environment(**variables: object) -> dict[str, str]:
    """This process's environment without those of another job, and with this Python first."""
    stray = ("SLURM", "SBATCH", "NPROC")
    env = {name: value for name, value in os.environ.items() if not name.startswith(stray)}
    env |= {"VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    return env | {name: str(value) for name, value in variables.items()}


# --- the table ---


def line(row: dict) -> str:
    found = ratios(row)
    times, spread = f"{median(found):.2f}", f"{min(found):.2f} to {max(found):.2f}"
    return f"| {row['name']} | {row['other']} | {times} | {spread} | {row['result']} |\n"


def ratios(row: dict) -> list[float]:
    return [theirs / ours for ours, theirs in zip(row["ours"], row["theirs"], strict=True)]


def machine() -> dict:
    """The machine and the versions of a run."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.*)$", info, re.M)
    git = ["git", "describe", "--always", "--exclude=*", "--dirty= + changes"]
    commit = subprocess.run(git, cwd=REPOSITORY, capture_output=True, text=True).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "cpu": model[1] if model else platform.machine(),
        "cpus": os.cpu_count(),
        "extensions": [name for name in ("avx512_bf16", "amx_bf16") if f" {name} " in info],
        "torch": version("torch"),
        "load_before": round(os.getloadavg()[0], 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="only rows with this word")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds takes 1 or more")
    run = machine()
    # Without instructions for it bfloat16 takes many times as long.
    to_measure = [row for row in rows() if run["extensions"] or "bf16" not in row[0]]
    to_measure = [row for row in to_measure if args.only in row[0]]
    if not to_measure:
        names = "; ".join(name for name, *_ in rows())
        parser.error(f"no row has {args.only!r} in its name. There are: {names}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "first_step.py").write_text(FIRST_STEP)
    found = []
    try:
        if any(name.startswith("launch") for name, *_ in to_measure):
            up = on_cluster("up", "--nodes", "1", "--cpus", "4", "--gpus", "4")
            if up.returncode != 0:
                sys.exit(f"compare.py: {up.stderr.strip()}")
        print(HEAD, end="", flush=True)
        for name, other, ours, theirs in to_measure:
            turns = [(ours(), theirs()) for _ in range(args.rounds)]
            loss, their_loss = (loss for _, loss in turns[-1])
            row = {"name": name, "other": other}
            # Five digits of the seconds are enough.
            row["ours"] = [float(f"{seconds:.5g}") for (seconds, _), _ in turns]
            row["theirs"] = [float(f"{seconds:.5g}") for _, (seconds, _) in turns]
            row["result"] = f"loss {loss}, theirs {their_loss}" if loss else ""
            found.append(row)
            print(line(row), end="", flush=True)
    finally:
        on_cluster("down")
    data = FOLDER / "benchmarks.jsonl"
    data.write_text("".join(f"{json.dumps(values)}\n" for values in (run, *found)))
    print(f"Data: {data}")


if __name__ == "__main__":
    main()
