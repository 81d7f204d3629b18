"""launch_slurm_with_spare.sh: a run goes on within its job when a rank or a node fails, and ends
when it makes no progress."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import chaos
from conftest import LAUNCHERS, REPOSITORY, Cluster, at_once, note, one_rank_a_node, wait_for
from test_launchers import copy_file

LAUNCHER = "launch_slurm_with_spare.sh"
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

    def __init__(self, cluster, folder: Path, data: Path, *train: str, edits=(), sbatch=()):
        folder.mkdir(exist_ok=True)
        for name in ("env.sh", "torchrun.sh", LAUNCHER):
            copy_file(name, folder)
        for name in ("aux", "distributed", "tests", ".venv"):
            (folder / name).symlink_to(REPOSITORY / name)
        launcher = folder / LAUNCHER
        text = launcher.read_text().replace("HEARTBEAT_LIMIT=600", "HEARTBEAT_LIMIT=15")
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        launcher.write_text(text)
        self.cluster, self.folder = cluster, folder
        command = [*SIZE, "--exclude=node-1", *sbatch, "--output=log.out", LAUNCHER]
        command += train or [*TRAIN.split(), "--data-dir", data]
        self.job = cluster.submit(*command, cwd=folder, env={"ALWAYS": 1})

    @property
    def log(self) -> str:
        path = self.folder / "log.out"
        return path.read_text() if path.exists() else ""

    def nodes(self, start: int) -> list[str]:
        """Those of a start, once it takes steps."""
        said = rf"(?s)^Start {start} on (\S+)$.*^epoch=\d step=[7-9]/"
        wait_for(lambda: re.search(said, self.log, re.M), 240)
        return re.search(said, self.log, re.M)[1].split(",")

    def rank(self, node: str) -> int:
        """The process of its rank, whose parent is torchrun."""
        [rank] = {*chaos.processes(self.job, "slowly.py", node)} - {self.torchrun(node)}
        return rank

    def torchrun(self, node: str) -> int:
        [torchrun] = chaos.processes(self.job, "torch.distributed.run", node)
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
        fault += f", {lost} steps lost"
        note("spare", fault, job.state, job.exit_code, restarts, seconds)
        assert job.state == state, job.log
        return job


def processes_of(cluster, node: str) -> list[int]:
    """All that run on a node, its slurmd included."""
    state = Path(f"/run/slurm-cluster-{cluster.environment['CLUSTER']}")
    init = int((state / f"{node}.pid").read_text())
    space = os.readlink(f"/proc/{init}/ns/pid_for_children")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/pid") == space:
                found.append(int(process.name))
        except OSError:
            continue
    return found


def crash(run, node: str):
    state = Path(f"/run/slurm-cluster-{run.cluster.environment['CLUSTER']}")
    os.kill(int((state / f"{node}.pid").read_text()), signal.SIGKILL)


def freeze(run, node: str):
    for process in processes_of(run.cluster, node):
        os.kill(process, signal.SIGSTOP)


FAULTS = {
    "torchrun killed": lambda run, node: os.kill(run.torchrun(node), signal.SIGKILL),
    "rank killed": lambda run, node: os.kill(run.rank(node), signal.SIGKILL),
    "rank frozen": lambda run, node: os.kill(run.rank(node), signal.SIGSTOP),
    "node crashed": crash,
    "node frozen": freeze,
}


def test_nodes_are_left_out(cluster, tiny, tmp_path):
    """One on which a rank has failed twice, and one that the list has. A node that cannot run the
    probe is left out before the first start, and if too few are left, the job says so."""

    def twice():
        (tmp_path / "twice").mkdir()
        (tmp_path / "twice/bad_nodes.txt").write_text("2026-11-01 node-14 a rank failed twice\n")
        run = Run(cluster, tmp_path / "twice", tiny, sbatch=["--nodelist=node-[2-4]"])
        for start in (1, 2):
            assert run.nodes(start) == ["node-2", "node-3"]
            os.kill(run.rank("node-3"), signal.SIGKILL)
        assert run.nodes(3) == ["node-2", "node-4"]
        job = run.ends("COMPLETED", "rank killed twice", 0)
        assert job.log.count("Left out: node-3, a rank has failed there twice\n") == 1, job.log
        _, line = (tmp_path / "twice/bad_nodes.txt").read_text().splitlines()
        assert re.fullmatch(
            rf"\d{{4}}-\d\d-\d\d node-3 a rank has failed there twice \(job {run.job}\)", line
        )
        options = [*SIZE, "--nodelist=node-[2-4]", "--output=again.out", LAUNCHER]
        assert json.loads(job.log.splitlines()[-1])["starts"] == 3
        again = cluster.sbatch(*options, "tests/scripts/variables.py", cwd=run.folder)
        said = "Left out: node-3, as bad_nodes.txt says\nStart 1 on node-2,node-4\n"
        assert again.state == "COMPLETED" and said in again.log, again.log
        site = cluster.exec(sys.executable, "aux/check_site.py", cwd=run.folder).stdout
        assert "--exclude=node-14,node-3, or delete their lines" in site, site

    def probe():
        edits = [("probe=(true)", "probe=(bash -c '[[ $SLURMD_NODENAME != node-[56] ]]')")]
        options = ["--nodelist=node-[5-7]"]
        run = Run(cluster, tmp_path / "probe", tiny, edits=edits, sbatch=options)
        job = run.ends("FAILED", "two nodes that cannot run a step", 0)
        assert job.log.count(", it does not run a step\n") == 2, job.log
        said = (
            "No spare node is left: the run needs 2, and only 1 can be used. Submit it again with "
        )
        assert re.search(f"{said}--exclude=node-[56],node-[56]\n$", job.log), job.log

    def fails_at_once():
        run = Run(
            cluster,
            tmp_path / "at_once",
            tiny,
            "tests/scripts/variables.py",
            "fail",
            sbatch=["--nodelist=node-[8-10]"],
        )
        job = run.ends("FAILED", "a script that fails at once", 0)
        assert job.log.count("\nStart ") == 3, job.log
        said = f"The run has failed three times without a new file in checkpoints/{run.job}"
        assert said in job.log.splitlines()[-1], job.log

    at_once(lambda scenario: scenario(), [(twice,), (probe,), (fails_at_once,)])


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


# --- the EDIT line of the plain launchers ---

FAILS = """import os, pathlib, sys
folder = pathlib.Path("checkpoints", os.environ["RUN"])
if sys.argv[1:] == ["saves"] and os.environ["RANK"] == "0" and not folder.exists():
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt").touch()
sys.exit(1)
"""


@pytest.mark.matrix
def test_a_failed_job_is_requeued_if_it_has_saved(cluster, tiny, tmp_path):
    """Until it has failed three times more without a save. A script that saves nothing fails."""
    (tmp_path / "fails.py").write_text(FAILS)
    copies = ["env.sh", "torchrun.sh", "aux/slurm_rank.sh", "aux/requeue_failed.sh"]
    for name in (*copies, *LAUNCHERS.values()):
        copy_file(name, tmp_path)
    for name in ("distributed", "tests", ".venv"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    for name in LAUNCHERS.values():
        text = (tmp_path / name).read_text()
        assert text.count("\n#source aux/requeue_failed.sh") == 1
        (tmp_path / name).write_text(text.replace("\n#source aux/", "\nsource aux/"))

    def job(way, *command):
        size = [*one_rank_a_node(way), "--cpus-per-task=1", "--output=%j.out"]
        return cluster.submit(*size, LAUNCHERS[way], *command, cwd=tmp_path, env={"ALWAYS": 1})

    def fails(argument, restarts, says):
        number = job("srun", "fails.py", argument)
        ended = cluster.wait(number, 240)
        assert ended.state == "FAILED", ended.log
        assert cluster.show(number)["Restarts"] == restarts, ended.log
        assert ended.log.splitlines()[-1] == f"Not requeued: {says}", ended.log

    def killed():
        number = job("torchrun", *TRAIN.split(), "--data-dir", tiny)
        log = tmp_path / f"{number}.out"
        wait_for(lambda: log.exists() and "epoch=1 step=7/" in log.read_text(), 120)
        fault_at = time.monotonic()
        os.kill(max(chaos.processes(number, "slowly.py")), signal.SIGKILL)
        wait_for(lambda: re.search(r"(?s)^Resumed after .*^epoch", log.read_text(), re.M), 120)
        note("torchrun", "rank killed, requeued", "", 0, 1, time.monotonic() - fault_at)
        ended = cluster.wait(number, 240)
        assert ended.state == "COMPLETED" and "\nResumed after step 5\n" in ended.log, ended.log
        assert ended.log.count("and requeued: it resumes by itself\n") == 1, ended.log

    at_once(
        lambda scenario, *arguments: scenario(*arguments),
        [
            (killed,),
            (fails, "saves", "4", "three requeues without a save"),
            (fails, "saves nothing", "0", "the run has saved nothing"),
        ],
    )


@pytest.mark.matrix
def test_check_ranks_is_a_probe(cluster, tiny, tmp_path):
    """Of each node by itself, with the line that the launcher names."""
    [named] = re.findall(
        r"^# or (\(env .*check_ranks\.py\))$", (REPOSITORY / LAUNCHER).read_text(), re.M
    )
    edits = [("probe=(true)", f"probe={named}")]
    run = Run(cluster, tmp_path / "run", tiny, "tests/scripts/variables.py", edits=edits)
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
    """By itself, because Slurm waits a minute for its answers, and asks no other node meanwhile.
    Not the first one: Slurm requeues its job after minutes only."""
    goes_on("node frozen", 1, cluster, tiny, tmp_path)
