"""The same training run started in every way, by real Slurm jobs: are all losses the same?

    ./local/cluster/namespaces.sh up --cpus 4
    ./local/cluster/namespaces.sh exec python dev/figures/prove_convergence.py
    python dev/figures/prove_convergence.py --draw     # table and figure of the last time

The cluster needs nodes of four CPUs; a login node will do as well. It trains on CPUs, in float32
and without dropout, a ConvNet on images and a transformer on text. Exit status 1 if the losses of
any two runs differ by more than rounding explains, or if a run whose learning rate is 1 % higher is
not told from the others.
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
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "distributed"))

import style

LAUNCHERS = {
    "srun": "launch_slurm_to_torch.sh",
    "torchrun": "launch_slurm_with_torchrun.sh",
    "spawn": "launch_slurm_with_mp.sh",
    "container": "run_script.sh",
}
SINGLE, DDP = "local/train_single.py", "distributed/train_ddp.py"
PREEMPTIBLE = "distributed/train_preemptible.py"
FSDP, TP = "distributed/train_fsdp.py", "distributed/train_tp.py"
# Primes: no number of ranks divides them.
IMAGES = {"train": 3019, "t10k": 503}
STEPS = 100
BATCH = {"images": 60, "text": 12}
# Rounding is below 1e-5 here, and an error of 1 % above 1e-3.
LIMIT = 1e-4
SECONDS = 3600
CONTROL = "learning rate 1 % higher"


@dataclass(frozen=True)
class Run:
    """One row of the table; `family` is its line in the figure. No launcher means one process.

    With `stop` it is told to stop once it trains, and Slurm requeues it, or `then` resumes it.
    """

    name: str
    family: str
    launcher: str
    nodes: int
    ranks: int
    script: str
    arguments: tuple[str, ...] = ()
    stop: bool = False
    then: "Run | None" = None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--draw", action="store_true", help="no runs: from --out's convergence.json"
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs/figures")
    parser.add_argument("--container", action="store_true", help="also in containers of Enroot")
    parser.add_argument("--images", type=Path, default=REPOSITORY / "data/mnist")
    parser.add_argument("--text", type=Path, default=REPOSITORY / "data/shakespeare")
    args = parser.parse_args()
    args.out, args.images, args.text = (p.resolve() for p in (args.out, args.images, args.text))
    return args


def main(args: argparse.Namespace):
    losses = args.out / "convergence.json"
    if not args.draw:
        for tool in ("sbatch", *["enroot"] * args.container):
            if shutil.which(tool) is None:
                fail(f"no {tool} here: run it on a login node, or in namespaces.sh exec")
        result = prove(args)
        args.out.mkdir(parents=True, exist_ok=True)
        # A line for each run.
        losses.write_text(json.dumps(result).replace('{"name"', '\n{"name"') + "\n")
    if not losses.exists():
        fail(f"no losses at {losses}: run it without --draw first")
    result = json.loads(losses.read_text())
    draw(result, losses.with_suffix(".png"))
    faults = [fault for training in result["trainings"] for fault in judge(training)]
    if faults:
        fail("; ".join(faults))
    print(f"VERDICT: all launchers agree; figure in {losses.with_suffix('.png')}")


def fail(sentence: str):
    sys.exit(f"prove_convergence.py: {sentence}")


# --- what is run ---


def image_runs(container: bool) -> Iterator[Run]:
    """DistributedDataParallel. All others must repeat the first run."""
    alone = Run("one process", "one process", "", 1, 1, SINGLE)
    yield alone
    for launcher in ("srun", "torchrun", "spawn", *["container"] * container):
        for nodes, ranks in ((1, 1), (1, 2), (2, 4)):
            yield Run(f"{launcher}, {place(nodes, ranks)}", launcher, launcher, nodes, ranks, DDP)
    yield Run(f"srun, {place(1, 3)}", "srun", "srun", 1, 3, DDP)
    resumed = "stopped and resumed"
    name = f"torchrun, {place(2, 4)}, a second job resumes after epoch 1"
    again = Run(name, resumed, "torchrun", 2, 4, DDP, ("--resume",))
    yield replace(again, arguments=("--epochs", "1"), then=again)
    name = "spawn, 2 ranks on 2 nodes, stopped in an epoch, requeued"
    yield Run(name, resumed, "spawn", 2, 2, PREEMPTIBLE, stop=True)
    yield control(alone)


def text_runs(container: bool) -> Iterator[Run]:
    """A model that is split over the ranks."""
    alone = Run("one process", "one process", "", 1, 1, FSDP)
    parts = ("--accumulation", "3")
    yield alone
    yield replace(alone, name="one process, 3 accumulated parts", family="FSDP", arguments=parts)
    yield Run(f"srun, FSDP, {place(1, 2)}", "FSDP", "srun", 1, 2, FSDP)
    yield Run(f"srun, FSDP, {place(1, 3)}", "FSDP", "srun", 1, 3, FSDP)
    yield Run(f"torchrun, FSDP, {place(2, 4)}", "FSDP", "torchrun", 2, 4, FSDP)
    name = f"spawn, FSDP --hybrid, {place(2, 4)}, 3 accumulated parts"
    yield Run(name, "FSDP", "spawn", 2, 4, FSDP, ("--hybrid", *parts))
    yield Run(f"torchrun, TP 2, {place(1, 2)}", "TP", "torchrun", 1, 2, TP)
    sequence = ("--sequence-parallel",)
    name = f"spawn, TP 4 --sequence-parallel, {place(1, 4)}"
    yield Run(name, "TP", "spawn", 1, 4, TP, ("--tensor-parallel", "4", *sequence))
    yield Run(f"srun, TP 2 x data 2, {place(2, 4)}", "TP x data", "srun", 2, 4, TP)
    name = f"spawn, TP 2 --sequence-parallel x data 2, {place(2, 4)}, 2 accumulated parts"
    yield Run(name, "TP x data", "spawn", 2, 4, TP, (*sequence, "--accumulation", "2"))
    if container:
        yield Run(f"container, TP 2 x data 2, {place(2, 4)}", "TP x data", "container", 2, 4, TP)
    name = "srun, FSDP on 2 ranks, stopped; torchrun, TP 2 x data 2, resumes"
    then = Run(name, "stopped and resumed", "torchrun", 2, 4, TP, ("--resume",))
    yield Run(name, "stopped and resumed", "srun", 1, 2, FSDP, stop=True, then=then)
    yield control(alone)


def control(alone: Run) -> Run:
    arguments = ("--learning-rate", "0.00101")
    return replace(alone, name=f"one process, {CONTROL}", family=CONTROL, arguments=arguments)


def place(nodes: int, ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"


def arguments_of(training: str, data: Path) -> list[str]:
    """The arguments that all runs of a training share."""
    shared = ["--device", "cpu", "--precision", "fp32", "--seed", "7"]
    shared += ["--log-every", "1", "--batch-size", str(BATCH[training]), "--data-dir", str(data)]
    shared += ["--learning-rate", "0.001"]
    if training == "images":
        return [*shared, "--epochs", "2"]
    evaluation = ["--eval-every", str(STEPS // 2), "--eval-windows", "100"]
    return [*shared, "--dropout", "0", "--steps", str(STEPS), "--warmup-steps", "20", *evaluation]


# --- the runs ---


def prove(args: argparse.Namespace) -> dict:
    """Starts all runs, one after the other. Returns the content of convergence.json."""
    # Relative paths are the same in a container.
    os.chdir(REPOSITORY)
    Path("checkpoints").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="convergence-", dir="checkpoints"))
    sources = copy_data(args, folder)
    slurm = subprocess.run(["sbatch", "--version"], capture_output=True, text=True).stdout.split()[
        -1
    ]
    torch = importlib.metadata.version("torch")
    result = {
        "date": str(datetime.date.today()),
        "machine": f"torch {torch}, Slurm {slurm}, {os.cpu_count()} CPUs",
        "command": "python dev/figures/prove_convergence.py" + " --container" * args.container,
        "trainings": [],
    }
    for training, runs in (("images", image_runs), ("text", text_runs)):
        found = {"name": training, "data": sources[training], "limit": LIMIT, "runs": []}
        shared = arguments_of(training, folder / training)
        for number, run in enumerate(runs(args.container), start=1):
            print(f"{training} {number}: {run.name}", flush=True)
            losses, evaluations = execute(run, shared, folder / f"{training}-{number}")
            row = {"name": run.name, "family": run.family}
            found["runs"].append(row | {"evaluations": evaluations, "losses": losses})
        result["trainings"].append(found)
    # Not reached if a run failed, so that its folder stays.
    shutil.rmtree(folder)
    return result


def copy_data(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Puts the first images and the text where all nodes see them. Returns their names."""
    import mnist
    import token_files

    (folder / "images/MNIST/raw").mkdir(parents=True)
    try:
        images, text = mnist.describe(args.images), token_files.describe(args.text)
        for split, count in IMAGES.items():
            for kind, header, item in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
                name = f"MNIST/raw/{split}-{kind}-ubyte"
                source = (args.images / name).read_bytes()
                content = source[:4] + count.to_bytes(4, "big") + source[8 : header + item * count]
                (folder / "images" / name).write_bytes(content)
        shutil.copytree(args.text, folder / "text")
    except OSError as error:
        shutil.rmtree(folder)
        fail(f"no data at {error.filename}; prepare both sets once: python aux/prepare_data.py")
    images, text = images.partition(", in ")[0], text.partition(", in ")[0]
    return {"images": f"{IMAGES['train']:,} images of: {images}", "text": text}


