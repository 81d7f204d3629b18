"""The failure matrix: signals, requeues, dead ranks and nodes, damaged files, on a real cluster.

A job that resumes must have the losses of an uninterrupted run on as many ranks: train_fsdp.py with
weights that are bit for bit the same, however it splits the model; train_preemptible.py up to
rounding. Without options a quick part runs, and with `-m matrix` the rest.
"""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

import job_processes
from slurm import (
    LAUNCHERS,
    REPOSITORY,
    Cluster,
    at_once,
    cells,
    environment,
    mounted_in_memory,
    ranks,
    wait_for,
)
from trials import (
    LANGUAGE_MODEL,
    PREEMPTIBLE,
    RANKS,
    REQUEUED,
    SCRIPTS,
    Trial,
    assert_same_losses,
    assert_same_run,
    remount,
)

IN_ALL_WAYS = [(way, PREEMPTIBLE) for way in LAUNCHERS]
BY_TORCHRUN = [("torchrun", PREEMPTIBLE)]  # between which and the ranks most can go wrong
OTHERS = [case for case in IN_ALL_WAYS if case not in BY_TORCHRUN]
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


def tracebacks(log: str) -> list[str]:
    """Their lines in our own scripts, because torchrun reports every failure with its own."""
    ours = r"^(?:\[rank\d+\]: )?  File \"(?!<frozen|\S*(?:/bin/torchrun|/lib/python)).*"
    return re.findall(ours, log, re.M)


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


@pytest.mark.parametrize(
    "cases", cells([(BY_TORCHRUN,), (OTHERS,)], (BY_TORCHRUN,)), ids=["torchrun", "others"]
)
def test_stopped_requeued_and_cancelled(cases, cluster, data, uninterrupted, tmp_path):
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

    at_once(scenario, cases)


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
