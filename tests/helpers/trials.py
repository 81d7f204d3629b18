"""Runs on the cluster that are stopped, killed and started again: their losses and what is left."""

import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import checkpoint
import job_processes
from models import saved_state
from slurm import ENDED, LAUNCHERS, PATIENCE, Job, one_rank_a_node, ranks, wait_for

PREEMPTIBLE = "train_preemptible.py"
MNIST = shlex.split("--epochs 3 --batch-size 20 --log-every 1")  # 300 images: 45 steps
LANGUAGE_MODEL = shlex.split(
    "--num-hidden-layers 2 --hidden-size 32 --context 32 --batch-size 8 --precision fp32 "
    "--steps 45 --log-every 1 --eval-every 20 --eval-windows 8"
)
STEPS = 45
TP = "train_fsdp.py --tensor-parallel 2"
SCRIPTS = {PREEMPTIBLE: MNIST, "train_fsdp.py": LANGUAGE_MODEL, TP: LANGUAGE_MODEL}
RANKS = {PREEMPTIBLE: 2, "train_fsdp.py": 4, TP: 4}  # of jobs on two nodes


@pytest.fixture(scope="module")
def data(tiny, text) -> dict[str, Path]:
    return {PREEMPTIBLE: tiny, "train_fsdp.py": text, TP: text}


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """The folder of an uninterrupted run of a script, with the checkpoints of all its steps."""
    folders, lock = {}, threading.Lock()

    def folder(script: str, count: int = 0) -> Path:
        count = count or RANKS[script]
        with lock:
            if (script, count) not in folders:
                out = folders[script, count] = tmp_path_factory.mktemp(script.split()[0])
                command = [*f"distributed/{script}".split(), *SCRIPTS[script]]
                command += ["--data-dir", data[script], "--checkpoint-dir", out]
                command += ["--save-every", 1]
                if script != PREEMPTIBLE:
                    command += ["--keep", STEPS]
                done = ranks(count, *command, timeout=300)
                assert done.returncode == 0, done.stderr
                (out / "log").write_text(done.stdout)
            return folders[script, count]

    return folder


def losses(log: str) -> dict[int, float]:
    """Those of train_preemptible.py by step. Steps that were taken again have the same again."""
    found: dict[int, float] = {}
    for epoch, step, loss in re.findall(r"^epoch=(\d) step=(\d+)/15 loss=(\S+) ", log, re.M):
        number = 15 * (int(epoch) - 1) + int(step)
        assert float(loss) == pytest.approx(found.get(number, float(loss)), rel=1e-3)
        found[number] = float(loss)
    return found


def assert_same_losses(log: str, reference: Path, steps: int = STEPS):
    """Of train_preemptible.py: so many steps, and their losses up to rounding."""
    expected = losses((reference / "log").read_text())
    assert list(expected) == list(range(1, STEPS + 1))
    expected = {step: loss for step, loss in expected.items() if step <= steps}
    assert losses(log) == pytest.approx(expected, rel=1e-3), log


def values(log: str, name: str) -> dict[str, str]:
    """Those of train_fsdp.py. Steps that were taken again have the same again."""
    found: dict[str, str] = {}
    for step, value in re.findall(rf"^step=(\d+)/\d+ (?:.* )?{name}=(\S+)", log, re.M):
        assert found.setdefault(step, value) == value, f"step {step}: {name}"
    return found


def assert_same_run(log: str, out: Path, reference: Path, steps: int = STEPS, unseen=()):
    """Weights after so many steps bit for bit; and all losses, but for those of steps `unseen`."""
    assert checkpoint.steps(out)[0] == steps
    ours, theirs = (saved_state(path / f"step_{steps}", "model") for path in (out, reference))
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, different

    expected = (reference / "log").read_text()
    # A run that was stopped evaluates after its last step when it resumes.
    evaluated = steps if steps == STEPS else steps - 1
    for name, last in (("loss", steps), ("val_loss", evaluated)):
        wanted = {step: x for step, x in values(expected, name).items() if int(step) <= last}
        found = values(log, name)
        lost = {step for step in wanted if step not in found and int(step) in unseen}
        assert found == {step: x for step, x in wanted.items() if step not in lost}


