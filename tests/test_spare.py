"""launch_slurm_with_spare.sh: a run goes on within its job when a rank or a node fails, and ends
when it makes no progress. What aux/launch/spare.py decides is tested without a cluster."""

import contextlib
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import heartbeat
import job_processes
import spare
from copies import copy_file
from slurm import REPOSITORY, Cluster, at_once, environment, heartbeat_of, run, stand_ins, wait_for

LAUNCHER = "launch_slurm_with_spare.sh"
TWO_TASKS = "srun: error: n2: task 1: Exited with exit code 1\nsrun: error: n1: task 0: Killed\n"

# --- what it decides, as tables ---


def report(host: str, exitcode: int) -> str:
    """The end of torchrun's report, behind srun's label."""
    lines = ["Root Cause (first observed failure):", "[0]:", "  time      : 2026-11-01_12:00:00"]
    lines += [f"  host      : {host}", "  rank      : 1 (local_rank: 0)"]
    lines += [f"  exitcode  : {exitcode} (pid: 7)", "=" * 60]
    return "".join(f"1: {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("said", "node"),
    [
        (TWO_TASKS, "n2"),
        ("srun: error: n[1-2]: tasks 0-1: Killed\nloss=0.1\n", None),
        ("srun: error: n9: task 1: Killed\n", None),
        ("srun: error: n1: task 0: Killed\n" + report("n2.cluster.org", -9), "n2"),
        (report("n1", 1) + report("n2", -7), "n2"),
        ("srun: error: n1: task 0: Exited\n" + report("n2", -11), "n1"),
        ("0: Ended, because of rank 1 on n2: no step for 600 s\nsrun: error: n1: task 0: x", "n2"),
        ("[default0]: Ended, because of no rank by itself: no\nsrun: error: n1: task 0: x", None),
    ],
)
def test_node_to_blame(said, node):
    assert spare.node_to_blame(said, ["n1", "n2"]) == node


@pytest.mark.parametrize(
    ("failed", "why"),
    [
        ([("n2", (5, 9))], None),
        ([("n1", (5, 9)), ("n2", (50, 54))], None),
        ([("n2", (5, 9)), (None, None)], None),
        ([("n2", (5, 9)), ("n2", (10, 14))], spare.TWICE),
        ([("n2", None), ("n2", None)], spare.TWICE),
        ([("n2", (5, 9)), ("n2", (9, 13))], spare.SAME_STEP),
        ([("n2", (50, 54)), ("n1", (5, 9)), ("n2", (7, 11))], spare.SAME_STEP),
    ],
)
def test_whether_a_node_is_left_out(failed, why):
    """After two failures. Those in one step, even of different nodes, are the script's."""
    assert spare.verdict(failed) == why


def test_the_step_in_which_a_start_failed(tmp_path, monkeypatch):
    """A heartbeat is up to two seconds, here five steps, old. Two ranks show none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    folder = Path("log/7/ranks-0")
    assert spare.steps_of(folder) is None
    folder.mkdir(parents=True)
    for rank, step in enumerate((28, 30, None)):
        heart = heartbeat.Heart(60, rank, world_size=4)
        heart.first_step, heart.counts = 11, [200, 80, 0]
        heart.file = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT)
        monkeypatch.setattr(heartbeat, "step", step)
        heart.write(0)
        os.close(heart.file)
    (folder / "3").write_text('{"step": 4')
    # A stranger's, who may write there
    os.mkfifo(folder / "4")
    (folder / "5").write_bytes(b"\xff")
    (folder / "6").write_text("[" * 60_000)
    (folder / "7").write_text('{"counts": [0, 1e400], "step": 1, "first_step": 1, "interval": 1}')
    assert spare.steps_of(folder) == (30, 35)


def test_three_nodes_watch(monkeypatch):
    """Of however many, because each of them asks slurmctld."""
    monkeypatch.setattr(spare, "nodes_of_job", lambda: [f"n{number}" for number in range(9)])
    called = []
    monkeypatch.setattr(spare.os, "execvp", lambda program, words: called.extend(words))
    spare.command_watch()
    assert {"--nodelist=n1,n2,n3", "--nodes=3", "--ntasks=3"} < set(called)


def test_the_node_that_heartbeat_names_is_found(tmp_path, monkeypatch, capsys):
    """In the words with which a run ends that has hung: rank 0 waits for rank 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setattr(heartbeat.os, "_exit", lambda status: None)
    monkeypatch.setattr(heartbeat.time, "sleep", lambda seconds: None)
    heart = heartbeat.Heart(60, 0, world_size=2)
    heart.folder.mkdir(parents=True)
    for rank in (0, 1):
        values = {"host": f"n{rank + 1}", "seconds_in_step": 600, "waits": rank == 0}
        beat = heartbeat_of(rank, stack=[f"f{rank}"], **values)
        (heart.folder / str(rank)).write_text(beat)
    heart.end(600)
    assert spare.node_to_blame(capsys.readouterr().out, ["n1", "n2"]) == "n2"


