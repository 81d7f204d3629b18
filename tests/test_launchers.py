"""env.sh and the launchers on the real cluster: counts, addresses, arguments, CPUs, GPUs, and
every way to fail."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import chaos
from conftest import LAUNCHERS, NAMESPACES, REPOSITORY, Job, cells, environment, note, run, wait_for

VARIABLES, STRANGER = "tests/scripts/variables.py", "tests/scripts/stranger.py"
NASTY = [
    "a b",
    "it's",
    'say "x"',
    "*",
    "$HOME",
    "",
    "line\nbreak",
    "--flag=v",
    "; touch canary",
    "`touch canary`",
    "\\",
    "$(touch canary)",
    "--",
]
# What an outer job, or a careless shell, has left in the environment of the one who types sbatch.
STRAY = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "7",
    "NNODES": "5",
    "NPROC_PER_NODE": "a[$(touch canary)]",
    "MASTER_ADDR": "$(touch canary)",
    "MASTER_PORT": "1",
    "OMP_NUM_THREADS": "7",
    "TORCHELASTIC_RUN_ID": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x00000001",
    "SLURM_CPU_BIND_TYPE": "mask_cpu:",
    "SLURM_CPU_BIND_LIST": "0x00000001",
    "SLURM_CPU_BIND_VERBOSE": "quiet",
    "SLURM_MEM_PER_NODE": "1000",
    "SLURM_MEM_PER_CPU": "100",
}


def assert_five_variables(ranks: list[dict], sizes: list[int]):
    """Ranks 0..n-1, each node's local ranks in order from 0, one world size, env.sh's address
    and port for all."""
    count = sum(sizes)
    assert [rank["rank"] for rank in ranks] == list(range(count))
    assert {rank["world_size"] for rank in ranks} == {count}
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank["host"], []).append(rank["local_rank"])
        assert rank["signals"] == ["SIG_DFL", "SIG_DFL"], "nobody has them ignored"
    assert sorted(map(len, nodes.values())) == sorted(sizes)
    assert all(local_ranks == list(range(len(local_ranks))) for local_ranks in nodes.values())
    assert len({(rank["master_addr"], rank["master_port"]) for rank in ranks}) == 1
    assert ranks[0]["master_addr"] in nodes
    assert ranks[0]["master_addr"] == ranks[0]["host"]
    assert int(ranks[0]["master_port"]) == 61000 + int(ranks[0]["job"]) % 4536


def in_all_ways(
    cluster, tmp_path, *script: object, size: dict | None = None, **options
) -> dict[str, Job]:
    """A job of two nodes x two ranks by every launcher, all at once; `size` adds sbatch's
    options for one of them."""
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        more = (size or {}).get(way, [])
        submitted[way] = cluster.submit(
            f"--output={tmp_path}/{way}-%j", *more, launcher, *script, **options
        )
    return {way: cluster.wait(number) for way, number in submitted.items()}


def one_rank_a_node(way: str) -> list[str]:
    return ["--gpus-per-node=1", *(["--ntasks-per-node=1"] if way == "srun" else [])]


# --- sizes, addresses, arguments ---


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory) -> dict[str, Job]:
    """As the header asks for them, with hostile arguments, from an environment that is full of
    an outer job's."""
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        command = [f"--chdir={REPOSITORY}", launcher, VARIABLES, *NASTY]
        submitted[way] = cluster.submit(
            *command, env=STRAY, cwd=tmp_path_factory.mktemp("elsewhere")
        )
    ended = {way: cluster.wait(number) for way, number in submitted.items()}
    for way, job in ended.items():
        log = Path(cluster.show(job.id)["StdOut"])
        assert log == REPOSITORY / f"{LAUNCHERS[way]}_{job.id}.out"
        log.unlink()
    return ended


@pytest.mark.parametrize("way", LAUNCHERS)
def test_header_is_what_the_job_gets(way, jobs, cluster):
    """Asked for is what the job has."""
    assert jobs[way].state == "COMPLETED", jobs[way].log
    tasks, shown = 2 if way == "srun" else 1, cluster.show(jobs[way].id)
    assert (
        shown["NumNodes"] == "2"
        and shown["NumTasks"] == str(2 * tasks)
        and shown["TimeLimit"] == "01:00:00"
    )
    assert "gres:gpu:2" in shown["TresPerNode"] and shown["CPUs/Task"] == str(2 // tasks)
    assert shown["Requeue"] == "1"


@pytest.mark.parametrize("way", LAUNCHERS)
def test_ranks_arguments_and_nothing_of_an_outer_job(way, jobs):
    job = jobs[way]
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [2, 2])
    assert all(rank["arguments"] == NASTY for rank in job.ranks())
    assert {rank["threads"] for rank in job.ranks()} == {"1"}
    assert not (REPOSITORY / "canary").exists()
    first = rf"{LAUNCHERS[way]}: 4 ranks on node-\S+, 1 CPUs each, at node-\d+:\d+"
    assert re.fullmatch(first, job.log.splitlines()[0]), job.log


