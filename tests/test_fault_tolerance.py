"""The failure matrix: signals, requeues, dead ranks and nodes, full disks and damaged files, on
a real cluster.

A job that resumes must end with weights that are bit for bit those of an uninterrupted run on as
many ranks, with dropout on. Without options a quick part runs: `pytest -m faults` is the whole
of it.
"""

import decimal
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import chaos
from conftest import (
    LAUNCHERS,
    REPOSITORY,
    Cluster,
    Job,
    at_once,
    cells,
    environment,
    note,
    read_metrics,
    run,
)
from resilience.checkpoint_files import find_checkpoints, step_of
from resilience.checkpoints import Checkpoints
from resilience.place import Place
from resilience.ranks import Ranks

DDP = ["--epochs", 3, "--batch-size", 20, "--log-every", 1]  # 300 images: 45 steps
LANGUAGE_MODEL = [
    "--layers",
    2,
    "--heads",
    4,
    "--width",
    32,
    "--context",
    32,
    "--batch-size",
    8,
    "--dropout",
    0.2,
]
LANGUAGE_MODEL += [
    "--steps",
    45,
    "--log-every",
    1,
    "--eval-every",
    20,
    "--eval-windows",
    8,
    "--precision",
    "fp32",
]
SCRIPTS = {
    "train_preemptible.py": DDP,
    "train_fsdp.py": LANGUAGE_MODEL,
    "train_tp.py": LANGUAGE_MODEL,
}
STEPS = 45
pytestmark = pytest.mark.faults
BY_HAND = {
    "none": [sys.executable],
    "torchrun": ["./torchrun.sh"],
    "spawn": [sys.executable, "distributed/spawn_ranks.py"],
}
DIAGONAL = [
    ("srun", "train_preemptible.py"),
    ("torchrun", "train_fsdp.py"),
    ("spawn", "train_tp.py"),
]
# Quick, because all need one reference: make test's part.
QUICK = [(way, "train_preemptible.py") for way in LAUNCHERS]
GROUPS = ["at-once", "at-once-1", "at-once-2", "at-once-3"]  # cases whose jobs run side by side
OTHERS = [[(way, [*SCRIPTS][(i + k) % 3]) for i, way in enumerate(LAUNCHERS)] for k in (1, 2)]
NINE = [
    pytest.param(three, marks=pytest.mark.matrix, id=GROUPS[i])
    for i, three in enumerate([DIAGONAL, *OTHERS])
]


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Path:
    """A file system that can be made small or read-only while all nodes see it: mounted before
    they start."""
    folder = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="module")
def cluster(disk):
    """Nodes of its own: some of node-7 to node-12 do not survive."""
    cluster = Cluster(f"faults-{os.getpid()}", nodes=12, cpus=4, gpus=2)
    yield cluster
    cluster.down()


@pytest.fixture(autouse=True)
def nothing_runs_on(request):
    """A job of a test that has failed does not slow down the next one."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").exec("scancel", "--user=root")


@pytest.fixture(scope="module")
def data(tiny, text) -> dict[str, Path]:
    return {"train_preemptible.py": tiny, "train_fsdp.py": text, "train_tp.py": text}


def weights(folder: Path, steps: int) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint, whole, by name."""
    newest = find_checkpoints(folder)[0]
    assert newest.name.removesuffix(".pt") == f"checkpoint_step_{steps}"
    if newest.is_dir():
        whole = folder / "whole.pt"
        dcp_to_torch_save(newest, whole)
        return torch.load(whole, weights_only=False)["model"]
    return torch.load(newest, weights_only=True)["model"]


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """The folder of an uninterrupted run of a script on four ranks, made once."""
    folders, lock = {}, threading.Lock()

    def folder(script: str) -> Path:
        with lock:
            if script not in folders:
                out = tmp_path_factory.mktemp(script)
                command = [
                    "./torchrun.sh",
                    f"distributed/{script}",
                    "--data-dir",
                    data[script],
                    *SCRIPTS[script],
                ]
                command += ["--checkpoint-every", 30]  # and at the end
                done = run(
                    *command,
                    "--checkpoint-dir",
                    out,
                    env=environment(NPROC_PER_NODE=4, OMP_NUM_THREADS=1),
                )
                assert done.returncode == 0, done.stderr
                folders[script] = out
            return folders[script]

    return folder


def assert_same_run(out: Path, reference: Path, run_steps: int = STEPS):
    """Final weights bit for bit, and every step once in the metrics, with the same losses."""
    ours, theirs = weights(out, run_steps), weights(reference, run_steps)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, different
    steps = [event["step"] for event in read_metrics(out) if "loss" in event]
    assert steps == list(range(1, run_steps + 1))
    for name in ("loss", "val_loss", "test_loss"):
        found = [(event["step"], event[name]) for event in read_metrics(out) if name in event]
        assert found == [
            (event["step"], event[name]) for event in read_metrics(reference) if name in event
        ]


class Trial:
    """A slowed down job on two nodes with two ranks each, in a checkpoint folder of its own."""

    def __init__(
        self,
        cluster: Cluster,
        way: str,
        script: str,
        data: dict,
        folder: Path,
        *options,
        sbatch=(),
        slow=0.4,
        **env,
    ):
        folder.mkdir(exist_ok=True)
        self.case = ""  # for the table
        self.cluster, self.way, self.script, self.folder, self.out = (
            cluster,
            way,
            script,
            folder,
            folder / "out",
        )
        self.command = [LAUNCHERS[way], "tests/scripts/slowly.py", slow, f"distributed/{script}"]
        self.command += [
            "--data-dir",
            data[script],
            *SCRIPTS[script],
            "--checkpoint-dir",
            self.out,
            *options,
        ]
        self.fault_at = time.monotonic()
        self.job = cluster.submit(*sbatch, f"--output={folder}/log", *self.command, env=env)

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, pattern: str, timeout: float = 120) -> float:
        """Until the log has a line like that. Returns the seconds it took."""
        start = asked_at = time.monotonic()
        state = "not known"
        while not re.search(pattern, self.log, re.M):
            ended = state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            assert not ended and time.monotonic() - start < timeout, (
                f"{state}, no {pattern!r} in:\n{self.log}"
            )
            time.sleep(0.1)
            # Before the log is read again: what has ended writes nothing after it.
            if time.monotonic() - asked_at > 1:
                state, asked_at = self.cluster.show(self.job)["JobState"], time.monotonic()
        return time.monotonic() - start

    def train_a_little(self) -> list[str]:
        """Until the first steps are done. Returns the job's nodes."""
        self.wait_for(r"^step=[7-9]/", 180)  # at a machine's own pace
        self.fault_at = time.monotonic()
        nodes = self.cluster.show(self.job)["NodeList"]
        return self.cluster.exec("scontrol", "show", "hostnames", nodes).stdout.split()

    def signal(self, *options: str):
        done = self.cluster.exec("scancel", *options, self.job)
        assert done.returncode == 0, done.stderr

    def process(self, node: str, name: str) -> int:
        """The process id, on the host, of a process of the job on a node, by what its command
        line contains."""
        found = next(chaos.processes(self.job, name, node), None)
        assert found is not None, f"no {name} of job {self.job} on {node}"
        return found

    def rank(self, node: str) -> int:
        """A rank's process."""
        return chaos.ranks(self.job, "slowly.py", node)[0]

    def ends(self, timeout: float = 180) -> Job:
        """Its end, with no process left 30 s later."""
        job = self.cluster.wait(self.job, timeout)
        deadline = time.monotonic() + 30
        while left := self.cluster.left_over(self.job):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
        restarts, seconds = (
            self.cluster.show(self.job)["Restarts"],
            time.monotonic() - self.fault_at,
        )
        note(self.way, self.script, job.state, job.exit_code, restarts, seconds, self.case)
        return job

    def is_equal_after_a_restart(self, reference: Path, restarts: int = 1):
        job = self.ends(180)
        assert job.state == "COMPLETED", job.log
        assert int(self.cluster.show(self.job)["Restarts"]) == restarts, job.log
        assert re.search(r"^Resumed after step [1-9]", job.log, re.M), job.log
        assert_same_run(self.out, reference)


