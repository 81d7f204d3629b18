"""What only nodes with a kernel each can show: NFS with its caches and its faults, and cgroup v2.
make test-kernels runs it on dev/kernels.sh."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from slurm import (
    BACKEND,
    KERNELS,
    LAUNCHERS,
    SHARED,
    Cluster,
    at_once,
    mounted_in_memory,
    one_rank_a_node,
    wait_for,
)
from trials import MNIST, PREEMPTIBLE, REQUEUED, Trial, assert_same_losses, remount

pytestmark = pytest.mark.kernels
FSDP = "train_fsdp.py"


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Path:
    """A small file system of the server's."""
    with mounted_in_memory(tmp_path_factory.mktemp("disk"), "8m") as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(disk):
    assert BACKEND == KERNELS, "make test-kernels runs these tests"
    cluster = Cluster(f"nfs-{os.getpid()}", nodes=4, cpus=16, gpus=2, shared=(*SHARED, disk))
    yield cluster
    cluster.down()


@pytest.fixture(scope="module")
def state(cluster) -> Path:
    return Path(f"/run/slurm-kernels-{cluster.environment['CLUSTER']}")


# --- what it is ---


def test_nodes_as_sites_have_them(cluster):
    """A kernel of their own, cgroup v2, the repository on NFS 4.2."""
    look = "uname --release; cat /proc/self/cgroup; "
    look += "findmnt --noheadings --output=FSTYPE,OPTIONS -T ."
    shown = cluster.exec("srun", "--nodes=2", "--ntasks-per-node=1", "bash", "-c", look).stdout
    scope = r"0::/system\.slice/(node-[12]_)?slurmstepd\.scope/[^/]+/step_0/user/task_[01]"
    assert len(re.findall(rf"^{scope}$", shown, re.M)) == 2, shown
    assert len(re.findall(r"^nfs4 .*\bvers=4\.2\b", shown, re.M)) == 2, shown
    assert os.uname().release not in shown


# --- NFS ---