@pytest.mark.matrix
def test_srun_at_512_ranks(cluster, tmp_path):
    size = ["--nodes=64", "--ntasks-per-node=8", "--gpus-per-node=8", f"--output={tmp_path}/log"]
    job = cluster.sbatch(*size, LAUNCHERS["srun"], VARIABLES, timeout=180)
    assert job.state == "COMPLETED", job.log[-2000:]
    assert_five_variables(job.ranks(), [8] * 64)
    assert job.ranks()[0]["job_world_size"] == ["64", "8", "512"]


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["torchrun", "spawn"])
def test_torchrun_and_spawn_at_16_ranks(way, cluster, tmp_path):
    job = cluster.sbatch(
        "--nodes=8", f"--output={tmp_path}/log", LAUNCHERS[way], VARIABLES, timeout=180
    )
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [2] * 8)


def test_uneven_allocation(cluster, tmp_path):
    """11 tasks on 3 nodes, 4(x2),3: one sentence by every launcher, before any rank."""
    size = ["--nodes=3", "--ntasks=11", "--ntasks-per-node=4", "--gpus-per-node=4"]
    for job in in_all_ways(
        cluster, tmp_path, VARIABLES, size=dict.fromkeys(LAUNCHERS, size)
    ).values():
        assert job.state == "FAILED", job.log
        said = "11 tasks are not 4 on each node: use --ntasks-per-node"
        assert job.log == f"env.sh: {said}\n"


def test_more_ranks_than_tasks_under_srun(cluster, tmp_path):
    """Eight GPUs and the header's two tasks: the first line says how many ranks, srun that they
    do not fit."""
    job = cluster.sbatch(
        "--gpus-per-node=8", f"--output={tmp_path}/log", LAUNCHERS["srun"], VARIABLES
    )
    assert job.state == "FAILED" and job.ranks() == [], job.log
    first, second = job.log.splitlines()
    assert ": 16 ranks on " in first and second.endswith(
        "More processors requested than permitted"
    ), job.log


def test_ranks_on_the_cpu_are_the_tasks(cluster, tmp_path):
    size = [
        "--nodes=1",
        "--gpus-per-node=0",
        "--ntasks-per-node=3",
        "--cpus-per-task=2",
        f"--output={tmp_path}/log-%j",
    ]
    numbers = [cluster.submit(*size, LAUNCHERS[way], VARIABLES) for way in ("srun", "torchrun")]
    for job in map(cluster.wait, numbers):
        assert job.state == "COMPLETED", job.log
        assert_five_variables(job.ranks(), [3])
        assert {(rank["threads"], rank["cuda"]) for rank in job.ranks()} == {("2", None)}


def test_torchrun_by_hand_passes_arguments_untouched(tmp_path):
    script = tmp_path / "arguments.py"
    script.write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    done = run("./torchrun.sh", script, *NASTY, env=environment(NPROC_PER_NODE=1))
    assert json.loads(done.stdout) == NASTY, done.stderr


def test_default_script_is_train_ddp(cluster, tmp_path):
    """Without arguments a launcher runs train_ddp.py, which says that there are no data."""
    for name in (
        "env.sh",
        LAUNCHERS["srun"],
        "aux/slurm_rank.sh",
        "distributed/train_ddp.py",
        "distributed/mnist.py",
    ):
        copy_file(name, tmp_path)
    job = cluster.sbatch("--output=log", LAUNCHERS["srun"], cwd=tmp_path)
    assert job.state == "FAILED" and job.seconds < 60, job.log
    assert "no MNIST data in data/mnist: prepare it once" in job.log, job.log


def test_job_array(cluster, tmp_path):
    """Two tasks of an array at once on the same nodes: other ports, both whole."""
    size = ["--array=8-9", "--nodes=2", "--nodelist=node-[3-4]", f"--output={tmp_path}/log-%a"]
    cluster.sbatch(*size, "--wait", LAUNCHERS["srun"], VARIABLES)
    logs = [tmp_path / f"log-{i}" for i in (8, 9)]
    wait_for(
        lambda: all(log.exists() and log.read_text().count("VARIABLES") == 4 for log in logs), 60
    )
    found = [set(re.findall(r'"master_port": "(\d+)"', log.read_text())) for log in logs]
    assert found[0] != found[1] and all(len(ports) == 1 for ports in found)


# --- env.sh ---

ONE_TASK_A_NODE = {"SLURM_NTASKS_PER_NODE": 1, "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": 2}


