"""env.sh and the launchers on the real cluster: counts, addresses, arguments, CPUs, GPUs, and every way to fail."""

import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import LAUNCHERS, REPOSITORY, Job, cells, environment, note, run, wait_for
from test_style import TRACKED

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


def assert_five_variables(ranks: list[dict], sizes: list[int]):
    """Ranks 0..n-1, each node's local ranks in order from 0, one world size, env.sh's address and port for all."""
    count = sum(sizes)
    assert [rank["rank"] for rank in ranks] == list(range(count))
    assert {rank["world_size"] for rank in ranks} == {count}
    assert {rank["usr1"] for rank in ranks} == {"SIG_IGN"}, "a script that does not handle SIGUSR1 goes on"
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank["host"], []).append(rank["local_rank"])
    assert sorted(map(len, nodes.values())) == sorted(sizes)
    assert all(local_ranks == list(range(len(local_ranks))) for local_ranks in nodes.values())
    assert len({(rank["master_addr"], rank["master_port"]) for rank in ranks}) == 1
    assert ranks[0]["master_addr"] in nodes
    assert ranks[0]["master_addr"] == ranks[0]["host"]
    assert int(ranks[0]["master_port"]) == 61000 + int(ranks[0]["job"]) % 4536


def in_all_ways(cluster, tmp_path, *script: object, size: dict | None = None, **options) -> dict[str, Job]:
    """A job of two nodes x two ranks in every way, all at once; `size` adds sbatch's options for one of them."""
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        more = (size or {}).get(way, [])
        submitted[way] = cluster.submit(f"--output={tmp_path}/{way}-%j", *more, launcher, *script, **options)
    return {way: cluster.wait(number) for way, number in submitted.items()}


@pytest.mark.matrix
def test_way_1_at_512_ranks(cluster, tmp_path):
    size = ["--nodes=64", "--ntasks-per-node=8", "--gpus-per-node=8", f"--output={tmp_path}/log"]
    job = cluster.sbatch(*size, LAUNCHERS["srun"], VARIABLES, timeout=180)
    assert job.state == "COMPLETED", job.log[-2000:]
    assert_five_variables(job.ranks(), [8] * 64)
    assert job.ranks()[0]["job_world_size"] == ["64", "8", "512"]


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["torchrun", "spawn"])
def test_ways_2_and_3_at_16_ranks(way, cluster, tmp_path):
    job = cluster.sbatch("--nodes=8", f"--output={tmp_path}/log", LAUNCHERS[way], VARIABLES, timeout=180)
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [2] * 8)


def test_uneven_allocation(cluster, tmp_path):
    """11 tasks on 3 nodes, 4(x2),3: way 1 takes Slurm's own counts, the other two say what to do."""
    size = ["--nodes=3", "--ntasks=11", "--ntasks-per-node=4", "--gpus-per-node=4", f"--output={tmp_path}/log-%j"]
    job = cluster.sbatch(*size, LAUNCHERS["srun"], VARIABLES)
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [4, 4, 3])
    for way in ("torchrun", "spawn"):
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