@pytest.mark.parametrize(
    ("answers", "lost"),
    [
        (["0", "7 job on n1"], False),
        (["0", ""], True),
        (["1", ""], False),
        ([None, ""], False),
        (["0", None], False),
    ],
)
def test_whether_the_first_node_is_lost(answers, lost, monkeypatch):
    """The job runs, and not on this node. Whoever is not answered waits."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    said = iter(answers)
    monkeypatch.setattr(spare, "slurm", lambda *command: next(said))
    assert spare.has_lost("n1") == lost


# --- the launcher on nodes n1 to n4, two of them spare, with stand-ins for Slurm ---

ENV = """die() { echo "env.sh: $1" >&2 && exit 1; }
mkdir --parents log/7
export NNODES=$SLURM_JOB_NUM_NODES CPUS_PER_NODE=2 RUN=7
export MASTER_ADDR=${ADDRESS:-n1} MASTER_PORT=61007 SHELL_OF_JOB=$$
note_end() { echo "$1" >noted; }
"""
SLURM = {
    "scontrol": 'printf "n%s\\n" 1 2 3 4',
    "squeue": "if [[ -e ended ]]; then echo COMPLETING 1; else echo RUNNING 1; fi",
    # A probe, the watch, or a start, which is written down before it does what the test says.
    "srun": """case "$*" in
*--immediate=*)
    if rm told 2>/dev/null; then kill -TERM "$SHELL_OF_JOB"; fi
    if rm "busy-${1#--nodelist=}" 2>/dev/null; then
        echo "srun: error: Unable to create step for job 7: Socket timed out on send/recv" >&2
        exit 1
    fi
    ! grep --quiet --word-regexp "${1#--nodelist=}" down ;;
*" watch "*) echo "$*" >watch ;;
*) echo "${1#--nodelist=} $MASTER_ADDR $MASTER_PORT $SLURM_RESTART_COUNT $JOB_RESTARTS" >>starts
    echo "$HEARTBEAT_LIMIT $*" >asked
    start=$(wc --lines <starts)
    if ((start > 9)); then touch ended; exit 9; fi
    log=log/7/ranks-$SLURM_RESTART_COUNT
    source ./does ;;