def source_env(cluster, **variables) -> str:
    """What env.sh makes of Slurm's variables, on a node, with the real scontrol."""
    slurm = {
        "HOSTNAME": "node-1",
        "SLURM_JOB_ID": 89,
        "SLURM_JOB_NAME": "name",
        "SLURM_JOB_NUM_NODES": 2,
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_NTASKS": 4,
        "SLURM_NTASKS_PER_NODE": 2,
        "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
    }
    given = [f"{name}={value}" for name, value in (slurm | variables).items() if value is not None]
    names = [
        "NNODES",
        "NPROC_PER_NODE",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CPUS_PER_NODE",
    ]
    names += ["OMP_NUM_THREADS", "NCCL_DEBUG"]
    show = "source ./env.sh >/dev/null && echo " + " ".join(f'"${name}"' for name in names)
    done = cluster.exec("env", *given, "bash", "-euo", "pipefail", "-c", show)
    return (
        done.stdout.strip()
        if done.returncode == 0
        else f"status {done.returncode}: {done.stderr.strip()}"
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "2 2 4 node-1 61089 4 2 WARN"),
        ({"SLURM_JOB_ID": "0089"}, "2 2 4 node-1 61089 4 2 WARN"),
        ({"SLURM_JOB_ID": "4537"}, "2 2 4 node-1 61001 4 2 WARN"),
        ({"SLURM_JOB_NODELIST": "node-[2,7]"}, "2 2 4 node-2 61089 4 2 WARN"),
        ({"SLURM_GPUS_ON_NODE": 8}, "2 8 16 node-1 61089 4 1 WARN"),
        ({"SLURM_GPUS_ON_NODE": 2, "SLURM_CPUS_PER_TASK": 16}, "2 2 4 node-1 61089 32 16 WARN"),
        (
            {"SLURM_GPUS_ON_NODE": 4, **ONE_TASK_A_NODE, "SLURM_CPUS_PER_TASK": 16},
            "2 4 8 node-1 61089 16 4 WARN",
        ),
        ({"SLURM_NTASKS_PER_NODE": None, "SLURM_NTASKS": None}, "2 1 2 node-1 61089 4 4 WARN"),
        ({"SLURM_JOB_CPUS_PER_NODE": "16,8"}, "2 2 4 node-1 61089 16 8 WARN"),
        # As asked for, before as granted: an exclusive node has all its GPUs, its steps only those
        # asked for.
        ({"SLURM_GPUS_PER_NODE": 2, "SLURM_GPUS_ON_NODE": 8}, "2 2 4 node-1 61089 4 2 WARN"),
        ({"SLURM_GPUS_PER_NODE": "a100:4", "SLURM_GPUS_ON_NODE": 8}, "2 4 8 node-1 61089 4 1 WARN"),
        # salloc knows none on the node
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, "2 4 8 node-1 61089 4 1 WARN"),
        ({"SLURM_GPUS_PER_NODE": 0, "SLURM_GPUS_ON_NODE": 8}, "2 2 4 node-1 61089 4 2 WARN"),
        # Nothing but Slurm's variables is read, and what is for NCCL alone.
        (
            {
                "NPROC_PER_NODE": 3,
                "MASTER_ADDR": "10.0.0.7",
                "MASTER_PORT": 5,
                "OMP_NUM_THREADS": 7,
            },
            "2 2 4 node-1 61089 4 2 WARN",
        ),
        ({"NCCL_DEBUG": "INFO"}, "2 2 4 node-1 61089 4 2 INFO"),
        (
            {"SLURM_TASKS_PER_NODE": "4,3", "SLURM_NTASKS": 7, "SLURM_NTASKS_PER_NODE": 4},
            "status 1: env.sh: 7 tasks are not 4 on each node: use --ntasks-per-node",
        ),
        (
            {"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": 7, "SLURM_NTASKS_PER_NODE": 4},
            "status 1: env.sh: 7 tasks are not 4 on each node: use --ntasks-per-node",
        ),
        ({"SLURM_GPUS": 4, "SLURM_GPUS_ON_NODE": 2}, "2 2 4 node-1 61089 4 2 WARN"),
        (
            {"SLURM_GPUS": "a100:5", "SLURM_GPUS_ON_NODE": 2},
            "status 1: env.sh: --gpus=5 is not 2 on each node: use --gpus-per-node",
        ),
        (
            {"SLURM_JOB_NODELIST": "gpu-a-007.rack-2,gpu-a-008.rack-2"},
            "status 1: env.sh: the host name gpu-a-007.rack-2 does not resolve on node-1: "
            "edit MASTER_ADDR",
        ),
    ],
)
def test_env_sh(variables, expected, cluster):
    assert source_env(cluster, **variables) == expected


def test_rank_under_srun_is_by_node():
    """If a topology plugin has put task 1 on the second of two nodes, its rank is 2."""
    given = {"SLURM_NODEID": 1, "SLURM_LOCALID": 0, "SLURM_PROCID": 1, "NPROC_PER_NODE": 2}
    done = run(
        "./aux/slurm_rank.sh", "bash", "-c", 'echo "$RANK $LOCAL_RANK"', env=environment(**given)
    )
    assert done.stdout == "2 0\n", done.stderr


SHELL = r"""
state() {
    set +o; shopt; declare -p | grep -vE "^declare -\S+ $own="; declare -F; trap; umask; pwd
}
own='(_|BASH_\w+|PIPESTATUS|FUNCNAME|LINENO|SECONDS|S?RANDOM|EPOCH\w+)'
state >"$1/before"
source ./env.sh
state >"$1/after"
"""


@pytest.mark.parametrize("where", ["a login shell", "a script", "an allocation"])
def test_source_env_sh_by_hand(where, cluster, tmp_path):
    """It is one sentence, and leaves the shell as it was."""
    bash = [
        "bash",
        "--norc",
        "--noprofile",
        *(["-i"] if where != "a script" else []),
        "-c",
        SHELL,
        "shell",
        tmp_path,
    ]
    done = (
        cluster.exec("salloc", "--nodes=2", "--quiet", *bash)
        if where == "an allocation"
        else run(*bash)
    )
    assert done.returncode == 0, done.stderr
    # bash itself complains of a shell without a terminal.
    ours = [line for line in done.stderr.splitlines() if not line.startswith("bash: ")]
    assert len(ours) == 1 and ours[0].startswith("env.sh is for the launchers: sbatch launch_"), (
        ours
    )
    assert (tmp_path / "before").read_text() == (tmp_path / "after").read_text() != ""


