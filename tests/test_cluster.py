"""local/cluster/namespaces.sh itself: small clusters of their own, and what is left when they
are down."""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from conftest import LAUNCHERS, NAMESPACES, Cluster, environment, run, wait_for


@pytest.fixture
def small():
    """Two nodes with two CPUs each, so that Slurm can bind tasks to them, and one GPU."""
    cluster = Cluster(f"small-{os.getpid()}", nodes=2, cpus=2, gpus=1)
    yield cluster
    cluster.down()


def namespaces(cluster, *arguments, **options):
    return run(NAMESPACES, *arguments, env=environment(**cluster.environment), **options)


def test_sinfo_exec_and_status(small, tmp_path):
    idle = small.exec("sinfo", "-N", "-l").stdout
    assert idle.count(" idle ") == 2 and "node-1" in idle and "node-2" in idle
    arguments = ["a b", "it's", "*", "", "line\\nbreak", "$HOME"]
    program = (
        "import json, os, sys; print(json.dumps([os.uname().nodename, os.getcwd(), sys.argv[1:]]))"
    )
    there = small.exec(sys.executable, "-c", program, *arguments, node="node-2", cwd=tmp_path)
    assert json.loads(there.stdout) == ["node-2", str(tmp_path), arguments]
    assert small.exec("bash", "-c", "exit 7").returncode == 7
    assert (
        small.exec("srun", "--nodes=2", "--cores-per-socket=2", "hostname")
        .stdout.split()
        .count("node-2")
        == 1
    )
    assert namespaces(small, "status").returncode == 0


def test_up_again_and_wrong_sizes(small):
    size = ["--nodes", 2, "--cpus", 2, "--gpus", 1]
    assert namespaces(small, "up", *size).returncode == 0
    other = namespaces(small, "up", "--nodes", 3)
    assert other.returncode == 1 and "down" in other.stderr and len(other.stderr.splitlines()) == 1
    for bad in (
        ["up", "--nodes", 0],
        ["up", "--cpu", 2],
        ["exec"],
        ["exec", "--node", "node-9", "true"],
        ["fly"],
    ):
        refused = namespaces(small, *bad)
        assert refused.returncode != 0 and len(refused.stderr.splitlines()) == 1, bad
    # In a shell that exec has opened.
    for there in (
        ["up", *size],
        ["down"],
        ["status"],
        ["exec", "true"],
    ):
        refused = small.exec(NAMESPACES, *there)
        assert refused.returncode == 1 and "'exit' before" in refused.stderr, refused.stderr
    assert namespaces(small, "status").returncode == 0


def test_what_never_fits_is_refused_at_once(small, tmp_path):
    """And what fits later, because a node is down just now, waits for it."""
    for size in (
        ["--nodes=4", "--gpus-per-node=1"],
        ["--nodes=4"],
        ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=8"],
        ["--nodes=2", "--gpus-per-node=1", "--ntasks-per-node=3"],
        ["--nodes=1", "--gpus-per-node=2"],
    ):
        refused = small.exec(
            "sbatch", *size, f"--output={tmp_path}/log", LAUNCHERS["torchrun"], timeout=10
        )
        assert refused.returncode != 0, size
        assert re.search(
            r"^sbatch: error: Batch job submission failed: [A-Z][\w ]+$", refused.stderr, re.M
        ), refused
        assert small.exec("srun", *size, "true", timeout=10).returncode != 0, size
    assert small.exec("squeue", "--noheader").stdout == ""
    assert (
        small.exec("scontrol", "update", "NodeName=node-2", "State=DOWN", "Reason=test").returncode
        == 0
    )
    job = small.submit("--nodes=2", "--gpus-per-node=1", f"--output={tmp_path}/log", "--wrap=true")
    assert small.exec("scontrol", "update", "NodeName=node-2", "State=RESUME").returncode == 0
    assert small.wait(job, 60).state == "COMPLETED"