# --- asked to stop ---


REQUEUED = "^Requeued: it resumes by itself$"


@pytest.mark.parametrize("cases", [pytest.param(QUICK, id="at-once-preemptible"), *NINE])
def test_term(cases, cluster, data, uninterrupted, tmp_path):
    """As Slurm sends it, to what srun has started: the ranks save, and rank 0 requeues the job."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way)
        trial.train_a_little()
        trial.signal("--signal=TERM")
        assert trial.wait_for(REQUEUED) < 15
        stopped = int(re.search(r"^Stopped after step (\d+), saved$", trial.log, re.M)[1])
        trial.wait_for(f"^Resumed after step {stopped}$")
        assert min(map(int, watched_steps(trial))) >= stopped
        trial.is_equal_after_a_restart(uninterrupted(script))

    at_once(scenario, cases)


def watched_steps(trial: Trial) -> list[str]:
    """What watch_job.py shows as the steps of a job's four ranks, as soon as it knows them:
    until then it shows "-"."""
    steps, deadline = ["-"], time.monotonic() + 20
    while "-" in steps or len(steps) < 4:
        assert time.monotonic() < deadline, steps
        shown = run(sys.executable, "aux/watch_job.py", trial.job).stdout
        steps = re.findall(r"^ *\d+  node-\d+ +(\S+) ", shown, re.M)
    return steps


@pytest.mark.matrix
def test_usr1(cluster, data, uninterrupted, tmp_path):
    """For those who send it to srun's tasks. torchrun, which has no handler for it, would die of
    it."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way)
        trial.train_a_little()
        trial.signal("--signal=USR1")
        trial.wait_for(REQUEUED, 15)
        trial.is_equal_after_a_restart(uninterrupted(script))

    at_once(scenario, [("srun", "train_preemptible.py"), ("spawn", "train_tp.py")])


@pytest.mark.matrix
def test_term_before_the_ranks_listen(cluster, data, uninterrupted, tmp_path):
    """A signal while Python is still starting is not lost: the job saves after its first step."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way, LATE=5)
        trial.wait_for(r"(?s)(^Listening$.*){4}")
        trial.signal("--signal=TERM")
        trial.wait_for(REQUEUED, 60)
        trial.is_equal_after_a_restart(uninterrupted(script))

    at_once(scenario, DIAGONAL)


@pytest.mark.matrix
def test_scontrol_requeue(cluster, data, uninterrupted, tmp_path):
    """Slurm sends SIGTERM and, KillWait later, SIGKILL: the ranks have that long to save."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way)
        trial.train_a_little()
        assert cluster.exec("scontrol", "requeue", trial.job).returncode == 0
        trial.wait_for("^Resumed after step [1-9]")
        assert "Not requeued" not in trial.log, trial.log
        trial.is_equal_after_a_restart(uninterrupted(script))

    at_once(scenario, DIAGONAL)


LIMITS = {"the limit itself": ["--time=1"], "ahead of it": ["--time=3", "--signal=TERM@60"]}


@pytest.mark.matrix
@pytest.mark.parametrize("limit", LIMITS)
def test_time_limit(limit, cluster, data, uninterrupted, tmp_path):
    """Without --signal SIGTERM comes at the limit, and KillWait is the time to save. With it, up
    to 60 s too early."""

    def scenario(way, script):
        # 45 steps: 135 s.
        trial = Trial(cluster, way, script, data, tmp_path / way, sbatch=LIMITS[limit], slow=3)
        trial.case = limit
        trial.wait_for(REQUEUED, 180)
        assert trial.ends(400).state == "COMPLETED", trial.log
        assert int(cluster.show(trial.job)["Restarts"]) == 1
        assert_same_run(trial.out, uninterrupted(script))

    at_once(scenario, [(way, "train_preemptible.py") for way in LAUNCHERS])