@pytest.mark.parametrize("launcher", LAUNCHERS.values())
def test_outside_slurm(launcher):
    outside = run("bash", launcher)
    assert outside.returncode == 1 and len(outside.stderr.splitlines()) == 1
    assert "env.sh is for the launchers: sbatch" in outside.stderr


def test_in_the_wrong_folder(cluster, tmp_path):
    job = cluster.sbatch(
        f"--output={tmp_path}/log", REPOSITORY / LAUNCHERS["torchrun"], cwd=tmp_path
    )
    assert job.state == "FAILED" and job.log.endswith("./env.sh: No such file or directory\n"), (
        job.log
    )
    assert len(job.log.splitlines()) == 1


def test_names_of_the_fast_network(cluster, tmp_path):
    """The EDIT line for MASTER_ADDR holds in a job, too, that was submitted from inside a job on
    other nodes."""
    for name in (
        "aux",
        "tests",
        "distributed",
        "torchrun.sh",
        LAUNCHERS["srun"],
        LAUNCHERS["torchrun"],
    ):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    edited = re.sub(
        r"^# (MASTER_ADDR=.*i) +# EDIT.*$", r"\1", (REPOSITORY / "env.sh").read_text(), flags=re.M
    )
    assert edited.count("\nMASTER_ADDR=${MASTER_ADDR}i\n") == 1
    (tmp_path / "env.sh").write_text(edited)
    names = "".join(f"10.7.0.{i} node-{i}i\n" for i in (11, 12))
    cluster.exec("bash", "-c", 'printf %s "$1" >>/etc/hosts', "bash", names)
    inner = ["--nodelist=node-12", "--nodes=1", f"--output={tmp_path}/inner"]
    (tmp_path / "outer.py").write_text(
        "import os, subprocess\n"
        "print(os.environ['MASTER_ADDR'])\n"
        f"command = ['sbatch', *{inner}, '{LAUNCHERS['torchrun']}', '{STRANGER}']\n"
        "os.environ['RANK'] != '0' or print(subprocess.check_output(command, text=True))\n"
    )
    options = ["--nodes=1", "--nodelist=node-11", f"--output={tmp_path}/outer"]
    outer = cluster.sbatch(*options, LAUNCHERS["srun"], "outer.py", cwd=tmp_path)
    assert outer.state == "COMPLETED" and ", at node-11i:" in outer.log, outer.log
    job = cluster.wait(int(re.search(r"Submitted batch job (\d+)", outer.log)[1]))
    assert job.state == "COMPLETED" and ", at node-12i:" in job.log, job.log
    assert job.log.count("of 2, local rank") == 2, job.log


# --- the files to copy ---

THREE_FILES = {
    "srun": ["env.sh", LAUNCHERS["srun"], "aux/slurm_rank.sh"],
    "torchrun": ["env.sh", LAUNCHERS["torchrun"], "torchrun.sh"],
    "spawn": ["env.sh", LAUNCHERS["spawn"], "distributed/spawn_ranks.py"],
}


def copy_file(name: str, folder: Path):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(REPOSITORY / name, folder / name)


def test_three_files_and_a_strangers_script(cluster, tmp_path):
    """In an empty folder they train as a job: all ranks end with the same weights, whoever has
    started them."""
    submitted, weights = {}, set()
    for way, files in THREE_FILES.items():
        for name in files:
            copy_file(name, tmp_path / way)
        shutil.copy(REPOSITORY / STRANGER, tmp_path / way / "theirs.py")
        submitted[way] = cluster.submit(
            "--output=log", LAUNCHERS[way], "theirs.py", cwd=tmp_path / way
        )
    for way, number in submitted.items():
        job = cluster.wait(number)
        assert job.state == "COMPLETED", job.log
        found = re.findall(r"^rank (\d) of 4, local rank (\d): the sum is 6$", job.log, re.M)
        assert sorted(found) == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")], job.log
        trained = re.findall(r"^trained: (\S+)$", job.log, re.M)
        assert len(trained) == 4, job.log
        weights.update(trained)
        files = {
            str(path.relative_to(tmp_path / way))
            for path in (tmp_path / way).rglob("*")
            if path.is_file()
        }
        assert {name for name in files if "__pycache__" not in name} == {
            *THREE_FILES[way],
            "theirs.py",
            "log",
        }
    assert len(weights) == 1 and 3 < float(weights.pop()) < 5


@pytest.mark.matrix
def test_tensor_parallel_by_hand(cluster, tmp_path):
    size = ["--nodes=1", f"--output={tmp_path}/log"]
    job = cluster.sbatch(*size, LAUNCHERS["srun"], "distributed/tensor_parallel_by_hand.py")
    assert job.state == "COMPLETED", job.log


# --- CPUs, GPUs, memory, environment ---


