"""The same training started every way, by real Slurm jobs: have all of them the same losses? A table and a figure.

    ./local/cluster/namespaces.sh up --cpus 4                                      # nodes for up to four ranks
    ./local/cluster/namespaces.sh exec python dev/figures/prove_convergence.py     # there, or on a login node
    python dev/figures/prove_convergence.py --draw                                 # from the losses of the last time

Two trainings, on CPUs and in float32, without dropout: a ConvNet on images, and a transformer on text. Each is run as
one process, by every launcher, on 1 to 4 ranks of one and two nodes, split in every way, with numbers of samples that
no number of ranks divides, with gradient accumulation, and stopped and resumed. Exit status 1 if the losses of any two
differ by more than rounding explains, or if a training that is wrong by 1 % is not told from the others.
"""

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
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import style
from resilience.arguments import ArgumentParser

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    "srun": "launch_slurm_to_torch.sh",
    "torchrun": "launch_slurm_with_torchrun.sh",
    "spawn": "launch_slurm_with_mp.sh",
    "container": "run_script.sh",
}
SINGLE, DDP, PREEMPTIBLE = "local/train_single.py", "distributed/train_ddp.py", "distributed/train_preemptible.py"
FSDP, TP = "distributed/train_fsdp.py", "distributed/train_tp.py"
IMAGES = {"train": 3019, "t10k": 503}  # primes: no number of ranks divides them
STEPS, BATCH = 100, {"images": 60, "text": 12}  # batches that 1, 2, 3 and 4 ranks share evenly
LIMIT = 1e-4  # two losses of one step may differ by so much; rounding is below 1e-5 here, an error of 1 % above 1e-3
SECONDS = 3600  # that a job may take, from its submission on
CONTROL = "learning rate 1 % higher"


