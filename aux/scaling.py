"""Strong scaling of a train script: the same run on more and more ranks, by Slurm jobs.

    python aux/scaling.py --sizes 1x1 1x8 2x8 -- distributed/train_ddp.py --epochs 1 \\
        --batch-size 128 --log-every 5

A size is nodes x ranks of a node; speed-ups are relative to the first. Throughput and loss are
those of the script's own log lines. For weak scaling give each size its own call, with a larger
--batch-size. Other options of sbatch go into SBATCH_ACCOUNT, SBATCH_PARTITION and the like.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median


def parse_arguments() -> argparse.Namespace:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("--sizes", nargs="+", default=["1x1", "1x2", "2x2"], metavar="NxR")
    parser.add_argument("--rounds", type=int, default=3, help="run so many jobs of each size")
    parser.add_argument("--launcher", default="launch_slurm_with_torchrun.sh")
    help = "default: 8, or 1 with --cpu"
    parser.add_argument("--cpus-per-rank", type=int, metavar="N", help=help)
    parser.add_argument("--cpu", action="store_true", help="no GPUs instead of one per rank")
    parser.add_argument("--out", type=Path, default=Path("log/scaling"), help="folder for the logs")
    parser.add_argument("script", nargs="+", help="a train script and its arguments")
    args = parser.parse_args()
    if args.cpus_per_rank is None:
        # As in the launchers' headers: with fewer, GPUs wait for data.
        args.cpus_per_rank = 1 if args.cpu else 8
    if not all(re.fullmatch("[1-9][0-9]*x[1-9][0-9]*", size) for size in args.sizes):
        parser.error("--sizes takes nodes x ranks of a node, as in 1x1 1x2 2x2")
    if min(args.rounds, args.cpus_per_rank) < 1:
        parser.error("--rounds and --cpus-per-rank must be 1 or more")
    for path in (args.script[0], args.launcher):
        if not Path(path).is_file():
            parser.error(f"there is no {path} in this folder")
    if shutil.which("sbatch") is None:
        parser.error("no sbatch here: run it where jobs are submitted")
    return args


def main(args: argparse.Namespace):
    args.out.mkdir(parents=True, exist_ok=True)
    found = {size: [] for size in args.sizes}
    for number in range(1, args.rounds + 1):
        for size in args.sizes:
            print(f"Round {number} of {args.rounds}, {size}", file=sys.stderr, flush=True)
            found[size].append(run(args, size, args.out / f"{size}-{number}.out"))

    print("| nodes x ranks | per second | speed-up | efficiency | last loss |")
    print("|---|---|---|---|---|")
    first, first_ranks = None, None
    for size, runs in found.items():
        nodes, per_node = map(int, size.split("x"))
        rate, loss, ranks = median(rate for rate, _ in runs), runs[-1][1], nodes * per_node
        first, first_ranks = first or rate, first_ranks or ranks
        efficiency = rate / first * first_ranks / ranks
        print(f"| {size} | {rate:,.0f} | {rate / first:.2f} | {efficiency:.0%} | {loss} |")


def run(args: argparse.Namespace, size: str, log: Path) -> tuple[float, str]:
    """Runs a job of this size. Returns its throughput and its last loss."""
    nodes, per_node = size.split("x")
    gpus = 0 if args.cpu else per_node
    sbatch = ["sbatch", "--wait", "--parsable", "--no-requeue", f"--output={log}"]
    sbatch += [f"--nodes={nodes}"]
    sbatch += [f"--ntasks-per-node={per_node}", f"--gpus-per-node={gpus}"]
    sbatch += [f"--cpus-per-task={args.cpus_per_rank}", args.launcher, *args.script]
    log.unlink(missing_ok=True)
    done = subprocess.run(sbatch, stdout=subprocess.PIPE, text=True)
    job = done.stdout.strip().partition(";")[0]
    if job:
        # Nobody needs the checkpoints of such a job.
        for folder in ("checkpoints", "log"):
            shutil.rmtree(Path(folder, job), ignore_errors=True)
    text = log.read_text() if log.exists() else ""
    rates = [float(rate) for rate in re.findall(r"_per_second=([\d.e+]+)", text)]
    losses = re.findall(r" loss=(\S+)", text)
    if done.returncode != 0 or len(rates) < 2:
        wanted = "two lines with loss=... and ..._per_second=..."
        sys.exit(f"scaling.py: the job on {size} has failed, or its log lacks {wanted}: see {log}")
    # The first line includes the start-up.
    return median(rates[1:]), losses[-1]


if __name__ == "__main__":
    main(parse_arguments())