@pytest.mark.parametrize("way", cells([(way,) for way in LAUNCHERS], ("srun",)))
def test_an_exclusive_node(way, cluster, tmp_path):
    """It is granted all its eight GPUs and CPUs, but a rank is a GPU that was asked for, with
    the CPUs asked for."""
    size = ["--nodes=2", "--exclusive", "--cpus-per-task=4", f"--output={tmp_path}/log"]
    job = cluster.sbatch(*size, LAUNCHERS[way], VARIABLES)
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [2, 2])
    assert {rank["cuda"] for rank in job.ranks()} == {"0,1"}
    assert {rank["threads"] for rank in job.ranks()} == {"4" if way == "srun" else "2"}


@pytest.mark.parametrize("way", cells([(way,) for way in LAUNCHERS], ("srun",)))
def test_in_salloc(way, cluster, tmp_path):
    """A launcher typed in an allocation runs in it, as it would in a job."""
    size = [
        "--nodes=2",
        "--gpus-per-node=2",
        f"--ntasks-per-node={2 if way == 'srun' else 1}",
        "--cpus-per-task=2",
    ]
    done = cluster.exec("salloc", *size, f"./{LAUNCHERS[way]}", VARIABLES)
    assert done.returncode == 0, done.stderr
    ranks = Job(0, "COMPLETED", 0, done.stdout, 0).ranks()
    assert_five_variables(ranks, [2, 2])
    assert {rank["threads"] for rank in ranks} == {"2" if way == "srun" else "1"}


@pytest.mark.matrix
@pytest.mark.parametrize("way", LAUNCHERS)
def test_submitted_from_a_job_of_other_memory(way, cluster, tmp_path):
    options = [
        "--parsable",
        "--mem-per-cpu=2000",
        f"--output={tmp_path}/nested",
        LAUNCHERS[way],
        VARIABLES,
    ]
    nested = cluster.exec("srun", "--nodes=1", "--mem=3000", "sbatch", *options)
    assert nested.returncode == 0, nested.stderr
    cluster.jobs.append(int(nested.stdout))
    job = cluster.wait(int(nested.stdout))
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [2, 2])


EXPORTS = [(way, export) for way in LAUNCHERS for export in ("NONE", "FOO=1")]


@pytest.mark.parametrize(("way", "export"), cells(EXPORTS, ("srun", "NONE")))
def test_sbatch_export(way, export, cluster, tmp_path):
    """sbatch's --export is for the batch shell. The ranks get what that one has."""
    job = cluster.sbatch(
        f"--export={export}", f"--output={tmp_path}/log", LAUNCHERS[way], VARIABLES
    )
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [2, 2])
    assert all(".venv/bin" in rank["path"].split(":")[0] for rank in job.ranks())


