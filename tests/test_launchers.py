"""The launchers on the real cluster: counts, addresses, arguments, CPUs, GPUs, and every way to
fail. test_fault_tolerance.py has signals, time limits and --no-requeue."""

import re
import shutil
from pathlib import Path

import pytest

from copies import (
    NASTY,
    NOTHING,
    STRANGER,
    THREE_FILES,
    VARIABLES,
    assert_five_variables,
    copy_file,
    in_all_ways,
)
from slurm import (
    LAUNCHERS,
    PATIENCE,
    REPOSITORY,
    Job,
    at_once,
    cells,
    environment,
    one_rank_a_node,
    run,
    stand_ins,
)

# What begins an option of torchrun's own. Behind a `--` torchrun would take it as it is.
ABBREVIATED = ["--n", "5", "--log=3", "--max", "--run", "--start", "--local", "--node", "--no"]
ABBREVIATED += ["--event", "--monitor", "--master", "--rdzv", "--nproc_per_n=3", "-m", "-t"]
# What a careless shell has left in the environment of the one who types sbatch,
STRAY = {"NPROC_PER_NODE": "a[$(touch canary)]", "MASTER_ADDR": "$(touch canary)"}
STRAY |= {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "7", "NNODES": "5", "MASTER_PORT": "1"}
STRAY |= {"OMP_NUM_THREADS": "7"}
# and an outer job that was requeued, the third task of an array, in one of whose steps sbatch is
# typed: the output variables in the manuals of sbatch and srun (22.05 to 26.05), but for those that
# Slurm sets anew in every job and step, and the user's own wishes.
OUTER = """ARRAY_JOB_ID=3 ARRAY_TASK_COUNT=9 ARRAY_TASK_ID=3 ARRAY_TASK_MAX=9 ARRAY_TASK_MIN=1
ARRAY_TASK_STEP=1 RESTART_COUNT=3 CPUS_PER_GPU=3 CPU_BIND=quiet,mask_cpu:0x00000001
CPU_BIND_LIST=0x00000001 CPU_BIND_TYPE=mask_cpu: CPU_BIND_VERBOSE=quiet GPUS=1 GPUS_PER_NODE=1
GPUS_PER_SOCKET=1 GPUS_PER_TASK=1 MEM_PER_CPU=100 MEM_PER_GPU=100 MEM_PER_NODE=1000
NTASKS_PER_CORE=1 NTASKS_PER_GPU=1 NTASKS_PER_SOCKET=1 OVERCOMMIT=1 STEP_GPUS=1 STEP_ID=0
STEP_NODELIST=node-7 STEP_NUM_NODES=1 STEP_NUM_TASKS=1 STEP_TASKS_PER_NODE=1 TRES_PER_TASK=cpu:1"""
STRAY |= dict(f"SLURM_{word}".split("=") for word in OUTER.split())


# --- sizes, addresses, arguments ---


