"""env.sh and the launchers on the real cluster: counts, addresses, arguments, CPUs, GPUs, and
every way to fail."""

import re
import shutil
import sys
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
            assert rank["recorder"] == f"log/{job.id}/nccl_rank_"
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


# --- env.sh ---


SIZE = '"$NNODES" "$NPROC_PER_NODE" "$WORLD_SIZE" "$MASTER_ADDR:$MASTER_PORT" '
SIZE += '"$CPUS_PER_NODE" "$OMP_NUM_THREADS" "$NCCL_DEBUG"'


def source_env(
    cluster,
    folder: Path,
    record: str = NOTHING,
    cwd: Path = REPOSITORY,
    shown: str = SIZE,
    squeue: str = 'echo "$SLURM_JOB_ID $RECORD"',
    **variables,
) -> str:
    """What env.sh makes of Slurm's variables, on a node, and of squeue's record of the job."""
    stand_ins(folder, {"squeue": squeue, "sleep": "exit"})
    slurm = {"PATH": f"{folder}:{environment()['PATH']}", "RECORD": record, "HOSTNAME": "node-1"}
    slurm |= {"SLURM_JOB_ID": 89, "SLURM_PROCID": 0, "SLURM_JOB_NAME": "name"}
    slurm |= {"SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_NODELIST": "node-[1-2]"}
    slurm |= {"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": 4, "SLURM_NTASKS_PER_NODE": 2}
    slurm |= {"SLURM_JOB_CPUS_PER_NODE": "4(x2)"} | variables
    given = [f"{name}={value}" for name, value in slurm.items() if value != "unset"]
    command = f"source ./env.sh >/dev/null; echo {shown}"
    done = cluster.exec("env", *given, "bash", "-euo", "pipefail", "-c", command, cwd=cwd)
    if done.returncode != 0:
        return f"status {done.returncode}: {done.stderr.strip()}"
    return done.stdout.strip()


# Slurm's variables; the GPUs asked for on each node, in a job, and the CPUs for each GPU, in
# squeue's words; and what env.sh makes of them.
SIZES = """
                                      | N/A                    | 2 2 4 node-1:61089 4 2 WARN
JOB_ID=4537                           | N/A                    | 2 2 4 node-1:61001 4 2 WARN
JOB_NODELIST=node-[2,7]               | N/A                    | 2 2 4 node-2:61089 4 2 WARN
GPUS_ON_NODE=8                        | N/A                    | 2 8 16 node-1:61089 4 1 WARN
GPUS_ON_NODE=2 CPUS_PER_TASK=16       | N/A                    | 2 2 4 node-1:61089 32 16 WARN
NTASKS_PER_NODE=unset NTASKS=unset    | N/A                    | 2 1 2 node-1:61089 4 4 WARN
# The fewest, because srun asks for as many CPUs on every node.
JOB_CPUS_PER_NODE=48,16               | N/A                    | 2 2 4 node-1:61089 16 8 WARN
JOB_CPUS_PER_NODE=8,16                | N/A                    | 2 2 4 node-1:61089 8 4 WARN
JOB_CPUS_PER_NODE=48(x2),16           | N/A                    | 2 2 4 node-1:61089 16 8 WARN
# The CPUs of a task are those of the shell in which sbatch was typed.
CPUS_PER_TASK=1                       | N/A N/A gres:gpu:2     | 2 2 4 node-1:61089 4 2 WARN
# An exclusive node is granted with all its GPUs, and its steps get only those asked for.
GPUS_ON_NODE=8                        | gres:gpu:2             | 2 2 4 node-1:61089 4 2 WARN
GPUS_ON_NODE=8                        | gres/gpu:a100:4        | 2 4 8 node-1:61089 4 1 WARN
GPUS_ON_NODE=8                        | gres:gpu:0             | 2 2 4 node-1:61089 4 2 WARN
GPUS_ON_NODE=8                        | gres/gpu:2,gres/nic:1  | 2 2 4 node-1:61089 4 2 WARN
GPUS_ON_NODE=8                        | gres/nic:1             | 2 8 16 node-1:61089 4 1 WARN
# Those of the shell in which sbatch was typed do not count.
GPUS_PER_NODE=1                       | gres:gpu:4             | 2 4 8 node-1:61089 4 1 WARN
GPUS_PER_NODE=1 GPUS_ON_NODE=4        | N/A                    | 2 4 8 node-1:61089 4 1 WARN
# Two types on a node; and a type without a number, where as many as granted count.
GPUS_ON_NODE=8               | gres:gpu:a100:2,gres:gpu:v100:1 | 2 3 6 node-1:61089 4 1 WARN
GPUS_ON_NODE=1                        | gres:gpu:a100          | 2 1 2 node-1:61089 4 4 WARN
GPUS_ON_NODE=2                        | N/A gres:gpu:4         | 2 2 4 node-1:61089 4 2 WARN
GPUS_ON_NODE=2   | N/A gres/gpu:a100:5 | env.sh: --gpus=5 on 2 nodes: use --gpus-per-node
NTASKS=7 NTASKS_PER_NODE=4  | N/A      | env.sh: 7 tasks on 2 nodes: use --ntasks-per-node
"""


