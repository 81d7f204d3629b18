"""env.sh and the launchers on the real cluster: counts, addresses, arguments, CPUs, GPUs, and every way to fail."""

import re
import shlex
import sys
import time
from pathlib import Path

import pytest

from conftest import LAUNCHERS, REPOSITORY, cells, environment, note, run

VARIABLES = "tests/scripts/variables.py"
NASTY = [
    "a b",
    "it's",
    'say "x"',
    "*",
    "$HOME",
    "",
    "line\nbreak",
    "--flag=v",
    "; false",
    "\\",
    "$(touch canary)",
    "--",
]


def assert_five_variables(ranks: list[dict], sizes: list[int], own_port: bool = True):
    """Ranks 0..n-1, each node's local ranks in order from 0, one world size, one address and port for all.

    The port is env.sh's, except that torchrun uses that one for its rendezvous and gives the ranks another.
    """
    count = sum(sizes)
    assert [rank["rank"] for rank in ranks] == list(range(count))
    assert {rank["world_size"] for rank in ranks} == {count}
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank["host"], []).append(rank["local_rank"])
    assert sorted(map(len, nodes.values())) == sorted(sizes)
    assert all(local_ranks == list(range(len(local_ranks))) for local_ranks in nodes.values())
    assert len({(rank["master_addr"], rank["master_port"]) for rank in ranks}) == 1
    assert ranks[0]["master_addr"] in nodes
    assert int(ranks[0]["master_port"]) >= (61000 if own_port else 1)


def test_way_1_at_512_ranks(cluster, tmp_path):
    size = ["--nodes=64", "--ntasks-per-node=8", "--gpus-per-node=8", f"--output={tmp_path}/log"]
    job = cluster.sbatch(*size, LAUNCHERS["srun"], VARIABLES, timeout=180)
    assert job.state == "COMPLETED", job.log[-2000:]
    assert_five_variables(job.ranks(), [8] * 64)
    assert job.ranks()[0]["job_world_size"] == ["64", "8", "512"]


@pytest.mark.parametrize("way", cells([("torchrun",), ("mp",)], ("torchrun",)))
def test_ways_2_and_3_at_16_ranks(way, cluster, tmp_path):
    job = cluster.sbatch("--nodes=8", f"--output={tmp_path}/log", LAUNCHERS[way], VARIABLES, timeout=180)
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [2] * 8, own_port=way == "mp")


def test_uneven_allocation(cluster, tmp_path):
    """11 tasks on 3 nodes, 4(x2),3: way 1 takes Slurm's own counts, the other two say what to do."""
    size = ["--nodes=3", "--ntasks=11", "--ntasks-per-node=4", "--gpus-per-node=4", f"--output={tmp_path}/log-%j"]
    job = cluster.sbatch(*size, LAUNCHERS["srun"], VARIABLES)
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [4, 4, 3])
    for way in ("torchrun", "mp"):
        job = cluster.sbatch(*size, LAUNCHERS[way], VARIABLES)
        assert job.state == "FAILED" and job.log.count("uneven allocation") == 1, job.log
        assert "use launch_slurm_to_torch.sh" in job.log and job.ranks() == []


def test_way_1_refuses_a_mismatch_of_tasks_and_gpus(cluster, tmp_path):
    job = cluster.sbatch("--gpus-per-node=8", f"--output={tmp_path}/log", LAUNCHERS["srun"], VARIABLES)
    assert job.state == "FAILED" and "add --ntasks-per-node=8" in job.log and job.ranks() == []


@pytest.mark.parametrize("way", LAUNCHERS)
def test_arguments_arrive_untouched(way, cluster, tmp_path):
    size = ["--nodes=1", "--gpus-per-node=1", f"--output={tmp_path}/log"]
    size += ["--ntasks-per-node=1"] if way == "srun" else []
    job = cluster.sbatch(*size, LAUNCHERS[way], VARIABLES, *NASTY)
    assert job.state == "COMPLETED", job.log
    assert job.ranks()[0]["arguments"] == NASTY
    assert not (REPOSITORY / "canary").exists()


