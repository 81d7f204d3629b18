"""The failure matrix: signals, requeues, dead ranks and nodes, damaged files, on a real cluster.

A job that resumes must have the losses of an uninterrupted run on as many ranks: train_fsdp.py with
weights that are bit for bit the same, however it splits the model; train_preemptible.py up to
rounding. Without options a quick part runs, and with `-m matrix` the rest.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import checkpoint
import job_processes
from conftest import (
    ENDED,
    LAUNCHERS,
    PATIENCE,
    REPOSITORY,
    Cluster,
    Job,
    at_once,
    environment,
    mounted_in_memory,
    one_rank_a_node,
    ranks,
    wait_for,
)
from test_language_model import saved_state

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
IN_ALL_WAYS = [(way, PREEMPTIBLE) for way in LAUNCHERS]
SRUN, TORCHRUN, SPAWN = zip(LAUNCHERS, SCRIPTS, strict=True)
FSDP = ("srun", "train_fsdp.py")


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Path:
    """A file system that can be made read-only while all nodes see it."""
    with mounted_in_memory(tmp_path_factory.mktemp("disk"), "200m") as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(disk):
    """Nodes of its own: some of node-7 to node-12 do not survive."""
    cluster = Cluster(f"faults-{os.getpid()}", nodes=12, cpus=16, gpus=2)
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


def tracebacks(log: str) -> list[str]:
    """Their lines in our own scripts, because torchrun reports every failure with its own."""
    ours = r"^(?:\[rank\d+\]: )?  File \"(?!<frozen|\S*(?:/bin/torchrun|/lib/python)).*"
    return re.findall(ours, log, re.M)


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


@contextlib.contextmanager
def started(*command: object, **env):
    """A command, whose output is to be read; all that it starts ends with the with block."""
    command = ["unshare", "--fork", "--pid", "--kill-child", *command]
    options = {"cwd": REPOSITORY, "env": environment(OMP_NUM_THREADS=1, **env), "text": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    with subprocess.Popen([str(part) for part in command], **options) as process:
        timer = threading.Timer(120, process.kill)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            process.kill()


# --- asked to stop ---


REQUEUED = "^Requeued: it resumes by itself$"


def test_stopped_requeued_and_cancelled(cluster, data, uninterrupted, tmp_path):
    """SIGTERM: saved and requeued. scancel: saved, and it stays cancelled."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way, ALWAYS=1)
        trial.train_a_little()
        trial.signal("--signal=TERM")
        assert trial.wait_for(REQUEUED) < 15
        [first] = trial.stopped()
        trial.wait_for(f"^Resumed after step {first}$")
        trial.wait_for(rf"^epoch={(first + 2) // 15 + 1} step={(first + 2) % 15 + 1}/")

        trial.fault_at = time.monotonic()
        trial.signal()
        job = trial.ends(40)
        assert job.state == "CANCELLED" and trial.restarts == 1, job.log
        assert job.log.count("Requeued") == 1, job.log
        assert len(trial.stopped()) == 2, job.log
        last = trial.stopped()[1]
        assert last > first
        trial.is_equal(uninterrupted(script), last)

    at_once(scenario, IN_ALL_WAYS)


@pytest.mark.matrix
def test_term(cluster, data, uninterrupted, tmp_path):
    """The other scripts. SIGUSR1 does the same, but not under torchrun, which saves meanwhile."""

    def scenario(way, script, name, *options):
        trial = Trial(cluster, way, script, data, tmp_path / way, *options)
        trial.train_a_little()
        trial.survives(uninterrupted, name)

    at_once(scenario, [(*TORCHRUN, "TERM", "--save-every", 2), (*SPAWN, "USR1")])