SAVING = """
import os, signal, subprocess, sys, time
def save(*_):
    time.sleep(2)
    import colorsys, late  # from the standard library, and from the environment
    os.write(1, f"saved with {late.__file__}\\n".encode())
    os._exit(0)
signal.signal(signal.SIGTERM, save)
shown = subprocess.run(["show"], capture_output=True, text=True).stdout
os.write(1, f"PLACE {os.environ['SLURMD_NODENAME']} {sys.prefix} {shown}".encode())
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.matrix
def test_an_environment_on_the_nodes_own_disks(cluster, tmp_path):
    """env.sh's line for it: ranks and programs run from there. Gone once the job has ended, not
    before its ranks."""
    repository, local, nodes = tmp_path / "repository", tmp_path / "local", ("node-61", "node-62")
    local.mkdir()
    for name in (*THREE_FILES["srun"], "aux/stage_environment.sh"):
        copy_file(name, repository)
    line, count = re.subn(
        r"^# (PATH=.*) /tmp(\).*)$",
        rf"\1 {local}\2",
        (repository / "env.sh").read_text(),
        flags=re.M,
    )
    assert count == 1
    (repository / "env.sh").write_text(line)
    (repository / "train.py").write_text(SAVING)
    venv = repository / ".venv"
    assert run(sys.executable, "-m", "venv", "--without-pip", venv).returncode == 0
    (venv / f"lib/python3.{sys.version_info[1]}/site-packages/late.py").touch()
    (venv / "bin/show").write_text(f"#!{venv}/bin/python3\nimport sys; print(sys.executable)\n")
    (venv / "bin/show").chmod(0o755)
    for node in nodes:
        mounted = cluster.exec("mount", "-t", "tmpfs", "-o", "size=100m", "none", local, node=node)
        assert mounted.returncode == 0, mounted.stderr

    def submit(log: str, seconds: float, nodes: str = "node-[61-62]", **variables: str) -> int:
        size = [f"--nodelist={nodes}", "--nodes=2", "--gpus-per-node=1", "--ntasks-per-node=1"]
        size += [f"--output={tmp_path}/{log}", "--open-mode=append"]
        return cluster.submit(
            *size, LAUNCHERS["srun"], "train.py", seconds, cwd=repository, env=variables
        )

    def left() -> list[str]:
        return (
            cluster.exec("ls", local, node=nodes[0]).stdout.split()
            + cluster.exec("ls", local, node=nodes[1]).stdout.split()
        )

    def wait_for_places(log: str, count: int = 2):
        deadline = time.monotonic() + 90
        while not (tmp_path / log).exists() or (tmp_path / log).read_text().count("PLACE") < count:
            assert time.monotonic() < deadline, (tmp_path / log).read_text()
            time.sleep(0.2)

    job = cluster.wait(submit("ends", 0))
    assert job.state == "COMPLETED" and left() == [], job.log
    copy = local / f"environment-{job.id}-0"
    places = sorted(re.findall(r"^PLACE (.*)$", job.log, re.M))
    assert places == [f"{node} {copy} {copy}/bin/python3" for node in nodes], job.log

    number = submit("cancelled", 60)
    wait_for_places("cancelled")
    assert sorted(set(left())) == [f"environment-{number}-0"]
    assert cluster.exec("scancel", number).returncode == 0
    job = cluster.wait(number)
    assert (
        job.state == "CANCELLED"
        and job.log.count(f"saved with {local}/environment-{number}-0/lib/") == 2
    ), job.log
    assert left() == []

    number = submit("requeued", 5)
    wait_for_places("requeued")
    assert cluster.exec("scontrol", "requeue", number).returncode == 0
    job = cluster.wait(number)
    assert (
        job.state == "COMPLETED"
        and job.log.count(f"{local}/environment-{number}-1/bin/python3") == 2
    ), job.log
    assert left() == []

    packed = (repository / ".venv.tar").stat()
    (venv / f"lib/python3.{sys.version_info[1]}/site-packages/new.dist-info").mkdir()  # as pip does
    job = cluster.wait(submit("again", 0))
    assert job.state == "COMPLETED" and (repository / ".venv.tar").stat().st_ino != packed.st_ino, (
        job.log
    )
    # No room for what is sent, or to unpack it.
    for size in (
        "20k",
        f"{packed.st_size // 1024 + 8}k",
    ):
        cluster.exec("mount", "-o", f"remount,size={size}", local, node=nodes[1])
        job = cluster.wait(submit(size, 0))
        assert job.state == "FAILED" and "PLACE" not in job.log, job.log
        assert (
            job.log.count("stage_environment.sh on ") == 1
            and "see above" in job.log.splitlines()[-1]
        ), job.log
        assert left() == []


@pytest.mark.parametrize(
    ("options", "count", "devices"),
    [
        (["--gpus-per-node=2"], 2, ["cuda:0", "cuda:1"]),
        (["--gpus-per-node=2", "--gpus-per-task=1"], 1, ["cuda:0", "cuda:0"]),
        pytest.param(
            ["--gpus-per-node=2", "--gpu-bind=single:1"],
            1,
            ["cuda:0", "cuda:0"],
            marks=pytest.mark.matrix,
        ),
        pytest.param(["--gpus-per-node=0"], 0, ["cpu", "cpu"], marks=pytest.mark.matrix),
    ],
)
def test_gpu_binding(options, count, devices, cluster):
    """The script's own device function with Slurm's variables and a device count that follows
    CUDA_VISIBLE_DEVICES."""
    command = [
        "srun",
        "--nodes=1",
        "--ntasks-per-node=2",
        *options,
        "--label",
        "python",
        "tests/scripts/binding.py",
    ]
    done = cluster.exec(*command, env={"TRAIN_DEVICE": "auto"})
    lines = dict(line.split(": ", 1) for line in sorted(done.stdout.splitlines()))
    assert lines.keys() == {"0", "1"}, done.stderr
    for task, device in enumerate(devices):
        # A task with a GPU of its own sees it as number 0 if cgroups hide the others, else by its
        # number on the node.
        visible, *chosen = lines[str(task)].split()
        assert len(re.findall(r"\d", visible)) == count and chosen == [device, "None"], lines


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
    assert "2: 0,1 cpu local rank 2 has no GPU: torch sees 2" in done.stdout, (
        done.stdout + done.stderr
    )


def test_granted_gpus_that_torch_does_not_see_stop_the_job(cluster, tmp_path):
    """Pretended GPUs, and nobody said that the CPU is meant: one sentence, FAILED."""
    command = ["--nodes=1", f"--output={tmp_path}/log", LAUNCHERS["srun"], "aux/check_ranks.py"]
    job = cluster.sbatch(*command, "--device", "auto")
    assert job.state == "FAILED" and job.log.count("Slurm granted 2 GPUs on this node") == 1, (
        job.log
    )
    job = cluster.sbatch(*command)  # the local cluster's TaskProlog sets TRAIN_DEVICE=cpu
    assert job.state == "COMPLETED" and "VERDICT: all well" in job.log, job.log


@pytest.mark.matrix
def test_two_jobs_at_once_on_the_same_nodes(cluster, tiny, tmp_path):
    size = ["--nodes=2", "--nodelist=node-[5-6]", f"--output={tmp_path}/%j.log"]
    train = ["distributed/train_ddp.py", "--data-dir", tiny, "--epochs", 2]
    ids = [
        cluster.submit(*size, LAUNCHERS[way], *train, "--checkpoint-dir", tmp_path / way)
        for way in ("torchrun", "spawn")
    ]
    jobs = [cluster.wait(job) for job in ids]
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, jobs[0].log + jobs[1].log
    ports = [re.search(r", at \S+:(\d+)", job.log)[1] for job in jobs]
    assert ports[0] != ports[1]
    assert "node-5" in jobs[0].log and "node-5" in jobs[1].log


# --- failures ---

SAID = {  # by the one who started the rank
    "srun": r"^srun: error: node-\d+: task 1: Exited with exit code 3$",
    "torchrun": r"^  host      : node-\d+\n  rank      : 1 \(local_rank: 1\)\n  exitcode  : 3 ",
    "spawn": r"^spawn_ranks.py: rank 1 on node-\d+: process 1 terminated with exit code 3$",
}
STEPS = """#!/bin/bash
for ((i = 0; i < $1; i++)); do
    echo "STEP"
    seconds=$SECONDS
    "./$2" tests/scripts/variables.py fail && echo "it should have failed"
    ((SECONDS - seconds < 30)) || echo "it took $((SECONDS - seconds)) s"
