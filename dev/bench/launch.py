"""How long it takes from a launch to the first step: sbatch and each launcher, against bare `torchrun --standalone`.

    python dev/bench/launch.py             # root, on Linux with Slurm: four minutes on two quiet cores
    python dev/bench/launch.py --check     # status 1 when less is reached than is promised

A script of fifteen lines that takes one step with DistributedDataParallel is started on 2 and on 4 ranks of one node,
by each in turn. The four launchers are taken as they stand, on a cluster that local/cluster/namespaces.sh starts for
this run; run_script.sh takes Enroot and the image that it names, and its first launch, which does not count, creates
the container. Time counts from the first line of the batch script: what comes before it, from sbatch on,
is queueing and stands apart, in the file with the raw data. CPU seconds are not counted: Slurm's daemons start what is
measured. Without root, Slurm or Enroot the rows say so and claim nothing. The gate besides: all ranks are in one
process group.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "distributed")]

import rows
from resilience.arguments import ArgumentParser, whole_number
from rows import Row

LAUNCHERS = {
    "srun": "launch_slurm_to_torch.sh",
    "torchrun": "launch_slurm_with_torchrun.sh",
    "spawn": "launch_slurm_with_mp.sh",
    "container": "run_script.sh",
}
# 0.91: 1.1 times as long
LEASTS = {"srun": 1.0, "torchrun": round(1 / 1.1, 2), "spawn": 1.0, "container": round(1 / 1.1, 2)}
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

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=whole_number(1), default=4, help="launches of each kind, after a first one")
    parser.add_argument("--check", action="store_true", help="status 1 when less is reached than is promised")
    return parser.parse_args()


# --- launches ---------------------------------------------------------------------------------------------------------


def first_step(log: str, ranks: int, start: float) -> tuple[float, float]:
    """(wall, 0) seconds from `start` to the first step that a log tells of. Ends the program if there is none."""
    found = re.search(r"^FIRST STEP at (\S+): (\d+) ranks$", log, re.M)
    if not found or int(found[2]) != ranks:
        sys.exit(f"launch.py: no first step of {ranks} ranks:\n{log}")
    return float(found[1]) - start, 0.0


def bare(script: Path, ranks: int) -> tuple[float, float]:
    start = time.time()
    command = [Path(sys.executable).with_name("torchrun"), "--standalone", f"--nproc-per-node={ranks}", script]
    done = subprocess.run(command, capture_output=True, text=True)
    return first_step(done.stdout + done.stderr, ranks, start)


def through_slurm(launcher: Path, script: Path, ranks: int, queued: list[float]) -> tuple[float, float]:
    """By a copy of a launcher that says when it begins."""
    log = script.with_name("log")
    log.unlink(missing_ok=True)
    size = ["--nodes=1", f"--gpus-per-node={ranks}", f"--output={log}"]
    size += [f"--ntasks-per-node={ranks}"] if "to_torch" in launcher.name else [f"--cpus-per-task={ranks}"]
    submitted = time.time()
    done = on_cluster("sbatch", "--wait", "--parsable", *size, launcher, script.relative_to(REPOSITORY))
    shutil.rmtree(REPOSITORY / "log" / done.stdout.strip(), ignore_errors=True)
    text = log.read_text() if log.exists() else done.stderr
    began = re.search(r"^BEGAN (\S+)$", text, re.M)
    queued.append(float(began[1]) - submitted if began else 0.0)
    return first_step(text, ranks, submitted + queued[-1])


def on_cluster(*command: object) -> subprocess.CompletedProcess:
    """A command on its first node, with the Python of this process first in PATH."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "NPROC"))}
    env |= {"CLUSTER": f"bench-{os.getpid()}", "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    where = [CLUSTER, "exec"] if command[0] == "sbatch" else [CLUSTER]
    words = [str(word) for word in (*where, *command)]
    return subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def copies(folder: Path) -> dict[str, Path]:
    """The launchers, with one line more."""
    found = {}
    for name, launcher in LAUNCHERS.items():
        text = (REPOSITORY / launcher).read_text()
        text, count = re.subn("^set -euo pipefail", r'\g<0>; echo "BEGAN $EPOCHREALTIME"', text, flags=re.M)
        assert count == 1, f"{launcher} does not begin as launch.py expects"
        found[name] = folder / launcher
        found[name].write_text(text)
    return found


# --- main -------------------------------------------------------------------------------------------------------------


def measure(rounds: int, folder: Path) -> Iterator[Row]:
    script = folder / "first_step.py"
    script.write_text(FIRST_STEP)
    launchers = copies(folder)
    if not has_container():
        del launchers["container"]
    for ranks in (2, 4):
        queued = {name: [] for name in launchers}
        sides: dict[str, Callable[[], tuple[float, float]]] = {"bare": lambda ranks=ranks: bare(script, ranks)}
        for name, launcher in launchers.items():
            sides[name] = lambda launcher=launcher, ranks=ranks, queued=queued[name]: through_slurm(
                launcher, script, ranks, queued
            )
        taken = {name: [] for name in sides}
        for _ in range(1 + rounds):
            for name, launch in sides.items():
                taken[name].append(launch())
        for name, least in LEASTS.items():
            if name not in launchers:
                yield Row(name_of(name, ranks), "bare torchrun", least, missing="no Enroot or no image here")
                continue
            row = Row(name_of(name, ranks), "bare torchrun", least, taken[name][1:], taken["bare"][1:])
            row.quality, row.notes = f"{ranks} ranks in one group", {"seconds_queued": min(queued[name])}
            yield row


def has_container() -> bool:
    """Whether the nodes, which are this machine, have Enroot and the image that run_script.sh names."""
    image = re.search(r"\bCONTAINER_IMAGE=(\S+)", (REPOSITORY / "run_script.sh").read_text())[1]
    return shutil.which("enroot") is not None and Path(image.replace("$PWD", str(REPOSITORY))).is_file()


def name_of(launcher: str, ranks: int) -> str:
    return f"launch to first step, {launcher}, {ranks} ranks"


def main(args: Namespace):
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # runs `finally`
    up = on_cluster("up", "--nodes", "1", "--cpus", "4", "--gpus", "4")
    try:
        rows.print_heads()
        if up.returncode:
            print(f"launch.py: {up.stderr.strip().splitlines()[-1]}", file=sys.stderr, flush=True)
            kinds = [(name, ranks) for ranks in (2, 4) for name in LAUNCHERS]
            none = [Row(name_of(*kind), "bare torchrun", LEASTS[kind[0]], missing="no cluster here") for kind in kinds]
            missed = [rows.report(row) for row in none]
        else:
            (REPOSITORY / "log").mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=REPOSITORY / "log") as folder:  # a container sees the repository
                missed = [rows.report(row) for row in measure(args.rounds, Path(folder))]
    finally:
        on_cluster("down")
        with contextlib.suppress(OSError):  # it is not there, or others have logs in it
            (REPOSITORY / "log").rmdir()
    if args.check and any(missed):
        sys.exit("launch.py: " + "; ".join(filter(None, missed)))


if __name__ == "__main__":
    main(parse_arguments())
