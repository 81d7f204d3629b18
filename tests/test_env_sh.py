"""env.sh: what it makes of Slurm's variables, site.sh, and the code of each start."""

import os
import re
import shutil
from pathlib import Path

import pytest

from copies import NOTHING, copy_file
from slurm import REPOSITORY, environment, run, stand_ins

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


def start_on_one_node(folder: Path, before: str, after: str):
    """A launcher's lines before and after it sources env.sh, and what log/7/start-0 then has."""
    copy_file("env.sh", folder)
    programs = {"squeue": f"echo 7 {NOTHING}", "scontrol": "echo n1", "getent": "true"}
    slurm = {"SLURM_JOB_ID": 7, "SLURM_JOB_NAME": "n", "SLURM_JOB_NUM_NODES": 1}
    slurm |= {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": 1}
    slurm["PATH"] = f"{stand_ins(folder, programs)}:{environment()['PATH']}"
    lines = f"{before}\nsource ./env.sh >&2\n{after}"
    # The tests may have been started by nohup, and no shell can trap what it began to ignore.
    shell = ["env", "--default-signal", "bash", "-euo", "pipefail", "-c"]
    done = run(*shell, lines, cwd=folder, env=environment(**slurm))
    noted = folder / "log/7/start-0"
    text = noted.read_text() if noted.is_file() else ""
    return done, re.sub(r"(began|ended) \d+ ", r"\1 ", text)


SIGNALS = {"HUP": 129, "INT": 130, "TERM": 143, "USR1": 138, "USR2": 140, "XCPU": 152}
ENDS = [("", 0), ("exit 3", 3), ("cd /", 0), ("kill -KILL $$", None)]
ENDS += [(f"kill -{name} $$", status) for name, status in SIGNALS.items()]


@pytest.mark.parametrize(("lines", "status"), ENDS)
def test_how_a_start_has_ended(lines, status, tmp_path):
    """Also in another folder, and by a signal, after a command that went well."""
    done, noted = start_on_one_node(tmp_path, "", lines)
    ended = "" if status is None else f"ended {status}\n"
    assert re.fullmatch(rf"began n1 \S+\n{ended}", noted), noted
    assert done.returncode == (-9 if status is None else status), done.stderr


def test_a_trap_for_exit_of_one_s_own(tmp_path):
    """Stays, and env.sh says what it lacks."""
    said = "env.sh: begin your trap for EXIT with: note_end $?\n"
    done, noted = start_on_one_node(tmp_path, "trap 'echo tidy' EXIT", "exit 3")
    assert (done.returncode, done.stdout) == (3, "tidy\n") and said in done.stderr
    assert "ended" not in noted
    done, noted = start_on_one_node(tmp_path, "trap 'note_end $?; echo tidy' EXIT", "exit 3")
    assert (done.returncode, done.stdout) == (3, "tidy\n") and said not in done.stderr
    assert noted.endswith("\nended 3\n")


def test_what_others_have_put_into_log(tmp_path):
    """Through a link nothing is written, no FIFO is waited for, and code-N is this user's own."""
    mine, folder = tmp_path / "mine", tmp_path / "log/7"
    mine.write_text("precious")
    folder.mkdir(parents=True)
    for name in ("start-0", "code-0"):
        (folder / name).symlink_to(mine)
    done, _ = start_on_one_node(tmp_path, "", "")
    assert done.returncode == 0 and mine.read_text() == "precious"
    assert "env.sh" in (folder / "code-0").read_text() and not (folder / "code-0").is_symlink()
    (folder / "start-0").unlink()
    os.mkfifo(folder / "start-0")
    (folder / "code-0").chmod(0o666)
    done, _ = start_on_one_node(tmp_path, "", "")
    assert done.returncode == 0 and (folder / "code-0").stat().st_mode & 0o777 == 0o600


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
    (tmp_path / "site.sh").write_text('PATH="$PWD/module:$PATH"\ndeactivate || true\n')
    shown = '"$(type -P python)"'
    assert (
        source_env(cluster, tmp_path, cwd=tmp_path, shown=shown) == f"{tmp_path}/.venv/bin/python"
    )
    # But an environment that it activates is the reader's choice, and stays in front.
    (tmp_path / "module/activate").write_text('PATH="$PWD/module:$PATH"\n')
    (tmp_path / "site.sh").write_text("# activate\nsource module/activate\n")
    assert source_env(cluster, tmp_path, cwd=tmp_path, shown=shown) == f"{tmp_path}/module/python"


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