@dataclass(frozen=True)
class Run:
    """One row of the table. `family` is the line of the figure that it belongs to; no `launcher`: by hand, one process.

    `stop`: once it trains it is told to stop. Then Slurm requeues it, or, if there is one, `then` resumes it.
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


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="no runs: table and figure from convergence.json in --out")
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "docs/figures", help="folder of convergence.json, .svg"
    )
    parser.add_argument("--container", action="store_true", help="also in containers (the nodes have Enroot)")
    parser.add_argument("--images", type=Path, default=REPOSITORY / "data/mnist", help="of aux/prepare_data.py")
    parser.add_argument("--text", type=Path, default=REPOSITORY / "data/shakespeare", help="of aux/prepare_data.py")
    args = parser.parse_args()
    args.out, args.images, args.text = (path.resolve() for path in (args.out, args.images, args.text))
    return args


def main(args: Namespace):
    losses = args.out / "convergence.json"
    if not args.draw:
        missing = [tool for tool in ("sbatch", *["enroot"] * args.container) if shutil.which(tool) is None]
        if missing:
            fail(f"no {missing[0]} here: run it on a login node, or in ./local/cluster/namespaces.sh exec")
        result = prove(args)
        losses.parent.mkdir(parents=True, exist_ok=True)
        losses.write_text(json.dumps(result).replace('{"name"', '\n{"name"') + "\n")  # a line for each run
    try:
        result = json.loads(losses.read_text())
    except OSError as error:
        fail(f"no losses at {losses} ({error.strerror}): run it without --draw first")
    draw(result, losses.with_suffix(".svg"))
    faults = [fault for training in result["trainings"] for fault in judge(training)]
    if faults:
        fail("; ".join(faults))
    print(f"VERDICT: all ways agree; figure in {losses.with_suffix('.svg')}")


def fail(sentence: str):
    sys.exit(f"prove_convergence.py: {sentence}")


# --- what is run ------------------------------------------------------------------------------------------------------


def image_runs(container: bool) -> Iterator[Run]:
    """DistributedDataParallel, without and with what survives a stop. The first is what the others must repeat."""
    alone = Run("one process", "one process", "", 1, 1, SINGLE)
    yield alone
    for launcher in ("srun", "torchrun", "spawn", *["container"] * container):
        for nodes, ranks in ((1, 1), (1, 2), (2, 4)):
            yield Run(f"{launcher}, {place(nodes, ranks)}", launcher, launcher, nodes, ranks, DDP)
    yield Run(f"srun, {place(1, 3)}", "srun", "srun", 1, 3, DDP)
    again = Run("", "", "torchrun", 2, 4, DDP, ("--resume",))
    yield replace(again, name=f"{again.launcher}, {place(2, 4)}, a second job resumes after epoch 1",
                  family="stopped and resumed", arguments=("--epochs", "1"), then=again)  # fmt: skip
    yield Run("spawn, 2 ranks on 2 nodes, stopped in an epoch, requeued", "stopped and resumed", "spawn", 2, 2,
              PREEMPTIBLE, stop=True)  # fmt: skip
    yield replace(alone, name=f"one process, {CONTROL}", family=CONTROL, arguments=("--learning-rate", "0.00101"))


def text_runs(container: bool) -> Iterator[Run]:
    """A model that is split over the ranks."""
    alone = Run("one process", "one process", "", 1, 1, FSDP)
    yield alone
    yield replace(alone, name="one process, 3 accumulated parts", family="FSDP", arguments=("--accumulation", "3"))
    yield Run(f"srun, FSDP, {place(1, 2)}", "FSDP", "srun", 1, 2, FSDP)
    yield Run(f"srun, FSDP, {place(1, 3)}", "FSDP", "srun", 1, 3, FSDP)
    yield Run(f"torchrun, FSDP, {place(2, 4)}", "FSDP", "torchrun", 2, 4, FSDP)
    accumulated = ("--hybrid", "--accumulation", "3")
    yield Run(f"spawn, FSDP --hybrid, {place(2, 4)}, 3 accumulated parts", "FSDP", "spawn", 2, 4, FSDP, accumulated)
    yield Run(f"torchrun, TP 2, {place(1, 2)}", "TP", "torchrun", 1, 2, TP)
    four = ("--tensor-parallel", "4", "--sequence-parallel")
    yield Run(f"spawn, TP 4 --sequence-parallel, {place(1, 4)}", "TP", "spawn", 1, 4, TP, four)
    yield Run(f"srun, TP 2 x data 2, {place(2, 4)}", "TP x data", "srun", 2, 4, TP)
    parts = ("--sequence-parallel", "--accumulation", "2")
    yield Run(f"spawn, TP 2 --sequence-parallel x data 2, {place(2, 4)}, 2 accumulated parts", "TP x data", "spawn",
              2, 4, TP, parts)  # fmt: skip
    if container:
        yield Run(f"container, TP 2 x data 2, {place(2, 4)}", "TP x data", "container", 2, 4, TP)
    resumed = Run("", "", "torchrun", 2, 4, TP, ("--resume",))
    yield Run("srun, FSDP on 2 ranks, stopped; torchrun, TP 2 x data 2, resumes", "stopped and resumed", "srun", 1, 2,
              FSDP, stop=True, then=resumed)  # fmt: skip
    yield replace(alone, name=f"one process, {CONTROL}", family=CONTROL, arguments=("--learning-rate", "0.00101"))


def place(nodes: int, ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"


def arguments_of(training: str, data: Path) -> list[str]:
    """What all runs of a training have in common."""
    shared = ["--device", "cpu", "--dropout", "0", "--precision", "fp32", "--seed", "7", "--log-every", "1"]
    shared += ["--batch-size", str(BATCH[training]), "--data-dir", str(data)]
    if training == "images":
        return [*shared, "--epochs", "2", "--learning-rate", "0.001"]
    evaluation = ["--eval-every", str(STEPS // 2), "--eval-windows", "100"]
    return [*shared, "--steps", str(STEPS), "--warmup-steps", "20", "--learning-rate", "0.001", *evaluation]


# --- the runs ---------------------------------------------------------------------------------------------------------


def prove(args: Namespace) -> dict:
    """Does all runs, one after the other. Returns what convergence.json holds."""
    os.chdir(REPOSITORY)  # relative paths are the same in a container
    Path("checkpoints").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="convergence-", dir="checkpoints"))
    sources = copy_data(args, folder)
    slurm = subprocess.run(["sbatch", "--version"], capture_output=True, text=True).stdout.split()[-1]
    versions = f"torch {importlib.metadata.version('torch')}, Slurm {slurm}, {os.cpu_count()} CPUs"
    command = " ".join(["python dev/figures/prove_convergence.py", *["--container"] * args.container])
    result = {"date": str(datetime.date.today()), "machine": versions, "command": command, "trainings": []}
    for training, runs in (("images", image_runs(args.container)), ("text", text_runs(args.container))):
        described = {"name": training, "data": sources[training], "limit": LIMIT, "runs": []}
        shared = arguments_of(training, folder / training)
        for number, run in enumerate(runs, start=1):
            print(f"{training} {number}: {run.name}", flush=True)
            losses, evaluations, jobs = execute(run, shared, folder / f"{training}-{number}")
            row = {"name": run.name, "family": run.family, "commands": jobs, "evaluations": evaluations}
            described["runs"].append(row | {"losses": losses})
        result["trainings"].append(described)
    shutil.rmtree(folder)  # of a run that failed it is kept
    return result


def copy_data(args: Namespace, folder: Path) -> dict[str, str]:
    """Puts the first images and the text into `folder`, which all nodes see. Returns what they are, in words."""
    sys.path.insert(0, str(REPOSITORY / "distributed"))
    import characters
    import mnist

    raw = folder / "images/MNIST/raw"
    raw.mkdir(parents=True)
    try:
        described = mnist.describe(args.images), characters.describe(args.text)
        for split, count in IMAGES.items():
            for kind, header, item in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
                source = (args.images / f"MNIST/raw/{split}-{kind}-ubyte").read_bytes()
                content = source[:4] + count.to_bytes(4, "big") + source[8 : header + item * count]
                (raw / f"{split}-{kind}-ubyte").write_bytes(content)
        shutil.copytree(args.text, folder / "text")
    except OSError as error:
        shutil.rmtree(folder)
        fail(f"no data at {error.filename} ({error.strerror}); prepare both sets once: python aux/prepare_data.py")
    names = [text.partition(", in ")[0] for text in described]
    return {"images": f"{IMAGES['train']:,} images of: {names[0]}", "text": names[1]}


def execute(run: Run, shared: list[str], folder: Path) -> tuple[dict[int, float], dict[int, float], list[str]]:
    """Runs `run` and what comes after it, in `folder`. Returns losses and evaluations by step, and the commands."""
    folder.mkdir()
    commands, log = [], ""
    for part in (run, run.then) if run.then else (run,):
        arguments = [*shared, "--checkpoint-dir", str(folder / "out"), *part.arguments]
        part = replace(part, name=run.name)
        text, command = by_hand(part, arguments) if not part.launcher else submit(part, arguments, folder)
        log += text
        commands.append(command)
    resumed = re.search(r"^Resumed after (?:step|epoch) (\d+)$", log, re.M)
    if (run.stop or run.then) and not (resumed and 0 < int(resumed[1]) < STEPS):
        fail(f"{run.name}: it was not stopped and resumed in the middle, see {folder}")
    metrics = folder / "out/metrics.jsonl"
    losses, evaluations = read_metrics(metrics) if metrics.exists() else read_log(log)
    if list(losses) != list(range(1, STEPS + 1)):
        fail(f"{run.name}: {len(losses)} losses, and not one for each of {STEPS} steps, see {folder}")
    return losses, evaluations, commands


def by_hand(run: Run, arguments: list[str]) -> tuple[str, str]:
    """One process, without a launcher. Returns what it has printed, and the command."""
    command = [run.script, *arguments]
    stray = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    env = {name: value for name, value in os.environ.items() if name not in stray} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        fail(f"{run.name} failed: {done.stderr.strip()}")
    return done.stdout, " ".join(["python", *command])


def submit(run: Run, arguments: list[str], folder: Path) -> tuple[str, str]:
    """A job. Returns its log and the command."""
    size = [f"--nodes={run.nodes}", f"--ntasks-per-node={run.ranks // run.nodes}", "--cpus-per-task=1"]
    size += ["--gpus-per-node=0", "--time=15", f"--output={folder}/log-%j"]
    if run.then and run.stop:
        size += ["--no-requeue"]
    command = [*size, LAUNCHERS[run.launcher], run.script, *arguments]
    sbatch = ["sbatch", "--parsable", *command]
    submitted = subprocess.run(sbatch, capture_output=True, text=True)
    if submitted.returncode:
        fail(f"{run.name}: {submitted.stderr.strip()}")
    job = submitted.stdout.strip().partition(";")[0]
    try:
        wait(job, folder / "out/metrics.jsonl" if run.stop else None)
    except BaseException as error:
        subprocess.run(["scancel", job])
        if isinstance(error, TimeoutError):
            fail(f"{run.name}: job {job} has not ended after {SECONDS} s, see {folder}")
        raise
    log = folder / f"log-{job}"
    text = log.read_text() if log.exists() else ""
    expected = "Stopped after step" if run.then and run.stop else "Finished: "
    if not re.search(f"^{expected}", text, re.M):
        fail(f"{run.name}: job {job} has failed, and its log ends with: {' / '.join(text.splitlines()[-3:])}")
    shutil.rmtree(Path("log", job), ignore_errors=True)
    return text, " ".join(["sbatch", *command])


def wait(job: str, metrics: Path | None):
    """Until the job has ended: `sbatch --wait` looks only every 32 s. Raises TimeoutError.

    With `metrics` it is told to stop, once they are of ten steps. Is it requeued, it need not wait Slurm's two minutes.
    """
    deadline, told = time.monotonic() + SECONDS, metrics is None
    while time.monotonic() < deadline:
        shown = subprocess.run(["squeue", "--noheader", "--format=%T", f"--jobs={job}"], capture_output=True, text=True)
        state = shown.stdout.strip()
        if (shown.returncode == 0 and not state) or "Invalid job id" in shown.stderr:
            return
        if told and metrics and state == "PENDING":
            subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True)
        for _ in range(10):
            if not told and metrics.exists() and metrics.read_text().count("\n") >= 10:
                subprocess.run(["scancel", "--signal=TERM", job])
                told = True
            time.sleep(0.2)
    raise TimeoutError


def read_metrics(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Losses, and test or validation losses, by step."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    losses = {event["step"]: round(event["loss"], 7) for event in events if "loss" in event}
    found = {event["step"]: event.get("test_loss", event.get("val_loss")) for event in events}
    return losses, {step: round(loss, 7) for step, loss in found.items() if loss is not None}


def read_log(log: str) -> tuple[dict[int, float], dict[int, float]]:
    """The same of a plain script, from what it has printed."""
    found = re.findall(r"^epoch=(\d+) step=(\d+)/(\d+) loss=(\S+) ", log, re.M)
    losses = {(int(epoch) - 1) * int(steps) + int(step): float(loss) for epoch, step, steps, loss in found}
    steps = int(found[0][2]) if found else 0
    tested = re.findall(r"^epoch=(\d+) test_loss=(\S+) ", log, re.M)
    return losses, {int(epoch) * steps: float(loss) for epoch, loss in tested}


# --- verdict ----------------------------------------------------------------------------------------------------------


def difference(a: dict, b: dict) -> tuple[float, str]:
    """The largest difference of two runs' losses, those of evaluations among them, and in which step it is."""
    gaps = [(abs(a[kind][step] - b[kind][step]), step) for kind in ("losses", "evaluations") for step in a[kind]]
    return max((gap if math.isfinite(gap) else math.inf, step) for gap, step in gaps)