esac""",
}
FAILS = "echo srun: error: n2: task 1: Killed >&2; exit 5; "
SAVES = "sleep 0.02; mkdir --parents checkpoints/7; touch checkpoints/7/$start; "
OLD = "old n9 bad\n\n"
OWN = ">>log.out 2>&1"
BEATS = """mkdir $log
echo '{"step": 40, "first_step": 31, "interval": 2, "counts": [60, 50, 0]}' >$log/0; """


class Launched:
    """The launcher has run in `folder`: its starts, as rows of words, status and log."""

    def __init__(self, folder: Path, does: str, address="", down="", bad=OLD, nodes=4, log=OWN):
        copy_file(LAUNCHER, folder)
        launcher = folder / LAUNCHER
        launcher.write_text(launcher.read_text().replace("\nSPARE=1", "\nSPARE=2"))
        (folder / "aux").symlink_to(REPOSITORY / "aux")
        for name, text in {"env.sh": ENV, "does": does, "down": down}.items():
            (folder / name).write_text(text)
        (folder / "bad_nodes.txt").write_bytes(bad if isinstance(bad, bytes) else bad.encode())
        path = f"{stand_ins(folder / 'bin', SLURM)}:{environment()['PATH']}"
        slurm = {"SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": nodes, "SLURM_JOB_NODELIST": "n[1-4]"}
        slurm |= {"SLURM_RESTART_COUNT": 1, "PATH": path, "ADDRESS": address}
        # The log of the start that Slurm has requeued
        (folder / "log.out").write_text("Requeued: it resumes by itself\n")
        command = f"exec ./{LAUNCHER} train.py {log}"
        done = run("bash", "-c", command, cwd=folder, env=environment(**slurm))
        self.status, self.log = done.returncode, (folder / "log.out").read_text()
        self.bad = (folder / "bad_nodes.txt").read_text(errors="replace")
        starts = folder / "starts"
        rows = starts.read_text().splitlines() if starts.exists() else []
        self.starts = [row.split() for row in rows]


def test_a_run_that_saves_starts_as_often_as_it_fails(tmp_path):
    """On the nodes that are left, now and in later jobs, with a port of its own."""
    done = Launched(tmp_path, f"{SAVES} if ((start < 6)); then {FAILS} fi")
    assert done.status == 0, done.log
    nodes, addresses, ports, numbers, requeues = zip(*done.starts, strict=True)
    assert nodes == ("n1,n2", "n1,n2", "n1,n3", "n1,n3", "n1,n3", "n1,n3")
    assert set(addresses) == {"n1"} and set(requeues) == {"1"}
    assert ports[0] == "61007" and len(set(ports)) == 6
    assert numbers == tuple(str(number) for number in range(10000, 10006))
    assert done.log.count("Left out: ") == done.log.count(f"Left out: n2, {spare.TWICE}\n") == 1
    today, line = time.strftime("%F"), f"n2 {spare.TWICE} (job 7)"
    assert done.bad == f"{OLD}{today} {line}\n"
    step = "--nodelist=n1,n3 --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=2"
    step += " --no-kill=off --overlap --wait=0 --kill-on-bad-exit=1 ./torchrun.sh train.py\n"
    assert (tmp_path / "asked").read_text() == f"600 {step}"
    watch = "--nodelist=n2,n3,n4 --nodes=3 --ntasks=3 --cpus-per-task=1 --overlap --no-kill "
    watch += f"--kill-on-bad-exit=0 python3 {tmp_path}/aux/launch/spare.py watch n1\n"
    assert (tmp_path / "watch").read_text() == watch


@pytest.mark.parametrize(
    ("left", "variables"),
    [("old n1 bad\n", {}), ("old n1 bad\n", {"address": "n1.i"}), ("", {"down": "n1"})],
)
def test_the_first_node_is_left_out(left, variables, tmp_path):
    """The ranks meet on the first node that takes part."""
    done = Launched(tmp_path, "true", bad=left, **variables)
    assert done.status == 0, done.log
    address = variables.get("address", "n1").replace("n1", "n2")
    assert done.starts == [["n2,n3", address, "61007", "10000", "1"]]
    assert " n1 " in done.bad


def test_a_run_that_does_not_save_ends(tmp_path):
    """After three starts, in a folder with older saves as well. No node remains accused."""
    (tmp_path / "checkpoints/7").mkdir(parents=True)
    (tmp_path / "checkpoints/7/old.pt").touch()
    done = Launched(tmp_path, f"touch checkpoints/7/owner; {FAILS}")
    assert (done.status, len(done.starts)) == (5, 3), done.log
    said = "The run has failed three times without a new file in checkpoints/7: it ends\n"
    assert done.log.endswith(said), done.log
    assert "\nStart 2 has failed: status 5, n2 first\n" in done.log
    assert done.bad == OLD


def test_the_same_step_accuses_the_script(tmp_path):
    """The run tries another node, but this one stays out of bad_nodes.txt."""
    done = Launched(tmp_path, f"{SAVES} {BEATS} if ((start < 3)); then {FAILS} fi")
    assert done.status == 0, done.log
    assert [nodes for nodes, *_ in done.starts] == ["n1,n2", "n1,n2", "n1,n3"]
    assert f"Left out: n2, {spare.SAME_STEP}\n" in done.log
    assert done.bad == OLD


def test_a_busy_slurm_is_no_bad_node(tmp_path):
    """srun's probes get no answer at first."""
    for node in ("n1", "n3"):
        (tmp_path / f"busy-{node}").touch()
    done = Launched(tmp_path, "true")
    assert (done.status, done.bad) == (0, OLD), done.log
    assert [nodes for nodes, *_ in done.starts] == ["n1,n2"]