def test_a_job_gets_what_its_header_asks_for(cluster, tmp_path):
    """And hostile arguments as they are, in spite of an outer job's environment."""
    here = {"size": [f"--chdir={REPOSITORY}"], "cwd": tmp_path}
    command = [VARIABLES, *ABBREVIATED, *NASTY]
    for way, job in in_all_ways(cluster, tmp_path, *command, env=STRAY, **here).items():
        shown, tasks = cluster.show(job.id), 2 if way == "srun" else 1
        assert job.state == "COMPLETED", job.log
        assert shown["NumNodes"] == "2" and shown["NumTasks"] == str(2 * tasks)
        assert shown["TimeLimit"] == "01:00:00"
        assert re.search("gres.gpu:2", shown["TresPerNode"])
        assert shown["CPUs/Task"] == str(16 // tasks)
        assert_five_variables(job.ranks(), [2, 2])
        assert all(rank["arguments"] == command[1:] for rank in job.ranks())
        assert {len(rank["cuda"].split(",")) for rank in job.ranks()} == {2}
        for rank in job.ranks():
            assert rank["run"] == str(job.id)
            assert rank["recorder"] == [f"log/{job.id}/nccl_rank_", "2000"]
            assert rank["files"][0] == rank["files"][1], "as many open files as Linux allows"
        assert (REPOSITORY / f"log/{job.id}").is_dir()
        first = rf"{LAUNCHERS[way]}: 4 ranks on node-\S+, rank 0 at node-\d+:\d+\. "
        first += "Each node: ranks 2, GPUs 2 of 2, CPUs 16"
        assert re.fullmatch(first, job.log.splitlines()[0]), job.log
    assert not (REPOSITORY / "canary").exists()


def test_ranks_on_the_cpu_are_the_tasks(cluster, tmp_path):
    size = ["--nodes=1", "--gpus-per-node=0", "--ntasks-per-node=3", "--cpus-per-task=2"]
    for job in in_all_ways(cluster, tmp_path, VARIABLES, size=size).values():
        assert job.state == "COMPLETED", job.log
        assert_five_variables(job.ranks(), [3])
        assert {rank["cuda"] for rank in job.ranks()} == {None}
        assert job.log.splitlines()[0].endswith("Each node: ranks 3, GPUs 0 of 0, CPUs 6"), job.log


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


OPTIONS = [
    # sbatch's options, ranks, CPUs of a node
    (["--gpus-per-node=2", "--cpus-per-gpu=4"], 4, 8),
    (["--gpus-per-node=2", "--exclusive"], 4, 64),
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
        if "--exclusive" in options:  # which is granted all of a node's GPUs
            assert {rank["cuda"] for rank in job.ranks()} == {"0,1"}, job.log
        # A crash in a library is a traceback.
        assert all(rank["faulthandler"] for rank in job.ranks())
        first = rf"{LAUNCHERS['srun']}: {ranks} ranks on node-\S+, rank 0 at node-.*, CPUs {cpus}\n"
        assert re.match(first, job.log), job.log

    at_once(scenario, [(index, *case) for index, case in enumerate(OPTIONS)])


def test_rank_under_srun_is_by_node():
    """If a topology plugin has put task 1 on the second of two nodes, its rank is 2."""
    given = {"SLURM_NODEID": 1, "SLURM_LOCALID": 0, "SLURM_PROCID": 1, "NPROC_PER_NODE": 2}
    names = "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE"
    command = ["./aux/launch/slurm_rank.sh", "bash", "-c", f'echo "{names}"']
    done = run(*command, env=environment(NNODES=2, **given))
    assert done.stdout == "2 0 4 2\n", done.stderr


ALWAYS = "--overlap --wait=0 --kill-on-bad-exit=1"
A_NODE = f"--ntasks=2 --ntasks-per-node=1 --cpus-per-task=48 {ALWAYS}"
STARTS = {
    LAUNCHERS["srun"]: "--ntasks=8 --ntasks-per-node=4 --cpus-per-task=12 "
    f"--distribution=block:block {ALWAYS} ./aux/launch/slurm_rank.sh python",
    LAUNCHERS["torchrun"]: f"{A_NODE} ./torchrun.sh",
    LAUNCHERS["spawn"]: f"{A_NODE} python aux/launch/spawn_ranks.py",
    "run_script.sh": f"{A_NODE} ./aux/launch/enroot.sh ./torchrun.sh",
}


@pytest.mark.parametrize("launcher", STARTS)
def test_what_srun_is_asked_for(launcher, tmp_path):
    """On two nodes of four GPUs and 48 CPUs. The launcher outlives a SIGTERM. What a rank prints is
    in the log at once."""
    programs = {"scontrol": "if [[ $2 == hostnames ]]; then printf 'n1\\nn2\\n'; fi"}
    # srun gives a step as many GPUs as this variable says.
    programs["srun"] = 'kill -TERM "$PPID"; printf "%s\\n" "$SLURM_GPUS_PER_NODE GPUs: $*"'
    programs["srun"] += '; echo "PYTHONUNBUFFERED=$PYTHONUNBUFFERED"'
    stand_ins(tmp_path, programs | {"getent": "true", "squeue": f"echo 7 {NOTHING}"})
    slurm = {"SLURM_JOB_ID": 7, "SLURM_JOB_NAME": "n", "SLURM_JOB_NUM_NODES": 2}
    slurm |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "48(x2)"}
    slurm |= {"SLURM_GPUS_ON_NODE": 4, "PATH": f"{tmp_path}:{environment()['PATH']}"}
    slurm["PYTHONUNBUFFERED"] = ""  # which pytest's shell may have
    if launcher == LAUNCHERS["srun"]:
        slurm |= {"SLURM_NTASKS_PER_NODE": 4, "SLURM_NTASKS": 8}
    for script in (["train.py", "--epochs", "3"], ["-m", "a.b", "--", "--n"], []):
        done = run(f"./{launcher}", *script, env=environment(**slurm))
        assert done.returncode == 0, done.stderr
        command = " ".join(script) or "distributed/train_ddp.py"
        asked = f"4 GPUs: {STARTS[launcher]} {command}"
        assert done.stdout.splitlines()[-2:] == [asked, "PYTHONUNBUFFERED=1"]


SHOWS = """import os, sys
import model
os.write(1, " ".join(["RANK", os.environ["RANK"], *sys.argv[1:], "\\n"]).encode())
"""
TRAIN = "theirs/scripts/train.py"


def test_a_script_that_imports_its_project(cluster, tmp_path):
    """From the project's folder with -m, and from another one with PYTHONPATH, by the same line
    under every launcher. Two ranks of one node, as all nodes get the same line."""
    (tmp_path / TRAIN).parent.mkdir(parents=True)
    (tmp_path / TRAIN).write_text(SHOWS)
    (tmp_path / "theirs/model.py").touch()
    for name in [name for files in THREE_FILES.values() for name in files]:
        copy_file(name, tmp_path)
        copy_file(name, tmp_path / "theirs")

    submitted, log = [], ["--nodes=1", f"--output={tmp_path}/%j"]
    path = {"PYTHONPATH": f"{tmp_path}/theirs"}
    for launcher in LAUNCHERS.values():
        module = [*log, launcher, "-m", "scripts.train", "--", "--n", "5"]
        submitted.append(cluster.submit(*module, cwd=tmp_path / "theirs"))
        submitted.append(cluster.submit(*log, launcher, TRAIN, "--n", "5", cwd=tmp_path, env=path))
    for number in submitted:
        job = cluster.wait(number)
        assert job.state == "COMPLETED", job.log
        said = re.findall(r"^RANK (.*) $", job.log, re.M)
        assert sorted(said) == ["0 --n 5", "1 --n 5"], job.log

    job = cluster.sbatch(*log, LAUNCHERS["srun"], TRAIN, cwd=tmp_path)
    assert job.state == "FAILED" and "No module named 'model'" in job.log, job.log


@pytest.mark.parametrize(
    "launcher", [*LAUNCHERS.values(), "run_script.sh", "launch_slurm_with_spare.sh"]
)
def test_a_launcher_that_sbatch_has_not_started(launcher):
    """Outside Slurm, or as the second task of a srun: it goes no further than env.sh."""
    for job in ({}, {"SLURM_JOB_ID": 7, "SLURM_PROCID": 1}):
        done = run("bash", launcher, env=environment(**job))
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "env.sh is for the launchers: sbatch" in done.stderr


# --- the files to copy ---


def test_three_files_and_a_strangers_script(cluster, tmp_path):
    """All ranks end with the same weights, whoever has started them."""
    assert THREE_FILES.keys() == LAUNCHERS.keys(), "the page's table"
    submitted, weights = {}, set()
    for way, files in THREE_FILES.items():
        for name in files:
            copy_file(name, tmp_path / way)
        shutil.copy(REPOSITORY / STRANGER, tmp_path / way / "theirs.py")
        command = [*one_rank_a_node(way), "--output=out", LAUNCHERS[way], "theirs.py"]
        submitted[way] = cluster.submit(*command, cwd=tmp_path / way)
    for way, number in submitted.items():
        job = cluster.wait(number)
        assert job.state == "COMPLETED", job.log
        found = re.findall(r"^rank (\d) of 2, local rank 0: the sum is 1$", job.log, re.M)
        assert sorted(found) == ["0", "1"], job.log
        trained = re.findall(r"^trained: (\S+)$", job.log, re.M)
        assert len(trained) == 2, job.log
        weights.update(trained)
        left = {path.name for path in (tmp_path / way).iterdir()} - {"__pycache__"}
        files = {Path(name).parts[0] for name in THREE_FILES[way]}
        # log/JOB is for what NCCL writes when it gives up.
        assert left == {*files, "theirs.py", "out", "log"}
    assert len(weights) == 1 and 3 < float(weights.pop()) < 5


PRINTS = """import os, time
for step in range(100):
    print("step", step, "of rank", os.environ["RANK"], "ends")
    time.sleep(0.02 - time.time() % 0.02)
"""


@pytest.mark.parametrize("way", cells([(way,) for way in LAUNCHERS], ("spawn",)))
def test_whole_lines(way, cluster, tmp_path):
    """Two ranks of a node print several arguments at the same moment."""
    for name in THREE_FILES[way]:
        copy_file(name, tmp_path)
    if way == "torchrun":  # as docs/recipes.md has it
        torchrun = tmp_path / "torchrun.sh"
        torchrun.write_text(torchrun.read_text().replace('\n    "$@"', '\n    --tee=3 "$@"'))
    (tmp_path / "prints.py").write_text(PRINTS)
    job = cluster.sbatch("--nodes=1", "--output=out", LAUNCHERS[way], "prints.py", cwd=tmp_path)
    label = r"\[default\d\]:" if way == "torchrun" else ""
    lines = re.findall(rf"^{label}step (\d+) of rank (\d) ends$", job.log, re.M)
    assert sorted((int(rank), int(step)) for step, rank in lines) == [
        (rank, step) for rank in range(2) for step in range(100)
    ]


# --- CPUs, GPUs, memory, environment ---


@pytest.mark.parametrize("gpus", [2, 0])
def test_in_salloc(gpus, cluster):
    """A launcher typed in an allocation runs in it, as it would in a job. It has no GPUs of the job
    in whose shell salloc was typed."""
    outer = {"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_GPUS": "0,1,2,3,4,5,6,7"}
    size = ["--nodes=2", "--cpus-per-task=2", "--ntasks-per-node=2"]
    size += [f"--gres=gpu:{gpus}"] if gpus else []
    done = cluster.exec("salloc", *size, f"./{LAUNCHERS['srun']}", VARIABLES, env=outer)
    assert done.returncode == 0, done.stderr
    ranks = Job(0, "COMPLETED", 0, done.stdout, 0).ranks()
    assert_five_variables(ranks, [2, 2])
    assert {rank["run"][:-9] for rank in ranks} == {rank["job"] for rank in ranks}
    assert re.search(f"ranks 2, GPUs {gpus} of .*, CPUs 4$", done.stdout, re.M), done.stdout


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


def test_sbatch_export(cluster, tmp_path):
    """sbatch's --export is for the batch shell. The ranks get what that one has."""
    job = cluster.sbatch("--export=NONE", f"--output={tmp_path}/log", LAUNCHERS["srun"], VARIABLES)
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [2, 2])
    assert all(".venv/bin" in rank["bin"] for rank in job.ranks())