@pytest.mark.parametrize(("tasks", "cpus"), [(2, 1), (1, 2)])
def test_cpus_are_bound(tasks, cpus, small, tmp_path):
    """A rank may use --cpus-per-task CPUs, no more, and its thread count says so."""
    size = [
        f"--ntasks-per-node={tasks}",
        f"--gpus-per-node={0 if tasks == 2 else 1}",
        f"--cpus-per-task={cpus}",
    ]
    job = small.sbatch(
        *size, f"--output={tmp_path}/log", LAUNCHERS["srun"], "tests/scripts/variables.py"
    )
    assert job.state == "COMPLETED", job.log
    assert [len(rank["cpus"]) for rank in job.ranks()] == [cpus] * 2 * tasks
    assert {rank["threads"] for rank in job.ranks()} == {str(cpus)}
    # One task a node: its CPUs are shared by the ranks that it starts.
    for way in ("torchrun", "spawn") if tasks == 1 else ():
        size = ["--gpus-per-node=1", f"--output={tmp_path}/log-{way}"]
        job = small.sbatch(*size, LAUNCHERS[way], "tests/scripts/variables.py")
        assert [(len(rank["cpus"]), rank["threads"]) for rank in job.ranks()] == [(2, "2")] * 2, (
            job.log
        )


def test_signals_reach_the_direct_children_of_slurmstepd_alone(small, tmp_path):
    """As on a real site, with proctrack/cgroup: a shell between srun and a rank keeps a signal
    from it."""
    assert "proctrack/cgroup" in small.exec("scontrol", "show", "config").stdout
    child = (
        "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: print('child', flush=True))"
    )
    child += "; open('started', 'w').close(); time.sleep(9)"
    (tmp_path / "task.sh").write_text(
        f"#!/bin/bash\ntrap 'echo task' USR1\npython3 -c \"{child}\" &\nwait\nkill $!\n"
    )
    job = small.submit(
        "--nodes=1", f"--output={tmp_path}/log", "--wrap=srun --ntasks=1 bash task.sh", cwd=tmp_path
    )
    wait_for((tmp_path / "started").exists)
    assert small.exec("scancel", "--signal=USR1", job).returncode == 0
    assert small.wait(job).log.split() == ["task"]


def next_job_id(cluster) -> int:
    return int(
        re.search(
            r"^NEXT_JOB_ID\s*= (\d+)", cluster.exec("scontrol", "show", "config").stdout, re.M
        )[1]
    )


def test_cleans_up_after_a_crash(small):
    state = Path(f"/run/slurm-cluster-{small.environment['CLUSTER']}")
    first = next_job_id(small)
    os.kill(int((state / "machine.pid").read_text()), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while namespaces(small, "status").returncode == 0 and time.monotonic() < deadline:
        time.sleep(0.1)
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
        shutil.copy(NAMESPACES, folder)
        refused = run(
            "setpriv",
            "--reuid=65534",
            "--clear-groups",
            "bash",
            f"{folder}/namespaces.sh",
            "up",
            cwd="/",
        )
    assert (
        refused.returncode == 1
        and "needs root" in refused.stderr
        and len(refused.stderr.splitlines()) == 1
    )


@pytest.mark.scale
def test_way_1_at_4096_ranks(tmp_path):
    """512 nodes with 8 ranks each: `make test-scale`."""
    from test_launchers import assert_five_variables

    cluster = Cluster(f"scale-{os.getpid()}", nodes=512, cpus=8, gpus=8)
    try:
        size = [
            "--nodes=512",
            "--ntasks-per-node=8",
            "--gpus-per-node=8",
            f"--output={tmp_path}/log",
        ]
        job = cluster.sbatch(*size, LAUNCHERS["srun"], "tests/scripts/variables.py", timeout=600)
        assert job.state == "COMPLETED", job.log[-3000:]
        assert_five_variables(job.ranks(), [8] * 512)
        print(f"4,096 ranks in {job.seconds} s")
    finally:
        cluster.down()