def test_a_rank_is_not_to_blame_for_a_lost_node(tmp_path):
    """n2 fails in the second start because n1 is lost."""
    loses = "if ((start == 2)); then echo n1 >down; fi"
    done = Launched(tmp_path, f"{loses}; if ((start < 3)); then {FAILS} fi")
    assert done.status == 0, done.log
    assert [nodes for nodes, *_ in done.starts] == ["n1,n2", "n1,n2", "n2,n3"]
    assert f"Left out: n1, {spare.NO_STEP}\n" in done.log and " n2 " not in done.bad


def test_a_signal_during_the_probes(tmp_path):
    """Nothing starts."""
    (tmp_path / "told").touch()
    done = Launched(tmp_path, "true")
    assert (done.status, done.starts) == (1, []), done.log
    assert not (tmp_path / "told").exists()


def test_bad_nodes_that_others_have_written(tmp_path):
    """Such a line is skipped, and stays as it is. An odd reason is no fault of a line."""
    strange = "a stranger?\n", "now $(id) bad\n", "now n2;x bad\n", "caf\xe9\n", "\xff\xfe\n"
    bad = f"{OLD}old n1 caf\xe9\n{''.join(strange)}".encode("latin-1", "replace")
    done = Launched(tmp_path, f"{SAVES} if ((start < 3)); then {FAILS} fi", bad=bad)
    assert done.status == 0, done.log
    assert "bad_nodes.txt: skipped line 4, 5, 6, 7, 8, no date, node and reason\n" in done.log
    assert [nodes for nodes, *_ in done.starts] == ["n2,n3", "n2,n3", "n3,n4"], done.log
    lines = (tmp_path / "bad_nodes.txt").read_bytes().split(b"\n")
    assert b"\n".join(lines[:-2]) + b"\n" == bad and b" n2 " in lines[-2]