@pytest.fixture(scope="module")
def preempt(cluster):
    """A function that submits a job, of a second, in a partition that takes its nodes from the
    others."""
    created = cluster.exec(
        "scontrol", "create", "PartitionName=urgent", "Nodes=ALL", "PriorityTier=2", "State=UP"
    )
    assert created.returncode == 0, created.stderr
    options = ["--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    return lambda nodes: cluster.submit(*options, f"--nodelist={nodes}")


@pytest.mark.matrix
def test_preemption(preempt, cluster, data, uninterrupted, tmp_path):
    """By a job in a partition of higher priority: SIGTERM, a grace time, back into the queue."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way)
        nodes = trial.train_a_little()
        other = preempt(nodes[1])
        trial.wait_for("^Stopped after step [1-9]", 20)
        trial.wait_for("^Resumed after step [1-9]")
        trial.is_equal_after_a_restart(uninterrupted(script))
        assert cluster.wait(other).state == "COMPLETED"

    at_once(scenario, DIAGONAL)


@pytest.mark.matrix
def test_save_that_takes_40_seconds(cluster, data, uninterrupted, tmp_path):
    """torchrun's own patience with ranks that were told to stop is 30 s: env.sh gives them ten
    minutes."""
    trial = Trial(cluster, "torchrun", "train_preemptible.py", data, tmp_path, SLOW_SAVE=40)
    trial.train_a_little()
    trial.signal("--signal=TERM")
    assert trial.wait_for(REQUEUED, 90) > 40
    trial.is_equal_after_a_restart(uninterrupted("train_preemptible.py"))


@pytest.mark.matrix
def test_term_in_the_last_step(cluster, data, tmp_path):
    """A finished run is COMPLETED. torchrun fails once it was told to stop: that job finishes at
    its next start."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way, "--max-steps", 8, LONG_STEP=8)
        trial.wait_for("^In step 8$")
        trial.signal("--signal=TERM")
        job = trial.ends()
        assert job.state == "COMPLETED" and "Stopped" not in job.log, job.log
        assert int(cluster.show(trial.job)["Restarts"]) == (way == "torchrun"), job.log
        assert job.log.count("Traceback") == 0 or way == "torchrun", job.log

    at_once(scenario, [(way, "train_preemptible.py") for way in LAUNCHERS])


@pytest.mark.matrix
def test_job_that_may_not_be_requeued_says_what_to_type(cluster, data, uninterrupted, tmp_path):
    trial = Trial(cluster, "srun", "train_preemptible.py", data, tmp_path, sbatch=["--no-requeue"])
    trial.train_a_little()
    trial.signal("--signal=TERM")
    job = trial.ends()
    assert job.state == "FAILED" and job.exit_code == 1 and "lost a peer" not in job.log, job.log
    assert re.search(
        "^Not requeued: Requested operation is presently disabled.* To resume it:$", job.log, re.M
    )
    [typed] = re.findall(r"^    (sbatch .*--resume)$", job.log, re.M)
    again = cluster.exec(
        "bash", "-c", typed.replace("sbatch", f"sbatch --parsable --output={tmp_path}/again", 1)
    )
    assert cluster.wait(int(again.stdout)).state == "COMPLETED", again
    assert_same_run(trial.out, uninterrupted("train_preemptible.py"))


@pytest.mark.matrix
def test_finished_job_that_is_requeued_does_nothing(cluster, data, tmp_path):
    trial = Trial(cluster, "srun", "train_preemptible.py", data, tmp_path, "--max-steps", 2)
    assert trial.ends().state == "COMPLETED"
    before = len(trial.log)
    assert cluster.exec("scontrol", "requeue", trial.job).returncode == 0
    trial.wait_for(rf"(?s)\A.{{{before}}}.*^Resumed after step 2$")
    job = trial.ends()
    assert job.state == "COMPLETED" and job.log.count("\nstep=1/") == 1, job.log


def test_cancelled_job(cluster, data, tmp_path):
    """It saves, in KillWait, and stays cancelled."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way)
        trial.train_a_little()
        trial.signal()
        job = trial.ends(40)
        assert job.state == "CANCELLED" and int(cluster.show(trial.job)["Restarts"]) == 0, job.log
        [stopped] = re.findall(r"^Stopped after step (\d+), saved$", job.log, re.M)
        assert "Requeued" not in job.log and f"_{stopped}" in find_checkpoints(trial.out)[0].name, (
            job.log
        )

    at_once(scenario, QUICK)


def signalled(command: list, number: int, steps: int, **env) -> tuple[int, str]:
    """Status and output of a command whose process group gets a signal, as from a terminal,
    after so many steps."""
    options = {
        "cwd": REPOSITORY,
        "env": environment(OMP_NUM_THREADS=1, **env),
        "start_new_session": True,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([str(part) for part in command], **options, **pipes) as process:
        timer = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            shown = ""
            for line in process.stdout:
                shown += line
                steps -= line.startswith("step=")
                if steps == 0 and line.startswith("step="):
                    os.killpg(process.pid, number)
            return process.wait(), shown
        finally:
            timer.cancel()


@pytest.mark.parametrize("way", cells([(way,) for way in BY_HAND], ("torchrun",)))
def test_control_c_on_a_laptop(way, data, tmp_path):
    start = time.monotonic()
    command = [*BY_HAND[way], "tests/scripts/slowly.py", "0.1", "distributed/train_preemptible.py"]
    command += ["--data-dir", data["train_preemptible.py"], *DDP, "--checkpoint-dir", tmp_path]
    status, shown = signalled(command, signal.SIGINT, 7)
    note(way, "train_preemptible.py", "saved", status, 0, time.monotonic() - start)
    stopped = re.search(r"^Stopped after step (\d+), saved$", shown, re.M)
    assert stopped and ("Traceback" not in shown or way == "torchrun"), shown
    assert [path.name for path in find_checkpoints(tmp_path)] == [
        f"checkpoint_step_{stopped[1]}.pt"
    ], shown


# --- dead and stuck ---


@pytest.mark.parametrize("cases", [pytest.param(QUICK, id="at-once-preemptible"), *NINE])
def test_killed_rank(cases, cluster, data, tmp_path):
    """The job is FAILED within seconds, and what has started the ranks says which one it was."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way)
        node = trial.train_a_little()[1]
        os.kill(trial.rank(node), signal.SIGKILL)
        job = trial.ends(20)
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        assert re.search(KILLED[way].format(node=node), job.log, re.M), job.log

    at_once(scenario, cases)


KILLED = {
    "srun": r"^srun: error: {node}: task [23]: Killed$",
    "torchrun": r"failed \(exitcode: -9\) local_rank: [01] ",
    "spawn": r"^spawn_ranks.py: rank [23] on {node}: process [01] terminated with signal SIGKILL$",
}


@pytest.mark.matrix
def test_killed_torchrun(cluster, data, tmp_path):
    """Its ranks go with it: Slurm ends what is left in the step's cgroup."""
    trial = Trial(cluster, "torchrun", "train_preemptible.py", data, tmp_path)
    node = trial.train_a_little()[1]
    os.kill(trial.process(node, "torchrun"), signal.SIGKILL)
    job = trial.ends(40)
    assert job.state == "FAILED" and job.exit_code != 0, job.log
    assert re.search(rf"^srun: error: {node}: task 1: Killed$", job.log, re.M), job.log


@pytest.mark.parametrize("cases", [pytest.param(QUICK, id="at-once-preemptible"), NINE[0]])
def test_out_of_memory(cases, cluster, data, tmp_path):
    """The kernel ends a rank that uses more than the --mem of its job; srun says on which node."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way, sbatch=["--mem=2G"], HUNGRY=2)
        node = trial.train_a_little()[1]
        job = trial.ends(40)
        assert job.state in ("FAILED", "OUT_OF_MEMORY") and job.exit_code != 0, job.log
        assert re.search(rf"^srun: error: {node}: task \d: Out Of Memory$", job.log, re.M), job.log

    at_once(scenario, cases)


@pytest.mark.matrix
@pytest.mark.parametrize("cases", [DIAGONAL], ids=GROUPS[:1])
def test_stopped_rank(cases, cluster, data, tmp_path):
    """A rank that makes no progress is named before its peers give up after --timeout seconds."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way, "--timeout", 20)
        node = trial.train_a_little()[1]
        os.kill(trial.rank(node), signal.SIGSTOP)
        time.sleep(6)
        watched = run(sys.executable, "aux/watch_job.py", trial.job, "--after", 5)
        assert watched.returncode == 1 and re.search(
            rf"^ +\d  {node} +\d+ ", watched.stdout, re.M
        ), watched
        assert watched.stdout.endswith(f"sbatch --exclude={node}\n"), watched.stdout
        pattern = rf"^\[Rank \d on \S+\] rank \d on {node} has sent no heartbeat for \d+ s; "
        pattern += r"its last step is \d+"
        trial.wait_for(pattern, 30)
        job = trial.ends(60)
        assert job.state == "FAILED" and job.exit_code != 0, job.log

    at_once(scenario, cases)


@pytest.mark.matrix
@pytest.mark.parametrize("cases", [DIAGONAL], ids=GROUPS[:1])
def test_asked_to_stop_beside_a_stopped_rank(cases, cluster, data, tmp_path):
    """What cannot be saved without it is not waited for: the job ends long before --timeout, 120
    seconds."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way)
        node = trial.train_a_little()[1]
        os.kill(trial.rank(node), signal.SIGSTOP)
        time.sleep(2)  # five steps: by now all others wait for it in a collective
        trial.signal("--signal=TERM")
        silent = rf"^\[Rank (\d) on {node}\] asked to stop, but rank (\d) on this node has "
        silent += r"sent no heartbeat for 1\d s"
        assert trial.wait_for(silent, 30) < 25
        job = trial.ends(60)
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        assert len(re.findall(silent, job.log, re.M)) == 1, job.log

    at_once(scenario, cases)


@pytest.mark.matrix
@pytest.mark.parametrize("cases", [DIAGONAL], ids=GROUPS[:1])
def test_rank_that_never_comes(cases, cluster, data, tmp_path):
    """Whatever the launcher, rank 0 names it with its node, and all others are silent."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way, "--init-timeout", 20, MISSING=3)
        job = trial.ends(90)
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        named = r"^\[Rank 0 on (\S+)\] 1 of 4 ranks did not join within 0:00:20: rank 3 on (\S+)$"
        [(first, node)] = re.findall(named, job.log, re.M)
        assert first != node and job.log.count("[Rank") == 1, job.log
        assert "Traceback" not in job.log or way == "torchrun", job.log

    at_once(scenario, cases)


@pytest.mark.matrix
@pytest.mark.parametrize("cases", [DIAGONAL], ids=GROUPS[:1])
def test_wrong_interface(cases, cluster, data, tmp_path):
    """One sentence says which one it is, and what to set."""

    def scenario(way, script):
        trial = Trial(
            cluster,
            way,
            script,
            data,
            tmp_path / way,
            "--init-timeout",
            20,
            GLOO_SOCKET_IFNAME="lo",
        )
        job = trial.ends(90)
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        named = r"^\[Rank \d on \S+\] all ranks joined, but they cannot connect: .*"
        named += r" The interface is lo: GLOO_SOCKET_IFNAME in env.sh chooses one"
        said = re.findall(named, job.log, re.M)
        assert len(said) == job.log.count("all ranks joined") == 1, job.log
        assert "Traceback" not in job.log or way == "torchrun", job.log

    at_once(scenario, cases)


@pytest.mark.matrix
def test_stuck_rank(cluster, data, tmp_path):
    """One that is alive, but waits for something else than its peers: the log says where in the
    program it is."""
    trial = Trial(cluster, "srun", "train_preemptible.py", data, tmp_path, "--timeout", 20, STUCK=2)
    node = trial.train_a_little()[1]
    trial.wait_for(
        rf"^\[Rank 0 on \S+\] no step for 10 s. First to look at: rank 2 on {node} \(step 7\), in$",
        40,
    )
    trial.wait_for(r"^    wait_for_ever \(\S+slowly.py:\d+\)$", 5)
    assert trial.ends(60).state == "FAILED"


@pytest.mark.parametrize(
    ("way", "script", "index"),
    [("torchrun", "train_fsdp.py", 1), ("srun", "train_preemptible.py", 0)],
)
@pytest.mark.matrix
def test_node_crash(way, script, index, cluster, data, uninterrupted, tmp_path):
    """Slurm requeues the job on other nodes: from crash to training again within 60 s. Node 0
    has the batch shell."""
    trial = Trial(
        cluster,
        way,
        script,
        data,
        tmp_path,
        "--checkpoint-every",
        5,
        sbatch=["--exclude=node-[1-6]"],
    )
    node = trial.train_a_little()[index]
    os.kill(
        int(Path(f"/run/slurm-cluster-{cluster.environment['CLUSTER']}/{node}.pid").read_text()),
        signal.SIGKILL,
    )
    assert trial.wait_for("^Resumed after step [1-9]", 60) < 60
    trial.is_equal_after_a_restart(uninterrupted(script))


@pytest.mark.matrix
def test_split_brain(cluster, data, uninterrupted, tmp_path):
    """slurmd dies, all ranks live on: the job starts again elsewhere, and the old ranks are gone
    soon after."""
    one = ["--nodes=1", "--ntasks-per-node=4", "--gpus-per-node=0", "--exclude=node-[1-6]"]
    trial = Trial(
        cluster,
        "srun",
        "train_preemptible.py",
        data,
        tmp_path,
        "--checkpoint-every",
        5,
        sbatch=one,
        slow=2.0,
    )
    [node] = trial.train_a_little()
    for process in Path("/proc").glob("[0-9]*"):
        command = (process / "cmdline").read_text() if (process / "cmdline").exists() else ""
        if (
            command.startswith("slurmd\0")
            and command.endswith(f"{node}\0")
            and in_cluster(process, cluster)
        ):
            os.kill(int(process.name), signal.SIGKILL)
    trial.wait_for("^Resumed after step [1-9]")
    deadline = time.monotonic() + 20
    with pytest.raises(AssertionError, match=f"no slowly.py of job {trial.job} on {node}"):
        while time.monotonic() < deadline:
            trial.process(node, "slowly.py")
            time.sleep(0.5)
    trial.is_equal_after_a_restart(uninterrupted("train_preemptible.py"))


def test_superseded_attempt(data, tmp_path):
    """One process trains, another resumes in its folder: the first one ends, and writes no step
    more."""
    command = [
        sys.executable,
        "tests/scripts/slowly.py",
        "1",
        "distributed/train_preemptible.py",
        *DDP,
    ]
    command += [
        "--data-dir",
        data["train_preemptible.py"],
        "--checkpoint-dir",
        tmp_path,
        "--checkpoint-every",
        5,
    ]
    options = {
        "cwd": REPOSITORY,
        "env": environment(OMP_NUM_THREADS=1),
        "text": True,
        "stderr": subprocess.PIPE,
    }
    start = time.monotonic()
    with subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.DEVNULL, **options
    ) as first:
        try:
            deadline = start + 60
            while not find_checkpoints(tmp_path):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            second = run(*command[:2], "0", *command[3:], "--resume")
            assert second.returncode == 0 and "Resumed after step" in second.stdout, second.stderr
            _, stderr = first.communicate(timeout=30)
        finally:
            first.kill()
    note("none", "train_preemptible.py", "ended", first.returncode, 0, time.monotonic() - start)
    assert first.returncode == 1
    assert re.fullmatch(
        r"\[Rank 0 on \S+\] .* now belongs to another attempt .* writes nothing more and ends\n",
        stderr,
    )
    assert [event["step"] for event in read_metrics(tmp_path) if "loss" in event] == list(
        range(1, STEPS + 1)
    )
    assert find_checkpoints(tmp_path)[0].name == f"checkpoint_step_{STEPS}.pt"


