"""preemption.py in a script of ours and in one that is not: what is a request, who ends, and how
the job is requeued. The rows with every launcher are in test_fault_tolerance.py."""

import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import checkpoint
import job_processes
from copies import THREE_FILES, copy_file
from ddp_runs import EVALUATED, PREEMPTIBLE, copies, small_project, submit
from slurm import (
    REPOSITORY,
    at_once,
    cells,
    environment,
    kill,
    ranks,
    run,
    stand_ins,
    wait_for,
)

SCRIPTS = REPOSITORY / "tests/scripts"
BY_HAND = {
    "none": [sys.executable],
    "torchrun": ["./torchrun.sh"],
    "spawn": [sys.executable, "aux/launch/spawn_ranks.py"],
}


ENDS = [("saved", ["0 1 True", "1 0 True"]), ("failed", ["0 1 False", "1 1 False"])]
ENDS += [("finished", ["0 0 True", "1 0 True"])]


@pytest.mark.parametrize(("how", "said"), ENDS)
def test_no_rank_ends_before_the_job_is_requeued(how, said, tmp_path):
    """srun would end rank 0, which asks Slurm, or which still saves, if a signal comes as late as
    that. A refusal, or a failure, is rank 0's status."""
    path = {"PYTHONPATH": REPOSITORY / "distributed"}
    done = ranks(2, SCRIPTS / "end_of_ranks.py", how, cwd=tmp_path, **path)
    assert sorted(done.stdout.splitlines()) == said, done.stderr


ALONE = "import preemption; preemption.requeue = lambda _: False; print(1); preemption.end(True)"


