"""Start the same training run in every way, by real Slurm jobs. Are all losses the same?

    ./local/cluster/namespaces.sh up --cpus 4
    ./local/cluster/namespaces.sh exec python dev/prove_convergence.py
    python dev/prove_convergence.py --draw     # table and figure of the last time

The cluster needs nodes of four CPUs; a login node will do as well. It trains on CPUs, in float32
and without dropout, a ConvNet on images and a transformer on text. Exit status 1 if a run differs
from one process by more than rounding explains, or if a learning rate that is 1 % higher does not.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "distributed"))

OUT = REPOSITORY / "docs/figures"
LAUNCHERS = {
    "srun": "launch_slurm_to_torch.sh",
    "torchrun": "launch_slurm_with_torchrun.sh",
    "spawn": "launch_slurm_with_mp.sh",
}
SINGLE, DDP = "local/train_single.py", "distributed/train_ddp.py"
PREEMPTIBLE = "distributed/train_preemptible.py"
FSDP, TP = "distributed/train_fsdp.py", "distributed/train_tp.py"
# Primes: no number of ranks divides them.
IMAGES = {"train": 3019, "t10k": 503}
STEPS = 100
# Rounding is below 1e-5 here, and an error of 1 % above 1e-3.
LIMIT = 1e-4
CONTROL, HIGHER = "learning rate 1 % higher", "--learning-rate 0.00101"
SAME = "--device cpu --precision fp32 --seed 7 --log-every 1 --learning-rate 0.001 "
ARGUMENTS = {
    "images": SAME + "--batch-size 60 --epochs 2",
    "text": SAME + "--batch-size 12 --dropout 0 --steps 100 --warmup-steps 20 "
    "--eval-every 50 --eval-windows 100",
}


class Job(NamedTuple):
    """One start of a script; no launcher means one process. `stop`: SIGTERM once it trains."""

    launcher: str
    nodes: int
    ranks: int
    script: str
    arguments: str = ""
    stop: bool = False


# --- what is run ---


def image_runs() -> Iterator[tuple[str, str, list[Job]]]:
    """The row in the figure, the name in the table, and the jobs one after the other."""
    alone = Job("", 1, 1, SINGLE)
    yield "one process", "one process", [alone]
    for launcher in LAUNCHERS:
        for nodes, ranks in ((1, 1), (1, 2), (2, 4)):
            yield launcher, f"{launcher}, {place(nodes, ranks)}", [Job(launcher, nodes, ranks, DDP)]
    yield "srun", f"srun, {place(1, 3)}", [Job("srun", 1, 3, DDP)]

    resumed = "stopped and resumed"
    first, second = (Job("torchrun", 2, 4, DDP, more) for more in ("--epochs 1", "--resume"))
    name = f"torchrun, {place(2, 4)}, a second job resumes after epoch 1"
    yield resumed, name, [first, second]
    name = "spawn, 2 ranks on 2 nodes, stopped in an epoch, requeued"
    yield resumed, name, [Job("spawn", 2, 2, PREEMPTIBLE, stop=True)]
    yield CONTROL, f"one process, {CONTROL}", [alone._replace(arguments=HIGHER)]


def text_runs() -> Iterator[tuple[str, str, list[Job]]]:
    """The same for a model that is split over the ranks."""
    alone = Job("", 1, 1, FSDP)
    yield "one process", "one process", [alone]
    name = "one process, 3 accumulated parts"
    yield "FSDP", name, [alone._replace(arguments="--accumulation 3")]
    for launcher, nodes, ranks in (("srun", 1, 2), ("srun", 1, 3), ("torchrun", 2, 4)):
        name = f"{launcher}, FSDP, {place(nodes, ranks)}"
        yield "FSDP", name, [Job(launcher, nodes, ranks, FSDP)]
    name = f"spawn, FSDP --hybrid, {place(2, 4)}, 3 accumulated parts"
    yield "FSDP", name, [Job("spawn", 2, 4, FSDP, "--hybrid --accumulation 3")]
    yield "TP", f"torchrun, TP 2, {place(1, 2)}", [Job("torchrun", 1, 2, TP)]
    name = f"spawn, TP 4 --sequence-parallel, {place(1, 4)}"
    yield "TP", name, [Job("spawn", 1, 4, TP, "--tensor-parallel 4 --sequence-parallel")]
    yield "TP x data", f"srun, TP 2 x data 2, {place(2, 4)}", [Job("srun", 2, 4, TP)]
    name = f"spawn, TP 2 --sequence-parallel x data 2, {place(2, 4)}, 2 accumulated parts"
    yield "TP x data", name, [Job("spawn", 2, 4, TP, "--sequence-parallel --accumulation 2")]
    stopped, then = Job("srun", 1, 2, FSDP, stop=True), Job("torchrun", 2, 4, TP, "--resume")
    name = "srun, FSDP on 2 ranks, stopped; torchrun, TP 2 x data 2, resumes"
    yield "stopped and resumed", name, [stopped, then]
    yield CONTROL, f"one process, {CONTROL}", [alone._replace(arguments=HIGHER)]


def place(nodes: int, ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"


# --- the runs ---


def prove() -> dict:
    """Starts all runs, one after the other. Returns the content of convergence.json."""
    folder = Path("checkpoints", f"convergence-{os.getpid()}")
    slurm = output("sbatch", "--version").split()[-1]
    torch = importlib.metadata.version("torch")
    result = {
        "date": str(datetime.date.today()),
        "machine": f"torch {torch}, Slurm {slurm}, {os.cpu_count()} CPUs",
        "trainings": [],
    }
    for training, runs in (("images", image_runs()), ("text", text_runs())):
        data, said = image_data(folder) if training == "images" else text_data()
        found = {"name": training, "data": said, "runs": []}
        for number, (family, name, jobs) in enumerate(runs, start=1):
            print(f"{training} {number}: {name}", flush=True)
            shared = [*ARGUMENTS[training].split(), "--data-dir", str(data)]
            losses, evaluations = execute(jobs, shared, folder / f"{training}-{number}")
            row = {"name": name, "family": family, "evaluations": evaluations, "losses": losses}
            found["runs"].append(row)
        result["trainings"].append(found)
    # Not reached if a run failed, so that its folder stays.
    shutil.rmtree(folder)
    return result


def image_data(folder: Path) -> tuple[Path, str]:
    """A folder with the first images of data/mnist, and what they are."""
    import mnist

    said = mnist.describe("data/mnist").partition(", in ")[0]
    (folder / "data/MNIST/raw").mkdir(parents=True)
    for split, count in IMAGES.items():
        for kind, header, item in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            name = f"MNIST/raw/{split}-{kind}-ubyte"
            source = Path("data/mnist", name).read_bytes()
            content = source[:4] + count.to_bytes(4, "big") + source[8 : header + item * count]
            (folder / "data" / name).write_bytes(content)
    return folder / "data", f"{IMAGES['train']:,} images of: {said}"


def text_data() -> tuple[Path, str]:
    import token_files

    data = Path("data/shakespeare")
    return data, token_files.describe(data).partition(", in ")[0]


def execute(jobs: list[Job], shared: list[str], folder: Path) -> tuple[dict, dict]:
    """Runs the jobs, and returns losses and evaluations by step."""
    folder.mkdir()
    log = folder / "log"
    for job in jobs:
        command = [job.script, *shared, "--checkpoint-dir", f"{folder}/out", *job.arguments.split()]
        if job.launcher:
            submit(job, command, log)
        else:
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            log.write_text(output(sys.executable, *command, env=env))
    text = log.read_text() if log.exists() else ""
    metrics = folder / "out/metrics.jsonl"
    losses, evaluations = read_metrics(metrics) if metrics.exists() else read_log(text)
    if list(losses) != list(range(1, STEPS + 1)):
        sys.exit(f"prove_convergence.py: {len(losses)} losses for {STEPS} steps, see {folder}")
    if (jobs[0].stop or len(jobs) > 1) and not re.search(r"^Resumed after ", text, re.M):
        sys.exit(f"prove_convergence.py: it was not stopped and resumed, see {folder}")
    return losses, evaluations


def submit(job: Job, command: list[str], log: Path):
    """Submits a job and waits for its end; `sbatch --wait` looks only every 32 s."""
    size = [f"--nodes={job.nodes}", f"--ntasks-per-node={job.ranks // job.nodes}"]
    size += ["--cpus-per-task=1", "--gpus-per-node=0", "--time=15", f"--output={log}"]
    # FSDP's run goes on as another job.
    size += ["--no-requeue"] * (job.script == FSDP)
    number = output("sbatch", "--parsable", *size, LAUNCHERS[job.launcher], *command)
    number = number.strip().partition(";")[0]
    to_stop = job.stop
    while state := output("squeue", "--noheader", "--format=%T", f"--jobs={number}").strip():
        if to_stop and log.exists() and log.read_text().count(" loss=") >= 10:
            output("scancel", "--signal=TERM", number)
            to_stop = False
        elif job.stop and not to_stop and state == "PENDING":
            # It has been requeued, and need not wait for Slurm's two minutes.
            output("scontrol", "update", f"JobId={number}", "StartTime=now")
        time.sleep(0.5)
    shutil.rmtree(Path("log", number), ignore_errors=True)


def output(*command: str, env: dict | None = None) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env).stdout


def read_metrics(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Losses, and validation losses, by step, of a language model."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = ("loss", "val_loss")
    return tuple({e["step"]: round(e[kind], 7) for e in events if kind in e} for kind in kinds)


def read_log(log: str) -> tuple[dict[int, float], dict[int, float]]:
    """Losses, and test losses, by step, of a script that trains on images."""
    found = re.findall(r"^epoch=(\d+) step=(\d+)/(\d+) loss=(\S+) ", log, re.M)
    per_epoch = int(found[0][2]) if found else 0
    losses = {(int(e) - 1) * per_epoch + int(step): float(loss) for e, step, _, loss in found}
    tested = re.findall(r"^epoch=(\d+) test_loss=(\S+) ", log, re.M)
    return losses, {int(epoch) * per_epoch: float(loss) for epoch, loss in tested}


# --- verdict ---


def difference(a: dict, b: dict) -> float:
    """The largest difference between two runs' losses and evaluations."""
    kinds = ("losses", "evaluations")
    gaps = [abs(a[kind][step] - b[kind][step]) for kind in kinds for step in a[kind]]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


