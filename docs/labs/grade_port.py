#!/usr/bin/env python3
"""Grade a port of vit.py, tokens.py or trainer.py to two nodes, by jobs on the cluster.

    python docs/labs/grade_port.py vit mine/vit.py
    python docs/labs/grade_port.py tokens mine/tokens.py
    python docs/labs/grade_port.py trainer mine/trainer.py

It does not read the port. It runs it on one rank and on four, sends SIGTERM, lets a rank fail and a
time limit come, and names the first thing that is wrong, with the section that explains it. A port
of tokens.py only has to train the same. Your port keeps the options of its original, the lines that
it prints, and `averaged` (vit.py) or `model` (tokens.py) in its checkpoint.
It takes four minutes (tokens.py one, trainer.py six), with this Python, which needs torch, and for
trainer.py also transformers.
"""

import itertools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

LABS = Path(__file__).resolve().parent
sys.path.insert(0, str(LABS.parents[1] / "aux"))

from job_end import WAITS, ask_scontrol, is_over

LAUNCHER = "launch_slurm_with_torchrun.sh"
CHAPTER_2 = "02_your_own_script.md#your-script-is-for-one-gpu"
RARER = "appendix_your_script.md"
# With these options each task trains 256 samples in 24 steps. Where its weights are in its
# checkpoint, and the sections on its batch, on a loss that differs, and on a job that is stopped.
TASKS = {
    "vit": {
        "options": ["--exact", "--epochs=3", "--train-drawings=256"],
        "weights": "averaged",
        "batch": f"{CHAPTER_2}, number 2",
        "loss": "03_is_it_right.md#if-they-do-not-agree",
        "stop": "07_it_is_stopped.md#in-your-own-script",
    },
    "tokens": {
        "options": ["--exact", "--epochs=3"],
        "weights": "model",
        "batch": f"{CHAPTER_2}, number 2",
        "loss": RARER,
    },
    "trainer": {
        "options": ["--epochs=3"],
        "batch": "frameworks.md#begin-with-the-batch",
        "loss": "frameworks.md#begin-with-the-batch",
        "stop": "frameworks.md#the-trainer-of-transformers",
    },
}
STEP = r"^step=(\d+) loss=(\S+) learning_rate=(\S+)$"
EPOCH = r"^epoch=(\d+) accuracy=(\S+) best=(\S+)$"


class Wrong(Exception):
    """What is wrong with the port, and the section that explains it."""

    def __str__(self) -> str:
        said, section = self.args
        return f"{said}. See docs/{section}"


def slurm(*command: object) -> str:
    return subprocess.run(list(map(str, command)), check=True, text=True, stdout=-1).stdout


class Job:
    """A script on the cluster. Its log, its checkpoint and what its ranks read are in a folder."""

    def __init__(
        self, task: str, script: Path, folder: Path, nodes: int, ranks: int, *options: str, **port
    ):
        folder.mkdir(parents=True)
        self.task = task
        self.log, self.checkpoint, self.record = folder / "log", folder / "checkpoint", None
        self.waited = 0
        self.read = folder / "read"
        self.read.mkdir()
        paths = [script.parent, LABS, LABS.parent.parent / "distributed"]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        port |= {"PORT_READ": self.read, "PYTHONPATH": ":".join(map(str, paths))}
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in port.items())])
        size = [f"--nodes={nodes}", f"--gpus-per-node={ranks // nodes}", "--cpus-per-task=2"]
        command = [*size, f"--export={exported}", f"--output={self.log}", "--open-mode=append"]
        command += [*options, LAUNCHER, script, *TASKS[task]["options"]]
        command += [f"--checkpoint={self.checkpoint}"]
        self.job = slurm("sbatch", "--parsable", *command).split(";")[0].strip()

    def said(self, pattern: str) -> list:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return re.findall(pattern, text, re.M)

    def ended(self) -> bool:
        # Slurm forgets a job some minutes after its end, so the last record stays.
        if not self.record or not is_over(self.record):
            self.record = ask_scontrol(self.job) or self.record
        if not self.record:
            sys.exit(f"Slurm does not say how job {self.job} stands: try again later")
        return is_over(self.record)

    def wait(self, until=lambda: False, seconds: float = 600) -> str:
        """Its state when it has ended, or `until` is true, or it has run for so many seconds."""
        while not self.ended() and not until() and seconds > 0:
            if self.record["JobState"] in WAITS:
                self.say_why_it_waits()
            time.sleep(1)
            seconds -= self.record["JobState"] == "RUNNING"
        return self.record["JobState"]

    def say_why_it_waits(self):
        """Once, after ten seconds. Raises Wrong if Slurm holds the job, which then never starts."""
        reason = self.record["Reason"]
        # JobHeldUser, JobHeldAdmin, JobHoldMaxRequeue, launch_failed_requeued_held
        if re.search("(?i)held|jobhold", reason):
            said = f"Slurm holds job {self.job}, so it never starts ({reason}), {self.log}"
            raise Wrong(said, "troubleshooting.md#a-job-stays-in-the-queue")
        self.waited += 1
        if self.waited == 10:
            print(f"job {self.job} waits in the queue ({reason})", file=sys.stderr)

    def completed(self, where: str, section: str):
        state = self.wait()
        if state != "COMPLETED":
            raise Wrong(f"{where} the job is {state}, {self.log}", section)

    def items(self) -> dict[str, list[int]]:
        """What each rank has read, in its order."""
        return {rank.name: list(map(int, rank.read_text().split())) for rank in self.read.iterdir()}


