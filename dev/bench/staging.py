"""What aux/stage_environment.sh saves on a slow shared file system: `import torch` in a job of two nodes (root).

    python dev/bench/staging.py                  # some five minutes: leave the machine alone meanwhile
    python dev/bench/staging.py --delay 200      # a file system that is less slow

A job whose ranks import torch from a slow file system takes turns with one that first copies the environment to the
nodes' own disks; sbcast and unpacking count. The cluster is local/cluster/namespaces.sh's, the slow file system is
imitated by dev/bench/slow_files.c: each call that names a file takes --delay longer. One rank on a node, so that it has
no other one's cache. What is imported is a copy of this Python's virtual environment; it takes four times its size.
"""

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "distributed"))

from read_scaling import machine
from resilience.arguments import ArgumentParser, whole_number
from resilience.job import write_atomically

NAMESPACES = REPOSITORY / "local/cluster/namespaces.sh"
JOB = """#!/bin/bash
set -euo pipefail
export PATH=$SLOW_FOLDER/venv/bin:$PATH LD_PRELOAD=$PRELOAD
start=$EPOCHREALTIME
[[ -z "$OWN_DISK" ]] || PATH=$("$STAGE" "$SLOW_FOLDER/venv" "$OWN_DISK")/bin:$PATH
staged=$EPOCHREALTIME
srun --ntasks-per-node=1 python -c 'import sys, torch; print("imported from", sys.prefix)'
echo "seconds $start $staged $EPOCHREALTIME"
"""

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=whole_number(1), default=3, help="turns of both jobs; the medians are shown")
    parser.add_argument("--delay", type=whole_number(1), default=1000, help="microseconds to name a file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds of every turn there")
    args = parser.parse_args()
    if os.geteuid() != 0 or sys.prefix == sys.base_prefix:
        parser.error("takes root, for the cluster, and the Python of a virtual environment: .venv/bin/python")
    return args


def run(*command: object, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip())[-500:]
        sys.exit(f"staging.py: {' '.join(map(str, command[:3]))} failed: {last}")


# --- jobs -------------------------------------------------------------------------------------------------------------


def prepare(folder: Path):
    """In `folder`: the slow file system with the environment in it, and on each node a disk of its own."""
    (folder / "job.sh").write_text(JOB)
    library, source = folder / "slow_files.so", REPOSITORY / "dev/bench/slow_files.c"
    run("cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl")
    run("cp", "--archive", "--dereference", sys.prefix, folder / "shared/venv")
    for node in ("node-1", "node-2"):
        (folder / node).mkdir()
        run(NAMESPACES, "exec", "--node", node, "mount", "--bind", folder / node, folder / "own")


def run_job(folder: Path, delay: int, copied: bool) -> tuple[float, float]:
    """(seconds to copy, seconds to import) of one job of two nodes."""
    values = {"SLOW_FOLDER": folder / "shared", "SLOW_MICROSECONDS": delay, "PRELOAD": folder / "slow_files.so"}
    values |= {"STAGE": REPOSITORY / "aux/stage_environment.sh", "OWN_DISK": folder / "own" if copied else ""}
    env = os.environ | {name: str(value) for name, value in values.items()}
    command = ["sbatch", "--wait", "--nodes=2", "--output", folder / "log", folder / "job.sh"]
    run(NAMESPACES, "exec", *command, env=env, cwd=folder, timeout=900)
    log = (folder / "log").read_text()
    if log.count(f"imported from {folder}/{'own/environment-' if copied else 'shared/venv'}") != 2:
        sys.exit(f"staging.py: a job has not imported torch from where it should: {log[-500:]}")
    start, staged, done = map(float, re.search(r"^seconds (\S+) (\S+) (\S+)$", log, re.M).groups())
    return staged - start, done - staged


# --- main -------------------------------------------------------------------------------------------------------------


def main(args: Namespace):
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} CPUs, {args.delay} us to name a file", flush=True)
    os.environ["CLUSTER"] = f"staging-{os.getpid()}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shared").mkdir()
        (folder / "own").mkdir()
        run(NAMESPACES, "up", "--nodes", 2)
        try:
            prepare(folder)
            packing, _ = run_job(folder, args.delay, copied=True)
            print(f"the first job of all packs the environment: {packing:.1f} s to pack and copy", flush=True)
            turns = [
                (run_job(folder, args.delay, False), run_job(folder, args.delay, True)) for _ in range(args.rounds)
            ]
        finally:
            run(NAMESPACES, "down")
    slow = median(seconds for (_, seconds), _ in turns)
    copy, fast = (median(column) for column in zip(*(copied for _, copied in turns), strict=True))
    print(f"import torch from the slow file system: {slow:.1f} s")
    print(f"from the nodes' own disks: {copy:.1f} s to copy, {fast:.1f} s to import")
    print(f"{slow / (copy + fast):.2f} times as fast, and {slow / fast:.1f} times where the job imports it again")
    if args.json:
        found = {"date": datetime.date.today().isoformat(), "machine": machine(), "microseconds": args.delay}
        found["packing"] = packing
        found["turns"] = [{"import": shared, "copy": copy, "import again": own} for (_, shared), (copy, own) in turns]
        write_atomically(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(parse_arguments())