def judge(training: dict) -> list[str]:
    """Prints the table of a training. Returns a sentence for each fault."""
    one, *others, control = training["runs"]
    print(f"\n{training['name']}: {training['data']}; {len(one['losses'])} steps\n")
    faults = []
    for number, run in enumerate([one, *others], start=1):
        gap = difference(run, one)
        print(f"{number:2}. {run['name']:80} {gap:8.1e}")
        if gap > LIMIT:
            faults.append(f"'{run['name']}' differs by {gap:.1e}, the limit is {LIMIT:g}")
    seen = difference(control, one)
    print(f"    {control['name']:80} {seen:8.1e}")
    if seen <= LIMIT:
        faults.append(f"the {training['name']} do not show that a learning rate is 1 % higher")
    return faults


STYLE = """
svg { font: 14.5px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f }
.page { fill: #fff } .bold { font-weight: 600 } .quiet { fill: #59636e } .end { text-anchor: end }
.line { fill: none; stroke: #8a8a8a } .dashed { stroke-dasharray: 5 4 }
.dot { fill: var(--kind) } .curve { fill: none; stroke: var(--kind); stroke-width: 2.5 }
.wide { stroke: #8a8a8a; stroke-width: 8; opacity: .4 }
.k0 { --kind: #1f6099 } .k1 { --kind: #b4501a } .k2 { --kind: #1a7f52 } .k3 { --kind: #9a3f8b }
.k4 { --kind: #24292f }
@media (prefers-color-scheme: dark) {
  svg { fill: #e6edf3 } .page { fill: #0d1117 } .quiet { fill: #9198a1 } .k4 { --kind: #e6edf3 }
  .k0 { --kind: #79b8ff } .k1 { --kind: #f0883e } .k2 { --kind: #56d364 } .k3 { --kind: #d2a8ff }
}
"""