def test_bad_nodes_that_cannot_be_read(tmp_path, monkeypatch, capsys):
    """Nor written. The job goes on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "bad_nodes.txt").mkdir()
    spare.leave_out(spare.Notes(), "n1", spare.NO_STEP)
    spare.acquit()
    not_read = "bad_nodes.txt is not read: Is a directory\n"
    assert capsys.readouterr().err == f"Left out: n1, {spare.NO_STEP}\n{not_read}{not_read}"


TOO_FEW = "No spare node is left: the run needs 2, and only 1 can be used. Submit it again with "
NO_NODE = "No node runs a step with the probe"
ALL_BAD = "".join(f"old n{number} bad\n" for number in (1, 2, 3, 4))
OWN_LOG = "env.sh: this launcher reads the job's log: start it with sbatch, without --error\n"
TOO_SMALL = "env.sh: --nodes must be more than SPARE=2\n"
OTHER_ADDRESS = "env.sh: MASTER_ADDR=10.0.0.1 does not have the name of the first node, n1, in it\n"


@pytest.mark.parametrize(
    ("does", "variables", "said"),
    [
        ("kill -TERM $PPID", {}, "Start 1 on n1,n2\n"),
        ("touch ended", {}, "Slurm says COMPLETING, restart 1: no new start\n"),
        ("echo '[Rank 0]: Requeued: it resumes by itself'", {}, "by itself\n"),
        ("echo '0: Not requeued: Slurm is ending it'", {}, "Slurm is ending it\n"),
        ("false", {"down": "n1 n2 n3 n4"}, f"{NO_NODE}, true: the job ends\n"),
        ("false", {"down": "n2 n3 n4"}, f"{TOO_FEW}--exclude=n2,n3,n4\n"),
        ("false", {"bad": ALL_BAD}, TOO_FEW.replace("1", "0") + "--exclude=n1,n2,n3,n4\n"),
        ("false", {"address": "10.0.0.1"}, OTHER_ADDRESS),
        ("false", {"nodes": 2}, TOO_SMALL),
        ("false", {"log": ">other.out 2>>log.out"}, OWN_LOG),
    ],
)
def test_no_other_start(does, variables, said, tmp_path):
    """Of a run that has ended, or cannot start at all."""
    done = Launched(tmp_path, f"{does}; exit 5", **variables)
    assert done.log.endswith(said), done.log
    assert (done.status, len(done.starts)) == ((1, 0) if variables else (5, 1))
    if said not in (OWN_LOG, TOO_SMALL):
        assert (tmp_path / "noted").read_text() == f"{done.status}\n"


# --- on a cluster ---

TRAIN = "tests/scripts/slowly.py 0.3 distributed/train_preemptible.py --epochs 2 --batch-size 20"
TRAIN += " --log-every 1 --save-every 5"  # 300 images: 30 steps
SIZE = ["--gpus-per-node=1", "--cpus-per-task=1"]


@pytest.fixture(scope="module")
def cluster():
    """Nodes of its own, because some do not survive. node-1 has slurmctld."""
    cluster = Cluster(f"spare-{os.getpid()}", nodes=24, cpus=16, gpus=1)
    yield cluster
    cluster.down()


class Run:
    """A job on three of the cluster's nodes, one of them spare, in a folder of its own."""

    def __init__(self, cluster, folder: Path, data: Path, *train: str, edit=("", ""), sbatch=()):
        folder.mkdir(exist_ok=True)
        for name in ("env.sh", "torchrun.sh", LAUNCHER):
            copy_file(name, folder)
        for name in ("aux", "distributed", "tests", ".venv"):
            (folder / name).symlink_to(REPOSITORY / name)
        launcher = folder / LAUNCHER
        text = launcher.read_text().replace("HEARTBEAT_LIMIT=600", "HEARTBEAT_LIMIT=15")
        assert edit[0] in text
        launcher.write_text(text.replace(*edit) if edit[0] else text)
        self.cluster, self.folder = cluster, folder
        command = [*SIZE, "--exclude=node-1", *sbatch, "--output=log.out", LAUNCHER]
        train = train or (*TRAIN.split(), "--data-dir", data)
        self.script = train[0]
        env = {"ALWAYS": 1, "PYTHONPATH": REPOSITORY / "distributed"}
        self.job = cluster.submit(*command, *train, cwd=folder, env=env)

    @property
    def log(self) -> str:
        path = self.folder / "log.out"
        return path.read_text() if path.exists() else ""

    def nodes(self, start: int, epoch: int = 1) -> list[str]:
        """Those of a start, once it takes steps in that epoch."""
        said = rf"(?s)^Start {start} on (\S+)$.*^epoch={epoch} step=[7-9]/"
        wait_for(lambda: re.search(said, self.log, re.M), 240)
        return re.search(said, self.log, re.M)[1].split(",")

    def rank(self, node: str) -> int:
        """The process of its rank, whose parent is torchrun."""
        [rank] = {*job_processes.python(self.job, self.script, node)} - {self.torchrun(node)}
        return rank

    def torchrun(self, node: str) -> int:
        [torchrun] = job_processes.python(self.job, "torch.distributed.run", node)
        return torchrun

    def steps_after(self, fault_at: float, start: int) -> float:
        """Seconds from the fault to the first step of that start."""
        said = rf"(?s)^Start {start} on .*^Resumed after step [1-9].*^epoch="
        wait_for(lambda: re.search(said, self.log, re.M), 400)
        return time.monotonic() - fault_at

    def ends(self, state: str, fault: str, seconds: float):
        job = self.cluster.wait(self.job, 240)
        restarts = self.cluster.show(self.job)["Restarts"]
        before, resumed, after = job.log.partition("\nResumed after step ")
        epoch, step = (re.findall(r"^epoch=(\d) step=(\d+)/15", before, re.M) or [(1, 0)])[-1]
        lost = 15 * (int(epoch) - 1) + int(step) - int(after.partition("\n")[0]) if resumed else 0
        ended = f"{job.state}, status {job.exit_code}, {restarts} restarts"
        print(f"{fault}: {ended}, {lost} steps lost, {seconds:.0f} s")
        assert job.state == state, job.log
        return job


def init_of(run, node: str) -> int:
    state = Path(f"/run/slurm-cluster-{run.cluster.environment['CLUSTER']}")
    return int((state / f"{node}.pid").read_text())


def freeze(run, node: str):
    """All that runs on a node, its slurmd included."""
    space = os.readlink(f"/proc/{init_of(run, node)}/ns/pid_for_children")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "ns/pid") == space:
                os.kill(int(process.name), signal.SIGSTOP)


FAULTS = {
    "torchrun killed": lambda run, node: os.kill(run.torchrun(node), signal.SIGKILL),
    "rank killed": lambda run, node: os.kill(run.rank(node), signal.SIGKILL),
    "rank frozen": lambda run, node: os.kill(run.rank(node), signal.SIGSTOP),
    "node crashed": lambda run, node: os.kill(init_of(run, node), signal.SIGKILL),
    "node frozen": freeze,
}