def test_torchrun_by_hand_passes_arguments_untouched():
    script = "import sys, json; print(json.dumps(sys.argv[1:]))"
    path = REPOSITORY / "tests/scripts/arguments_by_hand.py"
    path.write_text(script)
    try:
        done = run("./torchrun.sh", path, *NASTY, env=environment(NPROC_PER_NODE=1))
    finally:
        path.unlink()
    assert done.stdout.strip() == __import__("json").dumps(NASTY), done.stderr


@pytest.mark.parametrize("way", LAUNCHERS)
def test_header_is_what_the_job_gets(way, cluster, tmp_path):
    """Every #SBATCH line is one Slurm reads: directly below the first line, and asked for is what the job has."""
    lines = (REPOSITORY / LAUNCHERS[way]).read_text().splitlines()
    header = [line for line in lines if re.match(r"#\s*SBATCH", line)]
    assert lines[1 : 1 + len(header)] == header and all(line.startswith("#SBATCH --") for line in header)
    assert any("--gpus-per-node=2 " in line and "EDIT" in line for line in header)
    tasks = 2 if way == "srun" else 1
    job = cluster.sbatch(f"--chdir={REPOSITORY}", LAUNCHERS[way], VARIABLES, cwd=tmp_path)
    assert job.state == "COMPLETED", job.log
    shown = cluster.show(job.id)
    assert shown["NumNodes"] == "2" and shown["NumTasks"] == str(2 * tasks) and shown["TimeLimit"] == "01:00:00"
    assert "gres:gpu:2" in shown["TresPerNode"] and shown["CPUs/Task"] == str(2 // tasks)
    assert Path(shown["StdOut"]).name == f"{LAUNCHERS[way]}_{job.id}.out"
    Path(shown["StdOut"]).unlink()
    assert_five_variables(job.ranks(), [2, 2], own_port=way != "torchrun")


def test_default_script_is_train_ddp(cluster, tmp_path):
    """Without arguments a launcher runs train_ddp.py, and without data that says so once, on one rank."""
    for launcher in LAUNCHERS.values():
        assert "set -- distributed/train_ddp.py" in (REPOSITORY / launcher).read_text()
    job = cluster.sbatch(
        f"--output={tmp_path}/log", LAUNCHERS["srun"], "distributed/train_ddp.py", "--data-dir", tmp_path / "none"
    )
    assert job.state == "FAILED" and job.log.count("no MNIST data at") == 1, job.log


def test_job_array(cluster, tmp_path):
    """Two tasks of an array at once on the same nodes: other ports, both whole."""
    size = ["--array=8-9", "--nodes=2", "--nodelist=node-[3-4]", f"--output={tmp_path}/log-%a"]
    cluster.sbatch(*size, "--wait", LAUNCHERS["srun"], VARIABLES)
    deadline = time.monotonic() + 60
    while not all(Path(f"{tmp_path}/log-{i}").exists() for i in (8, 9)) and time.monotonic() < deadline:
        time.sleep(0.2)
    found = []
    for i in (8, 9):
        log = Path(f"{tmp_path}/log-{i}").read_text()
        found.append(set(re.findall(r'"master_port": "(\d+)"', log)))
        assert log.count("VARIABLES") == 4, log
    assert found[0] != found[1] and all(len(ports) == 1 for ports in found)


ONE_TASK_A_NODE = {"SLURM_NTASKS_PER_NODE": 1, "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": 2}


def source_env(cluster, **variables) -> str:
    """What env.sh makes of the variables that Slurm would set, on a node, with the real scontrol."""
    slurm = {
        "SLURM_JOB_ID": 89,
        "SLURM_JOB_NUM_NODES": 2,
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_NTASKS": 4,
        "SLURM_NTASKS_PER_NODE": 2,
        "SLURM_CPUS_ON_NODE": 4,
    }
    given = {name: str(value) for name, value in (slurm | variables).items() if value is not None}
    names = ("NNODES", "NPROC_PER_NODE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "NCCL_DEBUG")
    show = "source ./env.sh && echo " + " ".join(f'"${name}"' for name in names)
    done = cluster.exec(
        "env", *(f"{name}={value}" for name, value in given.items()), "bash", "-euo", "pipefail", "-c", show
    )
    return done.stdout.strip() if done.returncode == 0 else f"status {done.returncode}: {done.stderr.strip()}"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "2 2 4 node-1 61089 2 WARN"),
        ({"SLURM_JOB_ID": "0089"}, "2 2 4 node-1 61089 2 WARN"),
        ({"SLURM_JOB_ID": "4537"}, "2 2 4 node-1 61001 2 WARN"),
        ({"SLURM_GPUS_ON_NODE": 8}, "2 8 16 node-1 61089 1 WARN"),
        ({"SLURM_GPUS_ON_NODE": 2, "SLURM_CPUS_PER_TASK": 16}, "2 2 4 node-1 61089 16 WARN"),
        ({"SLURM_GPUS_ON_NODE": 4, **ONE_TASK_A_NODE, "SLURM_CPUS_PER_TASK": 16}, "2 4 8 node-1 61089 4 WARN"),
        ({"SLURM_NTASKS_PER_NODE": None}, "2 1 2 node-1 61089 4 WARN"),
        ({"SLURM_JOB_NODELIST": "gpu-a-007.rack-2,gpu-a-008.rack-2"}, "2 2 4 gpu-a-007.rack-2 61089 2 WARN"),
        ({"SLURM_JOB_NODELIST": "0042"}, "2 2 4 0042 61089 2 WARN"),
        ({"SLURM_JOB_NODELIST": "b[1,5],a-3"}, "2 2 4 b1 61089 2 WARN"),
        ({"SLURM_TASKS_PER_NODE": "4,3", "SLURM_NTASKS": 7, "SLURM_NTASKS_PER_NODE": 4}, "2 4 7 node-1 61089 1 WARN"),
        ({"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": 7, "SLURM_NTASKS_PER_NODE": 4}, "2 4 7 node-1 61089 1 WARN"),
        ({"NPROC_PER_NODE": 3, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": 5}, "2 3 6 10.0.0.7 5 1 WARN"),
        ({"OMP_NUM_THREADS": 7, "NCCL_DEBUG": "INFO"}, "2 2 4 node-1 61089 7 INFO"),
        # Exported by env.sh of an outer job from which this one was submitted: not the user's.
        (
            {"ENV_SH_JOB_ID": 88, "MASTER_ADDR": "old", "NPROC_PER_NODE": 7, "MASTER_PORT": 1},
            "2 2 4 node-1 61089 2 WARN",
        ),
        ({"ENV_SH_JOB_ID": 89, "MASTER_ADDR": "mine"}, "2 2 4 mine 61089 2 WARN"),
    ],
)
def test_env_sh(variables, expected, cluster):
    assert source_env(cluster, **variables) == expected


def test_env_sh_refuses_what_it_cannot_use(cluster):
    bad = source_env(cluster, NPROC_PER_NODE="a[$(touch canary)]")
    assert bad.startswith("status 1") and "not a number of ranks" in bad and not (REPOSITORY / "canary").exists()
    bad = source_env(cluster, SLURM_JOB_NODELIST="n[1-2]-ib")  # before 23.11 scontrol prints an error, with status 0
    assert ("status 1" in bad and "MASTER_ADDR=HOST" in bad) or "n1-ib" in bad


def test_debug_switch(cluster):
    shown = source_env(cluster, DEBUG=1).splitlines()
    assert "SLURM_NTASKS=4" in shown and shown[-1].endswith("INFO")


def test_user_sets_ranks_and_port(cluster, tmp_path):
    """NPROC_PER_NODE and MASTER_PORT from the submitter's environment win, in a job without GPUs."""
    size = ["--nodes=2", "--gpus-per-node=0", f"--output={tmp_path}/log"]
    job = cluster.sbatch(*size, LAUNCHERS["mp"], VARIABLES, env={"NPROC_PER_NODE": "3", "MASTER_PORT": "64999"})
    assert job.state == "COMPLETED", job.log
    assert len(job.ranks()) == 6 and {rank["master_port"] for rank in job.ranks()} == {"64999"}


@pytest.mark.parametrize("way", LAUNCHERS)
def test_cpus_and_threads(way, cluster, tmp_path):
    """--cpus-per-task reaches the ranks as threads: a rank's own in way 1, a node's shared by its ranks in 2 and 3."""
    size = ["--nodes=2", "--cpus-per-task=4", f"--output={tmp_path}/log"]
    job = cluster.sbatch(*size, LAUNCHERS[way], VARIABLES)
    assert job.state == "COMPLETED", job.log
    assert {rank["threads"] for rank in job.ranks()} == {"4" if way == "srun" else "2"}


@pytest.mark.parametrize(
    ("options", "seen", "device"),
    [
        (["--gpus-per-node=2"], ["0,1", "0,1"], ["cuda:0", "cuda:1"]),
        (["--gpus-per-node=2", "--gpus-per-task=1"], ["0", "1"], ["cuda:0", "cuda:0"]),
        (["--gpus-per-node=2", "--gpu-bind=single:1"], ["0", "1"], ["cuda:0", "cuda:0"]),
        (["--gpus-per-node=0"], [None, None], ["cpu", "cpu"]),
    ],
)
def test_gpu_binding(options, seen, device, cluster, tmp_path):
    """The script's own device function with Slurm's variables and a device count that follows CUDA_VISIBLE_DEVICES."""
    command = ["srun", "--nodes=1", "--ntasks-per-node=2", *options, "--label", "python", "tests/scripts/binding.py"]
    done = cluster.exec(*command, env={"TRAIN_DEVICE": "auto"})
    lines = dict(line.split(": ", 1) for line in sorted(done.stdout.splitlines()))
    assert lines == {str(task): f"{seen[task]} {device[task]} None" for task in (0, 1)}, done.stderr


def test_gpu_binding_with_too_few_devices(cluster):
    command = [
        "srun",
        "--nodes=1",
        "--ntasks-per-node=3",
        "--gpus-per-node=2",
        "--label",
        "python",
        "tests/scripts/binding.py",
    ]
    done = cluster.exec(*command, env={"TRAIN_DEVICE": "auto"})
    assert "2: 0,1 cpu local rank 2 has no GPU: torch sees 2" in done.stdout, done.stdout + done.stderr


def test_granted_gpus_that_torch_does_not_see_stop_the_job(cluster, tmp_path):
    """Pretended GPUs, and nobody said that the CPU is meant: one sentence, FAILED."""
    command = [f"--output={tmp_path}/log", LAUNCHERS["srun"], "aux/check_ranks.py"]
    job = cluster.sbatch(*command, "--device", "auto")
    assert job.state == "FAILED" and job.log.count("Slurm granted 2 GPUs on this node") == 1, job.log
    job = cluster.sbatch(*command)  # the local cluster's TaskProlog sets TRAIN_DEVICE=cpu
    assert job.state == "COMPLETED" and "VERDICT: 4 ranks" in job.log, job.log


def test_two_jobs_at_once_on_the_same_nodes(cluster, tiny, tmp_path):
    size = ["--nodes=2", "--nodelist=node-[5-6]", f"--output={tmp_path}/%j.log"]
    train = ["distributed/train_ddp.py", "--data-dir", tiny, "--max-steps", 10]
    ids = [
        cluster.submit(*size, LAUNCHERS[way], *train, "--checkpoint-dir", tmp_path / way) for way in ("torchrun", "mp")
    ]
    jobs = [cluster.wait(job) for job in ids]
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, jobs[0].log + jobs[1].log
    ports = [re.search(r"rendezvous at \S+:(\d+)", job.log)[1] for job in jobs]
    assert ports[0] != ports[1]
    assert "node-5" in jobs[0].log and "node-5" in jobs[1].log


CAUSES = {
    "srun": {"exit": r"srun: error: (node-\d+): task 1: Exited with exit code 3", "kill": r"task 1: Killed"},
    "torchrun": {
        "exit": r"host +: (node-\d+)\n +rank +: 1 \(local_rank: 1\)\n +exitcode +: 3 ",
        "kill": r"rank +: 1 \(local_rank: 1\)\n +exitcode +: -9 ",
    },
    "mp": {
        "exit": r"rank 1 on (node-\d+) ended with exit code 3",
        "kill": r"rank 1 on (node-\d+) was killed by SIGKILL",
    },
}


FAILING = [(way, fault) for way in LAUNCHERS for fault in ("exit", "kill", "exception")]


@pytest.mark.parametrize(("way", "fault"), cells(FAILING, *FAILING[::4], ("srun", "kill"), ("torchrun", "exit")))
def test_a_failing_rank_ends_the_job(way, fault, cluster, tmp_path):
    job = cluster.sbatch(f"--output={tmp_path}/log", LAUNCHERS[way], "tests/scripts/fail.py", fault)
    assert job.state == "FAILED" and job.exit_code != 0, job.log
    assert job.seconds < 30
    assert cluster.left_over(job.id) == []
    if fault == "exception":
        assert job.log.count("ValueError: boom on purpose") == 1, job.log
        assert re.search(r"\[Rank 1 on node-\d+\] failed:", job.log)
    else:
        assert len(re.findall(CAUSES[way][fault], job.log)) == 1, job.log


@pytest.mark.parametrize("way", cells([(way,) for way in LAUNCHERS], ("torchrun",)))
def test_missing_script_and_missing_data(way, cluster, tmp_path):
    job = cluster.sbatch(f"--output={tmp_path}/log-1", LAUNCHERS[way], "distributed/train_dpd.py")
    assert job.state == "FAILED" and job.log.count("no such train script: distributed/train_dpd.py") == 1, job.log
    job = cluster.sbatch(
        f"--output={tmp_path}/log-2", LAUNCHERS[way], "distributed/train_ddp.py", "--data-dir", tmp_path / "none"
    )
    assert job.state == "FAILED" and job.seconds < 30
    assert job.log.count("no MNIST data at") == 1 and "aux/prepare_data.py mnist" in job.log, job.log
    assert re.search(r"^\[Rank 0 on node-\d+\] no MNIST data", job.log, re.M)
    assert cluster.left_over(job.id) == []


def test_independent_worlds_are_named(cluster, tmp_path):
    """A torchrun of one node, started on two: N trainings that do not know of each other, told before they begin."""
    wrong = tmp_path / "wrong.sh"
    wrong.write_text(
        "#!/bin/bash\nsource ./env.sh\n"
        'srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 '
        'torchrun --nnodes 1 --standalone --nproc-per-node=1 "$@"\n'
    )
    command = ["--nodes=2", "--gpus-per-node=1", f"--output={tmp_path}/log-%j", wrong]
    for job in [cluster.submit(*command, script) for script in ("distributed/train_ddp.py", "aux/check_ranks.py")]:
        job = cluster.wait(job)
        assert job.state == "FAILED", job.log
        assert job.log.count("2 independent trainings instead of one") == 1, job.log


def test_occupied_port(cluster, tmp_path):
    """Every way names a port that another program holds on the first node, and the job ends at once."""
    listen = "import socket, time; s = socket.create_server(('', 64321)); time.sleep(90)"
    holder = cluster.submit(
        "--nodes=1", "--nodelist=node-7", f"--output={tmp_path}/h", "--wrap", shlex.join([sys.executable, "-c", listen])
    )
    while cluster.show(holder)["JobState"] != "RUNNING":
        time.sleep(0.2)
    try:
        for way, launcher in LAUNCHERS.items():
            options = ["--nodes=2", "--nodelist=node-[7-8]", f"--output={tmp_path}/{way}"]
            job = cluster.sbatch(*options, launcher, "aux/check_ranks.py", env={"MASTER_PORT": "64321"})
            assert job.state == "FAILED" and job.seconds < 30, job.log
            assert len(re.findall(r"port 64321 on \S+ is taken by another program", job.log)) == 1, job.log
            note(way, "check_ranks.py", job.state, job.exit_code, 0, job.seconds)
    finally:
        cluster.exec("scancel", holder)


@pytest.mark.parametrize("way", LAUNCHERS)
def test_address_that_does_not_resolve(way, cluster, tmp_path):
    job = cluster.sbatch(
        f"--output={tmp_path}/log", LAUNCHERS[way], "aux/check_ranks.py", env={"MASTER_ADDR": "no-such-host"}
    )
    assert job.state == "FAILED" and job.seconds < 30
    assert len(re.findall(r"on node-\d+.* the host name MASTER_ADDR=no-such-host does not resolve", job.log)) == 1, (
        job.log
    )


@pytest.mark.parametrize("launcher", LAUNCHERS.values())
def test_outside_slurm_and_in_the_wrong_folder(launcher, cluster, tmp_path):
    outside = run("bash", launcher)
    assert outside.returncode == 1 and len(outside.stderr.splitlines()) == 1
    assert "Not in a Slurm job: type sbatch" in outside.stderr
    job = cluster.sbatch(f"--output={tmp_path}/log", REPOSITORY / launcher, cwd=tmp_path)
    assert job.state == "FAILED" and f"No env.sh in {tmp_path}" in job.log and len(job.log.splitlines()) == 1


def test_check_ranks_passes_on_every_way(cluster, tmp_path):
    jobs = {
        way: cluster.submit(f"--output={tmp_path}/{way}", LAUNCHERS[way], "aux/check_ranks.py") for way in LAUNCHERS
    }
    for way, job in jobs.items():
        job = cluster.wait(job)
        assert job.state == "COMPLETED" and f"VERDICT: 4 ranks started by {way} are fine" in job.log, job.log


def test_check_ranks_names_different_versions_of_torch(cluster, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('SLURM_NODEID') == '1':\n    import torch\n    torch.__version__ = '2.0.0'\n"
    )
    options = [f"--output={tmp_path}/log", LAUNCHERS["srun"], "aux/check_ranks.py"]
    job = cluster.sbatch(*options, env={"PYTHONPATH": tmp_path})
    assert job.state == "FAILED", job.log
    assert re.search(r"different versions of torch: 2\.13\S* \(rank 0 on \S+\), 2\.0\.0 \(rank 2 on \S+\)", job.log), (
        job.log
    )


def test_check_ranks_names_too_few_cpus(cluster, tmp_path):
    """The job asked for eight CPUs a task, but this machine, or a binding, leaves fewer to the rank."""
    script = tmp_path / "narrow.py"
    script.write_text(
        "import os, runpy, sys\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.path[0] = 'aux'\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    options = ["--cpus-per-task=2", f"--output={tmp_path}/log", LAUNCHERS["srun"], script, "aux/check_ranks.py"]
    job = cluster.sbatch(*options)
    assert job.state == "FAILED", job.log
    assert re.search(r"\[Rank 0 on node-\d+\] may use 1 CPUs, but the job asked for 2", job.log), job.log


def test_two_ranks_on_one_device_are_named(cluster, tmp_path):
    """Both ranks of a node see the same single GPU: the comparison in Step 0 stops them before NCCL would hang."""
    command = [
        "srun",
        "--nodes=1",
        "--ntasks-per-node=2",
        "--gpus-per-node=1",
        "python",
        "tests/scripts/binding.py",
        "join",
    ]
    done = cluster.exec(*command, env={"TRAIN_DEVICE": "auto"})
    assert done.returncode != 0
    assert done.stderr.count("ranks 0 and 1 are on one device, GPU uuid-0") == 1, done.stderr