def draw(result: dict) -> str:
    """An SVG: the losses, and below them how far each kind of run is from one process."""
    height = 372
    parts = []

    def text(x: int, y: int, words: object, look: str):
        parts.append(f'<text class="{look}" x="{x}" y="{y}">{words}</text>')

    def curve(run: dict, low: float, high: float, look: str):
        points = ""
        for step, loss in run["losses"].items():
            x = 48 + 416 * (int(step) - 1) / (STEPS - 1)
            points += f"{x:.0f},{170 - 130 * (loss - low) / (high - low):.1f} "
        parts.append(f'<polyline {look} points="{points}"/>')

    def across(gap: float) -> int:
        """1e-7 is at 200, and 0.1 or more at 392."""
        return round(200 + 32 * (math.log10(min(max(gap, 1e-7), 0.1)) + 7))

    for number, training in enumerate(result["trainings"]):
        one, *others = training["runs"]
        low, high = min(one["losses"].values()), max(one["losses"].values())
        parts.append(f'<g transform="translate(0 {number * height})">')
        text(16, 28, f"{training['name']}: the loss of each kind of run", "bold")
        parts.append('<path class="line" d="M48 34V176H464"/>')
        text(42, 46, f"{high:.1f}", "quiet end")
        text(42, 175, f"{low:.1f}", "quiet end")
        text(48, 194, "step 1", "quiet")
        text(464, 194, STEPS, "quiet end")
        curve(one, low, high, 'class="curve wide"')
        text(16, 224, "largest difference from one process", "quiet")
        text(across(LIMIT) + 6, 224, "limit", "quiet")
        parts.append(f'<path class="line dashed" d="M{across(LIMIT)} 212V356"/>')
        for place, kind in enumerate(dict.fromkeys(run["family"] for run in others)):
            # The run of this kind that is farthest from one process.
            runs = [run for run in others if run["family"] == kind]
            run = max(runs, key=lambda its: difference(its, one))
            gap = difference(run, one)
            # The curves lie on each other, so each one has gaps in which the others are seen.
            dashes = f'stroke-dasharray="8 24" stroke-dashoffset="{-8 * place}"'
            if kind != CONTROL:
                curve(run, low, high, f'class="curve k{place}" {dashes}')
            x, y = across(gap), 250 + 24 * place
            text(16, y, kind, "")
            parts.append(f'<circle class="dot k{place}" cx="{x}" cy="{y - 5}" r="6"/>')
            text(464, y, f"{gap:.0e}" if gap else "0", "end")
        parts.append("</g>")
    height *= len(result["trainings"])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="464" height="{height}"'
    head += f' viewBox="8 0 464 {height}" role="img">\n<style>{STYLE}</style>'
    page = f'<rect class="page" x="8" width="464" height="{height}" rx="8"/>'
    return "\n".join([head, page, *parts, "</svg>\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draw", action="store_true", help="from convergence.json, without runs")
    args = parser.parse_args()
    os.chdir(REPOSITORY)
    losses = OUT / "convergence.json"
    if not args.draw:
        if shutil.which("sbatch") is None:
            sys.exit("prove_convergence.py: no sbatch here: run it on a login node")
        if not (Path("data/mnist").exists() and Path("data/shakespeare").exists()):
            sys.exit("prove_convergence.py: prepare both data sets: python aux/prepare_data.py")
        # A line for each run.
        losses.write_text(json.dumps(prove()).replace('{"name"', '\n{"name"') + "\n")
    result = json.loads(losses.read_text())
    losses.with_suffix(".svg").write_text(draw(result))
    faults = [fault for training in result["trainings"] for fault in judge(training)]
    if faults:
        sys.exit(f"prove_convergence.py: {'; '.join(faults)}")
    print("VERDICT: all launchers agree")


if __name__ == "__main__":
    main()