@pytest.mark.parametrize("row", re.findall(r"^[^#\n].*", SIZES, re.M))
def test_env_sh(row, cluster, tmp_path):
    given, asked, expected = (part.strip() for part in row.split("|"))
    record = ["1", "N/A", "N/A", "0", *asked.split(), "N/A", "N/A"][:7]
    variables = dict(f"SLURM_{word}".split("=") for word in given.split())
    found = source_env(cluster, tmp_path, " ".join(record), **variables)
    assert found.removeprefix("status 1: ") == expected


def test_half_of_a_heterogeneous_job(cluster, tmp_path):
    """It would train alone, and the other half idle. And NCCL_DEBUG is the user's."""
    said = "status 1: env.sh: srun leaves out nodes of a heterogeneous job (A : B)"
    assert source_env(cluster, tmp_path, NOTHING.replace("1 N/A", "1 89")) == said
    found = source_env(cluster, tmp_path, NCCL_DEBUG="INFO")
    assert found == "2 2 4 node-1:61089 4 2 INFO"


HET = ["--ntasks=3", "--gpus-per-node=3", ":", "--ntasks=1", "--gpus-per-node=1"]


def test_a_step_over_a_heterogeneous_job(cluster, tmp_path):
    """As docs/other_jobs.md says, a job script of one's own starts ranks on both parts."""
    says = "echo $SLURM_PROCID $SLURM_STEP_NUM_TASKS ${CUDA_VISIBLE_DEVICES//[^,]}"
    wrap = f"--wrap=srun --het-group=0,1 bash -c '{says}'"
    job = cluster.sbatch(f"--output={tmp_path}/log", *HET, wrap)
    assert job.state == "COMPLETED", job.log
    assert sorted(job.log.splitlines()) == ["0 4 ,,", "1 4 ,,", "2 4 ,,", "3 4"]


# What squeue shows, and what the scripts then have of array task and restarts
JOBS = [
    (f"89 {NOTHING}", "no no"),
    ("89 1 N/A N/A 2 N/A N/A N/A", "no 2"),
    ("89 1 N/A 5 0 N/A N/A N/A", "5 no"),
    # The id of an array's last task shows the whole array.
    ("90 1 N/A 4 7 N/A N/A N/A\n89 1 N/A 5 1 N/A N/A N/A", "5 1"),
]


@pytest.mark.parametrize(("record", "expected"), JOBS)
def test_a_job_that_another_one_has_submitted(record, expected, cluster, tmp_path):
    """Is an array's task, or was requeued, only if Slurm says so."""
    left = {"SLURM_ARRAY_JOB_ID": 3, "SLURM_ARRAY_TASK_ID": 5, "SLURM_RESTART_COUNT": 1}
    # With the first of these no rank opens the store at which they meet.
    left |= {"TORCHELASTIC_USE_AGENT_STORE": True, "GROUP_RANK": 1, "JOB_RESTARTS": 0}
    shown = '"${SLURM_ARRAY_TASK_ID-no}" "${SLURM_RESTART_COUNT-no}" '
    shown += '"${!TORCHELASTIC_@}${GROUP_RANK-}${JOB_RESTARTS-}"'
    options = {"shown": shown, "squeue": 'echo "$RECORD"'}
    assert source_env(cluster, tmp_path, record, **options, **left) == expected