class Trial:
    """A slowed down job on two nodes, in a checkpoint folder of its own."""

    def __init__(self, cluster, way, script, data, folder, *options, sbatch=(), slow=0.4, **env):
        folder.mkdir(exist_ok=True)
        self.cluster, self.way, self.script = cluster, way, script
        self.folder, self.out = folder, folder / "out"
        # A CPU for each rank: sums of two threads have other last bits.
        size = [*one_rank_a_node(way), "--cpus-per-task=1"] if RANKS[script] == 2 else []
        command = [*size, *sbatch, f"--output={folder}/log", LAUNCHERS[way]]
        command += ["tests/scripts/slowly.py", slow, *f"distributed/{script}".split()]
        command += SCRIPTS[script]
        command += ["--data-dir", data[script], "--checkpoint-dir", self.out, *options]
        self.fault_at = time.monotonic()
        self.job = cluster.submit(*command, env=env)

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    @property
    def restarts(self) -> int:
        return int(self.cluster.show(self.job)["Restarts"])

    def wait_for(self, pattern: str, timeout: float = 300) -> float:
        """Until the log has a line like that. Returns the seconds it took."""
        start = asked_at = time.monotonic()
        state = "not known"
        while not re.search(pattern, self.log, re.M):
            waits = state not in ENDED and time.monotonic() - start < timeout * PATIENCE
            assert waits, f"{state}, no {pattern!r} in:\n{self.log}"
            time.sleep(0.1)
            # Before the log is read again: what has ended writes nothing after it.
            if time.monotonic() - asked_at > 1:
                state, asked_at = self.cluster.show(self.job)["JobState"], time.monotonic()
        return time.monotonic() - start

    def train_a_little(self) -> list[str]:
        """Until the first steps are done. Returns the job's nodes."""
        self.wait_for(r"^(?:epoch=1 )?step=[7-9]/", 180)  # at a machine's own pace
        self.fault_at = time.monotonic()
        nodes = self.cluster.show(self.job)["NodeList"]
        return self.cluster.exec("scontrol", "show", "hostnames", nodes).stdout.split()

    def signal(self, *options: str):
        done = self.cluster.exec("scancel", *options, self.job)
        assert done.returncode == 0, done.stderr

    def stopped(self) -> list[int]:
        """The steps after which it has stopped and saved."""
        steps = re.findall(r"^Stopped after step (\d+), saved$", self.log, re.M)
        return [int(step) for step in steps]

    def rank(self, node: str) -> int:
        """The process id, on the host, of a rank on a node."""
        return job_processes.ranks(self.job, "slowly.py", node)[0]

    def ends(self, timeout: float = 180) -> Job:
        """Its end, with no process left 30 s later."""
        job = self.cluster.wait(self.job, timeout)
        wait_for(lambda: not self.cluster.left_over(self.job), 30)
        ended = f"{job.state}, status {job.exit_code}, {self.restarts} restarts"
        print(f"{self.way} {self.script}: {ended}, {time.monotonic() - self.fault_at:.0f} s")
        return job

    def fails(self, timeout: float = 60) -> Job:
        job = self.ends(timeout)
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        return job

    def is_equal(self, reference: Path, steps: int = STEPS):
        if self.script == PREEMPTIBLE:
            assert_same_losses(self.log, reference, steps)
        else:
            assert_same_run(self.log, self.out, reference, steps)

    def resumes(self):
        job = self.ends(400)
        assert job.state == "COMPLETED" and self.restarts == 1, job.log
        assert re.search(r"^Resumed after step [1-9]", job.log, re.M), job.log

    def is_equal_after_a_restart(self, uninterrupted: Callable):
        self.resumes()
        self.is_equal(uninterrupted(self.script))

    def survives(self, uninterrupted: Callable, name: str = "TERM", within: float = 15) -> float:
        """A signal. Returns the seconds until the job was requeued."""
        self.signal(f"--signal={name}")
        seconds = self.wait_for(REQUEUED, within)
        self.is_equal_after_a_restart(uninterrupted)
        return seconds


REQUEUED = "^Requeued: it resumes by itself$"


def remount(disk: Path, option: str):
    subprocess.run(["mount", "-o", f"remount,{option}", disk], check=True)