LOOKS_FIRST = """
import os, runpy, shutil, sys, time
import torch.distributed, torch.utils.data
whole, folder, signs = sys.argv[1:4]
def wait_for(sign):
    while sign not in os.listdir(signs):
        time.sleep(0.1)
if os.environ["RANK"] == "1":
    assert not os.path.exists(folder + "/step_45")
    open(signs + "/looked", "w").close()
    wait_for("saved")
else:
    wait_for("looked")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    open(signs + "/saved", "w").close()
del sys.argv[:4]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_checkpoint_that_a_node_has_just_looked_for(
    cluster,
    data,
    uninterrupted,
    tmp_path,
):
    """In vain, before it was saved on another one, with or without its folder. All ranks resume."""
    (tmp_path / "looks.py").write_text(LOOKS_FIRST)
    whole = uninterrupted(PREEMPTIBLE)

    def scenario(case):
        out, signs, log = (tmp_path / f"{name}-{case}" for name in ("out", "signs", "log"))
        signs.mkdir()
        if case == "folder":
            out.mkdir()
        options = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", f"--output={log}"]
        train = [f"distributed/{PREEMPTIBLE}", *MNIST, "--data-dir", data[PREEMPTIBLE]]
        train += ["--checkpoint-dir", out, "--resume"]
        looks = [tmp_path / "looks.py", whole, out, signs]
        job = cluster.sbatch(*options, LAUNCHERS["torchrun"], *looks, *train)
        assert job.state == "COMPLETED" and "\nResumed after step 45\n" in job.log, job.log

    at_once(scenario, [("folder",), ("nothing",)])


# --- a training and its server ---


def training(cluster, way: str, data, folder: Path, *options, **more) -> Trial:
    """With a checkpoint every five steps."""
    return Trial(cluster, way, PREEMPTIBLE, data, folder, "--save-every", 5, *options, **more)


def completes(trial: Trial, reference: Path):
    job = trial.ends(400)
    assert job.state == "COMPLETED" and trial.restarts == 0, job.log
    assert_same_losses(job.log, reference)


def on_server(cluster, *command: str):
    done = cluster.exec("ip", *command, node="server")
    assert done.returncode == 0, done.stderr


ASKED = {
    "TERM": [(way, PREEMPTIBLE) for way in LAUNCHERS],
    "time limit": [("torchrun", PREEMPTIBLE)],
    # Each rank saves its own.
    "TERM, parts": [("torchrun", FSDP)],
}


@pytest.mark.parametrize("asked", ASKED)
def test_stopped_and_resumed(asked, cluster, data, uninterrupted, tmp_path):
    """Saved on NFS, requeued and resumed, with equal losses; a model in parts bit for bit."""

    def scenario(way, script):
        # Two seconds a step, so that it trains for longer than the limit.
        slow = 2 if asked == "time limit" else 1
        trial = Trial(cluster, way, script, data, tmp_path / way, slow=slow)
        trial.train_a_little()
        if asked == "time limit":
            cluster.exec("scontrol", "update", f"JobId={trial.job}", "TimeLimit=1")
        else:
            trial.signal("--signal=TERM")
        trial.wait_for(REQUEUED, 400)
        cluster.exec("scontrol", "update", f"JobId={trial.job}", "TimeLimit=UNLIMITED")
        trial.is_equal_after_a_restart(uninterrupted)

    at_once(scenario, ASKED[asked])


def test_a_rank_that_hangs_is_named(cluster, data, tmp_path):
    """By heartbeats on NFS: in the log, and by watch_job.py."""
    trial = training(cluster, "torchrun", data, tmp_path, slow=0, STUCK=1)
    said = r"^\[Rank 0 on node-\d\] no step for 6\d s. First to look at: "
    said += r"rank 1 on (node-\d) \(step 7\)"
    trial.wait_for(said, 400)
    node = re.search(said, trial.log, re.M)[1]
    watched = cluster.exec(sys.executable, "aux/watch_job.py", trial.job).stdout
    assert f"{node}: rank 1 keeps the others waiting\n" in watched, watched
    cluster.exec("scancel", trial.job)
    assert trial.ends().state == "CANCELLED"


def test_a_server_that_hangs(cluster, state, data, uninterrupted, tmp_path):
    """For 40 seconds nobody reaches it; later it does not answer. The run waits, and goes on."""
    trial = training(cluster, "torchrun", data, tmp_path, slow=2)
    trial.train_a_little()
    on_server(cluster, "link", "set", "eth0", "down")
    time.sleep(40)
    on_server(cluster, "link", "set", "eth0", "up")
    trial.wait_for("^epoch=2 step=1/")
    server = int((state / "nfs.pid").read_text())
    os.kill(server, signal.SIGSTOP)
    time.sleep(40)
    os.kill(server, signal.SIGCONT)
    completes(trial, uninterrupted(PREEMPTIBLE))
    assert "no step for" not in trial.log, trial.log


def test_a_node_without_the_server(cluster, data, uninterrupted, tmp_path):
    """Its rank goes on, but is silent, which watch_job.py says. Then all is as before."""
    trial = training(cluster, "srun", data, tmp_path, slow=2)
    node = trial.train_a_little()[1]
    address = cluster.exec("getent", "ahostsv4", node).stdout.split()[0]
    on_server(cluster, "route", "add", "blackhole", address)
    try:
        watch = (sys.executable, "aux/watch_job.py", trial.job, "--after", 10)
        said = f"{node}: rank 1 is silent"
        wait_for(lambda: said in cluster.exec(*watch).stdout, 60)
    finally:
        on_server(cluster, "route", "del", "blackhole", address)
    completes(trial, uninterrupted(PREEMPTIBLE))


def test_a_full_server(cluster, disk, data, uninterrupted, tmp_path):
    """The run continues, and only an end that cannot be saved is a failure."""
    reference, out = uninterrupted(PREEMPTIBLE), ["--checkpoint-dir", disk / "out"]
    checkpoint = sum(path.stat().st_size for path in (reference / "step_45").iterdir())
    remount(disk, f"size={checkpoint * 3 // 2}")
    first = training(cluster, "torchrun", data, tmp_path / "first", *out, slow=0).fails(200)
    assert "\nwarning: step 10 is not saved, older ones stay, " in first.log, first.log
    assert "\nThe last steps are not saved\n" in first.log, first.log
    assert not [name for name in os.listdir(disk / "out") if name.startswith(".nfs")]
    remount(disk, "size=64m")
    again = training(cluster, "srun", data, tmp_path / "again", *out, "--resume", slow=0)
    job = again.ends(200)
    assert job.state == "COMPLETED" and "Resumed after step 5\n" in job.log, job.log
    assert_same_losses(first.log + job.log, reference)


# --- cgroup v2 ---

GROWS = """
import os, time
import torch
if os.environ["RANK"] == "1":
    data = []
    while True:
        data.append(torch.ones(10_000_000))