def test_torchrun_with_a_node_rank_says_who_knows_it():
    done = run("./torchrun.sh", "0", "node-1")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "'0' is no train script" in done.stderr and "sbatch launch_slurm_with_torchrun.sh SCRIPT" in done.stderr


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
    header = [line for line in lines if re.match(r"#+\s*SBATCH", line)]
    assert lines[1 : 1 + len(header)] == header and all(line.startswith("#SBATCH --") for line in header[:-1])
    assert header[-1].startswith("##SBATCH --mem=0 ") and "EDIT" in header[-1]  # a comment, for Slurm
    assert any("--gpus-per-node=2 " in line and "EDIT" in line for line in header)
    tasks = 2 if way == "srun" else 1
    job = cluster.sbatch(f"--chdir={REPOSITORY}", LAUNCHERS[way], VARIABLES, cwd=tmp_path)
    assert job.state == "COMPLETED", job.log
    shown = cluster.show(job.id)
    assert shown["NumNodes"] == "2" and shown["NumTasks"] == str(2 * tasks) and shown["TimeLimit"] == "01:00:00"
    assert "gres:gpu:2" in shown["TresPerNode"] and shown["CPUs/Task"] == str(2 // tasks)
    assert shown["MinMemoryCPU"] == "1000000M"  # the cluster's default
    assert Path(shown["StdOut"]).name == f"{LAUNCHERS[way]}_{job.id}.out"
    Path(shown["StdOut"]).unlink()
    assert_five_variables(job.ranks(), [2, 2])


def test_default_script_is_train_ddp(cluster, tmp_path):
    """Without arguments a launcher runs train_ddp.py, and without data that says so once, on one rank."""
    for launcher in LAUNCHERS.values():
        assert "if (($# == 0)); then set -- distributed/train_ddp.py; fi" in (REPOSITORY / launcher).read_text()
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


def source_env(cluster, then: str = "", **variables) -> str:
    """What env.sh makes of the variables that Slurm would set, on a node, with the real scontrol; `then` follows it."""
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
    show = f"source ./env.sh && {then or 'true'} && echo " + " ".join(f'"${name}"' for name in names)
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
        # As asked for, before as granted: an exclusive node has all its GPUs, its steps only those asked for.
        ({"SLURM_GPUS_PER_NODE": 2, "SLURM_GPUS_ON_NODE": 8}, "2 2 4 node-1 61089 2 WARN"),
        ({"SLURM_GPUS_PER_NODE": "a100:4", "SLURM_GPUS_ON_NODE": 8}, "2 4 8 node-1 61089 1 WARN"),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, "2 4 8 node-1 61089 1 WARN"),  # salloc knows none on the node
        ({"SLURM_GPUS_PER_NODE": "a100:1,h100:2", "SLURM_GPUS_ON_NODE": 3}, "2 3 6 node-1 61089 1 WARN"),
        ({"SLURM_GPUS_PER_NODE": 0, "SLURM_GPUS_ON_NODE": 8}, "2 2 4 node-1 61089 2 WARN"),
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