@pytest.mark.matrix
def test_cut_link(cluster, data, uninterrupted, tmp_path):
    trial = Trial(
        cluster,
        "spawn",
        "train_tp.py",
        data,
        tmp_path,
        "--checkpoint-every",
        5,
        "--timeout",
        20,
        sbatch=["--exclude=node-[1-6]"],
    )
    node = trial.train_a_little()[1]
    cluster.exec("ip", "link", "set", "eth0", "down", node=node)
    try:
        trial.wait_for("^Resumed after step [1-9]", 90)
    finally:
        cluster.exec("ip", "link", "set", "eth0", "up", node=node)
    trial.is_equal_after_a_restart(uninterrupted("train_tp.py"))


@pytest.mark.matrix
def test_two_jobs_on_one_port(cluster, data, uninterrupted, tmp_path):
    """The second one does not join the first; nor does one whose ranks are elsewhere than its
    address."""
    first = Trial(cluster, *DIAGONAL[0], data, tmp_path / "first", slow=0.8)
    node = first.train_a_little()[0]
    [port] = re.findall(rf" at {node}:(\d+)$", first.log, re.M)
    place = {"MASTER_ADDR": node, "MASTER_PORT": port}
    script = f"distributed/train_preemptible.py --data-dir {data['train_preemptible.py']}"

    def scenario(where, sentence):
        folder = tmp_path / where
        srun = f"srun --kill-on-bad-exit=1 python {script} --checkpoint-dir {folder}/out"
        size = [where, "--nodes=1", "--ntasks-per-node=2", f"--output={folder}.log"]
        job = cluster.sbatch(*size, f"--wrap={srun}", env=place)
        assert job.state == "FAILED" and job.exit_code == 1 and sentence in job.log, job.log

    taken = f"port {port} on {node} is taken by another program"
    elsewhere = f"MASTER_ADDR is {node}, but rank 0 is on"
    at_once(scenario, [(f"--nodelist={node}", taken), (f"--exclude={node}", elsewhere)])
    assert first.ends().state == "COMPLETED", first.log
    assert_same_run(first.out, uninterrupted("train_preemptible.py"))


