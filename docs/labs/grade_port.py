#!/usr/bin/env python3
"""Grade a port of vit.py to two nodes, by jobs on the cluster.

    python docs/labs/grade_port.py mine/vit.py

It does not read the port. It runs it on one rank and on four, sends SIGTERM, lets a rank fail and a
time limit come, and names the first thing that is wrong, with the section that explains it. Your
port keeps vit.py's options, the lines that it prints, and `averaged` in its checkpoint.
It takes four minutes, with this Python, which needs torch.
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

from job_end import ask_scontrol, is_over

LAUNCHER = "launch_slurm_with_torchrun.sh"
EXACT = ["--exact", "--epochs=3", "--train-drawings=256"]  # 24 steps
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

    def __init__(self, script: Path, folder: Path, nodes: int, ranks: int, *options: str, **port):
        folder.mkdir(parents=True)
        self.log, self.checkpoint, self.record = folder / "log", folder / "vit.pt", None
        self.read = folder / "read"
        self.read.mkdir()
        paths = [script.parent, LABS, LABS.parent.parent / "distributed"]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        port |= {"PORT_READ": self.read, "PYTHONPATH": ":".join(map(str, paths))}
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in port.items())])
        size = [f"--nodes={nodes}", f"--gpus-per-node={ranks // nodes}", "--cpus-per-task=2"]
        command = [*size, f"--export={exported}", f"--output={self.log}", "--open-mode=append"]
        command += [*options, LAUNCHER, script, *EXACT, f"--checkpoint={self.checkpoint}"]
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
            time.sleep(1)
            seconds -= self.record["JobState"] == "RUNNING"
        return self.record["JobState"]

    def completed(self, where: str, section: str):
        state = self.wait()
        if state != "COMPLETED":
            raise Wrong(f"{where} the job is {state}, {self.log}", section)

    def items(self) -> dict[str, list[int]]:
        """What each rank has read, in its order."""
        return {rank.name: list(map(int, rank.read_text().split())) for rank in self.read.iterdir()}


def same_training(plain: Job, one: Job, four: Job):
    """That four ranks train what one rank trains, in vit.py's steps and at its rates."""
    plain.completed("vit.py itself fails:", "01_your_first_job.md#submit-two-jobs")
    for job, where in [(one, "on one rank"), (four, "on four ranks")]:
        job.completed(where, "troubleshooting.md#find-the-first-error")
    steps = len(plain.said(STEP))
    times = Counter(step for step, *_ in four.said(STEP))
    if set(times.values()) != {1} or len(four.said(EPOCH)) != len(plain.said(EPOCH)):
        print_by_one = "02_your_own_script.md#your-script-is-for-one-gpu, number 5"
        raise Wrong("each line of steps and epochs has to come once", print_by_one)
    if len(times) != steps:
        batch = "02_your_own_script.md#your-script-is-for-one-gpu, number 2"
        raise Wrong(f"one GPU trains {steps} steps and four ranks {len(times)}: the batch", batch)
    read = Counter(itertools.chain(*four.items().values()))
    if set(read.values()) != {3} or len(read) != 256:
        sampler = "02_your_own_script.md#your-script-is-for-one-gpu, number 2"
        raise Wrong("the ranks together have to read each drawing once an epoch", sampler)
    for rank, items in four.items().items():
        epoch = len(items) // 3
        if set(items[:epoch]) == set(items[epoch : 2 * epoch]):
            raise Wrong(
                f"rank {rank} reads the same drawings in each epoch",
                "09_data_parallel.md#lab-two-silent-mistakes-ten-minutes",
            )
    rates = [rate for _, _, rate in plain.said(STEP)]
    for job, where in [(one, "one rank"), (four, "four ranks")]:
        if [rate for _, _, rate in job.said(STEP)] != rates:
            raise Wrong(
                f"the learning rates of {where} are not vit.py's",
                "appendix_your_script.md",
            )
    for (step, loss, _), (_, other, _) in zip(one.said(STEP)[:20], four.said(STEP), strict=False):
        if not abs(float(loss) - float(other)) < 1e-6:
            raise Wrong(
                f"step {step}: the loss is {loss} on one rank, and {other} on four",
                "03_is_it_right.md#if-they-do-not-agree",
            )
    same_averages(one, four, "on four ranks", "appendix_your_script.md")
    sums = "02_your_own_script.md#your-script-is-for-one-gpu, number 4"
    same_epochs(one, four, "on four ranks", sums)


def same_averages(job: Job, other: Job, where: str, section: str):
    """That both have saved the same averaged weights."""
    averages = []
    for each in (job, other):
        try:
            saved = torch.load(each.checkpoint, map_location="cpu", weights_only=True)
            averages.append(saved["averaged"])
        except Exception as error:
            raise Wrong(f"no `averaged` in {each.checkpoint} ({error!r})", section) from error
    if averages[0].keys() != averages[1].keys():
        raise Wrong(f"{where}, the averaged weights have other names", section)
    for name, average in averages[0].items():
        if not torch.allclose(average, averages[1][name], atol=1e-6):
            raise Wrong(f"{where}, the averaged {name} differs", section)


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
        if not abs(float(loss) - float(other)) < 1e-6:
            raise Wrong(f"after {what}, the loss of step {step} is {other}, not {loss}", section)
    same_averages(whole, job, f"after {what}", section)
    same_epochs(whole, job, f"after {what}", section)


def grade(port: Path, folder: Path):
    """Raises Wrong, with the first fault. Cancels the jobs that it leaves."""
    jobs = []

    def start(name: str, *size_and_options, script: Path = port, **variables) -> Job:
        jobs.append(Job(script, folder / name, *size_and_options, **variables))
        return jobs[-1]

    try:
        plain = start("plain", 1, 1, script=LABS / "vit.py")
        one, four = start("one", 1, 1), start("four", 2, 4)
        same_training(plain, one, four)
        print("four ranks on two nodes train what one rank trains", flush=True)

        fails = start("fails", 2, 4, "--no-requeue", PORT_FAIL=100)
        fails.wait(lambda: fails.said("^.*ValueError: drawing 100"))
        if (state := fails.wait(seconds=30)) != "FAILED":
            section = "06_it_hangs.md#the-usual-causes"
            raise Wrong(f"30 s after a rank has failed, the job is {state}", section)
        print("a rank that fails ends the job", flush=True)

        stops = "07_it_is_stopped.md#in-your-own-script"
        stopped = start("stopped", 2, 4, PORT_SLOW=0.1)
        limited = start("limited", 2, 4, "--time=1", PORT_SLOW=0.7)
        stopped.wait(lambda: len(stopped.said(STEP)) >= 5)
        if not stopped.ended():
            slurm("scancel", "--signal=TERM", stopped.job)
        same_after_a_stop(stopped, four, "a SIGTERM", stops)
        print("after a SIGTERM it resumes, with no step twice", flush=True)
        same_after_a_stop(limited, four, "the time limit", stops)
        print("after the time limit it resumes, with no step twice", flush=True)
    finally:
        if left := [job.job for job in jobs if not job.record or not is_over(job.record)]:
            subprocess.run(["scancel", *left], check=False)


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).exists():
        sys.exit(__doc__)
    port = Path(sys.argv[1]).resolve()
    folder = port.parent / time.strftime(f"{port.stem}_graded_%H%M%S_{os.getpid()}")
    try:
        grade(port, folder)
    except Wrong as wrong:
        print(f"FAILED: {wrong}")
        return 1
    print("PASSED")
    return 0


if __name__ == "__main__":
    sys.exit(main())
