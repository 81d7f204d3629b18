"""A real Slurm cluster in network namespaces, jobs on it, and small data in MNIST's own format."""

import contextlib
import fcntl
import getpass
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import forks
import job_processes
import record

REPOSITORY = Path(__file__).resolve().parents[2]
NAMESPACES = REPOSITORY / "local/cluster/namespaces.sh"
TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True
).stdout.split()
# For make test-kernels: a few nodes with a kernel each, which get both folders by NFS.
KERNELS = REPOSITORY / "dev/kernels.sh"
BACKEND = KERNELS if os.environ.get("BACKEND") == "kernels" else NAMESPACES
PATIENCE = 4 if BACKEND == KERNELS else 1  # such a kernel needs a while for import torch
SHARED = (REPOSITORY, Path(tempfile.gettempdir()) / f"pytest-of-{getpass.getuser()}")
LAUNCHERS = {
    "srun": "launch_slurm_to_torch.sh",
    "torchrun": "launch_slurm_with_torchrun.sh",
    "spawn": "launch_slurm_with_mp.sh",
}
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED", "OUT_OF_MEMORY", "PREEMPTED")


def cells(pairs: list[tuple], *quick: tuple) -> list:
    """Cases for parametrize, of which make test runs only those in `quick`."""
    return [
        pytest.param(*pair, marks=() if pair in quick else pytest.mark.matrix) for pair in pairs
    ]


def at_once(scenario: Callable, cases: list[tuple]):
    """Calls `scenario` with each case in a thread: a job waits more than it computes. When what it
    prints is recorded, one after the other."""
    with ThreadPoolExecutor(1 if record.RECORDING else len(cases)) as pool:
        for done in [pool.submit(scenario, *case) for case in cases]:
            done.result()


def one_rank_a_node(way: str) -> list[str]:
    return ["--gpus-per-node=1", *(["--ntasks-per-node=1"] if way == "srun" else [])]


def environment(**values: object) -> dict[str, str]:
    """This process's environment, less what would lead a launcher astray; .venv first in PATH."""
    stray = ("SLURM", "SBATCH", "MASTER_", "NPROC", "NNODES", "OMP_", "RANK", "WORLD", "LOCAL_")
    stray += ("TRAIN_", "VIRTUAL_ENV", "ARGS", "MAKE")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(stray)}
    clean["PATH"] = f"{Path(sys.executable).parent}:{clean['PATH']}"
    return clean | {name: str(value) for name, value in values.items()}


def stand_ins(folder: Path, programs: dict[str, str]) -> Path:
    """Shell scripts by name, for a PATH."""
    folder.mkdir(exist_ok=True)
    for name, lines in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{lines}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def commands_hang(monkeypatch):
    """Every command that is run in this process, until its time is up."""

    def hang(command, **options):
        raise subprocess.TimeoutExpired(command[0], options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)


