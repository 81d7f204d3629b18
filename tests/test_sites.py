"""What production sites configure: sizes, an MPI plugin, launchers inside of jobs.

test_launchers.py has salloc, --export and sbatch typed in a job; test_fault_tolerance.py has
signals, time limits and --no-requeue.
"""

import re

import pytest

from copies import VARIABLES
from slurm import LAUNCHERS, REPOSITORY, at_once


@pytest.fixture(scope="module")
def without_sizes(tmp_path_factory):
    """A folder with launchers whose headers ask for no CPUs and no GPUs."""
    folder = tmp_path_factory.mktemp("without-sizes")
    for name in ("env.sh", "torchrun.sh", "aux", "distributed", "tests"):
        (folder / name).symlink_to(REPOSITORY / name)
    for name in LAUNCHERS.values():
        line = re.compile(r"^#SBATCH --(cpus-per-task|gpus-per-node)=.*\n", re.M)
        text, count = line.subn("", (REPOSITORY / name).read_text())
        assert count == 2
        (folder / name).write_text(text)
    return folder


SIZES = [
    # sbatch's options, ranks, CPUs of a node
    (["--gpus-per-node=2", "--cpus-per-gpu=4"], 4, 8),
    (["--gpus-per-node=2", "--exclusive"], 4, 64),
    (["--gpus-per-node=2"], 4, 2),
    (["--gres=gpu:2", "--cpus-per-task=2"], 4, 4),
    (["--gpus-per-task=1"], 4, 2),
    (["--gpus=2"], 2, 2),
    # In spite of the GPUs of a job in which sbatch is typed
    ([], 4, 2),
]


def test_ranks_and_cpus_by_every_option(without_sizes, cluster, tmp_path):
    """Two nodes x two tasks: ranks are GPUs, and share the CPUs of the node."""

    def scenario(index, options, ranks, cpus):
        log, outer = f"--output={tmp_path}/{index}", {"SLURM_GPUS_ON_NODE": "8"}
        command = [log, *options, LAUNCHERS["srun"], VARIABLES]
        job = cluster.sbatch(*command, cwd=without_sizes, env=outer)
        assert job.state == "COMPLETED", job.log
        assert [rank["rank"] for rank in job.ranks()] == list(range(ranks)), job.log
        # A crash in a library is a traceback.
        assert all(rank["faulthandler"] for rank in job.ranks())
        first = rf"{LAUNCHERS['srun']}: {ranks} ranks on node-\S+, rank 0 at node-.*, CPUs {cpus}\n"
        assert re.match(first, job.log), job.log

    at_once(scenario, [(index, *case) for index, case in enumerate(SIZES)])


def test_a_launcher_in_a_step(cluster):
    """In `srun bash` a launcher shares its resources."""
    commands = f"./{LAUNCHERS['srun']} {VARIABLES}"
    size = ["--nodes=1", "--gpus-per-node=2", "--cpus-per-task=2"]
    done = cluster.exec("srun", *size, "bash", "-c", commands, timeout=60)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r'"rank": (\d)', done.stdout)) == ["0", "1"], done.stdout
    assert re.search(r"^bash: 2 ranks on node-\d+, rank 0 at", done.stdout, re.M), done.stdout


def test_an_mpi_plugin_that_does_not_load(cluster, tmp_path):
    """As with MpiDefault=pmix where its library is missing: srun would start nothing."""
    size = ["--nodes=1", "--gpus-per-node=1", f"--output={tmp_path}/log"]
    job = cluster.sbatch("--export=ALL,SLURM_MPI_TYPE=absent", *size, LAUNCHERS["srun"], VARIABLES)
    assert job.state == "COMPLETED", job.log