def same_training(plain: Job, one: Job, four: Job):
    """That four ranks train what one process trains, in as many steps and at the same rates."""
    task, sections = plain.task, TASKS[plain.task]
    plain.completed(f"{task}.py itself fails:", "01_your_first_job.md#submit-two-jobs")
    for job, where in [(one, "on one rank"), (four, "on four ranks")]:
        job.completed(where, "troubleshooting.md#find-the-first-error")
    steps = len(plain.said(STEP))
    times = Counter(step for step, *_ in four.said(STEP))
    if set(times.values()) != {1} or len(four.said(EPOCH)) != len(plain.said(EPOCH)):
        lines = "steps and epochs" if plain.said(EPOCH) else "steps"
        raise Wrong(f"each line of {lines} has to come once", f"{CHAPTER_2}, number 5")
    if len(times) != steps:
        trained = f"one GPU trains {steps} steps and four ranks {len(times)}"
        raise Wrong(f"{trained}: the batch", sections["batch"])
    read = Counter(itertools.chain(*four.items().values()))
    if set(read.values()) != {3} or len(read) != 256:
        raise Wrong(
            "the ranks together have to read each sample once an epoch", f"{CHAPTER_2}, number 2"
        )
    for rank, items in four.items().items():
        epoch = len(items) // 3
        # Only tokens.py reads its data in their order.
        if task != "tokens" and set(items[:epoch]) == set(items[epoch : 2 * epoch]):
            raise Wrong(
                f"rank {rank} reads the same samples in each epoch",
                "09_data_parallel.md#lab-two-silent-mistakes-ten-minutes",
            )
    rates = [rate for _, _, rate in plain.said(STEP)]
    for job, where in [(one, "one rank"), (four, "four ranks")]:
        if [rate for _, _, rate in job.said(STEP)] != rates:
            raise Wrong(f"the learning rates of {where} are not {task}.py's", RARER)
    if task == "vit":
        # Its order of the data is not that of a DistributedSampler.
        same_losses(one, "on one rank", four, "on four")
    else:
        same_losses(plain, f"in {task}.py", one, "on one rank")
        same_losses(plain, f"in {task}.py", four, "on four ranks")
    same_weights(one, four, "on four ranks", RARER)
    same_epochs(one, four, "on four ranks", f"{CHAPTER_2}, number 4")


def differ(loss: str, other: str, task: str) -> bool:
    # trainer.py computes in float32.
    return not abs(float(loss) - float(other)) < (1e-3 if task == "trainer" else 1e-6)


def same_losses(job: Job, here: str, other: Job, there: str):
    """That both have the same losses in their first twenty steps, or how they begin to differ."""
    for (step, right, _), (_, found, _) in zip(job.said(STEP)[:20], other.said(STEP), strict=False):
        if differ(right, found, job.task):
            said = f"step {step}: the loss is {right} {here}, and {found} {there}"
            if job.task == "tokens":
                said += because(int(step), there)
            raise Wrong(said, TASKS[job.task]["loss"])


def because(step: int, where: str) -> str:
    """What it means that the losses of tokens.py differ from this step on.

    The sequences of its first four steps have equal lengths, so that a mean of means is right.
    """
    if step == 1:
        return ", before any update: it is not the mean over all tokens"
    if step <= 4:
        return ", while all sequences have equal lengths: the gradients have another size"
    means = "the two batches'" if where == "on one rank" else "the ranks'"
    return f", now that the lengths differ: a mean of {means} means is not the mean over all tokens"