# --- failures ---

# By the one who started the rank.
SAID = {
    "srun": r"^srun: error: node-\d+: task 1: Exited with exit code {}$",
    "torchrun": r"^  host      : node-\d+\n  rank      : 1 \(local_rank: [01]\)\n  exitcode  : {} ",
    "spawn": r"^spawn_ranks.py: rank 1 on node-\d+: process [01] terminated with exit code {}$",
}


def test_a_failing_rank_ends_the_job(cluster, tmp_path):
    """Within seconds; its rank or task, its host, its status and its last words are in the log."""
    size = one_rank_a_node("srun")
    script = [VARIABLES, "fail", tmp_path]
    for way, job in in_all_ways(cluster, tmp_path, *script, size=size).items():
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        assert job.seconds < 60 * PATIENCE, job.log
        assert re.search(SAID[way].format(3), job.log, re.M), job.log
        assert job.log.count("these are my last words\n") == 1, job.log
        assert cluster.left_over(job.id) == []


# --- check_ranks.py ---


def test_check_ranks_passes_with_every_launcher(cluster, tmp_path):
    """And leaves nothing in the folder. A rank on each node; chapter 1's job has two."""
    folder = tmp_path / "not-there-yet"
    command = ["aux/check_ranks.py", "--checkpoint-dir", folder]
    size = one_rank_a_node("srun")
    for way, job in in_all_ways(cluster, tmp_path, *command, size=size).items():
        assert job.state == "COMPLETED", job.log
        assert f"VERDICT: all well, 2 ranks started by {way}" in job.log, job.log
    assert not folder.exists()
    # Its parent was there, so rank 0's file was in it.
    assert not [*tmp_path.glob(".*")]