def test_nodes_are_left_out(cluster, tiny, tmp_path):
    """One on which a rank has failed twice, in different steps, now and by the next job."""
    options = ["--nodelist=node-[2-4]"]
    run = Run(cluster, tmp_path, tiny, "tests/scripts/counts.py", sbatch=options)
    assert run.nodes(1) == ["node-2", "node-3"]
    os.kill(run.rank("node-3"), signal.SIGKILL)
    assert run.nodes(2, epoch=2) == ["node-2", "node-3"]
    os.kill(run.rank("node-3"), signal.SIGKILL)
    assert run.nodes(3, epoch=2) == ["node-2", "node-4"]
    job = run.ends("COMPLETED", "rank killed twice", 0)
    assert job.log.count(f"Left out: node-3, {spare.TWICE}\n") == 1, job.log
    assert json.loads(job.log.splitlines()[-1])["starts"] == 3
    options += [*SIZE, "--output=again.out", LAUNCHER]
    again = cluster.sbatch(*options, "tests/scripts/variables.py", cwd=run.folder)
    said = "Left out: node-3, as bad_nodes.txt says\nStart 1 on node-2,node-4\n"
    assert again.state == "COMPLETED" and said in again.log, again.log
    site = cluster.exec(sys.executable, "aux/check_site.py", cwd=run.folder).stdout
    assert "--exclude=node-3, or delete their lines" in site, site


@pytest.mark.matrix
def test_sigterm(cluster, tiny, tmp_path):
    """After a restart, and after the requeue again."""
    run = Run(cluster, tmp_path, tiny, sbatch=["--exclude=node-[1-10]"])
    os.kill(run.rank(run.nodes(1)[1]), signal.SIGKILL)
    run.nodes(2)
    cluster.exec("scancel", "--signal=TERM", run.job)
    wait_for(lambda: run.log.count("Resumed after step") == 2, 120)
    job = run.ends("COMPLETED", "SIGTERM", 0)
    assert job.log.count("Requeued: it resumes by itself") == 1, job.log
    assert cluster.show(run.job)["Restarts"] == "1"


@pytest.mark.matrix
def test_check_ranks_is_a_probe(cluster, tiny, tmp_path):
    """Of each node by itself, with the line that the launcher names."""
    text = (REPOSITORY / LAUNCHER).read_text()
    [named] = re.findall(r"^# or (\(env .*check_ranks\.py\))$", text, re.M)
    probe = ("probe=(true)", f"probe={named}")
    run = Run(cluster, tmp_path / "run", tiny, "tests/scripts/variables.py", edit=probe)
    job = run.ends("COMPLETED", "none", 0)
    assert "Left out" not in job.log and job.log.count("VARIABLES") == 2, job.log


# --- faults, last, because some nodes do not survive ---


def goes_on(fault, place, cluster, tiny, tmp_path):
    """On the first of two nodes, which also has the batch shell, or the second."""
    run = Run(cluster, tmp_path / fault.replace(" ", "_"), tiny)
    nodes = run.nodes(1)
    fault_at = time.monotonic()
    FAULTS[fault](run, nodes[place])
    # A job that loses its first node is requeued.
    again = fault.startswith("node") and place == 0
    seconds = run.steps_after(fault_at, 1 if again else 2)
    job = run.ends("COMPLETED", f"{fault} {place}", seconds)
    assert cluster.show(run.job)["Restarts"] == str(int(again)), job.log
    lost_a_node = fault.startswith("node") and place == 1
    said = f"Left out: {nodes[1]}, it does not run a step\n"
    assert job.log.count("Left out: ") == job.log.count(said) == int(lost_a_node), job.log
    ledger = json.loads(job.log.splitlines()[-1])
    assert ledger["starts"] == 2 and ledger["ranks"] == 2, ledger


@pytest.mark.matrix
@pytest.mark.parametrize("place", [0, 1])
def test_goes_on(place, cluster, tiny, tmp_path):
    faults = [(fault,) for fault in FAULTS if fault != "node frozen"]
    at_once(lambda fault: goes_on(fault, place, cluster, tiny, tmp_path), faults)


@pytest.mark.matrix
def test_goes_on_without_a_frozen_node(cluster, tiny, tmp_path):
    """By itself: Slurm waits for its answers. The first one is requeued after minutes only."""
    goes_on("node frozen", 1, cluster, tiny, tmp_path)
