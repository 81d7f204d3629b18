"""local/cluster/namespaces.sh itself: small clusters of their own, and what is left when they
are down."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from copies import VARIABLES, assert_five_variables
from slurm import LAUNCHERS, NAMESPACES, REPOSITORY, Cluster, environment, run, wait_for

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def small():
    """Nodes with two CPUs, to which Slurm can bind tasks, and a GPU. The last test crashes it."""
    cluster = Cluster(f"small-{os.getpid()}", nodes=2, cpus=2, gpus=1)
    yield cluster
    cluster.down()


def namespaces(cluster, *arguments, **options):
    return run(NAMESPACES, *arguments, env=environment(**cluster.environment), **options)


def test_sinfo_exec_and_status(small, tmp_path):
    idle = small.exec("sinfo", "-N", "-l").stdout
    assert idle.count(" idle ") == 2 and "node-1" in idle and "node-2" in idle
    arguments = ["a b", "it's", "*", "", "line\\nbreak", "$HOME"]
    program = "import json, os, sys\n"
    program += "print(json.dumps([os.uname().nodename, os.getcwd(), sys.argv[1:]]))"
    there = small.exec(sys.executable, "-c", program, *arguments, node="node-2", cwd=tmp_path)
    assert json.loads(there.stdout) == ["node-2", str(tmp_path), arguments]
    assert small.exec("bash", "-c", "exit 7").returncode == 7
    assert "node-2" in small.exec("srun", "--nodes=2", "hostname").stdout.split()
    assert namespaces(small, "status").returncode == 0


def test_up_again_and_wrong_sizes(small):
    size = ["--nodes", 2, "--cpus", 2, "--gpus", 1]
    assert namespaces(small, "up", *size).returncode == 0
    wrong = [["up", "--nodes", 3], ["up", "--nodes", 0], ["up", "--cpu", 2], ["exec"], ["fly"]]
    for bad in [*wrong, ["exec", "--node", "node-9", "true"]]:
        refused = namespaces(small, *bad)
        assert refused.returncode != 0 and len(refused.stderr.splitlines()) == 1, bad
    # In a shell that exec has opened.
    inside = small.exec(NAMESPACES, "down")
    assert inside.returncode == 1 and "'exit' before" in inside.stderr, inside.stderr
    assert namespaces(small, "status").returncode == 0


def test_what_never_fits_is_refused_at_once(small, tmp_path):
    """And what fits later, because a node is down just now, waits for it."""
    too_much = ["--nodes=4", "--gpus-per-node=1 --cpus-per-task=8", "--nodes=1 --gpus-per-node=2"]
    for size in too_much:
        command = [*size.split(), f"--output={tmp_path}/log", LAUNCHERS["torchrun"]]
        refused = small.exec("sbatch", *command, timeout=10)
        said = "sbatch: error: Batch job submission failed: "
        assert refused.returncode != 0 and said in refused.stderr, refused
    down = ["scontrol", "update", "NodeName=node-2", "State=DOWN", "Reason=test"]
    assert small.exec(*down).returncode == 0
    job = small.submit("--nodes=2", "--gpus-per-node=1", f"--output={tmp_path}/log", "--wrap=true")
    assert small.exec("scontrol", "update", "NodeName=node-2", "State=RESUME").returncode == 0
    assert small.wait(job, 60).state == "COMPLETED"


@pytest.mark.parametrize(("way", "tasks", "cpus"), [("srun", 2, 1), ("spawn", 1, 2)])
def test_cpus_are_bound(way, tasks, cpus, small, tmp_path):
    """A rank may use --cpus-per-task CPUs, no more, and its thread count says so."""
    size = [f"--ntasks-per-node={tasks}", f"--gpus-per-node={2 - tasks}", f"--cpus-per-task={cpus}"]
    job = small.sbatch(*size, f"--output={tmp_path}/log", LAUNCHERS[way], VARIABLES)
    assert job.state == "COMPLETED", job.log
    for node in ("node-1", "node-2"):
        used = [rank["cpus"] for rank in job.ranks() if rank["host"] == node]
        assert [len(its) for its in used] == [cpus] * tasks
        assert len({cpu for its in used for cpu in its}) == 2, "no CPU belongs to two ranks"
    assert {rank["threads"] for rank in job.ranks()} == {str(cpus)}


def test_requeue_is_asked_for(small):
    """By each header: at a site with JobRequeue=0 a preempted job would be gone."""
    change = 'sed -i s/JobRequeue=1/JobRequeue=0/ "$SLURM_CONF" && scontrol reconfigure'
    assert small.exec("bash", "-c", change).returncode == 0
    size = ["--hold", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1"]
    launchers = [*REPOSITORY.glob("launch_*.sh"), REPOSITORY / "run_script.sh"]
    assert len(launchers) == 5
    for launcher in launchers:
        assert small.show(small.submit(*size, launcher))["Requeue"] == "1"
    assert small.show(small.submit("--hold", "--wrap=true"))["Requeue"] == "0"


def test_signals_reach_the_direct_children_of_slurmstepd_alone(small, tmp_path):
    """As on a real site: a shell between srun and a rank keeps a signal from it."""
    assert "proctrack/cgroup" in small.exec("scontrol", "show", "config").stdout
    child = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: print('child')); "
    child += "open('started', 'w').close(); time.sleep(9)"
    task = f"trap 'echo task' USR1\npython3 -uc \"{child}\" &\nwait\nsleep 1\nkill $!\n"
    (tmp_path / "task.sh").write_text(task)
    command = ["--nodes=1", f"--output={tmp_path}/log", "--wrap=srun --ntasks=1 bash task.sh"]
    job = small.submit(*command, cwd=tmp_path)
    wait_for((tmp_path / "started").exists)
    assert small.exec("scancel", "--signal=USR1", job).returncode == 0
    assert small.wait(job).log.split() == ["task"]


def next_job_id(cluster) -> int:
    shown = cluster.exec("scontrol", "show", "config").stdout
    return int(re.search(r"^NEXT_JOB_ID\s*= (\d+)", shown, re.M)[1])


def test_cleans_up_after_a_crash(small):
    state = Path(f"/run/slurm-cluster-{small.environment['CLUSTER']}")
    first = next_job_id(small)
    os.kill(int((state / "machine.pid").read_text()), signal.SIGKILL)
    wait_for(lambda: namespaces(small, "status").returncode != 0, 10)
    assert "not up" in namespaces(small, "status").stderr
    assert namespaces(small, "up", "--nodes", 2, "--cpus", 2, "--gpus", 0).returncode == 0
    # So that jobs find no checkpoints/JOB of other jobs.
    assert abs(next_job_id(small) - first) > 1000
    assert namespaces(small, "down").returncode == 0
    assert namespaces(small, "down").returncode == 0  # twice is no mistake
    assert not state.exists()
    assert small.environment["CLUSTER"] not in Path("/proc/mounts").read_text()


def test_refuses_without_root():
    with tempfile.TemporaryDirectory() as folder:  # one that an ordinary user may enter
        Path(folder).chmod(0o755)
        for name in ("namespaces.sh", "shared.sh"):
            shutil.copy(NAMESPACES.with_name(name), folder)
        user = ["setpriv", "--reuid=65534", "--clear-groups"]
        refused = run(*user, "bash", f"{folder}/namespaces.sh", "up", cwd="/")
    assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1
    assert "needs root" in refused.stderr


@pytest.mark.scale
def test_4096_ranks_of_srun(tmp_path):
    """512 nodes with 8 ranks each: `make test-scale`."""
    cluster = Cluster(f"scale-{os.getpid()}", nodes=512, cpus=64, gpus=8)
    try:
        size = ["--nodes=512", "--ntasks-per-node=8", "--gpus-per-node=8"]
        options = [*size, f"--output={tmp_path}/log", LAUNCHERS["srun"], VARIABLES]
        job = cluster.sbatch(*options, timeout=600)
        assert job.state == "COMPLETED", job.log[-3000:]
        assert_five_variables(job.ranks(), [8] * 512)
        print(f"4,096 ranks in {job.seconds} s")
    finally:
        cluster.down()
