"""How long it takes from a launch to the first step: sbatch and each launcher, against bare `torchrun --standalone`.

    python aux/bench/launch.py             # root, on Linux with Slurm: four minutes on two quiet cores
    python aux/bench/launch.py --check     # status 1 when less is reached than is promised

A script of fifteen lines that takes one step with DistributedDataParallel is started on 2 and on 4 ranks of one node,
by each in turn. The launchers are those of the four ways as they stand, on a cluster that local/cluster/namespaces.sh
starts for this run; for way 4 Enroot and the image of env.sh have to be there, and the first launch, which does not
count, creates the container. Time counts from the first line of the batch script: what comes before it, from sbatch on,
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
    "way 1": "launch_slurm_to_torch.sh",
    "way 2": "launch_slurm_with_torchrun.sh",
    "way 3": "launch_slurm_with_mp.sh",
    "way 4": "run_script.sh",
}
LEASTS = {"way 1": 1.0, "way 2": round(1 / 1.1, 2), "way 3": 1.0, "way 4": round(1 / 1.1, 2)}  # 0.91: 1.1 times as long
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
    folder = REPOSITORY / "log" / done.stdout.strip()
    text = log.read_text() if log.exists() else done.stderr
    text += "".join(path.read_text() for path in sorted(folder.glob("*.out")))  # way 4's ranks write there
    shutil.rmtree(folder, ignore_errors=True)
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
    for way, launcher in LAUNCHERS.items():
        text = (REPOSITORY / launcher).read_text()
        text, count = re.subn("^set -euo pipefail", r'\g<0>; echo "BEGAN $EPOCHREALTIME"', text, flags=re.M)
        assert count == 1, f"{launcher} does not begin as launch.py expects"
        found[way] = folder / launcher
        found[way].write_text(text)
    return found


# --- main -------------------------------------------------------------------------------------------------------------


def measure(rounds: int, folder: Path) -> Iterator[Row]:
    script = folder / "first_step.py"
    script.write_text(FIRST_STEP)
    launchers = copies(folder)
    if not has_container():
        del launchers["way 4"]
    for ranks in (2, 4):
        queued = {way: [] for way in launchers}
        sides: dict[str, Callable[[], tuple[float, float]]] = {"bare": lambda ranks=ranks: bare(script, ranks)}
        for way, launcher in launchers.items():
            sides[way] = lambda launcher=launcher, ranks=ranks, queued=queued[way]: through_slurm(
                launcher, script, ranks, queued
            )
        taken = {name: [] for name in sides}
        for _ in range(1 + rounds):
            for name, launch in sides.items():
                taken[name].append(launch())
        for way in LAUNCHERS:
            if way not in launchers:
                yield Row(name_of(way, ranks), "bare torchrun", LEASTS[way], missing="no Enroot or no image here")
                continue
            row = Row(name_of(way, ranks), "bare torchrun", LEASTS[way], taken[way][1:], taken["bare"][1:])
            row.quality, row.notes = f"{ranks} ranks in one group", {"seconds_queued": min(queued[way])}
            yield row


def has_container() -> bool:
    """Whether the nodes, which are this machine, have Enroot and the image that env.sh names."""
    image = re.search(r"^export CONTAINER_IMAGE=(\S+)", (REPOSITORY / "env.sh").read_text(), re.M)[1]
    return shutil.which("enroot") is not None and Path(image.replace("$PWD", str(REPOSITORY))).is_file()


def name_of(way: str, ranks: int) -> str:
    return f"launch to first step, {way}, {ranks} ranks"


def main(args: Namespace):
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # by way of `finally`
    up = on_cluster("up", "--nodes", "1", "--cpus", "4", "--gpus", "4")
    try:
        rows.print_heads()
        if up.returncode:
            print(f"launch.py: {up.stderr.strip().splitlines()[-1]}", file=sys.stderr, flush=True)
            kinds = [(way, ranks) for ranks in (2, 4) for way in LAUNCHERS]
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