def run(*command: object, timeout: float = 120, **options) -> subprocess.CompletedProcess:
    """A command in the repository; ended with everything it started when the time is up."""
    name, value = "STARTED_BY_RUN", str(uuid.uuid4())
    env = options.pop("env", None) or environment(OMP_NUM_THREADS=1)
    options = {"cwd": REPOSITORY, "stdin": subprocess.DEVNULL, "text": True} | options
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    options["env"] = env | {name: value}
    with subprocess.Popen([str(part) for part in command], **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            # torchrun's ranks have sessions of their own, so a signal to the group is not enough.
            wait_for(lambda: not kill(f"{name}={value}"), 10)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill(mark: str) -> bool:
    """Kills all processes that have this variable. Returns whether there were any."""
    found = [process for process, _ in job_processes.having(mark)]
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return bool(found)


def wait_for(condition: Callable[[], object], seconds: float = 90):
    """Until it holds; the test fails when that takes longer."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds * PATIENCE, f"not within {seconds} seconds"
        pause(start, 0.1)


def pause(start: float, least: float):
    """Between two looks at something since `start`: each look costs as much as the other tests
    lose by it, so the longer it has taken, the fewer there are. At most a twentieth more time."""
    time.sleep(max(least, min(1, (time.monotonic() - start) / 20)))


# Its server starts, and imports torch, with the first process.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(forks.MODULES.split())
STARTS = threading.Lock()  # tests have threads, and each start looks after all processes


def ranks(
    count: int, *command: object, cwd: Path = REPOSITORY, timeout: float = 120, **variables: object
) -> subprocess.CompletedProcess:
    """A Python script on so many ranks of this machine, or, with 0, without the variables of a
    rank; one thread each. If one fails, the others have three seconds for their last words."""
    env = environment(OMP_NUM_THREADS=1, **variables)
    if count:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)] or [{}]
    words, started, failed = [str(part) for part in command], [], None
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/out", f"{folder}/err"]
        for file in files:
            Path(file).touch()
        try:
            for place in places:
                arguments = (words, str(cwd), env | place, *files)
                started.append(FORKS.Process(target=forks.become, args=arguments))
                with STARTS:
                    started[-1].start()
            deadline = time.monotonic() + timeout
            while True:
                with STARTS:
                    codes = [process.exitcode for process in started]
                if None not in codes:
                    break
                if failed is None and any(codes):
                    failed = next(filter(None, codes))
                    deadline = min(deadline, time.monotonic() + 3)
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            statuses = codes
        finally:
            for process in started:  # also the workers of those that have ended
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # it may have no group yet
                process.join()
        out, err = (Path(file).read_text() for file in files)
    if failed is None and None in statuses:
        raise subprocess.TimeoutExpired(words, timeout, out, err)
    status = failed or next((status for status in statuses if status), 0)
    return subprocess.CompletedProcess(words, status, out, err)


@dataclass
class Job:
    """A job that has ended: Slurm's state, the exit status, the log, and how long it ran."""

    id: int
    state: str
    exit_code: int
    log: str
    seconds: float

    def ranks(self) -> list[dict]:
        """What tests/scripts/variables.py has printed, by rank."""
        return sorted(
            (json.loads(x) for x in re.findall(r"^VARIABLES (.*)$", self.log, re.M)),
            key=lambda x: x["rank"],
        )


class Cluster:
    def __init__(self, name: str, nodes: int, cpus: int, gpus: int, shared: tuple = SHARED):
        # Jobs run as root even under sudo, because the tests' folders are root's.
        self.environment, self.jobs = {"CLUSTER": name, "SUDO_UID": ""}, []
        size = ["--nodes", nodes, "--cpus", cpus, "--gpus", gpus]
        if BACKEND == KERNELS:
            size = ["--nodes", min(nodes, 4)]
            size += [option for folder in shared for option in ("--share", folder)]
        try:
            up = run(BACKEND, "up", *size, env=environment(**self.environment))
        except subprocess.TimeoutExpired:
            self.down()
            raise
        assert up.returncode == 0, f"the Slurm cluster does not start: {up.stdout}{up.stderr}"

    def down(self):
        for job in self.jobs:  # what env.sh keeps of them, in the folder they ran in
            shutil.rmtree(REPOSITORY / "log" / str(job), ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty, or not there
            (REPOSITORY / "log").rmdir()
        down = run(BACKEND, "down", env=environment(**self.environment))
        assert down.returncode == 0, down.stderr

    def exec(self, *command: object, node: str = "", env: dict | None = None, **options):
        where = [BACKEND, "exec", *(["--node", node] if node else [])]
        return run(*where, *command, env=environment(**self.environment, **env or {}), **options)

    def submit(self, *command: object, env: dict | None = None, cwd: Path = REPOSITORY) -> int:
        """sbatch with options, launcher and arguments in `command`. Returns the job id."""
        sbatch = self.exec("sbatch", "--parsable", *command, env=env, cwd=cwd)
        assert sbatch.returncode == 0, sbatch.stderr
        self.jobs.append(int(sbatch.stdout))
        return self.jobs[-1]

    def show(self, job: int) -> dict[str, str]:
        shown = self.exec("scontrol", "show", "job", "--oneliner", job).stdout
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)

    def wait(self, job: int, timeout: float = 120) -> Job:
        """Waits for the job's end; past `timeout` seconds it is cancelled and the test fails
        with its log."""
        start = time.monotonic()
        while True:
            shown = self.show(job)
            log = Path(shown["StdOut"])
            text = log.read_text() if log.exists() else ""
            if shown["JobState"] in ENDED:
                break
            if time.monotonic() > start + timeout * PATIENCE:
                self.exec("scancel", job)
                pytest.fail(f"job {job} is {shown['JobState']} after {timeout} s:\n{text}")
            pause(start, 0.2)
        status, signal = map(int, shown["ExitCode"].split(":"))
        seconds = [int(x) for x in re.split("[-:]", shown["RunTime"])]
        return Job(job, shown["JobState"], status or signal, text, seconds[-1] + 60 * seconds[-2])

    def start_again(self, job: int, timeout: float = 90):
        """Waits until it is in the queue again, and starts it soon: in the second in which slurmd
        has killed a job, it starts none of that number ("Job credential revoked")."""
        wait_for(lambda: self.show(job)["JobState"] == "PENDING", timeout)
        self.exec("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def sbatch(self, *command: object, timeout: float = 120, **options) -> Job:
        """submit, and wait."""
        return self.wait(self.submit(*command, **options), timeout)

    def left_over(self, job: int) -> list[str]:
        """The processes that belong to a job, on any node, as pid and command."""
        if BACKEND == KERNELS:
            look = (
                f"grep --files-with-matches --null-data ^SLURM_JOB_ID={job}$ /proc/[0-9]*/environ"
            )
            nodes = self.exec("sinfo", "--noheader", "--Node", "--format=%N").stdout.split()
            found = [self.exec("bash", "-c", look, node=node).stdout for node in nodes]
            return "".join(found).split()
        return [f"{process} {command}" for process, command in job_processes.of(job)]


@contextlib.contextmanager
def mounted_in_memory(folder: Path, size: str):
    """A file system, which clusters that start later see on all nodes."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="session")
def memory(tmp_path_factory):
    """For many files, as containers have."""
    folder = tmp_path_factory.mktemp("memory")
    if BACKEND == KERNELS:
        yield folder  # on NFS, as all else
        return
    with mounted_in_memory(folder, "4g"):
        yield folder


@pytest.fixture(scope="session")
def cluster(memory):
    """24 nodes with 64 CPUs and 8 pretended GPUs each: the more nodes, the longer a requeued job
    waits. A cluster that does not start is a failure, never a skip."""
    cluster = Cluster(f"tests-{os.getpid()}", nodes=24, cpus=64, gpus=8)
    yield cluster
    cluster.down()


def heartbeat_of(rank: int, **values: object) -> str:
    """As distributed/heartbeat.py writes it, of a rank that takes steps."""
    beat = {"rank": rank, "world_size": 2, "host": "n0", "step": 5, "interval": 2, "waited": None}
    beat |= {"time": time.time(), "seconds_in_step": 1.0, "waits": False, "frame": "f"}
    beat |= {"stack": ["f"], "began": 1.0, "first_step": 1, "first_time": 2.0, "pid": 7}
    return json.dumps(beat | {"counts": [100, 80, 0]} | values)


def write_heartbeat(folder: Path, rank: int, **values: object):
    """Into the folder of a start, such as log/7/ranks-0."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(rank)).write_text(heartbeat_of(rank, **values))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def once(tmp_path_factory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills once for all processes of pytest-xdist."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / name
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            make(shared / f"{name}.unfinished")
            (shared / f"{name}.unfinished").rename(folder)
    return folder


def synthetic(name: str, folder: Path):
    """Fills the folder with a data set that aux/prepare_data.py makes on this machine."""
    made = ranks(0, "aux/prepare_data.py", name, "--synthetic", "--data-dir", folder)
    assert made.returncode == 0, made.stderr


@pytest.fixture(scope="session")
def mnist_full(tmp_path_factory) -> Path:
    """The whole synthetic set."""
    return once(tmp_path_factory, "mnist-full", lambda folder: synthetic("mnist", folder))


def digits(folder: Path, train: int, test: int) -> Path:
    """A folder with so many synthetic images of each split."""
    from prepare_data import draw_mnist  # and torch

    raw = folder / "MNIST/raw"
    raw.mkdir(parents=True)
    for name, content in draw_mnist(train, test).items():
        (raw / name).write_bytes(content)
    return folder


@pytest.fixture(scope="session")
def mnist(tmp_path_factory) -> Path:
    """1,003 training images, which divide neither by the ranks nor by the batch size, and five test
    images: on two or four ranks the mean of the ranks' means is another than that of all."""
    return digits(tmp_path_factory.mktemp("mnist"), 1003, 5)


@pytest.fixture(scope="session")
def tiny(request, tmp_path_factory) -> Path:
    """300 training and 100 test images, where a test is not about what is learnt: five steps an
    epoch. When what the pages show is recorded, the whole set."""
    if record.RECORDING:
        return request.getfixturevalue("mnist_full")
    return digits(tmp_path_factory.mktemp("tiny"), 300, 100)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Prepared text."""
    return once(tmp_path_factory, "text", lambda folder: synthetic("shakespeare", folder))


@pytest.fixture(scope="session")
def packages() -> dict[str, str]:
    """The environment of a job that finds the frameworks, and downloads nothing."""
    if not (REPOSITORY / ".venv-guests/ready").exists():
        pytest.fail("no Accelerate, Lightning and so on: `make test-all` installs them")
    [folder] = (REPOSITORY / ".venv-guests/lib").glob("python*/site-packages")
    return {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}


# Where this machine's Python, and a Debian's that debootstrap has made, look for packages.
DIST_PACKAGES = f"/usr/local/lib/python3.{sys.version_info.minor}/dist-packages"


def debootstrap(release: str, folder: Path, *options: str):
    """A Debian or Ubuntu in a folder, from this machine's apt mirror."""
    indexes = run("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
    kind = "debian" if release in ("bookworm", "trixie", "forky", "sid") else "ubuntu"
    mirror = [uri for uri in indexes.stdout.split() if re.search(f"/{kind}/?$", uri)][:1]
    path = environment(PATH=f"{os.environ['PATH']}:/usr/sbin")
    command = ["debootstrap", "--variant=minbase", *options, release, folder, *mirror]
    made = run(*command, env=path, timeout=300)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr


@pytest.fixture(scope="session")
def debian(tmp_path_factory) -> Path:
    """The folder of this machine's own Debian or Ubuntu with Python, for images."""
    release = platform.freedesktop_os_release()["VERSION_CODENAME"]

    def make(folder: Path):
        debootstrap(release, folder, "--include=python3")

    return once(tmp_path_factory, "debian", make)


os.environ["OMP_NUM_THREADS"] = "1"