done
"""


def test_a_failing_rank_ends_the_job(cluster, tmp_path):
    """Within seconds; its rank or task, its host, its status and its last words are in the log."""
    for way, job in in_all_ways(cluster, tmp_path, VARIABLES, "fail").items():
        assert job.state == "FAILED" and job.exit_code != 0 and job.seconds < 60, job.log
        assert re.search(SAID[way], job.log, re.M), job.log
        assert job.log.count("these are my last words\n") == 1, job.log
        assert cluster.left_over(job.id) == []


@pytest.mark.matrix
def test_a_failing_rank_50_times(cluster, tmp_path):
    """In one job of each launcher, one step after the other."""
    steps, submitted = tmp_path / "steps.sh", {}
    steps.write_text(STEPS)
    for way, launcher in LAUNCHERS.items():
        size = ["--nodes=2", "--gpus-per-node=2", f"--ntasks-per-node={2 if way == 'srun' else 1}"]
        size += ["--cpus-per-task=2", f"--output={tmp_path}/{way}"]
        submitted[way] = cluster.submit(*size, steps, 50, launcher)
    for way, number in submitted.items():
        job = cluster.wait(number, timeout=1200)
        assert job.state == "COMPLETED", job.log
        runs = job.log.split("STEP\n")[1:]
        assert len(runs) == 50 and "it should" not in job.log and "it took" not in job.log, job.log
        for log in runs:
            assert (
                re.search(SAID[way], log, re.M) and log.count("these are my last words\n") == 1
            ), log


def children_of_slurmstepd(job: int) -> Counter:
    """What srun has started in the job's first step, by the names of the programs."""
    found = Counter()
    for process, command in chaos.all_processes(job):
        parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
        if f"[{job}.0]" in Path(f"/proc/{parent}/cmdline").read_text():
            python, program = command.split("\0")[:2]
            assert Path(python).name.startswith("python"), command
            found[Path(program).name] += 1
    return found


def test_what_srun_starts_becomes_the_program(cluster, tmp_path):
    """No shell stays between Slurm and what it signals. So USR1 ends ranks of srun that do not
    listen, and TERM all."""
    becomes = {
        "srun": {"variables.py": 4},
        "torchrun": {"torchrun": 2},
        "spawn": {"spawn_ranks.py": 2},
    }
    logs = {way: tmp_path / way for way in LAUNCHERS}
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        submitted[way] = cluster.submit(f"--output={logs[way]}", launcher, VARIABLES, "wait")
    for way, log in logs.items():
        wait_for(lambda log=log: log.exists() and log.read_text().count("VARIABLES") == 4)
        assert children_of_slurmstepd(submitted[way]) == becomes[way]
        signal = "USR1" if way == "srun" else "TERM"
        assert cluster.exec("scancel", f"--signal={signal}", submitted[way]).returncode == 0
    for way, number in submitted.items():
        job = cluster.wait(number, 30)
        assert job.state == "FAILED", job.log
        assert way != "srun" or "User defined signal 1" in job.log, job.log
        assert cluster.left_over(number) == []


def test_missing_script(cluster, tmp_path):
    """Python's own sentence."""
    size = {way: ["--nodes=1", *one_rank_a_node(way)] for way in LAUNCHERS}
    for job in in_all_ways(cluster, tmp_path, "distributed/train_dpd.py", size=size).values():
        assert job.state == "FAILED" and job.seconds < 60, job.log
        assert (
            re.search(r"distributed/train_dpd\.py'?", job.log)
            and "No such file or directory" in job.log
        ), job.log


def test_independent_worlds_are_named(cluster, tmp_path):
    """A torchrun of one node, started on two: N trainings that do not know of each other, told
    before they begin."""
    wrong = tmp_path / "wrong.sh"
    wrong.write_text(
        "#!/bin/bash\nsource ./env.sh\n"
        'srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 '
        'torchrun --nnodes 1 --standalone --nproc-per-node=1 "$@"\n'
    )
    command = ["--nodes=2", "--gpus-per-node=1", f"--output={tmp_path}/log-%j", wrong]
    for job in [
        cluster.submit(*command, script)
        for script in ("distributed/train_fsdp.py", "aux/check_ranks.py")
    ]:
        job = cluster.wait(job)
        assert job.state == "FAILED", job.log
        assert job.log.count("2 independent trainings instead of one") == 1, job.log