time.sleep(300)
"""


def test_a_rank_that_needs_more_memory(cluster, tmp_path):
    """Linux kills it, and Slurm says so. The job ends at once."""
    (tmp_path / "grows.py").write_text(GROWS)

    def scenario(way):
        size = ["--nodes=2", *one_rank_a_node(way), "--mem=900M", f"--output={tmp_path}/{way}"]
        job = cluster.sbatch(*size, LAUNCHERS[way], tmp_path / "grows.py", timeout=200)
        assert job.state in ("FAILED", "OUT_OF_MEMORY"), job.log
        said = r"^srun: error: node-\d: task 1: Out Of Memory$"
        assert re.search(said, job.log, re.M) and re.search("oom.kill event", job.log), job.log

    at_once(scenario, [(way,) for way in LAUNCHERS])


def test_devices(cluster, state):
    """A step opens the GPUs that it was granted, and no other ones. They have no driver here."""
    open_both = f"for gpu in 0 1; do head -c 1 {state}/inside/gpu$gpu; done"
    done = cluster.exec("srun", "--gpus-per-node=1", "bash", "-c", open_both)
    assert re.search("gpu0.*No such device", done.stderr), done.stderr
    assert re.search("gpu1.*Operation not permitted", done.stderr), done.stderr


SIGNALLED = """
trap 'echo task' USR1
python3 -uc "
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: print('child'))
open('started', 'w').close()
time.sleep(20)
" &
wait
sleep 3
kill $!
"""


@pytest.mark.parametrize("children", [False, True])
def test_whom_a_signal_reaches(children, cluster, state, tmp_path):
    """Only the processes that Slurm has started, or with SignalChildrenProcesses all of a step."""
    if children and re.search(r" 22\.| 23\.02", cluster.exec("slurmd", "-V").stdout):
        pytest.skip("this Slurm has no SignalChildrenProcesses")
    if children:
        change = f"echo SignalChildrenProcesses=yes >>{state}/inside/cgroup.conf; pkill -x slurmd; "
        change += "while pgrep -x slurmd; do sleep 0.2; done; slurmd -N $HOSTNAME"
        assert cluster.exec("bash", "-c", change, node="node-1").returncode == 0
    (tmp_path / "task.sh").write_text(SIGNALLED)
    command = ["--nodelist=node-1", f"--output={tmp_path}/log"]
    command += ["--wrap=srun --ntasks=1 bash task.sh"]
    job = cluster.submit(*command, cwd=tmp_path)
    wait_for((tmp_path / "started").exists)
    assert cluster.exec("scancel", "--signal=USR1", job).returncode == 0
    assert sorted(cluster.wait(job).log.split()) == (["child", "task"] if children else ["task"])


# --- the last one: a node does not come back ---


def test_power_cut(cluster, state, data, uninterrupted, tmp_path):
    """A kernel ends without a word. Its job starts again on other nodes."""
    trial = training(cluster, "srun", data, tmp_path, sbatch=["--exclude=node-1"], slow=1)
    node = trial.train_a_little()[1]
    os.kill(int((state / f"{node}.pid").read_text()), signal.SIGKILL)
    trial.wait_for("^Resumed after step [1-9]")
    trial.is_equal_after_a_restart(uninterrupted)