BUSY = """echo >>"$(dirname "$0")/asked"
if (($(wc --lines <"$(dirname "$0")/asked") < 3)); then echo "Zero Bytes" >&2; exit 1; fi
echo "$SLURM_JOB_ID $RECORD"
"""


def test_what_squeue_shows_a_user_by_default(cluster, tmp_path):
    """Is for the user's own terminal."""
    squeue = '[[ -z "${SQUEUE_STATES-}" ]] && echo "$SLURM_JOB_ID $RECORD"'
    options = {"squeue": squeue, "shown": '"$NNODES"'}
    assert source_env(cluster, tmp_path, SQUEUE_STATES="PD", **options) == "2"


def test_slurmctld_is_busy(cluster, tmp_path):
    """A job's first second is not to be its last one, after days in the queue."""
    assert source_env(cluster, tmp_path, squeue=BUSY, shown='"$NNODES"') == "2"
    for silent in ("exit 1", "true"):
        said = source_env(cluster, tmp_path, squeue=silent)
        assert said == "status 1: env.sh: squeue does not show job 89"


def test_limits(cluster, tmp_path):
    """The soft limits of the login node, which Slurm passes on, are raised to Linux's."""
    (tmp_path / "low.sh").write_text("ulimit -S -n 100 -l 64\n")
    shown = '"$(ulimit -S -n) $(ulimit -S -l)" = "$(ulimit -H -n) $(ulimit -H -l)"'
    low = {"BASH_ENV": tmp_path / "low.sh"}
    soft, hard = source_env(cluster, tmp_path, shown=shown, **low).split(" = ")
    assert soft == hard and soft.split() != ["100", "64"]