def judge(training: dict) -> list[str]:
    """Prints the table of a training. Returns a sentence for each fault."""
    *runs, control = training["runs"]
    limit, faults = training["limit"], []
    print(f"\n{training['name']}: {training['data']}; {len(runs[0]['losses'])} steps, at most {limit:g} apart\n")
    print(f"{'':3} {'run':80} {'from one process':>16}   {'from any other':>14}")
    for number, run in enumerate(runs, start=1):
        others = [(*difference(run, other), i) for i, other in enumerate(runs, start=1) if other is not run]
        (far, _, which), (near, _) = max(others), difference(run, runs[0])
        print(f"{number:2}. {run['name']:80} {near:16.1e}   {far:8.1e} ({which:2})")
    seen, _ = difference(control, runs[0])
    print(f"    {control['name']:80} {seen:16.1e}   is told from the others: {'yes' if seen > limit else 'NO'}")
    apart, step, a, b = max((*difference(a, b), a["name"], b["name"]) for a, b in combinations(runs, 2))
    if not apart <= limit:
        faults += [f"'{a}' and '{b}' differ by {apart:.1e} in step {step}, at most {limit:g} is rounding"]
    if not seen > limit:
        faults += [f"the {training['name']} do not show that a learning rate is 1 % higher: {seen:.1e}"]
    return faults