def test_a_script_without_a_process_group_ends_as_well():
    """With the last words that it has printed, which Python would keep for its shutdown."""
    env = environment(PYTHONPATH="distributed", PYTHONUNBUFFERED="")
    done = run(sys.executable, "-c", ALONE, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (1, "1\n", ""), done


@pytest.mark.long
@pytest.mark.parametrize("way", BY_HAND)
def test_control_c_at_a_terminal(way, mnist, tmp_path):
    """It saves."""
    command = [*BY_HAND[way], "tests/scripts/slowly.py", "0.1", PREEMPTIBLE]
    command += ["--data-dir", str(mnist), "--log-every", "1", "--checkpoint-dir", str(tmp_path)]
    options = {"cwd": REPOSITORY, "text": True, "start_new_session": True}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    env = environment(NPROC_PER_NODE=2, OMP_NUM_THREADS=1)
    shown = ""
    with subprocess.Popen(command, env=env, **options) as process:
        for line in process.stdout:
            shown += line
            if line.startswith("epoch=1 step=3/"):
                os.killpg(process.pid, signal.SIGINT)
    # torchrun sends its ranks a second signal, perhaps before all have agreed.
    assert "Traceback" not in shown or way == "torchrun", shown
    [stopped] = re.findall(r"^Stopped after step (\d+), saved$", shown, re.M)
    assert int(stopped) <= 10 and checkpoint.steps(tmp_path) == [int(stopped)], shown


# --- the queue ---

DISABLED = "Requested operation is presently disabled"
REQUEUED = "Requeued: it resumes by itself\n"
STATES = {
    "JobState=RUNNING Reason=None Restarts=2 BatchFlag=1": "",
    "JobState=COMPLETING Reason=TimeLimit Restarts=2 BatchFlag=1": "",
    # scancel
    "JobState=COMPLETING Reason=None Restarts=2 BatchFlag=1": "Slurm is ending it",
    # --no-requeue
    "JobState=RUNNING Reason=Disabled Restarts=2 BatchFlag=1": DISABLED,
    # Slurm has requeued it by itself: one start more.
    "JobState=PENDING Reason=BeginTime Restarts=3 BatchFlag=1": "",
    # slurmctld does not answer, or shows nothing
    "": "Unable to contact slurm controller",
    "unknown": "Slurm does not show it",
    # scontrol is killed before slurmctld has heard it
    "JobState=RUNNING Reason=Killed Restarts=2 BatchFlag=1": "scontrol ended with -9: try again",
}
KNOWN = [(state, 2) for state in STATES]
# The variable is left from the job that has submitted this one, or that of a start that Slurm has
# not requeued yet.
SUBMITTED = "JobState=RUNNING Reason=None Restarts=0 BatchFlag=1"
STATES[SUBMITTED] = ""
KNOWN += [(SUBMITTED, known) for known in ("", 0, 1)]
SCONTROL = """echo "$@" >>calls
if [[ $STATE == unknown ]]; then exit; fi
if [[ $1 == requeue && $STATE == *Killed* ]]; then kill -KILL $$; fi
if [[ $1 == show && -z "$STATE" ]]; then echo "Unable to contact slurm controller" >&2; exit 1; fi
NAME=$'a\n\n   b'
show() {
    echo "JobId=$1 ArrayJobId=9 ArrayTaskId=$2 JobName=$NAME $3 Command=/home/me/launch.sh train.py"
}
if [[ $1 == show ]]; then
    show 7 0 "JobState=RUNNING Reason=None Restarts=7 "
    echo
    show 9 1 "$STATE"
fi
if [[ $1 == requeue && $STATE == *Disabled* ]]; then echo "{}" >&2; exit 1; fi
echo "ERROR: ld.so: object 'libsite.so' from LD_PRELOAD cannot be preloaded: ignored." >&2
"""
CALL = "import sys, preemption; preemption.time.sleep = lambda _: None; "
CALL += "sys.exit(not preemption.requeue('--resume'))"


@pytest.mark.parametrize(("state", "known"), KNOWN)
def test_what_is_requeued(state, known, tmp_path):
    """Of an array this task alone, by Slurm's record: the variables are left from another job.
    Otherwise it says what to type. What a site's setup prints besides is no refusal. The job's name
    has an empty line, as there is between two records."""
    stand_ins(tmp_path, {"scontrol": SCONTROL.replace("{}", DISABLED)})
    array = {"SLURM_JOB_ID": 9, "SLURM_ARRAY_JOB_ID": 5, "SLURM_ARRAY_TASK_ID": 3}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    path["PYTHONPATH"] = REPOSITORY / "distributed"
    env = environment(**array, **path, SLURM_RESTART_COUNT=known, STATE=state)
    done = run(sys.executable, "-c", CALL, "--data dir", cwd=tmp_path, env=env)
    reason = STATES[state]
    launcher = "/home/me/launch.sh" if "JobState" in state else "LAUNCHER"
    typed = f"Not requeued: {reason}. To resume it, type this with your sbatch options:\n"
    typed += f"    sbatch {launcher} -c '--data dir' --resume\n"
    assert done.stdout == (typed if reason else REQUEUED), done.stderr
    assert done.returncode == bool(reason)
    calls = (tmp_path / "calls").read_text().splitlines()
    requeues = "RUNNING" in state or "TimeLimit" in state
    # If there was no answer it is asked five times, in half a minute.
    tries = 5 if state == "" or "Killed" in state else 1
    assert calls == ["show job 9", *["requeue 9_1"] * requeues] * tries


BUSY = """echo "$@" >>calls
count=$(wc --lines <calls)
say() { echo "$1" >&2; exit 1; }
if ((count == 1)); then say "Unable to contact slurm controller (connect failure)"; fi
if [[ $1 == show ]]; then echo "JobId=9 JobState=RUNNING Restarts=$((count > 5)) "; exit; fi
if ((count == 3)); then say "Zero Bytes were transmitted or received"; fi
# It is heard, but not answered.
if ((count == 5)); then say "Socket timed out on send/recv operation"; fi
"""
WITHOUT_SLEEP = """import preemption
slept = []
preemption.time.sleep = slept.append
print(preemption.requeue(), slept)
"""


def test_slurmctld_is_busy(tmp_path):
    """It is asked again, and a job that it has requeued without an answer is not requeued twice."""
    stand_ins(tmp_path, {"scontrol": BUSY})
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": REPOSITORY / "distributed"}
    env = environment(SLURM_JOB_ID=9, **path)
    done = run(sys.executable, "-c", WITHOUT_SLEEP, cwd=tmp_path, env=env)
    assert done.stdout == f"{REQUEUED}True [0, 2, 4, 8]\n", done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["show job 9", *["show job 9", "requeue 9"] * 2, "show job 9"]


SIGNALLED = """if [[ $1 == show ]]; then echo "JobId=9 JobState=RUNNING Restarts=0 "; exit; fi
kill -TERM "$PARENT"  # and its group
sleep 0.5
echo "$@" >>calls
"""
IN_A_GROUP = """import os, signal, preemption
preemption.listen()
os.environ["PARENT"] = str(-os.getpgid(0))
print(preemption.requeue())
"""


def test_a_signal_does_not_reach_scontrol(tmp_path):
    """torchrun sends SIGTERM to all processes in a rank's group. A request that it has killed would
    be no requeue, although nobody complains."""
    stand_ins(tmp_path, {"scontrol": SIGNALLED.replace('"$PARENT"', '-- "$PARENT"')})
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": REPOSITORY / "distributed"}
    env = environment(SLURM_JOB_ID=9, **path)
    done = run(sys.executable, "-c", IN_A_GROUP, cwd=tmp_path, env=env)
    assert done.stdout == f"{REQUEUED}True\n", done.stderr
    assert (tmp_path / "calls").read_text() == "requeue 9\n"


def test_the_second_control_c_ends_a_run_that_hangs():
    command = [sys.executable, SCRIPTS / "control_c_twice.py"]
    done = run(*command, env=environment(PYTHONPATH="distributed"))
    assert done.stdout == "True\nends\n", done.stderr


def test_in_a_container(tmp_path):
    """It has no scontrol, so run_script.sh finds what to type in a file that it has made. Without
    one nobody would requeue the job."""
    env = environment(SLURM_JOB_ID=9, PATH=tmp_path, PYTHONPATH=REPOSITORY / "distributed")
    done = run(sys.executable, "-c", CALL, "train.py", cwd=tmp_path, env=env)
    said = "Not requeued: no scontrol here, and the job was not started by run_script.sh. To "
    assert done.returncode == 1 and done.stdout.startswith(said), done
    assert done.stdout.endswith("\n    sbatch LAUNCHER -c train.py --resume\n")

    asks = tmp_path / "log/9/requeue"
    asks.parent.mkdir(parents=True)
    asks.touch()
    done = run(sys.executable, "-c", CALL, "train.py", cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    assert asks.read_text() == "-c train.py --resume"


@pytest.mark.matrix
def test_sbatch_in_a_requeued_task_of_an_array(cluster, tmp_path):
    """The job that it submits is requeued itself, and the task is left alone."""
    for name in (*THREE_FILES["srun"], "distributed/preemption.py"):
        copy_file(name, tmp_path)
    for name in ("outer_job.sh", "inner_job.py"):
        copy_file(f"tests/scripts/{name}", tmp_path)
    shutil.copy(tmp_path / "distributed/preemption.py", tmp_path / "tests/scripts")
    options = ["--nodes=1", "--array=3", "--requeue", "--output=outer.out"]
    options += ["tests/scripts/outer_job.sh"]
    task = cluster.submit(*options, cwd=tmp_path)
    wait_for((tmp_path / "inner.id").exists, 60)
    inner = int((tmp_path / "inner.id").read_text())
    log = tmp_path / "inner.out"
    wait_for(lambda: log.exists() and "first start\n" in log.read_text(), 60)
    assert cluster.exec("scancel", "--signal=TERM", inner).returncode == 0
    done = cluster.wait(inner)
    assert done.state == "COMPLETED" and REQUEUED in done.log, done.log
    assert "second start\n" in done.log and cluster.show(inner)["Restarts"] == "1"
    outer = cluster.show(task)
    assert (outer["JobState"], outer["Restarts"]) == ("RUNNING", "1"), outer
    cluster.exec("scancel", task)


def test_a_start_of_the_spare_launcher(tmp_path):
    """Its own restarts are in SLURM_RESTART_COUNT, and Slurm's in JOB_RESTARTS: here Slurm has
    requeued the job by itself."""
    show = "JobId=9 JobState=PENDING Reason=BeginTime Restarts=2 "
    stand_ins(tmp_path, {"scontrol": f'echo "$1" >>calls\necho "{show}"'})
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": REPOSITORY / "distributed"}
    env = environment(SLURM_JOB_ID=9, SLURM_RESTART_COUNT=10001, JOB_RESTARTS=1, **path)
    done = run(sys.executable, "-c", CALL, cwd=tmp_path, env=env)
    assert done.stdout == REQUEUED and (tmp_path / "calls").read_text() == "show\n", done.stderr


# --- when the ranks are asked ---

EACH_TENTH = [1, 2, 10, 20, 30, 40]
# Seconds for a step here, and on the slowest rank
LOOKS = [
    (0.01, 0, EACH_TENTH),
    (0.5, 0, EACH_TENTH),
    (1, 0, [1, 2, *range(5, 41, 5)]),
    (30, 0, list(range(1, 41))),
    (0.01, 30, list(range(1, 41))),
]


@pytest.mark.parametrize(("seconds", "slowest", "looks"), LOOKS)
def test_how_often_ranks_look(seconds, slowest, looks):
    """All in the same steps, and at least once in some 5 seconds: a save needs the time."""
    command = [SCRIPTS / "asks_in_steps.py", seconds, slowest]
    done = ranks(0, *command, PYTHONPATH="distributed")
    assert done.stdout == f"{looks}\n", done.stderr


REQUESTS = """import os, signal, preemption
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    preemption.received = False
    preemption.listen()
    os.kill(os.getpid(), number)
    print(preemption.received)
"""


def test_each_signal_is_a_request():
    done = run(sys.executable, "-c", REQUESTS, env=environment(PYTHONPATH="distributed"))
    assert done.stdout == "True\n" * 3, done.stderr


# --- processes that a rank starts ---


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_ends_while_it_works(method):
    """It ends its workers by SIGTERM, and waits for them: they must not take it for a request."""
    env = environment(PYTHONPATH=REPOSITORY / "distributed")
    command = [sys.executable, SCRIPTS / "pool_that_works.py", method]
    done = run(*command, env=env, timeout=20)
    assert done.stdout == "0\nended\n", done.stderr


# What the rank has started; then, for SIGTERM to the rank, for SIGTERM to all its processes, and
# for an error in the rank: its status, or that it waits, and whether what it has started is left.
TREES = {
    "daemon": ("0", "0", "1"),
    "pool": ("0", "0", "1"),
    "process": ("0, left", "0", "waits, left"),
    "executor": ("0, left", "0", "waits, left"),
    "program": ("0, left", "0", "1, left"),
    "loader": ("0", "0", "1"),
    "persistent": ("0", "0", "1"),
    "dataset": ("0", "0", "1"),
}
EVENTS = ["rank", "all", "fail"]
METHODS = ["fork", "spawn", "forkserver"]
# Each of these is one rank. Those that read data have imported torch, so they are one.
RANKS = [["daemon"], ["pool"], ["process"], ["executor"], ["program"]]
RANKS += [["loader", "persistent", "dataset"]]
# Older forkservers do not import the main file, so SIGTERM ends them, and loader workers with them.
SERVER_LISTENS = sys.version_info >= (3, 13, 8)


class Tree:
    """A rank of process_tree.py, in a session of its own, and what it has started."""

    def __init__(self, kinds: list[str], method: str, how: str, folder: Path):
        self.kinds, self.folder, self.mark = kinds, folder, f"TREE={folder}"
        folder.mkdir()
        env = environment(OMP_NUM_THREADS=1, TREE=folder, PYTHONPATH=REPOSITORY / "distributed")
        command = [sys.executable, REPOSITORY / "tests/scripts/process_tree.py", method, how]
        with (folder / "out").open("w") as out:
            options = {"cwd": folder, "env": env, "stdout": out, "stderr": out}
            self.rank = subprocess.Popen([*command, *kinds], start_new_session=True, **options)

    def is_ready(self) -> bool:
        assert self.rank.poll() in (None, 1), (self.folder / "out").read_text()
        return "ready\n" in (self.folder / "out").read_text()

    def status(self, seconds: float) -> str:
        try:
            return str(self.rank.wait(seconds))
        except subprocess.TimeoutExpired:
            return "waits"

    def left(self, seconds: float) -> dict[int, str]:
        """The processes that are there after this time, if any, and which kind they are."""
        deadline = time.monotonic() + seconds
        while found := [process for process, _ in job_processes.having(self.mark)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        kinds = dict(path.name.split("-")[::-1] for path in self.folder.glob("*-*"))
        return {process: kinds.get(str(process), "another") for process in found}


@pytest.mark.long
@pytest.mark.parametrize(("event",), cells([(event,) for event in EVENTS], ("fail",)))
@pytest.mark.parametrize("method", METHODS)
def test_a_tree_of_processes(method, event, tmp_path):
    """As fault_tolerance.md says. That a rank with an error waits for a process is Python's own
    rule, and it ends when that process does."""
    expected = {kind: outcomes[EVENTS.index(event)] for kind, outcomes in TREES.items()}
    ranks = RANKS
    if event == "all" and method == "forkserver" and not SERVER_LISTENS:
        expected |= {"loader": "1", "persistent": "1"}
        # A pool that has lost its workers may wait for ever when an error closes it.
        del expected["dataset"]
        ranks = [kinds[:2] for kinds in RANKS]
    how, trees, seen = "fail" if event == "fail" else "stop", [], {}

    def look(tree: Tree):
        outcome = expected[tree.kinds[0]]
        status = tree.status(5 if "waits" in outcome else 30)
        left = tree.left(1 if "left" in outcome else 30)
        for kind in tree.kinds:
            seen[kind] = status + ", left" * (kind in left.values())
        assert "left" in outcome or not left, left
        if status == "waits":
            [started] = [process for process, kind in left.items() if kind in tree.kinds]
            os.kill(started, signal.SIGKILL)
            assert tree.status(20) == "1"

    try:
        for kinds in ranks:
            trees.append(Tree(kinds, method, how, tmp_path / kinds[0]))
        wait_for(lambda: all([tree.is_ready() for tree in trees]), 120)
        for tree in trees:
            if event == "rank":
                os.kill(tree.rank.pid, signal.SIGTERM)
            if event == "all":
                os.killpg(tree.rank.pid, signal.SIGTERM)
        at_once(look, [(tree,) for tree in trees])
    finally:
        for tree in trees:
            wait_for(lambda tree=tree: not kill(tree.mark), 20)
            tree.rank.wait(10)
    assert seen == expected


# With the second, meanings.py is imported for the first task.
MAINS = {
    "at_the_top": "import sys, meanings\n{}    meanings.main(sys.argv[1])\n",
    "guarded": "{}    import sys, meanings\n    meanings.main(sys.argv[1])\n",
}
MEANINGS = [(method, main, "none") for method in METHODS for main in MAINS]


@pytest.mark.parametrize(("method", "main", "way"), [*MEANINGS, ("spawn", "at_the_top", "spawn")])
def test_whose_signals_are_requests(method, main, way, tmp_path):
    """A rank's, and those of a rank that spawn_ranks.py has spawned; but of no process that a rank
    starts by multiprocessing, or by the guests' multiprocess if `make test-all` has installed it.
    It may import the rank's files in its turn."""
    guard = "if __name__ == '__main__':\n"
    (tmp_path / "main.py").write_text(MAINS[main].format(guard))
    minor = f"python3.{sys.version_info.minor}"
    path = [
        SCRIPTS,
        REPOSITORY / "distributed",
        REPOSITORY / f".venv-guests/lib/{minor}/site-packages",
    ]
    env = environment(PYTHONPATH=":".join(map(str, path)), NPROC_PER_NODE=1)
    script = tmp_path / "main.py"
    done = run(*BY_HAND[way], script, method, env=env)
    said = dict(line.split(": ") for line in done.stdout.splitlines())
    assert said.pop("rank") == "a request" and len(said) >= 3, done
    assert set(said.values()) == {"ordinary"}, done


@pytest.mark.parametrize("method", METHODS)
def test_what_a_loader_worker_starts(method):
    """Is told to end as any other process, although the worker itself lives as long as its rank."""
    env = environment(PYTHONPATH="distributed", OMP_NUM_THREADS=1)
    done = run(sys.executable, SCRIPTS / "starts_in_workers.py", method, env=env)
    assert done.stdout == "[['ordinary', [0, 0]]]\n", done


@pytest.mark.parametrize("method", METHODS)
def test_loader_workers_end_with_a_rank_that_is_killed(method, tmp_path):
    """Also while they write a batch that no pipe can hold, because `ignore` sees to it."""
    mark = f"KILLED_{method}={tmp_path}"
    env = environment(**dict([mark.split("=")]), PYTHONPATH=REPOSITORY / "distributed")
    command = [sys.executable, SCRIPTS / "killed_rank.py", method]
    with subprocess.Popen(command, cwd=tmp_path, env=env) as rank:
        try:
            assert rank.wait(120) == -signal.SIGKILL
            wait_for(lambda: not [*job_processes.having(mark)], 60)
        finally:
            kill(mark)


def test_a_child_of_a_rank_is_none():
    """Nothing is held back from what it starts, and a handler of its own is handed down."""
    env = environment(PYTHONPATH="distributed", OMP_NUM_THREADS=1)
    done = run(sys.executable, SCRIPTS / "child_of_a_rank.py", env=env)
    assert done.stdout == "its loader worker: ordinary\nown\n", done


def test_only_a_data_loader_s_forks_hold_signals_back():
    """Until they call preemption.ignore. Processes of torch's compiler are told to end."""
    env = environment(PYTHONPATH="distributed")
    done = run(sys.executable, SCRIPTS / "forks_of_torch.py", env=env)
    said = dict(line.rsplit(".", 1)[-1].split(": ") for line in done.stdout.splitlines())
    assert said == {"dataloader": "a request", "subproc_pool": "ordinary"}, done


def test_a_rank_ends_well_beside_its_loader_workers():
    """torch's handler takes their end for a failure, and the job would have failed."""
    env = environment(PYTHONPATH="distributed", OMP_NUM_THREADS=1)
    done = run(sys.executable, SCRIPTS / "end_beside_workers.py", env=env)
    assert (done.returncode, done.stderr) == (0, ""), done


def test_a_daemon_is_asked_before_it_is_killed():
    """When its rank fails, as by Python's own exit."""
    env = environment(PYTHONPATH="distributed")
    done = run(sys.executable, SCRIPTS / "daemon_of_a_rank.py", env=env, timeout=20)
    assert (done.stdout, done.stderr, done.returncode) == ("cleans up\n", "a rank fails\n", 1)


def test_the_fork_server_lives_as_long_as_its_rank():
    """If it has imported a file that listens: the main one, from Python 3.14 on. Its loader workers
    would take its end for that of the rank."""
    # An older server finds what it imports only by this variable.
    env = environment(PYTHONPATH=f"{SCRIPTS}:distributed")
    done = run(sys.executable, SCRIPTS / "fork_server.py", env=env)
    assert done.stdout == "ordinary\nordinary\nTrue\n", done


# --- a script that is not ours ---


def test_chapter_7_s_script_is_chapter_2_s():
    """But for the lines that are shown here, and those that are new."""
    old, new = (
        (REPOSITORY / "examples" / name).read_text().splitlines()
        for name in ("many_gpus.py", "many_gpus_preemptible.py")
    )
    gone = [line.strip(" -") for line in difflib.ndiff(old, new) if line.startswith("- ")]
    assert gone == [
        old[0],
        "sampler = DistributedSampler(train_set, drop_last=True)",
        "best = -1.0",
        "for epoch in range(EPOCHS):",
        "start = time.perf_counter()",
        "images_per_second = len(train_loader) * BATCH / (time.perf_counter() - start)",
        'torch.save(model.state_dict(), f"best_{run}.pt")',
        *[line.strip() for line in old[-4:]],
    ]


@pytest.mark.matrix
def test_chapter_s_script_resumes(tmp_path):
    """Chapter 2's script for many GPUs, with chapter 7's lines. Only rank 1 is asked: both stop
    after the same step. A requeued run and one that gets the file end with the loss of one that was
    not stopped."""
    script = small_project("many_gpus_preemptible.py", tmp_path)

    def train(*command: object, **variables: object) -> str:
        path = {"PYTHONPATH": REPOSITORY / "distributed"}
        done = ranks(2, *command, cwd=tmp_path, **path, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    whole = train(script)
    # Step 3 of the second epoch, because slowly.py takes this script's epoch 1 for the first.
    stopped = train(REPOSITORY / "tests/scripts/slowly.py", 0, script, TERM_AT=3)
    [last] = re.findall(r"^Stopped after step (\d+), saved$", stopped, re.M)
    # An epoch has six steps, so the run was stopped in its second one. On a busy machine it looks
    # more often than in every tenth step.
    assert 6 < int(last) < 12
    first, second = re.findall(EVALUATED, whole)
    assert re.findall(EVALUATED, stopped) == [first]
    shutil.copy(tmp_path / "last_by_hand.pt", tmp_path / "of_job_1.pt")
    for resumed in (train(script, SLURM_RESTART_COUNT=1), train(script, "of_job_1.pt")):
        assert f"\nResumed after step {last}\n" in resumed
        assert re.findall(EVALUATED, resumed) == [second]


def test_a_file_that_cannot_be_read_is_not_replaced(tmp_path):
    """A link to a file system that is away."""
    script, path = small_project("many_gpus_preemptible.py", tmp_path), tmp_path / "last.pt"
    path.symlink_to("/away/last.pt")
    done = ranks(1, script, path, cwd=tmp_path, PYTHONPATH=REPOSITORY / "distributed")
    assert done.returncode == 1 and "No such file" in done.stderr, done.stdout + done.stderr
    assert path.is_symlink()


def test_a_worker_that_has_just_begun():
    """torchrun passes SIGTERM on to the workers as well. torch has a handler of its own in them,
    which ends them, until worker_init_fn is called."""
    command = [sys.executable, SCRIPTS / "young_worker.py"]
    done = run(*command, env=environment(PYTHONPATH="distributed"))
    assert done.stdout == "28 False\n", done.stdout + done.stderr


def with_hunks(script: str, diff: str) -> str:
    """The script with the changes of a diff whose hunks have no line numbers."""
    for hunk in re.split(r"^@@\n", diff, flags=re.M)[1:]:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in sign) for sign in (" -", " +"))
        assert script.count(old) == 1, f"not once in the script:\n{old}"
        script = script.replace(old, new)
    return script


@pytest.mark.matrix
def test_chapter_s_ten_lines(tmp_path):
    """Chapter 2's script with them, killed in its second epoch and started again, ends as if nobody
    had killed it. A start that finds nothing left to do ends."""
    page = (REPOSITORY / "docs/07_it_is_stopped.md").read_text()
    diff = re.search(r"^```diff\n(--- many_gpus\.py\n.*?)^```$", page, re.M | re.S)[1]
    script = small_project("many_gpus.py", tmp_path)
    script.write_text(with_hunks(script.read_text(), diff))

    def train(*command: object, fails: bool = False, **variables: object) -> list[str]:
        done = ranks(2, *command, cwd=tmp_path, **variables)
        assert (done.returncode != 0) == fails, done.stderr
        return re.findall(r"^epoch.*accuracy.\d\.\d{4}", done.stdout, re.M)

    first, second = train(script, "whole.pt")
    # slowly.py takes this script's epoch 1 for the first.
    slowly = [REPOSITORY / "tests/scripts/slowly.py", 0]
    assert train(*slowly, script, "run.pt", fails=True, KILL_AT=3) == [first]
    assert train(script, "run.pt") == [second]
    assert train(script, "run.pt") == []


@pytest.mark.parametrize(("ways",), cells([(["srun"],), (["torchrun", "spawn"],)], (["srun"],)))
def test_a_strangers_script(ways, cluster, tmp_path):
    """A ResNet, AdamW, a schedule, best.pt, random flips in workers: stopped within an epoch and
    requeued, its losses are bit for bit those of a run that was not."""
    submitted = {}
    for way in ways:
        (tmp_path / way).mkdir()
        submitted[way] = submit(cluster, way, tmp_path / way, SLOW="0.4")
    for way, number in submitted.items():
        log = tmp_path / way / "log.out"
        wait_for(lambda log=log: log.exists() and "\nstep 6: " in log.read_text())
        assert cluster.exec("scancel", "--signal=TERM", number).returncode == 0
    (tmp_path / "reference").mkdir()
    copies(tmp_path / "reference", "srun")
    reference = ranks(2, tmp_path / "reference/train.py", cwd=tmp_path / "reference")
    curve = re.findall(r"^step \d+: loss .*$", reference.stdout, re.M)
    assert reference.returncode == 0 and len(curve) == 24, reference.stderr
    for way, number in submitted.items():
        job = cluster.wait(number, 240)
        assert job.state == "COMPLETED" and cluster.show(number)["Restarts"] == "1", job.log
        [stopped] = re.findall(r"^stopped after step (\d+)$", job.log, re.M)
        assert int(stopped) in (10, 15) and f"resumed after step {stopped}" in job.log
        assert re.findall(r"^step \d+: loss .*$", job.log, re.M) == curve, job.log
        assert (tmp_path / way / "best.pt").exists()