def execute(run: Run, shared: list[str], folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Runs `run`, and `then` after it. Returns losses and evaluations by step."""
    folder.mkdir()
    log = ""
    for part in (run, run.then) if run.then else (run,):
        arguments = [*shared, "--checkpoint-dir", str(folder / "out"), *part.arguments]
        log += submit(part, arguments, folder) if part.launcher else by_hand(part, arguments)
    resumed = re.search(r"^Resumed after (?:step|epoch) (\d+)$", log, re.M)
    if (run.stop or run.then) and not (resumed and 0 < int(resumed[1]) < STEPS):
        fail(f"{run.name}: it was not stopped and resumed in the middle, see {folder}")
    metrics = folder / "out/metrics.jsonl"
    losses, evaluations = read_metrics(metrics) if metrics.exists() else read_log(log)
    if list(losses) != list(range(1, STEPS + 1)):
        fail(f"{run.name}: {len(losses)} losses for {STEPS} steps, see {folder}")
    return losses, evaluations


def by_hand(run: Run, arguments: list[str]) -> str:
    """One process, without a launcher. Returns its output."""
    stray = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: value for name, value in os.environ.items() if name not in stray}
    env["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, run.script, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode != 0:
        fail(f"{run.name} failed: {done.stderr.strip()}")
    return done.stdout


def submit(run: Run, arguments: list[str], folder: Path) -> str:
    """A job. Returns its log."""
    size = [f"--nodes={run.nodes}", f"--ntasks-per-node={run.ranks // run.nodes}"]
    size += ["--cpus-per-task=1", "--gpus-per-node=0", "--time=15", f"--output={folder}/log-%j"]
    ends_early = run.stop and run.then
    if ends_early:
        size += ["--no-requeue"]
    command = ["sbatch", "--parsable", *size, LAUNCHERS[run.launcher], run.script, *arguments]
    submitted = subprocess.run(command, capture_output=True, text=True)
    if submitted.returncode != 0:
        fail(f"{run.name}: {submitted.stderr.strip()}")
    job = submitted.stdout.strip().partition(";")[0]
    log = folder / f"log-{job}"
    try:
        wait(job, log if run.stop else None)
    except BaseException:
        subprocess.run(["scancel", job])
        raise
    text = log.read_text() if log.exists() else ""
    expected = "Stopped after step" if ends_early else "Finished: "
    if not re.search(f"^{expected}", text, re.M):
        fail(f"{run.name}: job {job} failed; its log ends with: {text.splitlines()[-3:]}")
    shutil.rmtree(Path("log", job), ignore_errors=True)
    return text


def wait(job: str, log: Path | None):
    """Waits until the job has ended; `sbatch --wait` looks only every 32 s.

    If `log` is given, the job is told to stop once ten losses are in that file.
    """
    deadline, told = time.monotonic() + SECONDS, False
    squeue = ["squeue", "--noheader", "--format=%T", f"--jobs={job}"]
    while time.monotonic() < deadline:
        shown = subprocess.run(squeue, capture_output=True, text=True)
        state = shown.stdout.strip()
        if (shown.returncode == 0 and not state) or "Invalid job id" in shown.stderr:
            return
        if log and not told and log.exists() and log.read_text().count(" loss=") >= 10:
            subprocess.run(["scancel", "--signal=TERM", job])
            told = True
        if told and state == "PENDING":
            # It has been requeued, and need not wait for Slurm's two minutes.
            update = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
            subprocess.run(update, capture_output=True)
        time.sleep(0.2)
    fail(f"job {job} has not ended after {SECONDS} s")


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


def difference(a: dict, b: dict) -> tuple[float, str]:
    """The largest difference between two runs' losses and evaluations, and its step."""
    kinds = ("losses", "evaluations")
    gaps = [(abs(a[kind][step] - b[kind][step]), step) for kind in kinds for step in a[kind]]
    return max((gap if math.isfinite(gap) else math.inf, step) for gap, step in gaps)


def judge(training: dict) -> list[str]:
    """Prints the table of a training. Returns a sentence for each fault."""
    *runs, control = training["runs"]
    limit, faults = training["limit"], []
    steps = len(runs[0]["losses"])
    print(f"\n{training['name']}: {training['data']}; {steps} steps, at most {limit:g} apart\n")
    print(f"{'':3} {'run':80} {'from one process':>16}   {'from any other':>14}")
    for number, run in enumerate(runs, start=1):
        others = [(*difference(run, r), i) for i, r in enumerate(runs, start=1) if r is not run]
        far, _, which = max(others)
        near, _ = difference(run, runs[0])
        print(f"{number:2}. {run['name']:80} {near:16.1e}   {far:8.1e} ({which:2})")
    seen, _ = difference(control, runs[0])
    told = "yes" if seen > limit else "NO"
    print(f"    {control['name']:80} {seen:16.1e}   is told from the others: {told}")

    pairs = [(*difference(a, b), a["name"], b["name"]) for a, b in combinations(runs, 2)]
    apart, step, a, b = max(pairs)
    if not apart <= limit:
        faults += [f"'{a}' and '{b}' differ by {apart:.1e} in step {step}, the limit is {limit:g}"]
    if not seen > limit:
        faults += [f"the {training['name']} do not show that a learning rate is 1 % higher"]
    return faults


def draw(result: dict, path: Path):
    """All losses on top of each other; below them how far each family is from one process."""
    figure, axes = style.subplots(2, len(result["trainings"]), 9, 6.2)
    for (above, below), training in zip(axes.T, result["trainings"], strict=True):
        one, *others = training["runs"]
        steps = [int(step) for step in one["losses"]]
        thick = {"color": style.GREY, "alpha": 0.35, "linewidth": 7}
        above.plot(steps, one["losses"].values(), label="one process", **thick)
        for number, family in enumerate(dict.fromkeys(run["family"] for run in others)):
            members = [run["losses"] for run in others if run["family"] == family]
            far = [
                max(abs(m[step] - one["losses"][step]) for m in members) for step in one["losses"]
            ]
            look = style.line(number, len(steps))
            if family == CONTROL:
                look |= {"color": "black"}
            below.plot(steps, [max(gap, 1e-7) for gap in far], label=family, **look)
            for losses in members if family != CONTROL else ():
                above.plot(steps, losses.values(), **look | {"linewidth": 0.7})
        above.set(title=f"{training['name']}: the losses of {len(others)} runs", ylabel="loss")
        above.legend(loc="upper right")
        below.axhline(training["limit"], color=style.GREY, linewidth=1)
        below.text(steps[-1], training["limit"] * 0.8, "limit", ha="right", va="top")
        below.set(yscale="log", ylim=(7e-8, 0.2), xlabel="step")
        below.set_title("largest difference from one process; 0 is drawn as 1e-7")
        below.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, fontsize=8)
    style.save(figure, path)


if __name__ == "__main__":
    main(parse_arguments())