@pytest.mark.matrix
def test_rank_of_another_job_is_turned_away(data, tmp_path):
    """By what rank 0 has written into the store: nothing else distinguishes the jobs here."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "distributed/train_preemptible.py",
        *DDP,
        "--data-dir",
        data["train_preemptible.py"],
    ]
    command = [str(part) for part in (*command, "--init-timeout", 10, "--checkpoint-dir", tmp_path)]
    place = {"LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ours, theirs = (
        environment(RANK=0, SLURM_JOB_ID=7, **place),
        environment(RANK=1, SLURM_JOB_ID=8, **place),
    )
    with (
        subprocess.Popen(
            command, cwd=REPOSITORY, env=ours, text=True, stderr=subprocess.PIPE
        ) as first,
        subprocess.Popen(command, cwd=REPOSITORY, env=theirs) as second,
    ):
        try:
            assert second.wait(60) == 1
            _, stderr = first.communicate(timeout=60)
        finally:
            first.kill()
            second.kill()
    assert re.fullmatch(
        r"\[Rank 0 on \S+\] 1 of 2 ranks did not join within 0:00:10: rank 1\n", stderr
    )
    assert first.returncode == 1 and not find_checkpoints(tmp_path)


# --- disks and files ---


def alone(script: str, data: dict, out: Path, *options, **how) -> subprocess.CompletedProcess:
    """A whole run on this machine, as one process."""
    command = (
        f"distributed/{script}",
        "--data-dir",
        data[script],
        *SCRIPTS[script],
        "--checkpoint-dir",
        out,
    )
    return run(sys.executable, *command, "--device", "cpu", *options, **how)


@pytest.fixture(scope="module")
def one_rank(data, tmp_path_factory):
    """A script's whole run as one process, with its checkpoints of steps 30 and 45."""
    folders = {}

    def folder(script: str) -> Path:
        if script not in folders:
            folders[script] = tmp_path_factory.mktemp(script)
            done = alone(script, data, folders[script], "--checkpoint-every", 30)
            assert done.returncode == 0, done.stderr
        return folders[script]

    return folder


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def zeroed(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(4096) + content[middle + 4096 :]


def a_web_page(content: bytes) -> bytes:
    return b"<!DOCTYPE html><html><body>502 Bad Gateway</body></html>"


DAMAGE = [truncated, flipped, zeroed, a_web_page]
# A file in one way, and a folder in another one. The quick part damages a file; a folder:
# test_language_model.py.
DAMAGED = [[(*DIAGONAL[0], DAMAGE[i]), (*DIAGONAL[1], DAMAGE[(i + 1) % 4])] for i in range(4)]
DAMAGED = [
    pytest.param(pair, marks=pytest.mark.matrix, id=name)
    for pair, name in zip(DAMAGED, GROUPS, strict=True)
]


@pytest.mark.parametrize("cases", [pytest.param([(*DIAGONAL[0], truncated)], id="alone"), *DAMAGED])
def test_damaged_checkpoint(cases, cluster, data, uninterrupted, tmp_path):
    """It is named and quarantined: the run resumes from the one before, to the same end."""

    def scenario(way, script, damage):
        out = tmp_path / way / "out"
        shutil.copytree(uninterrupted(script), out)
        newest, before = find_checkpoints(out)
        file = max(newest.glob("*.distcp")) if newest.is_dir() else newest
        file.write_bytes(damage(file.read_bytes()))
        trial = Trial(cluster, way, script, data, tmp_path / way, "--resume", slow=0)
        trial.case = damage.__name__
        job = trial.ends()
        assert job.state == "COMPLETED", job.log
        assert job.log.count(f"checkpoint {newest} is damaged and skipped") == 1, job.log
        assert re.search(rf"^Resumed after step {step_of(before)}$", job.log, re.M), job.log
        assert (out / f"damaged_{newest.name}").exists()
        assert_same_run(out, uninterrupted(script))

    at_once(scenario, cases)


def hold(folder: Path, *steps: int) -> Path:
    """A folder for the variable HOLD of slowly.py: the checkpoints of these steps are not whole
    until it is changed."""
    folder.mkdir()
    for step in steps:
        (folder / str(step)).touch()
    return folder


@pytest.mark.matrix
def test_killed_while_a_checkpoint_is_written_asynchronously(data, uninterrupted, tmp_path):
    """The steps go on meanwhile, and it is published later; of one that is not whole nothing is
    left after a resume."""
    out, held = tmp_path / "out", hold(tmp_path / "hold", 10, 20)
    command = [
        "./torchrun.sh",
        "tests/scripts/slowly.py",
        "0.1",
        "distributed/train_fsdp.py",
        *LANGUAGE_MODEL,
    ]
    command += [
        "--data-dir",
        data["train_fsdp.py"],
        "--checkpoint-dir",
        out,
        "--checkpoint-every",
        10,
    ]
    four = {"NPROC_PER_NODE": 4, "OMP_NUM_THREADS": 1}
    options = {
        "cwd": REPOSITORY,
        "env": environment(HOLD=held, **four),
        "start_new_session": True,
        "text": True,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    names = {}
    with subprocess.Popen([str(part) for part in command], **options, **pipes) as process:
        timer = threading.Timer(120, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        try:
            for line in process.stdout:
                if step := re.match(r"step=(15|25)/", line):
                    names[int(step[1])] = {path.name for path in out.glob("*checkpoint*")}
                    (held / "10").unlink(missing_ok=True)
                if 25 in names:
                    break
        finally:
            timer.cancel()
            os.killpg(process.pid, signal.SIGKILL)
    assert names == {
        15: {".checkpoint_step_10.none.0.tmp"},
        25: {"checkpoint_step_10", ".checkpoint_step_20.none.0.tmp"},
    }
    command[2] = "0"
    again = run(*command, "--resume", env=environment(HOLD=tmp_path / "none", **four))
    assert again.returncode == 0 and "Resumed after step 10" in again.stdout, again.stderr
    assert sorted(path.name for path in out.glob("*checkpoint*")) == [
        "checkpoint_step_40",
        "checkpoint_step_45",
    ]
    assert_same_run(out, uninterrupted("train_fsdp.py"))


def test_superseded_while_a_checkpoint_is_written_asynchronously(data, tmp_path):
    out, held = tmp_path / "out", hold(tmp_path / "hold", 45)
    command = [
        sys.executable,
        "tests/scripts/slowly.py",
        "0",
        "distributed/train_fsdp.py",
        *LANGUAGE_MODEL,
    ]
    command += [
        "--data-dir",
        data["train_fsdp.py"],
        "--checkpoint-dir",
        out,
        "--checkpoint-every",
        30,
    ]
    options = {"cwd": REPOSITORY, "env": environment(HOLD=held, OMP_NUM_THREADS=1), "text": True}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen([str(part) for part in command], **options, **pipes) as process:
        try:
            deadline = time.monotonic() + 60
            while not list(out.glob(".checkpoint_step_45.*")):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            (out / "owner").write_text("job 8, start 0, node-3:4711")
            (held / "45").unlink()
            _, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (
        process.returncode == 1
        and "now belongs to another attempt (job 8, start 0, node-3:4711)" in stderr
    ), stderr
    assert [path.name for path in find_checkpoints(out)] == ["checkpoint_step_30"]


@pytest.mark.matrix
@pytest.mark.parametrize("cases", [DIAGONAL[1:]], ids=GROUPS[:1])
def test_term_while_checkpoints_are_written_asynchronously(
    cases, cluster, data, uninterrupted, tmp_path
):
    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way, "--checkpoint-every", 2)
        trial.train_a_little()
        trial.signal("--signal=TERM")
        trial.wait_for(REQUEUED, 15)
        trial.is_equal_after_a_restart(uninterrupted(script))

    at_once(scenario, cases)


def test_damaged_checkpoints_never_push_out_whole_ones(data, tmp_path):
    """Two of later steps cannot be read: they are quarantined, and two of this run are kept."""
    assert alone("train_preemptible.py", data, tmp_path, "--max-steps", 5).returncode == 0
    for step in (900, 1000):
        (tmp_path / f"checkpoint_step_{step}.pt").write_bytes(b"nothing")
    done = alone("train_preemptible.py", data, tmp_path, "--checkpoint-every", 5, "--resume")
    assert done.returncode == 0 and "Resumed after step 5" in done.stdout, done.stderr
    assert [step_of(path) for path in find_checkpoints(tmp_path)] == [45, 40]
    assert len(list(tmp_path.glob("damaged_*"))) == 2


@pytest.mark.parametrize(
    "script", ["train_preemptible.py", pytest.param("train_fsdp.py", marks=pytest.mark.matrix)]
)
def test_nothing_begins_again_by_itself(script, data, one_rank, tmp_path):
    """If all checkpoints are damaged, a new run would look like a resumed one."""
    shutil.copytree(one_rank(script), tmp_path / "out")
    metrics = (tmp_path / "out/metrics.jsonl").read_text()
    for path in find_checkpoints(tmp_path / "out"):
        file = max(path.glob("*.distcp")) if path.is_dir() else path
        file.write_bytes(truncated(file.read_bytes()))
    done = alone(script, data, tmp_path / "out", "--resume")
    assert done.returncode == 1 and "has 2 damaged checkpoints and no whole one" in done.stderr, (
        done.stderr
    )
    assert (
        tmp_path / "out/metrics.jsonl"
    ).read_text() == metrics and "Traceback" not in done.stderr


@pytest.fixture
def checkpoints_alone(tmp_path, monkeypatch) -> Checkpoints:
    """Those of a process alone, where a fault is a SystemExit."""
    monkeypatch.setattr(Place, "stop_if_any", lambda place, fault: fault and sys.exit(fault))
    args = Namespace(checkpoint_dir=tmp_path, checkpoint_every=(1, "steps"), keep_checkpoints=2)
    place = Place(Ranks(0, 0, 1, 1, "none"), torch.device("cpu"), 9)
    return Checkpoints(args, place, {"seed": 0}, 9)


def test_what_cannot_be_loaded_now_is_not_damaged(checkpoints_alone, tmp_path, monkeypatch):
    """A file system that fails for a moment, or a value of a kind that is refused: no file is
    quarantined."""
    checkpoints_alone.save_files(5, {}, {"best": decimal.Decimal("0.5")})
    path = tmp_path / "checkpoint_step_5.pt"
    with pytest.raises(SystemExit, match=r"not damaged, but cannot be loaded: .*decimal.Decimal"):
        checkpoints_alone.load_files({})
    stale = OSError(116, "Stale file handle")
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda _: (_ for _ in ()).throw(stale))
    with pytest.raises(SystemExit, match=r"not damaged, but cannot be loaded: .*Stale file handle"):
        checkpoints_alone.load_files({})
    assert [*tmp_path.iterdir()] == [path]


def test_a_loaded_checkpoint_may_be_removed(checkpoints_alone, tmp_path):
    """Nothing of the mapped file stays in the model or its optimizer."""
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.SGD(model.parameters(), 1, momentum=0.9)
    model(torch.ones(1000)).sum().backward()
    optimizer.step()
    values = [*model.state_dict().values(), *optimizer_state(optimizer)]
    expected = [value.clone() for value in values]
    parts = {"model": model, "optimizer": optimizer}
    checkpoints_alone.save_files(5, parts, {"best": 0.5})
    for value in values:
        value.zero_()
    assert checkpoints_alone.load_files(parts) == {"step": 5, "best": 0.5}
    with (tmp_path / "checkpoint_step_5.pt").open("r+b") as file:
        file.write(bytes(10**7))
    found = [*model.state_dict().values(), *optimizer_state(optimizer)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [values["momentum_buffer"] for values in optimizer.state.values()]


def test_holes_in_the_metrics_are_dropped(data, one_rank, tmp_path):
    """A node that crashes may cause them: no reason to end."""
    shutil.copytree(one_rank("train_preemptible.py"), tmp_path / "out")
    find_checkpoints(tmp_path / "out")[0].unlink()
    with (tmp_path / "out/metrics.jsonl").open("ab") as file:
        file.write(b'\0\0\0"loss": 1.2}\n\xff\n[]\n{"st')
    done = alone("train_preemptible.py", data, tmp_path / "out", "--resume")
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "out", one_rank("train_preemptible.py"))


def test_damage_to_what_says_which_step_it_is(data, one_rank, tmp_path):
    """A flipped bit in manifest.json would give the right weights a wrong place in the data."""
    shutil.copytree(one_rank("train_fsdp.py"), tmp_path / "out")
    newest, before = find_checkpoints(tmp_path / "out")
    whole = newest / "manifest.json"
    whole.write_text(whole.read_text().replace(f'"step": {step_of(newest)}', '"step": 44'))
    done = alone("train_fsdp.py", data, tmp_path / "out", "--resume")
    assert (
        done.returncode == 0 and "its manifest.json is not the file that was written" in done.stderr
    ), done.stderr
    assert f"Resumed after step {step_of(before)}" in done.stdout
    assert_same_run(tmp_path / "out", one_rank("train_fsdp.py"))


def test_folder_of_another_script(data, one_rank, tmp_path):
    shutil.copytree(one_rank("train_fsdp.py"), tmp_path / "out")
    done = alone("train_preemptible.py", data, tmp_path / "out", "--resume")
    assert done.returncode == 1 and "was written in another format" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_late_start_of_the_same_job(data, tmp_path):
    """A start that comes up after the one that Slurm has put in its place does not take the
    folder from it."""
    (tmp_path / "owner").write_text("job 7, start 2, node-3:4711")
    command = [
        sys.executable,
        "distributed/train_preemptible.py",
        *DDP,
        "--data-dir",
        data["train_preemptible.py"],
        "--checkpoint-dir",
    ]
    done = run(
        *command,
        tmp_path,
        env=environment(OMP_NUM_THREADS=1, SLURM_JOB_ID=7, SLURM_RESTART_COUNT=1),
    )
    assert done.returncode == 1 and "belongs to a later start of this job" in done.stderr, (
        done.stderr
    )
    assert (
        tmp_path / "owner"
    ).read_text() == "job 7, start 2, node-3:4711" and not find_checkpoints(tmp_path)


def remount(disk: Path, option: str):
    subprocess.run(["mount", "-o", f"remount,{option}", disk], check=True)


@pytest.mark.parametrize(("way", "script"), cells(DIAGONAL[:2]))
def test_full_disk(way, script, cluster, disk, data, uninterrupted, tmp_path):
    """Old checkpoints are kept, the run continues, and only an end that cannot be saved is a
    failure."""
    out, reference = disk / script, uninterrupted(script)
    # Of one checkpoint.
    size = sum(file.stat().st_size for file in reference.rglob("*") if file.is_file()) // 2
    remount(disk, f"size={size // 1024 + 200}k")
    try:
        often = ("--checkpoint-every", 10, "--keep-checkpoints", 4, "--checkpoint-dir", out)
        job = Trial(cluster, way, script, data, tmp_path, *often, slow=0).ends()
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        assert (
            job.log.count("the last steps could not be saved") == 1 and "No space left" in job.log
        ), job.log
        assert re.search(r"^step=45/", job.log, re.M) and "Traceback" not in job.log, job.log
        assert len(find_checkpoints(out)) >= 1 and not list(out.glob(".*.tmp"))
        remount(disk, "size=200m")
        again = ("--resume", "--checkpoint-dir", out)
        job = Trial(cluster, way, script, data, tmp_path, *again, slow=0).ends()
        assert job.state == "COMPLETED" and re.search("^Resumed after step [1-9]", job.log, re.M), (
            job.log
        )
        assert_same_run(out, reference)
    finally:
        remount(disk, "size=200m")
        shutil.rmtree(out)


def test_read_only_folder(cluster, disk, data, tmp_path):
    def scenario(name, *resume):
        to = ("--checkpoint-dir", disk / "read-only", *resume)
        job = Trial(cluster, "srun", "train_preemptible.py", data, tmp_path / name, *to).ends()
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        assert job.log.count(f"{disk} cannot be written: choose another --checkpoint-dir") == 1, (
            job.log
        )
        assert "step=" not in job.log and "Traceback" not in job.log, job.log

    remount(disk, "ro")
    try:
        at_once(scenario, [("new",), ("resumed", "--resume")])
    finally:
        remount(disk, "rw")


@pytest.mark.parametrize("cases", [pytest.param(DIAGONAL[:1], id="alone"), *NINE[:1]])
def test_corrupt_data(cases, cluster, data, tmp_path):
    """One bit is not as aux/prepare_data.py wrote it: one sentence, and no step. A node's first
    rank has found it."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import hashlib, os, sys\n"
        "sha256 = hashlib.sha256\n"
        "def noting(*data, **options):\n"
        "    if sys._getframe(1).f_code.co_filename.endswith('checksums.py'):\n"
        "        open(os.environ['HASHED'] + os.environ['RANK'], 'w').close()\n"
        "    return sha256(*data, **options)\n"
        "hashlib.sha256 = noting\n"
    )

    def scenario(way, script):
        folder = tmp_path / f"data-{way}"
        shutil.copytree(data[script], folder)
        file = next(folder.rglob("train-images-idx3-ubyte"), folder / "train.bin")
        subprocess.run("sha256sum train* > SHA256SUMS", shell=True, cwd=file.parent, check=True)
        file.write_bytes(flipped(file.read_bytes()))
        noted = {"PYTHONPATH": tmp_path / "site", "HASHED": tmp_path / f"hashed-{way}-by-"}
        job = Trial(cluster, way, script, {script: folder}, tmp_path / way, **noted).ends(60)
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        assert {path.name for path in tmp_path.glob(f"hashed-{way}*")} == {
            f"hashed-{way}-by-{rank}" for rank in (0, 2)
        }
        assert (
            job.log.count(
                f"{file} is damaged: it is not the file that SHA256SUMS beside it tells of; move"
            )
            == 1
        )
        assert "step=" not in job.log and "Traceback" not in job.log, job.log

    at_once(scenario, cases)


@pytest.mark.matrix
def test_node_without_the_shared_folder(cluster, data, uninterrupted, tmp_path):
    """Rank 0 has chosen a checkpoint, and another node does not see it: one sentence, and
    nothing is quarantined."""

    def scenario(way, script, node):
        out = tmp_path / way / "out"
        shutil.copytree(uninterrupted(script), out)
        lacking = f"node-{node + 1}"
        assert cluster.exec("mount", "-t", "tmpfs", "tmpfs", out, node=lacking).returncode == 0
        here = f"--nodelist=node-{node},{lacking}"
        try:
            job = Trial(
                cluster, way, script, data, tmp_path / way, "--resume", sbatch=[here], slow=0
            ).ends(60)
        finally:
            cluster.exec("umount", out, node=lacking)
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        newest = find_checkpoints(out)[0]
        said = rf"^\[Rank 2 on {lacking}\] {newest} cannot be loaded here \(.*\), but by rank 0: "
        said += "all nodes must share"
        assert len(re.findall(said, job.log, re.M)) == job.log.count("cannot be loaded") == 1, (
            job.log
        )
        assert "damaged" not in job.log and "Traceback" not in job.log and "step=" not in job.log, (
            job.log
        )

    at_once(scenario, [(*DIAGONAL[0], 3), (*DIAGONAL[1], 5)])


def test_arguments_that_would_change_the_run_are_refused(data, one_rank, tmp_path):
    shutil.copytree(one_rank("train_fsdp.py"), tmp_path / "out")
    done = alone(
        "train_fsdp.py", data, tmp_path / "out", "--resume", "--seed", 5, "--batch-size", 4
    )
    assert done.returncode == 1 and "batch_size was 8, not 4, seed was 0, not 5" in done.stderr, (
        done.stderr
    )
    assert len(done.stderr.splitlines()) == 1


def test_keep_checkpoints(data, tmp_path):
    assert (
        alone(
            "train_preemptible.py", data, tmp_path, "--checkpoint-every", 5, "--keep-checkpoints", 3
        ).returncode
        == 0
    )
    assert [path.name for path in find_checkpoints(tmp_path)] == [
        f"checkpoint_step_{step}.pt" for step in (45, 40, 35)
    ]


# --- many ---


@pytest.mark.matrix
def test_stopped_at_twenty_random_steps(data, uninterrupted, tmp_path):
    """Four local ranks, stopped by SIGTERM again and again."""
    moments, stops, shown, start = random.Random(7), 0, "", time.monotonic()
    command = [
        *BY_HAND["spawn"],
        "tests/scripts/slowly.py",
        "0.3",
        "distributed/train_preemptible.py",
        *DDP,
    ]
    command += [
        "--data-dir",
        data["train_preemptible.py"],
        "--checkpoint-dir",
        tmp_path,
        "--resume",
    ]
    while "Finished" not in shown:
        status, shown = signalled(
            command, signal.SIGTERM, moments.randint(1, 2) if stops < 20 else 99, NPROC_PER_NODE=4
        )
        assert status == 0 and ("Stopped after step" in shown or "Finished" in shown), shown
        stops += "Stopped" in shown
    note("spawn", "train_preemptible.py", "finished", status, stops, time.monotonic() - start)
    assert stops == 20
    assert_same_run(tmp_path, uninterrupted("train_preemptible.py"))


@pytest.mark.matrix
def test_chaos(cluster, data, tmp_path):
    """Twenty faults, one after the other, and 180 steps."""
    longer = [
        "./torchrun.sh",
        "distributed/train_preemptible.py",
        *DDP,
        "--epochs",
        12,
        "--data-dir",
        data["train_preemptible.py"],
    ]
    longer += ["--checkpoint-dir", tmp_path / "reference"]
    assert run(*longer, env=environment(NPROC_PER_NODE=4, OMP_NUM_THREADS=1)).returncode == 0
    options = ("--epochs", 12, "--checkpoint-every", 1)
    trial = Trial(
        cluster, "torchrun", "train_preemptible.py", data, tmp_path, *options, slow=1, ALWAYS=1
    )
    command = ("tests/chaos.py", trial.job, "--every", 10, "--faults", 20)
    done = run(sys.executable, *command, env=environment(**cluster.environment), timeout=1500)
    shown = cluster.show(trial.job)
    seconds = time.monotonic() - trial.fault_at
    note(
        trial.way,
        trial.script,
        shown["JobState"],
        shown["ExitCode"].split(":")[0],
        shown["Restarts"],
        seconds,
    )
    assert done.returncode == 0 and re.search(r"^COMPLETED after 20 faults", done.stdout, re.M), (
        done.stdout + trial.log
    )
    assert_same_run(trial.out, tmp_path / "reference", 180)
    done_before = (
        0  # with a checkpoint after every step, no start may lose more than the step it was in
    )
    for step, resumed in re.findall(r"^step=(\d+)/|^Resumed after step (\d+)", trial.log, re.M):
        assert not resumed or int(resumed) >= done_before - 1, trial.log
        done_before = max(done_before, int(step or resumed))


def in_cluster(process: Path, cluster: Cluster) -> bool:
    return (
        process / f"root/run/slurm-cluster-{cluster.environment['CLUSTER']}/inside/spool"
    ).exists()