@pytest.mark.matrix
def test_term_before_the_ranks_listen(cluster, data, uninterrupted, tmp_path):
    """A signal while Python is still starting is not lost: the job saves after its first step."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way, LATE=5)
        trial.wait_for(r"(?s)(^Listening$.*)" f"{{{RANKS[script]}}}")
        trial.survives(uninterrupted, within=60)

    at_once(scenario, IN_ALL_WAYS)


def handles_term(process: int) -> bool:
    """Whether that process has a handler for SIGTERM, number 15."""
    [mask] = re.findall(r"^SigCgt:\t(\w+)$", Path(f"/proc/{process}/status").read_text(), re.M)
    return bool(int(mask, 16) >> 14 & 1)


@pytest.mark.matrix
def test_term_while_a_spawner_imports_torch(cluster, data, uninterrupted, tmp_path):
    """It waits there, and reaches the ranks once they listen."""
    trial = Trial(cluster, "spawn", PREEMPTIBLE, data, tmp_path)

    def both_listen() -> bool:
        spawners = job_processes.starters(trial.job)
        return len(spawners) == 2 and all(map(handles_term, spawners))

    wait_for(both_listen)
    trial.survives(uninterrupted, within=60)


@pytest.mark.matrix
def test_requeued_by_slurm(cluster, data, uninterrupted, tmp_path):
    """By hand, and for a job of higher priority: the ranks have until SIGKILL to save."""
    urgent = ["PartitionName=urgent", "Nodes=ALL", "PriorityTier=2", "State=UP"]
    assert cluster.exec("scontrol", "create", *urgent).returncode == 0

    def scenario(way, script, preempted):
        trial = Trial(cluster, way, script, data, tmp_path / way)
        nodes = trial.train_a_little()
        if preempted:
            options = ["--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
            other = cluster.submit(*options, f"--nodelist={nodes[1]}")
            assert cluster.wait(other).state == "COMPLETED"
        else:
            assert cluster.exec("scontrol", "requeue", trial.job).returncode == 0
        trial.is_equal_after_a_restart(uninterrupted)
        assert trial.stopped() and "Not requeued" not in trial.log, trial.log

    at_once(scenario, [(*SRUN, True), (*TORCHRUN, False)])


@pytest.mark.matrix
def test_time_limit(cluster, data, uninterrupted, tmp_path):
    """SIGTERM comes at the limit, before KillWait. With --signal up to 60 s too early."""

    def scenario(way, script, slow, *limit):
        trial = Trial(cluster, way, script, data, tmp_path / way, sbatch=limit, slow=slow)
        trial.wait_for(REQUEUED, 180)
        trial.is_equal_after_a_restart(uninterrupted)

    # 45 steps: 90 or 135 s.
    ahead = ("torchrun", PREEMPTIBLE, 3, "--time=3", "--signal=TERM@60")
    at_once(scenario, [(*FSDP, 2, "--time=1"), ahead])


@pytest.mark.matrix
def test_save_that_takes_40_seconds(cluster, data, uninterrupted, tmp_path):
    """torchrun.sh gives ranks ten minutes, and torchrun by itself 30 s."""
    trial = Trial(cluster, "torchrun", PREEMPTIBLE, data, tmp_path, SLOW_SAVE=40)
    trial.train_a_little()
    assert trial.survives(uninterrupted, within=90) > 40


@pytest.mark.matrix
def test_term_in_the_last_step(cluster, data, tmp_path):
    """It is saved, and evaluated at the next start."""

    def scenario(way, script, last, *shorter):
        trial = Trial(cluster, way, script, data, tmp_path / way, *shorter, LONG_STEP=last)
        trial.wait_for(f"^In step {last}$")
        trial.signal("--signal=TERM")
        job = trial.ends()
        assert job.state == "COMPLETED" and trial.restarts == 1, job.log
        assert not tracebacks(job.log), job.log
        taken = rf"^(?:epoch=1 )?step={last}/{last} .*\bloss="
        assert len(re.findall(taken, job.log, re.M)) == 1, "the next start takes no step"
        evaluated = r"^(?:step=8/8|epoch=1) .*(?:test|val)_loss="
        assert len(re.findall(evaluated, job.log, re.M)) == 1, job.log

    at_once(scenario, [(*SRUN, 15, "--epochs", 1), (*TORCHRUN, 8, "--steps", 8)])


@pytest.mark.matrix
def test_job_that_may_not_be_requeued_says_what_to_type(cluster, data, uninterrupted, tmp_path):
    """It has saved."""
    trial = Trial(cluster, *SRUN, data, tmp_path, sbatch=["--no-requeue"])
    trial.train_a_little()
    trial.signal("--signal=TERM")
    job = trial.fails()
    assert "\nNot requeued: " in job.log, job.log
    [typed] = re.findall(r"^    (sbatch .* --resume --checkpoint-dir .*)$", job.log, re.M)
    assert f"/{LAUNCHERS['srun']} distributed/{PREEMPTIBLE} " in typed
    size = f"sbatch --parsable --output={tmp_path}/again --ntasks-per-node=1 --gpus-per-node=1"
    again = cluster.exec("bash", "-c", typed.replace("sbatch", size, 1))
    resumed = cluster.wait(int(again.stdout))
    assert resumed.state == "COMPLETED", again
    assert_same_losses(job.log + resumed.log, uninterrupted(PREEMPTIBLE))


# --- dead and stuck ---


@pytest.mark.matrix
def test_killed_while_it_trains(cluster, data, tmp_path):
    """A rank, or torchrun, whose ranks go with it: Slurm ends what is left in the step."""

    def scenario(way, script):
        trial = Trial(cluster, way, script, data, tmp_path / way)
        node = trial.train_a_little()[1]
        torchrun = job_processes.python(trial.job, "torch.distributed.run", node)
        os.kill(next(torchrun, None) or trial.rank(node), signal.SIGKILL)
        job = trial.fails(30)
        assert re.search(rf"^srun: error: {node}: task \d: Killed$", job.log, re.M), job.log

    at_once(scenario, [SRUN, TORCHRUN])


@pytest.mark.matrix
def test_node_crash(cluster, data, uninterrupted, tmp_path):
    """It trains again on other nodes within 60 s. Node 0 has the batch shell."""
    state = Path(f"/run/slurm-cluster-{cluster.environment['CLUSTER']}")

    def scenario(way, script, index, nodes):
        options = {"sbatch": [f"--exclude=node-[1-6],{nodes}"]}
        often = ("--save-every", 5)
        trial = Trial(cluster, way, script, data, tmp_path / way, *often, **options)
        node = trial.train_a_little()[index]
        os.kill(int((state / f"{node}.pid").read_text()), signal.SIGKILL)
        trial.wait_for("^Resumed after step [1-9]", 60)
        trial.is_equal_after_a_restart(uninterrupted)

    # On nodes of its own, each with one to spare.
    at_once(scenario, [(*TORCHRUN, 1, "node-[10-12]"), (*SRUN, 0, "node-[7-9]")])


@pytest.mark.matrix
def test_split_brain(cluster, data, uninterrupted, tmp_path):
    """slurmd dies, and the ranks live on: they end when the job has started elsewhere."""
    one = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2", "--exclude=node-[1-6]"]
    often = ["--save-every", 5]
    trial = Trial(cluster, *FSDP, data, tmp_path, *often, sbatch=one, slow=2.0)
    [node] = trial.train_a_little()
    killed = cluster.exec("pkill", "-KILL", "-x", "slurmd", node=node)  # in its own PID namespace
    assert killed.returncode == 0
    trial.wait_for("^Resumed after step [1-9]")
    wait_for(lambda: not job_processes.ranks(trial.job, "slowly.py", node), 20)
    job = trial.ends(400)
    assert job.state == "COMPLETED" and trial.restarts == 1, job.log
    first = int(re.search(r"^Resumed after step (\d+)$", job.log, re.M)[1])
    reference = uninterrupted("train_fsdp.py", 2)
    assert_same_run(job.log, trial.out, reference, unseen=range(8, first + 1))


@pytest.mark.matrix
def test_cut_link(cluster, data, uninterrupted, tmp_path):
    options = ["--save-every", 5]
    trial = Trial(cluster, *SPAWN, data, tmp_path, *options, sbatch=["--exclude=node-[1-6]"])
    node = trial.train_a_little()[1]
    cluster.exec("ip", "link", "set", "eth0", "down", node=node)
    try:
        # SlurmdTimeout, KillWait and a start together take a minute of an idle machine.
        trial.wait_for("^Resumed after step [1-9]", 240)
    finally:
        cluster.exec("ip", "link", "set", "eth0", "up", node=node)
    trial.is_equal_after_a_restart(uninterrupted)


# --- disks and files ---


@pytest.mark.matrix
def test_killed_while_a_checkpoint_is_written_asynchronously(data, uninterrupted, tmp_path):
    """The steps go on meanwhile, and nothing is left of one that is not whole."""
    out, held, names = tmp_path / "out", tmp_path / "hold", {}
    held.mkdir()
    for step in (10, 20):
        (held / str(step)).touch()
    train = ["distributed/train_fsdp.py", *LANGUAGE_MODEL, "--data-dir", data["train_fsdp.py"]]
    train += ["--checkpoint-dir", out, "--save-every", 10]
    slowly = "tests/scripts/slowly.py"
    with started("./torchrun.sh", slowly, 0.1, *train, HOLD=held, NPROC_PER_NODE=4) as process:
        for line in process.stdout:
            if step := re.match(r"step=(15|25)/", line):
                names[int(step[1])] = sorted(path.name[:8] for path in out.glob("*step*"))
                (held / "10").unlink(missing_ok=True)
            # Step 20's save waits for nothing else than step 10's.
            if 25 in names:
                break
    assert names == {15: [".step_10"], 25: [".step_20", "step_10"]}
    again = ranks(4, slowly, 0, *train, "--resume", HOLD=tmp_path / "none")
    assert again.returncode == 0 and "Resumed after step 10" in again.stdout, again.stderr
    assert sorted(path.name for path in out.glob("*step*")) == ["step_40", "step_45"]
    reference = uninterrupted("train_fsdp.py")
    first = (reference / "log").read_text().partition("step=11/")[0]
    assert_same_run(first + again.stdout, out, reference)


def remount(disk: Path, option: str):
    subprocess.run(["mount", "-o", f"remount,{option}", disk], check=True)


@pytest.mark.matrix
def test_read_only_folder(cluster, disk, data, tmp_path):
    remount(disk, "ro")
    try:
        to = ("--checkpoint-dir", disk / "read-only")
        job = Trial(cluster, *FSDP, data, tmp_path, *to).fails()
    finally:
        remount(disk, "rw")
    said = f"{disk}/read-only cannot be written: Read-only file system"
    assert job.log.count(said) == 1, job.log
    assert "step=" not in job.log and not tracebacks(job.log), job.log