def draw(result: dict, path: Path):
    """All losses on top of each other, how far each family is from one process by step, and how far any two are."""
    figure, axes = style.subplots(3, len(result["trainings"]), 9, 9.2)
    for (above, below, pairs), training in zip(axes.T, result["trainings"], strict=True):
        one, *others = training["runs"]
        steps = [int(step) for step in one["losses"]]
        above.plot(steps, one["losses"].values(), color=style.GREY, alpha=0.35, linewidth=7, label="one process")
        for number, family in enumerate(dict.fromkeys(run["family"] for run in others)):
            members = [run["losses"] for run in others if run["family"] == family]
            farthest = [max(abs(run[step] - one["losses"][step]) for run in members) for step in one["losses"]]
            look = style.line(number, len(steps)) | ({"color": style.GREY} if family == CONTROL else {})
            below.plot(steps, [max(far, 1e-7) for far in farthest], label=family, linewidth=0.9, **look)
            for run in members if family != CONTROL else ():
                above.plot(steps, run.values(), **style.line(number) | {"linewidth": 0.7})
        above.sharex(below)
        above.tick_params(labelbottom=False)
        above.set(title=f"{training['name']}: the losses of {len(others)} runs, one on top of the other", ylabel="loss")
        above.legend(loc="upper right")
        below.axhline(training["limit"], color=style.GREY, linewidth=1)
        below.text(steps[-1], training["limit"] * 0.8, "limit", ha="right", va="top")
        below.set(yscale="log", ylim=(7e-8, 0.2), xlabel="step", ylabel="difference from one process")
        below.set_title("the largest of each kind; 0 is drawn as 1e-7")
        below.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, fontsize=8)
        draw_pairs(pairs, training)
    style.save(figure, path, "Loss curves of the same training started every way")
    style.plt.close(figure)


def draw_pairs(axes: style.plt.Axes, training: dict):
    """The largest difference of each pair of runs, which have the table's numbers."""
    runs = training["runs"][:-1]  # all but the control
    for row, run in enumerate(runs[1:], start=2):
        for column, other in enumerate(runs[: row - 1], start=1):
            far = f"{difference(run, other)[0] * 1e7:.0f}"
            axes.text(column, row, far, ha="center", va="center", fontsize=7)
    axes.set(xticks=range(1, len(runs)), xlim=(0.4, len(runs) - 0.4), xlabel="number of a run")
    axes.set(yticks=range(2, len(runs) + 1), ylim=(len(runs) + 0.6, 1.4), ylabel="number of another run")
    axes.set_title(f"the largest difference of each pair, in 1e-7; the limit is {training['limit'] * 1e7:.0f}")
    axes.tick_params(length=0, labelsize=7)
    axes.grid(False)


if __name__ == "__main__":
    main(parse_arguments())