def same_weights(job: Job, other: Job, where: str, section: str):
    """That both have saved the same weights; those of vit.py are averaged."""
    if not (key := TASKS[job.task].get("weights")):
        return
    weights = []
    for each in (job, other):
        try:
            saved = torch.load(each.checkpoint, map_location="cpu", weights_only=True)[key]
            weights.append({name: weight.double() for name, weight in saved.items()})
        except Exception as error:
            said = f"no weights by their names in `{key}` of {each.checkpoint} ({error!r})"
            raise Wrong(said, section) from error
    if weights[0].keys() != weights[1].keys():
        raise Wrong(f"{where}, the weights in `{key}` have other names", section)
    for name, weight in weights[0].items():
        found = weights[1][name]
        if weight.shape != found.shape or not torch.allclose(weight, found, atol=1e-6):
            raise Wrong(f"{where}, {name} in `{key}` differs", section)


def same_epochs(job: Job, other: Job, where: str, section: str):
    """That both have printed the same accuracy and the same best one after each epoch."""
    if len(job.said(EPOCH)) != len(other.said(EPOCH)):
        raise Wrong(f"{where}, the line of an epoch is missing, or is there twice", section)
    for (epoch, *right), (_, *found) in zip(job.said(EPOCH), other.said(EPOCH), strict=True):
        if right != found:
            words = "accuracy and best of epoch"
            raise Wrong(f"{where}, {words} {epoch} are {found}, not {right}", section)


def same_after_a_stop(job: Job, whole: Job, what: str, section: str):
    """That a stopped run trains each step once, with the losses of a run that was not stopped."""
    job.completed(f"after {what}", section)
    if job.record["Restarts"] == "0":
        raise Wrong(f"{what} did not stop it", section)
    times = Counter(step for step, *_ in job.said(STEP))
    twice = [step for step, count in times.items() if count > 1]
    if twice:
        raise Wrong(f"after {what}, steps {twice[0]} to {twice[-1]} are trained twice", section)
    if len(times) != len(whole.said(STEP)):
        raise Wrong(f"after {what}, it trains {len(times)} steps in all", section)
    for (step, loss, _), (_, other, _) in zip(whole.said(STEP), job.said(STEP), strict=True):
        if differ(loss, other, job.task):
            raise Wrong(f"after {what}, the loss of step {step} is {other}, not {loss}", section)
    same_weights(whole, job, f"after {what}", section)
    same_epochs(whole, job, f"after {what}", section)


def grade(task: str, port: Path, folder: Path):
    """Raises Wrong, with the first fault. Cancels the jobs that it leaves."""
    jobs = []

    def start(name: str, *size_and_options, script: Path = port, **variables) -> Job:
        jobs.append(Job(task, script, folder / name, *size_and_options, **variables))
        return jobs[-1]

    try:
        plain = start("plain", 1, 1, script=LABS / f"{task}.py")
        one, four = start("one", 1, 1), start("four", 2, 4)
        same_training(plain, one, four)
        print("four ranks on two nodes train what one process trains", flush=True)
        if task == "tokens":
            return

        fails = start("fails", 2, 4, "--no-requeue", PORT_FAIL=100)
        fails.wait(lambda: fails.said("^.*ValueError: sample 100"))
        if (state := fails.wait(seconds=30)) != "FAILED":
            section = "06_it_hangs.md#the-usual-causes"
            raise Wrong(f"30 s after a rank has failed, the job is {state}", section)
        print("a rank that fails ends the job", flush=True)

        stops = TASKS[task]["stop"]
        stopped = start("stopped", 2, 4, PORT_SLOW=0.1)
        # All steps take two and a half minutes. To import a Trainer may take more than one.
        minutes = 2 if task == "trainer" else 1
        limited = start("limited", 2, 4, f"--time={minutes}", PORT_SLOW=0.8)
        stopped.wait(lambda: len(stopped.said(STEP)) >= 5)
        if not stopped.ended():
            # It may end at this moment, and scancel then fails.
            subprocess.run(["scancel", "--signal=TERM", stopped.job], check=False)
        same_after_a_stop(stopped, four, "a SIGTERM", stops)
        print("after a SIGTERM it resumes, with no step twice", flush=True)
        same_after_a_stop(limited, four, "the time limit", stops)
        print("after the time limit it resumes, with no step twice", flush=True)
    finally:
        if left := [job.job for job in jobs if not job.record or not is_over(job.record)]:
            subprocess.run(["scancel", *left], check=False)


def main() -> int:
    if len(sys.argv) != 3 or sys.argv[1] not in TASKS or not Path(sys.argv[2]).exists():
        sys.exit(__doc__)
    task, port = sys.argv[1], Path(sys.argv[2]).resolve()
    folder = port.parent / time.strftime(f"{port.stem}_graded_%H%M%S_{os.getpid()}")
    try:
        grade(task, port, folder)
    except Wrong as wrong:
        print(f"FAILED: {wrong}")
        return 1
    print("PASSED")
    return 0


if __name__ == "__main__":
    sys.exit(main())