def test_the_job_has_its_own_folder_for_dumps(cluster):
    """NCCL's flight recorder under both of its names; with DEBUG=1 it records."""
    show = "env | grep -E '^TORCH_(FR|NCCL)_' | sort"
    folder = {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
    for debug, names in ((0, folder), (1, folder | {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"})):
        lines = source_env(cluster, show, DEBUG=debug).splitlines()[:-1]
        found = dict(line.split("=", 1) for line in lines if line.startswith("TORCH_"))
        assert names <= found.keys() and {found[name] for name in folder} == {"log/89/nccl_trace_rank_"}, lines


@pytest.mark.parametrize(("tasks", "expected"), [("2(x2)", "2 0"), ("2,1", "1 0")])
def test_rank_in_way_1_is_by_node(tasks, expected):
    """Where a topology plugin has put task 1 on the second of two even nodes, its rank is 2."""
    text = (REPOSITORY / LAUNCHERS["srun"]).read_text()
    task = re.search(r"bash --norc -pc '\n(.*?)\n +exec ", text, re.S)[1]
    given = {"SLURM_NODEID": 1, "SLURM_LOCALID": 0, "SLURM_PROCID": 1, "NPROC_PER_NODE": 2}
    given["SLURM_STEP_TASKS_PER_NODE"] = tasks
    done = run("bash", "-euc", f'{task}\necho "$RANK $LOCAL_RANK"', env=environment(**given))
    assert done.stdout == f"{expected}\n", done.stderr
    assert " --distribution=block:block " in text


def test_no_shell_goes_on_asking_for_one_that_is_killed():
    """Slurm kills what it sees of a job, and may miss a shell that has just been forked to ask slurmctld."""
    function = re.search(r"^show_job\(\) \{.*?^\}", (REPOSITORY / "aux/job.sh").read_text(), re.M | re.S)[0]
    stand_ins = 'job=1; scontrol() { echo "$BASHPID" >&2; return 1; }; sleep() { command sleep 0.1; }'
    command = ["bash", "-c", f"{stand_ins}\n{function}\nshown=$(show_job)"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as shell:
        asking = Path("/proc", shell.stderr.readline().strip(), "cmdline")  # empty when it has ended
        shell.kill()
        shell.wait()
        deadline = time.monotonic() + 1.5  # twenty times would take two seconds
        while asking.exists() and asking.read_bytes():
            assert time.monotonic() < deadline, "it asks on"
            time.sleep(0.02)


def test_env_sh_refuses_what_it_cannot_use(cluster):
    bad = source_env(cluster, NPROC_PER_NODE="a[$(touch canary)]")
    assert bad.startswith("status 1") and "not a number of ranks" in bad and not (REPOSITORY / "canary").exists()
    bad = source_env(
        cluster, "start_job Way aux/check_ranks.py", SLURM_JOB_NODELIST="n[1-2]-ib"
    )  # before 23.11 scontrol prints an error, with status 0
    assert ("status 1" in bad and "MASTER_ADDR=HOST" in bad) or "MASTER_ADDR=n1-ib does not resolve" in bad


def test_user_sets_ranks_and_port(cluster, tmp_path):
    """NPROC_PER_NODE and MASTER_PORT of the submitter win, in a job without GPUs; BATCH_SIZE is not read, and told."""
    size = ["--nodes=2", "--gpus-per-node=0", f"--output={tmp_path}/log"]
    variables = {"NPROC_PER_NODE": "3", "MASTER_PORT": "64999", "BATCH_SIZE": "64"}
    variables |= {"EPOCHS": "5", "LEARNING_RATE": "0.1"}
    job = cluster.sbatch(*size, LAUNCHERS["spawn"], VARIABLES, env=variables)
    assert job.state == "COMPLETED", job.log
    for name, flag in (
        ("BATCH_SIZE=64", "batch-size 64"),
        ("EPOCHS=5", "epochs 5"),
        ("LEARNING_RATE=0.1", "learning-rate 0.1"),
    ):
        said = f"note: {name} is not read by {VARIABLES}: say --{flag} after its name, if --help has it\n"
        assert said in job.log, job.log
    assert len(job.ranks()) == 6 and {rank["master_port"] for rank in job.ranks()} == {"64999"}


@pytest.mark.parametrize("way", LAUNCHERS)
def test_cpus_and_threads(way, cluster, tmp_path):
    """--cpus-per-task reaches the ranks as threads: a rank's own in way 1, a node's shared by its ranks in 2 and 3."""
    size = ["--nodes=2", "--cpus-per-task=4", f"--output={tmp_path}/log"]
    job = cluster.sbatch(*size, LAUNCHERS[way], VARIABLES)
    assert job.state == "COMPLETED", job.log
    assert {rank["threads"] for rank in job.ranks()} == {"4" if way == "srun" else "2"}


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
    """env.sh's line for it: ranks and programs run from there. Gone once the job has ended, not before its ranks."""
    repository, local, nodes = tmp_path / "repository", tmp_path / "local", ("node-61", "node-62")
    local.mkdir()
    for name in ("env.sh", *LAUNCHERS.values(), "aux/job.sh", "aux/run_task.sh", "aux/stage_environment.sh"):
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, repository / name)
    shutil.copytree(REPOSITORY / "distributed", repository / "distributed")
    line, count = re.subn(
        r"^# (PATH=.*) /tmp(\).*)$", rf"\1 {local}\2", (repository / "env.sh").read_text(), flags=re.M
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
        return cluster.submit(*size, LAUNCHERS["srun"], "train.py", seconds, cwd=repository, env=variables)

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
    assert job.state == "CANCELLED" and job.log.count(f"saved with {local}/environment-{number}-0/lib/") == 2, job.log
    assert left() == []

    number = submit("requeued", 5)
    wait_for_places("requeued")
    assert cluster.exec("scontrol", "requeue", number).returncode == 0
    job = cluster.wait(number)
    assert job.state == "COMPLETED" and job.log.count(f"{local}/environment-{number}-1/bin/python3") == 2, job.log
    assert left() == []

    packed = (repository / ".venv.tar").stat()
    (venv / f"lib/python3.{sys.version_info[1]}/site-packages/new.dist-info").mkdir()  # as pip does
    job = cluster.wait(submit("again", 0))
    assert job.state == "COMPLETED" and (repository / ".venv.tar").stat().st_ino != packed.st_ino, job.log
    for size in ("20k", f"{packed.st_size // 1024 + 8}k"):  # no room for what is sent, or to unpack it
        cluster.exec("mount", "-o", f"remount,size={size}", local, node=nodes[1])
        job = cluster.wait(submit(size, 0))
        assert job.state == "FAILED" and "PLACE" not in job.log, job.log
        assert job.log.count("stage_environment.sh on ") == 1 and "see above" in job.log.splitlines()[-1], job.log
        assert left() == []


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
    command = ["--nodes=1", f"--output={tmp_path}/log", LAUNCHERS["srun"], "aux/check_ranks.py"]
    job = cluster.sbatch(*command, "--device", "auto")
    assert job.state == "FAILED" and job.log.count("Slurm granted 2 GPUs on this node") == 1, job.log
    job = cluster.sbatch(*command)  # the local cluster's TaskProlog sets TRAIN_DEVICE=cpu
    assert job.state == "COMPLETED" and "VERDICT: 2 ranks" in job.log, job.log


@pytest.mark.matrix
def test_two_jobs_at_once_on_the_same_nodes(cluster, tiny, tmp_path):
    size = ["--nodes=2", "--nodelist=node-[5-6]", f"--output={tmp_path}/%j.log"]
    train = ["distributed/train_ddp.py", "--data-dir", tiny, "--epochs", 2]
    ids = [
        cluster.submit(*size, LAUNCHERS[way], *train, "--checkpoint-dir", tmp_path / way) for way in ("torchrun", "spawn")
    ]
    jobs = [cluster.wait(job) for job in ids]
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, jobs[0].log + jobs[1].log
    ports = [re.search(r"rendezvous at \S+:(\d+)", job.log)[1] for job in jobs]
    assert ports[0] != ports[1]
    assert "node-5" in jobs[0].log and "node-5" in jobs[1].log


FAILING = [(way, fault) for way in LAUNCHERS for fault in ("exit", "kill", "exception")]
STATUS = {
    "exit": (3, "ended with status 3"),
    "kill": (137, "was killed by SIGKILL"),
    "exception": (1, "ended with status 1"),
}


@pytest.mark.parametrize(("way", "fault"), cells(FAILING, *FAILING[::4], ("srun", "kill"), ("torchrun", "exit")))
def test_a_failing_rank_ends_the_job(way, fault, cluster, tmp_path):
    """Its rank, host and status are the last line, its own output stands before it, and its status is the job's."""
    job = cluster.sbatch(f"--output={tmp_path}/log", LAUNCHERS[way], "tests/scripts/fail.py", fault)
    status, how = STATUS[fault]
    assert job.state == "FAILED" and job.exit_code == status, job.log
    assert job.seconds < 30
    assert cluster.left_over(job.id) == []
    assert re.fullmatch(rf"{LAUNCHERS[way]}, job {job.id}: rank 1 on node-\d+ {how}", job.log.splitlines()[-1]), job.log
    assert job.log.count(how) == 1, job.log
    if fault == "exception":
        assert job.log.count("ValueError: boom on purpose") == 1, job.log
        assert re.search(r"\[Rank 1 on node-\d+\] failed:", job.log)
    else:
        assert "Traceback" not in job.log, job.log


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
    for job in [cluster.submit(*command, script) for script in ("distributed/train_fsdp.py", "aux/check_ranks.py")]:
        job = cluster.wait(job)
        assert job.state == "FAILED", job.log
        assert job.log.count("2 independent trainings instead of one") == 1, job.log


def test_occupied_port(cluster, tmp_path):
    """Every way names a port that another program holds on the first node, before any rank starts."""
    listen = "import socket, time; s = socket.create_server(('', 64321)); time.sleep(90)"
    holder = cluster.submit(
        "--nodes=1", "--nodelist=node-7", f"--output={tmp_path}/h", "--wrap", shlex.join([sys.executable, "-c", listen])
    )
    try:
        while cluster.exec("bash", "-c", ": 3<>/dev/tcp/node-7/64321").returncode != 0:
            time.sleep(0.2)
        options = ["--nodes=2", "--nodelist=node-[7-8]", f"--output={tmp_path}/log-%j"]
        submitted = [
            (way, cluster.submit(*options, launcher, VARIABLES, env={"MASTER_PORT": "64321"}))
            for way, launcher in LAUNCHERS.items()
        ]
        for way, number in submitted:
            job = cluster.wait(number)
            sentence = f"{LAUNCHERS[way]}, job {number}: port 64321 on node-7 is taken by another program"
            assert job.state == "FAILED" and job.exit_code == 1 and job.seconds < 30, job.log
            assert job.log == f"{sentence}: submit with MASTER_PORT=ANOTHER\n"
            note(way, "any script", job.state, job.exit_code, 0, job.seconds)
    finally:
        cluster.exec("scancel", holder)


REFUSED = {  # before any rank starts, and the whole log is this sentence
    "MASTER_ADDR=no-such-host": r"the host name MASTER_ADDR=no-such-host does not resolve on node-\d+",
    "MASTER_ADDR=a$(touch canary)": r"scontrol names no first host in .*: submit with MASTER_ADDR=HOST",
    "MASTER_PORT=99999": r"MASTER_PORT is '99999', which is no port number",
    "MASTER_PORT=0": r"MASTER_PORT is '0', which is no port number",
    "MASTER_PORT=http": r"MASTER_PORT is 'http', which is no port number",
    "MASTER_PORT=a[$(touch canary)]": r"MASTER_PORT is 'a\[\$\(touch canary\)\]', which is no port number",
}


def test_addresses_and_ports_that_cannot_be(cluster, tmp_path):
    jobs = []
    for way, launcher in LAUNCHERS.items():
        for variable in REFUSED if way == "torchrun" else list(REFUSED)[::2]:
            env = dict([variable.split("=", 1)])
            jobs.append(
                (launcher, variable, cluster.submit(f"--output={tmp_path}/log-%j", launcher, VARIABLES, env=env))
            )
    for launcher, variable, number in jobs:
        job = cluster.wait(number)
        assert job.state == "FAILED" and job.exit_code == 1 and job.seconds < 30, job.log
        assert re.fullmatch(f"{launcher}, job {number}: {REFUSED[variable]}\n", job.log), job.log
    assert not (REPOSITORY / "canary").exists()


def test_a_strangers_script(cluster, tmp_path):
    """Ten lines of torch that read RANK, LOCAL_RANK and the like run under every launcher as they stand."""
    by_hand = "distributed/tensor_parallel_by_hand.py"
    hand = cluster.submit("--nodes=1", f"--output={tmp_path}/hand", LAUNCHERS["srun"], by_hand)
    for job in in_all_ways(cluster, tmp_path, "tests/scripts/stranger.py").values():
        assert job.state == "COMPLETED", job.log
        found = re.findall(r"^rank (\d) of 4, local rank (\d): the sum is 6$", job.log, re.M)
        assert sorted(found) == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")], job.log
    assert cluster.wait(hand).state == "COMPLETED", cluster.wait(hand).log


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.matrix)])
def test_a_strangers_script_that_fails(times, cluster, tmp_path):
    """The last line names the rank that raised, not its peers, which fail a moment later."""
    one = {way: ["--gpus-per-node=1", *(["--ntasks-per-node=1"] if way == "srun" else [])] for way in LAUNCHERS}
    for _ in range(times):
        for way, job in in_all_ways(cluster, tmp_path, "tests/scripts/stranger.py", "fail", size=one).items():
            assert job.state == "FAILED" and job.exit_code == 1, job.log
            last = rf"{LAUNCHERS[way]}, job {job.id}: rank 1 on node-\d+ ended with status 1"
            assert re.fullmatch(last, job.log.splitlines()[-1]), job.log


@pytest.mark.matrix
def test_where_each_rank_is(cluster, tiny, tmp_path):
    """SIGABRT, as chapter 13 has it sent to a job of way 1: the lines that every rank was in; the job is FAILED."""
    train = ["distributed/train_ddp.py", "--data-dir", tiny, "--log-every", 1, "--checkpoint-dir", tmp_path / "out"]
    command = [f"--output={tmp_path}/log", LAUNCHERS["srun"], "tests/scripts/batches.py", *train]
    number, log = cluster.submit(*command, env={"SLOW": "5"}), tmp_path / "log"
    wait_for(lambda: log.exists() and "loss=" in log.read_text(), 120)
    assert cluster.exec("scancel", "--signal=ABRT", number).returncode == 0
    job = cluster.wait(number, 60)
    assert job.state == "FAILED" and job.log.count("Fatal Python error: Aborted") >= 4, job.log
    assert len(re.findall(r'^  File ".*/train_ddp.py", line \d+ in <module>$', job.log, re.M)) == 4, job.log
    assert cluster.left_over(number) == []


def test_the_line_that_lightning_needs():
    """After it SIGUSR1, which the launchers have ignored, has no handler: Lightning asks for that in these words."""
    page = (REPOSITORY / "docs/16_your_own_model_and_data.md").read_text()
    [line] = re.findall(r"Before the Trainer, say\s+`(signal.signal\(.+?\))`", page)
    asked = "signal.getsignal(signal.SIGUSR1) in (None, signal.SIG_DFL)"
    ignored = "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)"
    done = run(sys.executable, "-c", f"{ignored}; print({asked}); {line}; print({asked})")
    assert done.stdout == "False\nTrue\n", done.stdout + done.stderr


def test_an_exclusive_node(cluster, tmp_path):
    """It is granted all its eight GPUs, but a rank is a GPU that was asked for."""
    size = {way: ["--exclusive", "--cpus-per-task=4"] for way in LAUNCHERS}
    for way, job in in_all_ways(cluster, tmp_path, VARIABLES, size=size).items():
        assert job.state == "COMPLETED", job.log
        assert_five_variables(job.ranks(), [2, 2])
        assert {rank["cuda"] for rank in job.ranks()} == {"0,1"}
        assert {rank["threads"] for rank in job.ranks()} == {"4" if way == "srun" else "2"}


def test_in_salloc(cluster, tmp_path):
    """A launcher typed in an allocation runs in it, as it would in a job."""
    for way, launcher in LAUNCHERS.items():
        size = ["--nodes=2", "--gpus-per-node=2", f"--ntasks-per-node={2 if way == 'srun' else 1}"]
        done = cluster.exec("salloc", *size, "--cpus-per-task=2", f"./{launcher}", VARIABLES)
        assert done.returncode == 0, done.stderr
        job = Job(0, "COMPLETED", 0, done.stdout, 0)
        assert_five_variables(job.ranks(), [2, 2])
        assert {rank["threads"] for rank in job.ranks()} == {"2" if way == "srun" else "1"}


SHELL = r"""
state() { set +o; shopt; declare -p | grep -vE "^declare -\S+ $own="; declare -F; trap; umask; pwd; }
own='(_|BASH_\w+|PIPESTATUS|FUNCNAME|LINENO|SECONDS|S?RANDOM|EPOCH\w+)'
state >"$1/before"
source ./env.sh
state >"$1/after"
"""


@pytest.mark.parametrize("where", ["a login shell", "a script", "an allocation"])
def test_source_env_sh_by_hand(where, cluster, tmp_path):
    """It is one sentence, and leaves the shell as it was."""
    bash = ["bash", "--norc", "--noprofile", *(["-i"] if where != "a script" else []), "-c", SHELL, "shell", tmp_path]
    done = cluster.exec("salloc", "--nodes=2", "--quiet", *bash) if where == "an allocation" else run(*bash)
    assert done.returncode == 0, done.stderr
    ours = [line for line in done.stderr.splitlines() if not line.startswith("bash: ")]  # of a shell without a terminal
    assert len(ours) == 1 and ours[0].startswith("env.sh is read by the launchers: type sbatch launch_"), ours
    assert (tmp_path / "before").read_text() == (tmp_path / "after").read_text() != ""


def test_cpus_are_named(cluster, tmp_path):
    """In the first line, in a note where a rank with a GPU has only one, and in every Usage line that names nodes."""
    note = "note: a rank with a GPU has one CPU"
    for cpus in (1, 2):
        size = {way: ["--nodes=1", f"--cpus-per-task={cpus * (1 if way == 'srun' else 2)}"] for way in LAUNCHERS}
        for way, job in in_all_ways(cluster, tmp_path, VARIABLES, size=size).items():
            assert job.state == "COMPLETED", job.log
            number = {"srun": 1, "torchrun": 2, "spawn": 3}[way]
            first = rf"Way {number}, .*: 2 ranks on node-\S+, CPUs per rank: {cpus}, rendezvous at node-\d+:\d+"
            assert re.fullmatch(first, job.log.splitlines()[0]), job.log
            assert job.log.count(note) == (cpus == 1), job.log
    job = cluster.sbatch("--gpus-per-node=0", f"--output={tmp_path}/log", LAUNCHERS["srun"], VARIABLES)
    assert job.state == "COMPLETED" and "CPUs per rank: 1," in job.log and note not in job.log, job.log
    named = set()
    for path in (path for path in TRACKED if path.endswith((".sh", ".py")) and not path.startswith("tests/")):
        usage = re.findall(r"^#?\s+sbatch --nodes=.*$", (REPOSITORY / path).read_text(), re.M)
        assert all("--cpus-per-task=" in line and "--gpus-per-node=" in line for line in usage), path
        named |= {path} if usage else set()
    assert {*LAUNCHERS.values(), "run_script.sh", "aux/check_ranks.py", "aux/bench/allreduce.py"} <= named


@pytest.mark.matrix
def test_submitted_from_a_task(cluster, tmp_path):
    """sbatch typed in `srun --pty bash`: the job inherits that task's CPU mask and memory, and no job breaks of it."""
    step = {"SLURM_CPU_BIND": "quiet,mask_cpu:0x00000001", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}
    step |= {"SLURM_CPU_BIND_LIST": "0x00000001", "SLURM_CPU_BIND_VERBOSE": "quiet", "SLURM_MEM_PER_NODE": "1000"}
    step |= {"RANK": "3", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "1", "SPAWN_RANKS": "1"}
    step |= {"SLURM_MEM_PER_CPU": "100", "ENV_SH_JOB_ID": "1", "MASTER_ADDR": "old", "MASTER_PORT": "1"}
    for job in in_all_ways(cluster, tmp_path, VARIABLES, env=step).values():
        assert job.state == "COMPLETED", job.log
        assert_five_variables(job.ranks(), [2, 2])
    options = ["--parsable", "--mem-per-cpu=2000", f"--output={tmp_path}/nested", LAUNCHERS["torchrun"], VARIABLES]
    nested = cluster.exec("srun", "--nodes=1", "--mem=3000", "sbatch", *options)
    assert nested.returncode == 0, nested.stderr
    job = cluster.wait(int(nested.stdout))
    cluster.jobs.append(job.id)
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [2, 2])


@pytest.mark.parametrize("export", ["NONE", pytest.param("FOO=1", marks=pytest.mark.matrix)])
def test_sbatch_export(export, cluster, tmp_path):
    """sbatch's --export is for the batch shell. The ranks get what that one has."""
    size = {way: [f"--export={export}"] for way in LAUNCHERS}
    for job in in_all_ways(cluster, tmp_path, VARIABLES, size=size).values():
        assert job.state == "COMPLETED", job.log
        assert_five_variables(job.ranks(), [2, 2])
        assert all(".venv/bin" in rank["path"].split(":")[0] for rank in job.ranks())


def test_a_failure_is_not_named_after_the_rank_that_submitted(cluster, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(9)\n")
    env = {"RANK": "3", "PYTHONPATH": tmp_path}
    job = cluster.sbatch(f"--output={tmp_path}/log", LAUNCHERS["spawn"], VARIABLES, env=env)
    assert job.state == "FAILED" and job.exit_code == 9, job.log
    assert "the process that starts the ranks on node-" in job.log.splitlines()[-1], job.log


def test_names_of_the_fast_network(cluster, tmp_path):
    """The EDIT line for MASTER_ADDR holds in a job, too, that was submitted from inside a job on other nodes."""
    for name in ("aux", "tests", "distributed", "torchrun.sh", LAUNCHERS["srun"], LAUNCHERS["torchrun"]):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    edited = re.sub(r"^# (MASTER_ADDR=.*i) +# EDIT.*$", r"\1", (REPOSITORY / "env.sh").read_text(), flags=re.M)
    assert edited.count("\nMASTER_ADDR=${hosts%%$'\\n'*}i\n") == 1
    (tmp_path / "env.sh").write_text(edited)
    names = "".join(f"10.7.0.{i} node-{i}i\n" for i in (11, 12))
    cluster.exec("bash", "-c", 'printf %s "$1" >>/etc/hosts', "bash", names)
    inner = ["--nodelist=node-12", "--nodes=1", f"--output={tmp_path}/inner"]
    (tmp_path / "outer.py").write_text(
        "import os, subprocess\n"
        "print(os.environ['MASTER_ADDR'])\n"
        f"command = ['sbatch', *{inner}, '{LAUNCHERS['torchrun']}', 'tests/scripts/stranger.py']\n"
        "os.environ['RANK'] != '0' or print(subprocess.check_output(command, text=True))\n"
    )
    options = ["--nodes=1", "--nodelist=node-11", f"--output={tmp_path}/outer"]
    outer = cluster.sbatch(*options, LAUNCHERS["srun"], "outer.py", cwd=tmp_path)
    assert outer.state == "COMPLETED" and "rendezvous at node-11i:" in outer.log, outer.log
    job = cluster.wait(int(re.search(r"Submitted batch job (\d+)", outer.log)[1]))
    assert job.state == "COMPLETED" and "rendezvous at node-12i:" in job.log, job.log
    assert job.log.count("of 2, local rank") == 2, job.log


def test_debug_switch(cluster, tiny, tmp_path):
    """DEBUG=1 shows what the job was given, and trains."""
    train = ["distributed/train_ddp.py", "--data-dir", tiny, "--epochs", 1, "--checkpoint-dir"]
    jobs = {
        way: cluster.submit(
            f"--output={tmp_path}/{way}.log", LAUNCHERS[way], *train, tmp_path / way, env={"DEBUG": "1"}
        )
        for way in ("srun", "torchrun")
    }
    for number in jobs.values():
        job = cluster.wait(number)
        assert job.state == "COMPLETED" and "Finished: epoch=1" in job.log, job.log[-3000:]
        for line in (f"SLURM_JOB_ID={number}", "WORLD_SIZE=4", "NCCL_DEBUG=INFO", "NNODES=2"):
            assert line in job.log.splitlines(), line
        assert "SLURM_JWT" not in job.log


@pytest.mark.parametrize("times", [1, pytest.param(50, marks=pytest.mark.matrix)])
def test_a_good_job_ends_with_its_last_sentence(times, cluster, tiny, tmp_path):
    """torchrun's rendezvous has nothing to add to it."""
    train = ["distributed/train_ddp.py", "--data-dir", tiny, "--epochs", 1, "--checkpoint-dir"]
    size = ["--nodes=2", "--exclusive", "--gpus-per-node=1", "--cpus-per-task=2", f"--output={tmp_path}/log-%j"]
    nodes = [f"--nodelist=node-[{first}-{first + 1}]" for first in (31, 33, 35)]  # three at once
    command = [LAUNCHERS["torchrun"], *train]
    jobs = [cluster.submit(*size, nodes[i % 3], *command, tmp_path / str(i)) for i in range(times)]
    for i, number in enumerate(jobs):
        job = cluster.wait(number, timeout=60 + 10 * times)
        assert job.state == "COMPLETED", job.log
        assert job.log.splitlines()[-1] == f"Finished: epoch=1, checkpoints in {tmp_path / str(i)}", job.log


@pytest.mark.parametrize("launcher", LAUNCHERS.values())
def test_outside_slurm_and_in_the_wrong_folder(launcher, cluster, tmp_path):
    outside = run("bash", launcher)
    assert outside.returncode == 1 and len(outside.stderr.splitlines()) == 1
    assert "env.sh is read by the launchers: type sbatch" in outside.stderr
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
