"""Time from launch to first step: each launcher, by sbatch, beside bare `torchrun --standalone`.

    python dev/bench/launch.py     # root, on Linux with Slurm: four minutes on two quiet cores

A script that takes one step with DistributedDataParallel is started on 2 and on 4 ranks of a
node, by each in turn, on a cluster that local/cluster/namespaces.sh starts for this run. Time
counts from the first line of the batch script, so queueing does not. The first launch of each
kind does not count. run_script.sh takes part if Enroot and its image are there.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "srun": "launch_slurm_to_torch.sh",
    "torchrun": "launch_slurm_with_torchrun.sh",
    "spawn": "launch_slurm_with_mp.sh",
    "container": "run_script.sh",
}
CLUSTER = REPOSITORY / "local/cluster/namespaces.sh"
FIRST_STEP = """
import os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4, 8)).sum().backward()
optimizer.step()
done, ranks = time.time(), torch.ones(())
dist.all_reduce(ranks)
if dist.get_rank() == 0:
    print(f"FIRST STEP at {done:.3f}: {int(ranks)} ranks", flush=True)
dist.barrier()
os._exit(0)
"""


def measure(rounds: int) -> Iterator[dict]:
    """The rows of compare.py: for each launcher and number of ranks the seconds of all rounds."""
    up = on_cluster("up", "--nodes", "1", "--cpus", "4", "--gpus", "4")
    try:
        if up.returncode != 0:
            print(f"launch.py: {up.stderr.strip().splitlines()[-1]}", file=sys.stderr, flush=True)
            for ranks in (2, 4):
                for name in LAUNCHERS:
                    yield row(name, ranks) | {"missing": "no cluster here"}
            return
        # In the repository, which a container sees.
        (REPOSITORY / "log").mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=REPOSITORY / "log") as folder:
            yield from launch_all(rounds, Path(folder))
    finally:
        on_cluster("down")


def row(launcher: str, ranks: int) -> dict:
    name = f"launch to first step, {launcher}, {ranks} ranks"
    return {"name": name, "other": "bare torchrun"}


def launch_all(rounds: int, folder: Path) -> Iterator[dict]:
    script = folder / "first_step.py"
    script.write_text(FIRST_STEP)
    launchers = {}
    for name, launcher in LAUNCHERS.items():
        if name == "container" and not has_container():
            continue
        # A copy that says when it begins.
        text = (REPOSITORY / launcher).read_text()
        begin = 'set -euo pipefail; echo "BEGAN $EPOCHREALTIME"\n'
        launchers[name] = folder / launcher
        launchers[name].write_text(text.replace("set -euo pipefail\n", begin, 1))
    for ranks in (2, 4):
        taken = {name: [] for name in ("bare", *launchers)}
        for _ in range(1 + rounds):
            taken["bare"].append(bare(script, ranks))
            for name, launcher in launchers.items():
                taken[name].append(through_slurm(launcher, script, ranks))
        for name in LAUNCHERS:
            if name in launchers:
                sides = {"ours": taken[name][1:], "theirs": taken["bare"][1:]}
                yield row(name, ranks) | sides
            else:
                yield row(name, ranks) | {"missing": "no Enroot or no image here"}


def first_step(log: str, ranks: int, start: float) -> float:
    """Seconds from `start` to the first step in a log."""
    found = re.search(rf"^FIRST STEP at (\S+): {ranks} ranks$", log, re.M)
    if not found:
        sys.exit(f"launch.py: no first step of {ranks} ranks:\n{log}")
    return round(float(found[1]) - start, 3)


def bare(script: Path, ranks: int) -> float:
    start = time.time()
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [torchrun, "--standalone", f"--nproc-per-node={ranks}", script]
    done = subprocess.run(command, capture_output=True, text=True)
    return first_step(done.stdout + done.stderr, ranks, start)


def through_slurm(launcher: Path, script: Path, ranks: int) -> float:
    log = script.with_name("log")
    log.unlink(missing_ok=True)
    size = ["--nodes=1", f"--gpus-per-node={ranks}", f"--output={log}"]
    if launcher.name == LAUNCHERS["srun"]:
        size += [f"--ntasks-per-node={ranks}"]
    else:
        size += [f"--cpus-per-task={ranks}"]
    relative = script.relative_to(REPOSITORY)
    done = on_cluster("exec", "sbatch", "--wait", "--parsable", *size, launcher, relative)
    shutil.rmtree(REPOSITORY / "log" / done.stdout.strip(), ignore_errors=True)
    text = log.read_text() if log.exists() else done.stderr
    began = re.search(r"^BEGAN (\S+)$", text, re.M)
    return first_step(text, ranks, float(began[1]) if began else 0.0)


def on_cluster(*command: object) -> subprocess.CompletedProcess:
    """A command of namespaces.sh, with this Python first in PATH."""
    inherited = ("SLURM", "SBATCH", "NPROC")
    env = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
    env |= {
        "CLUSTER": f"bench-{os.getpid()}",
        "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
    }
    words = [str(word) for word in (CLUSTER, *command)]
    return subprocess.run(
        words, cwd=REPOSITORY, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def has_container() -> bool:
    """Whether this machine has Enroot and the image that run_script.sh names."""
    launcher = (REPOSITORY / "run_script.sh").read_text()
    image = re.search(r"\bCONTAINER_IMAGE=(\S+)", launcher)[1].replace("$PWD", str(REPOSITORY))
    return shutil.which("enroot") is not None and Path(image.strip('"')).is_file()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=4, help="launches of each kind that count")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds takes 1 or more")
    for found in measure(args.rounds):
        if "missing" in found:
            print(f"{found['name']}: {found['missing']}")
        else:
            ours, theirs = median(found["ours"]), median(found["theirs"])
            print(f"{found['name']}: {ours:.2f} s, bare torchrun {theirs:.2f} s", flush=True)