def test_the_code_of_each_start(cluster, tmp_path):
    """Is in log/JOB/code-N, in git or not, and a start says whether it has changed."""
    for name in ("env.sh", "train.py", "more/model.py", "more/tasks/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / "env.sh", tmp_path / name)

    def start(number: int, *script: str) -> bool:
        """Whether it says that the code has changed."""
        log = 'said=$(source ./env.sh); echo "$said"'
        given = {"SLURM_JOB_ID": 89, "SLURM_JOB_NAME": "n", "SLURM_JOB_NUM_NODES": 1}
        given |= {"SLURM_JOB_NODELIST": "node-1", "SLURM_JOB_CPUS_PER_NODE": 1}
        record = NOTHING.replace(" 0 ", f" {number} ")
        stand_ins(tmp_path, {"squeue": f'echo "89 {record}"'})
        given["PATH"] = f"{tmp_path}:{environment()['PATH']}"
        bash = ["env", *(f"{name}={value}" for name, value in given.items()), "bash", "-euc"]
        done = cluster.exec(*bash, log, "bash", *(script or ["train.py"]), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        before, now = (f"log/89/code-{which}" for which in (number - 1, number))
        return (
            f"The code has changed since this job's last start: diff {before} {now}" in done.stdout
        )

    assert [start(0), start(1)] == [False, False]
    (tmp_path / "train.py").write_text("# edited\n")
    assert [start(2), start(3)] == [True, False]
    # A module beside model.py, and a package
    for name, module in (("model.py", "more.train"), ("tasks/__main__.py", "more.tasks")):
        start(7, "-m", module)
        (tmp_path / "more" / name).write_text("# edited, too\n")
        assert [start(8, "-m", module), start(9, "-m", module)] == [True, False], module

    run("git", "init", "--quiet", cwd=tmp_path)
    run("git", "add", "env.sh", "train.py", "more", cwd=tmp_path)
    name = ["-c", "user.name=n", "-c", "user.email=e"]
    assert run("git", *name, "commit", "-qm", "one", cwd=tmp_path).returncode == 0
    assert [start(4), start(5)] == [True, False]
    (tmp_path / "more/model.py").write_text("# edited\n")
    assert start(6)
    code = tmp_path / "log/89/code-6"
    assert "+# edited" in code.read_text() and code.stat().st_mode & 0o777 == 0o600


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
    """On two nodes of four GPUs and 48 CPUs. The launcher outlives a SIGTERM."""
    programs = {"scontrol": "if [[ $2 == hostnames ]]; then printf 'n1\\nn2\\n'; fi"}
    # srun gives a step as many GPUs as this variable says.
    programs["srun"] = 'kill -TERM "$PPID"; printf "%s\\n" "$SLURM_GPUS_PER_NODE GPUs: $*"'
    stand_ins(tmp_path, programs | {"getent": "true", "squeue": f"echo 7 {NOTHING}"})
    slurm = {"SLURM_JOB_ID": 7, "SLURM_JOB_NAME": "n", "SLURM_JOB_NUM_NODES": 2}
    slurm |= {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "48(x2)"}
    slurm |= {"SLURM_GPUS_ON_NODE": 4, "PATH": f"{tmp_path}:{environment()['PATH']}"}
    if launcher == LAUNCHERS["srun"]:
        slurm |= {"SLURM_NTASKS_PER_NODE": 4, "SLURM_NTASKS": 8}
    for script in (["train.py", "--epochs", "3"], ["-m", "a.b", "--", "--n"], []):
        done = run(f"./{launcher}", *script, env=environment(**slurm))
        assert done.returncode == 0, done.stderr
        command = " ".join(script) or "distributed/train_ddp.py"
        assert done.stdout.splitlines()[-1] == f"4 GPUs: {STARTS[launcher]} {command}"


def test_what_torchrun_is_asked_for(tmp_path):
    """SIGTERM is ignored until torchrun handles it, because a job that it ends is lost."""
    says = '"$*" "$$" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"'
    stand_ins(tmp_path, {"python3": f"kill -TERM $$; printf '%s\\n' {says}"})
    given = {"NNODES": 2, "NPROC_PER_NODE": 4, "MASTER_ADDR": "n1", "MASTER_PORT": 61007}
    given |= {"SLURM_NODEID": 1, "SLURM_JOB_ID": 7, "SLURM_RESTART_COUNT": 2}
    path = f"{tmp_path}:{environment()['PATH']}"
    shell = ["bash", "-c", 'echo $$; exec ./torchrun.sh "$@"', "bash", "train.py", "--epochs", 3]
    done = run(*shell, env=environment(PATH=path, **given))
    before, said, after, patience = done.stdout.splitlines()
    expected = "-m torch.distributed.run --nnodes=2 --node-rank=1 --nproc-per-node=4 "
    expected += "--master-addr=n1 --master-port=61007 --rdzv-id=7.2 --rdzv-conf=timeout=302 "
    assert said == f"{expected}-- train.py --epochs 3"
    assert before == after, "torchrun.sh becomes torchrun, so that Slurm's signals reach it"
    assert int(patience) >= 300, "ranks may save for longer than torchrun's own 30 s"


@pytest.mark.parametrize(
    ("cuda", "xpu", "given", "ranks"), [(8, 0, "", 8), (0, 3, "", 3), (0, 0, "", 2), (8, 0, 4, 4)]
)
def test_torchrun_by_hand(cuda, xpu, given, ranks, tmp_path):
    """One rank for each device that torch sees, and any free port: two runs do not meet."""
    counts = f"class cuda:\n    device_count = lambda: {cuda}\n"
    counts += f"class xpu:\n    device_count = lambda: {xpu}\n"
    (tmp_path / "torch.py").write_text(counts)
    python = f'if [[ $1 == -c ]]; then exec {sys.executable} "$@"; fi; echo "$*"'
    stand_ins(tmp_path, {"python3": python})
    path = f"{tmp_path}:{environment()['PATH']}"
    env = environment(PATH=path, PYTHONPATH=tmp_path, NPROC_PER_NODE=given)
    done = run("./torchrun.sh", "x.py", env=env)
    asked = f"-m torch.distributed.run --standalone --nproc-per-node={ranks} -- x.py\n"
    assert done.stdout == asked, done.stderr


def test_what_torchrun_would_take_for_its_own(tmp_path):
    """Options before the script are sbatch's or torchrun's, and the ranks would not find a file of
    that name."""
    stand_ins(tmp_path, {"python3": "echo started"})
    env = environment(PATH=f"{tmp_path}:{environment()['PATH']}", NNODES=1)
    done = run("./torchrun.sh", "--nodes=4", "train.py", env=env)
    said = "torchrun.sh: --nodes=4 is no script: sbatch's options stand before the launcher, and "
    said += "torchrun's in torchrun.sh\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


# A command, and how it would be without torchrun's `--`
WORDS = [
    ("-m a.b -- --n 5", "-m a.b --n 5"),
    ("-m -- a.b -- --n", "-m a.b -- --n"),
    ("x.py -- -- --n", "x.py -- --n"),
    ("-- x.py a --", "x.py a --"),
    ("x.py a -- --n", "x.py a -- --n"),
    ("-m a.b a -- -m", "-m a.b a -- -m"),
]


@pytest.mark.parametrize(("words", "kept"), WORDS)
def test_torchrun_s_dashes(words, kept, tmp_path):
    """Are no argument of the script, under srun as little as under torchrun."""
    stand_ins(tmp_path, {"python": 'echo "$*"', "python3": 'echo "$*"'})
    given = {"NNODES": 1, "NPROC_PER_NODE": 2, "SLURM_NODEID": 0, "SLURM_LOCALID": 0}
    given |= {"MASTER_ADDR": "n1", "MASTER_PORT": 1, "SLURM_JOB_ID": 7}
    env = environment(PATH=f"{tmp_path}:{environment()['PATH']}", **given)
    done = run("./aux/launch/slurm_rank.sh", "python", *words.split(), env=env)
    assert done.stdout == f"{kept}\n", done.stderr
    after = f"-m -- {kept[3:]}" if kept.startswith("-m ") else f"-- {kept}"
    for nnodes in (1, ""):  # in a job, and by hand
        done = run("./torchrun.sh", *words.split(), env=env | {"NNODES": str(nnodes)})
        before, _, rest = done.stdout.partition(f" {after}\n")
        assert before.split()[-1].startswith(("--rdzv", "--nproc")) and not rest, done


SHOWS = """import os, sys
import model
os.write(1, " ".join(["RANK", os.environ["RANK"], *sys.argv[1:], "\\n"]).encode())
"""
TRAIN = "theirs/scripts/train.py"


def test_a_script_that_imports_its_project(cluster, tmp_path):
    """From the project's folder with -m, and from another one with PYTHONPATH, by the same line
    under every launcher."""
    (tmp_path / TRAIN).parent.mkdir(parents=True)
    (tmp_path / TRAIN).write_text(SHOWS)
    (tmp_path / "theirs/model.py").touch()
    for name in [name for files in THREE_FILES.values() for name in files]:
        copy_file(name, tmp_path)
        copy_file(name, tmp_path / "theirs")

    submitted = []
    path = {"PYTHONPATH": f"{tmp_path}/theirs"}
    for way, launcher in LAUNCHERS.items():
        log = [*one_rank_a_node(way), f"--output={tmp_path}/%j"]
        module = [*log, launcher, "-m", "scripts.train", "--", "--n", "5"]
        submitted.append(cluster.submit(*module, cwd=tmp_path / "theirs"))
        submitted.append(cluster.submit(*log, launcher, TRAIN, "--n", "5", cwd=tmp_path, env=path))
    for number in submitted:
        job = cluster.wait(number)
        assert job.state == "COMPLETED", job.log
        said = re.findall(r"^RANK (.*) $", job.log, re.M)
        assert sorted(said) == ["0 --n 5", "1 --n 5"], job.log

    job = cluster.sbatch(*log, launcher, TRAIN, cwd=tmp_path)
    assert job.state == "FAILED" and "No module named 'model'" in job.log, job.log


BY_HAND = """
state() { set +o; shopt; compgen -e; trap; umask; pwd; }
before=$(state)
source ./env.sh
echo "status $?"
[[ "$(state)" != "$before" ]] || echo "the shell is as it was"
"""


@pytest.mark.parametrize("job", [{}, {"SLURM_JOB_ID": 7}], ids=["login", "salloc"])
def test_source_env_sh_by_hand(job):
    """One sentence, and the shell stays as it was."""
    done = run("bash", "--norc", "--noprofile", "-i", "-c", BY_HAND, env=environment(**job))
    assert done.stdout == "status 1\nthe shell is as it was\n", done.stdout + done.stderr
    # bash itself complains of a shell without a terminal.
    [ours] = [line for line in done.stderr.splitlines() if not line.startswith("bash: ")]
    assert ours.startswith("env.sh is for the launchers: sbatch launch_")


@pytest.mark.parametrize("launcher", [*LAUNCHERS.values(), "run_script.sh"])
def test_a_launcher_that_sbatch_has_not_started(launcher):
    """Outside Slurm, or as the second task of a srun: it goes no further than env.sh."""
    for job in ({}, {"SLURM_JOB_ID": 7, "SLURM_PROCID": 1}):
        done = run("bash", launcher, env=environment(**job))
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "env.sh is for the launchers: sbatch" in done.stderr


def test_site_sh(cluster, tmp_path):
    """Its lines may change all settings."""
    copy_file("env.sh", tmp_path)
    site = tmp_path / "site.sh"
    site.write_text("export NCCL_DEBUG=INFO OMP_NUM_THREADS=3\n")
    assert source_env(cluster, tmp_path, cwd=tmp_path) == "2 2 4 node-1:61089 4 3 INFO"
    site.write_text("MASTER_ADDR=${MASTER_ADDR}i\n")
    said = "status 1: env.sh: node-1i does not resolve: set it in site.sh"
    assert source_env(cluster, tmp_path, cwd=tmp_path) == said
    # An address without a name, as those of InfiniBand often are
    site.write_text("MASTER_ADDR=10.99.1.2\n")
    assert " 10.99.1.2:61089 " in source_env(cluster, tmp_path, cwd=tmp_path)
    site.write_text("MASTER_ADDR=${MASTER_ADDR%1}2\n")
    assert source_env(cluster, tmp_path, cwd=tmp_path) == "2 2 4 node-2:61089 4 2 WARN"


# Environment Modules and Lmod have the shell run `test 0 = 1` or `false` if a module is gone.
MODULE = """module() { eval "test $2 != gone"; }
"""
FAILS = [
    ("module load gone", "module load gone"),
    ("  module load nccl && module load gone", "  module load nccl && module load gone"),
    ("module load \\\n  gone", "module load \\"),
    ("module load nccl; no_such_command", "module load nccl; no_such_command"),
    ("source ./ends.sh; false", "source ./ends.sh; false"),
    ("module load nccl", None),
    ("module load gone || true", None),
    ("if module load gone; then echo there; fi", None),
    ("[[ -e gone ]] && module load gone", None),
    ('echo "$UNSET"', None),
    ("source ./ends.sh", None),
    (". ./ends.sh", None),
]


@pytest.mark.parametrize(("line", "shown"), FAILS)
def test_a_line_of_site_sh_that_fails(line, shown, cluster, tmp_path):
    """Ends the job, unless it is another file that ends with a status."""
    copy_file("env.sh", tmp_path)
    (tmp_path / "ends.sh").write_text("module load gone\n[[ -e gone ]] && echo there\n")
    (tmp_path / "site.sh").write_text(f"{MODULE}{line}\nexport OMP_NUM_THREADS=3\n")
    found = source_env(cluster, tmp_path, cwd=tmp_path)
    if shown is None:
        assert found == "2 2 4 node-1:61089 4 3 WARN"
    else:
        assert found.startswith("status 1: ")
        said = f"env.sh: site.sh, line 2 failed: {shown} (may it? add || true)"
        assert found.splitlines()[-1].removeprefix("status 1: ") == said


def test_site_sh_and_venv(cluster, tmp_path):
    """The Python of .venv is the job's, whatever a module has put into PATH."""
    copy_file("env.sh", tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    stand_ins(tmp_path / ".venv/bin", {"python": "true"})
    stand_ins(tmp_path / "module", {"python": "true"})
    (tmp_path / "site.sh").write_text('PATH="$PWD/module:$PATH"\n')
    shown = '"$(type -P python)"'
    assert (
        source_env(cluster, tmp_path, cwd=tmp_path, shown=shown) == f"{tmp_path}/.venv/bin/python"
    )


def test_a_log_that_is_no_folder(cluster, tmp_path):
    """Nothing is kept in it, and the job runs."""
    copy_file("env.sh", tmp_path)
    (tmp_path / "log").touch()
    assert source_env(cluster, tmp_path, cwd=tmp_path) == "2 2 4 node-1:61089 4 2 WARN"


@pytest.mark.parametrize("site", ['seen="$*"', 'seen="$*"; set -- another script'])
def test_site_sh_and_the_script(site, cluster, tmp_path):
    """It neither sees the arguments, nor changes them; and an error still ends the shell."""
    copy_file("env.sh", tmp_path)
    (tmp_path / "site.sh").write_text(f"{site}\n")
    arguments, shown = "set -- train.py 'a b'", '"$seen:$#:$1:$2:${-//[^eu]}"'
    (tmp_path / "shell.sh").write_text(arguments)
    found = source_env(cluster, tmp_path, cwd=tmp_path, shown=shown, BASH_ENV=tmp_path / "shell.sh")
    assert found == ":2:train.py:a b:eu"


# --- the files to copy ---


def test_three_files_and_a_strangers_script(cluster, tmp_path):
    """All ranks end with the same weights, whoever has started them."""
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


def test_sbatch_export(cluster, tmp_path):
    """sbatch's --export is for the batch shell. The ranks get what that one has."""
    job = cluster.sbatch("--export=NONE", f"--output={tmp_path}/log", LAUNCHERS["srun"], VARIABLES)
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [2, 2])
    assert all(".venv/bin" in rank["path"].split(":")[0] for rank in job.ranks())


# --- failures ---

# By the one who started the rank.
SAID = {
    "srun": r"^srun: error: node-\d+: task 1: Exited with exit code {}$",
    "torchrun": r"^  host      : node-\d+\n  rank      : 1 \(local_rank: [01]\)\n  exitcode  : {} ",
    "spawn": r"^spawn_ranks.py: rank 1 on node-\d+: process [01] terminated with exit code {}$",
}


def test_a_failing_rank_ends_the_job(cluster, tmp_path):
    """Within seconds; its rank or task, its host, its status and its last words are in the log."""
    for way, job in in_all_ways(cluster, tmp_path, VARIABLES, "fail").items():
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        assert job.seconds < 60 * PATIENCE, job.log
        assert re.search(SAID[way].format(3), job.log, re.M), job.log
        assert job.log.count("these are my last words\n") == 1, job.log
        assert cluster.left_over(job.id) == []


# --- check_ranks.py ---


def test_check_ranks_passes_with_every_launcher(cluster, tmp_path):
    """And leaves nothing in the folder."""
    folder = tmp_path / "not-there-yet"
    command = ["aux/check_ranks.py", "--checkpoint-dir", folder]
    for way, job in in_all_ways(cluster, tmp_path, *command).items():
        assert job.state == "COMPLETED", job.log
        assert f"VERDICT: all well, 4 ranks started by {way}" in job.log, job.log
    assert not folder.exists()
    # Its parent was there, so rank 0's file was in it.
    assert not [*tmp_path.glob(".*")]