def test_occupied_port(cluster, tmp_path):
    """Another program holds the port on the first node: torch's own sentence, FAILED."""
    listen = (
        "import socket, sys, time; s = socket.create_server(('', int(sys.argv[1]))); time.sleep(90)"
    )
    options = ["--hold", "--nodes=2", "--nodelist=node-[7-8]", f"--output={tmp_path}/log-%j"]
    submitted = {
        way: cluster.submit(*options, launcher, STRANGER) for way, launcher in LAUNCHERS.items()
    }
    holders = []
    try:
        for number in submitted.values():
            port = 61000 + number % 4536
            command = [
                NAMESPACES,
                "exec",
                "--node",
                "node-7",
                sys.executable,
                "-c",
                listen,
                str(port),
            ]
            holders.append(subprocess.Popen(command, env=environment(**cluster.environment)))
            held = ["bash", "-c", f": 3<>/dev/tcp/node-7/{port}"]
            wait_for(lambda held=held: cluster.exec(*held).returncode == 0)
        cluster.exec("scontrol", "release", ",".join(map(str, submitted.values())))
        for way, number in submitted.items():
            job = cluster.wait(number)
            assert job.state == "FAILED" and job.seconds < 60, job.log
            assert re.search("EADDRINUSE|[Aa]ddress already in use", job.log), job.log
            note(way, "any script", job.state, job.exit_code, 0, job.seconds)
    finally:
        for holder in holders:
            holder.terminate()
            holder.wait()


@pytest.mark.matrix
def test_where_each_rank_is(cluster, tiny, tmp_path):
    """SIGABRT, as chapter 13 has it sent to a job of srun's: the lines that every rank was in;
    the job is FAILED."""
    train = [
        "distributed/train_ddp.py",
        "--data-dir",
        tiny,
        "--log-every",
        1,
        "--checkpoint-dir",
        tmp_path / "out",
    ]
    command = [f"--output={tmp_path}/log", LAUNCHERS["srun"], "tests/scripts/batches.py", *train]
    number, log = cluster.submit(*command, env={"SLOW": "5"}), tmp_path / "log"
    wait_for(lambda: log.exists() and "loss=" in log.read_text(), 120)
    assert cluster.exec("scancel", "--signal=ABRT", number).returncode == 0
    job = cluster.wait(number, 60)
    assert job.state == "FAILED" and job.log.count("Fatal Python error: Aborted") >= 4, job.log
    assert (
        len(re.findall(r'^  File ".*/train_ddp.py", line \d+ in <module>$', job.log, re.M)) == 4
    ), job.log
    assert cluster.left_over(number) == []


@pytest.mark.matrix
def test_a_good_job_ends_with_its_last_sentence(cluster, tiny, tmp_path):
    """torchrun's rendezvous has nothing to add to it, in 50 jobs."""
    train = ["distributed/train_ddp.py", "--data-dir", tiny, "--epochs", 1, "--checkpoint-dir"]
    size = [
        "--nodes=2",
        "--exclusive",
        "--gpus-per-node=1",
        "--cpus-per-task=2",
        f"--output={tmp_path}/log-%j",
    ]
    nodes = [f"--nodelist=node-[{first}-{first + 1}]" for first in (31, 33, 35)]  # three at once
    command = [LAUNCHERS["torchrun"], *train]
    jobs = [cluster.submit(*size, nodes[i % 3], *command, tmp_path / str(i)) for i in range(50)]
    for i, number in enumerate(jobs):
        job = cluster.wait(number, timeout=560)
        assert job.state == "COMPLETED", job.log
        assert (
            job.log.splitlines()[-1] == f"Finished: epoch=1, checkpoints in {tmp_path / str(i)}"
        ), job.log


# --- check_ranks.py ---


def test_check_ranks_passes_with_every_launcher(cluster, tmp_path):
    for way, job in in_all_ways(cluster, tmp_path, "aux/check_ranks.py").items():
        assert (
            job.state == "COMPLETED" and f"VERDICT: all well, 4 ranks started by {way}" in job.log
        ), job.log


def test_check_ranks_names_different_versions_of_torch(cluster, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, torch\nif os.environ.get('SLURM_NODEID') == '1': torch.__version__ = '2.0.0'\n"
    )
    options = [f"--output={tmp_path}/log", LAUNCHERS["srun"], "aux/check_ranks.py"]
    job = cluster.sbatch(*options, env={"PYTHONPATH": tmp_path})
    assert job.state == "FAILED", job.log
    said = r"\[Rank 2 on \S+\] different versions of torch: 2\.0\.0, rank 0 2\.13"
    assert re.search(said, job.log), job.log


def test_check_ranks_names_too_few_cpus(cluster, tmp_path):
    """The job asked for eight CPUs a task, but this machine, or a binding, leaves fewer to the
    rank."""
    script = tmp_path / "narrow.py"
    script.write_text(
        "import os, runpy, sys\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.path[0] = 'aux'\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    options = [
        "--cpus-per-task=2",
        f"--output={tmp_path}/log",
        LAUNCHERS["srun"],
        script,
        "aux/check_ranks.py",
    ]
    job = cluster.sbatch(*options)
    assert job.state == "FAILED", job.log
    assert re.search(r"\[Rank 0 on node-\d+\] may use 1 CPUs, but the job asked for 2", job.log), (
        job.log
    )


def test_two_ranks_on_one_device_are_named(cluster, tmp_path):
    """Both ranks of a node see the same single GPU: the comparison in Step 0 stops them before
    NCCL would hang."""
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
