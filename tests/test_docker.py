"""The Docker Compose cluster on a real engine: one that is running already, or one started for
these tests."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import pytest

from conftest import LAUNCHERS, REPOSITORY, Cluster, environment, read_metrics, run
from test_readme import copy_of_repository, steps, try_block

pytestmark = pytest.mark.matrix  # an image is built
OWNER = 1234  # whom the clone belongs to, and so the number of the jobs' user
COMPOSES = [["docker", "compose"], ["docker-compose"]]  # v2 and 1.29, as far as they are there
COMPOSES = [
    tool for tool in COMPOSES if shutil.which(tool[0]) and run(*tool, "version").returncode == 0
]
TENSOR_PARALLEL = [
    "distributed/train_tp.py",
    "--tensor-parallel",
    2,
    "--across-nodes",
    "--steps",
    5,
    "--log-every",
    1,
]


def wait_until(condition, seconds: float, what: str):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def engine():
    """The environment in which `docker` reaches an engine. One that is running already is used,
    and left running."""
    if run("docker", "info").returncode == 0:
        yield {}
        return
    with open(__file__) as lock:  # two engines would take each other's bridge and rules away
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from engine_of_our_own()


def engine_of_our_own():
    # Not pytest's: a socket's path may have 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="docker-"))
    variables = {"DOCKER_HOST": f"unix://{folder}/socket"}
    forward = Path("/proc/sys/net/ipv4/ip_forward")
    forwarded, rules = forward.read_text(), run("iptables-save").stdout
    options = [
        "--host",
        variables["DOCKER_HOST"],
        "--data-root",
        folder / "data",
        "--exec-root",
        folder / "exec",
    ]
    options += ["--pidfile", folder / "pid"]
    log = folder / "log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            ["dockerd", *options], stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            answers = lambda: run("docker", "info", env=environment(**variables)).returncode == 0  # noqa: E731
            wait_until(answers, 60, f"dockerd answers\n{log.read_text()}")
            yield variables
        finally:
            process.terminate()
            process.wait(60)
            # What dockerd leaves behind: its bridge, its rules, a kernel that forwards.
            run("ip", "link", "delete", "docker0")
            empty = (
                "*filter\n:INPUT ACCEPT\n:FORWARD ACCEPT\n:OUTPUT ACCEPT\nCOMMIT\n*nat\nCOMMIT\n"
            )
            subprocess.run(["iptables-restore"], input=empty + rules, text=True, check=True)
            forward.write_text(forwarded)
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def base_image(engine, tmp_path_factory):
    """debian:bookworm-slim as far as it matters, made here: no registry is needed, and apt and
    pip have the packages that this machine has."""
    name = f"tests-{os.getpid()}-base"
    root = tmp_path_factory.mktemp("base")
    suite = ["--format", "$(REPO_URI)", "Identifier: Packages", "Codename: bookworm"]
    mirror = run("apt-get", "indextargets", *suite).stdout.split()[:1]
    made = run("debootstrap", "--variant=minbase", "bookworm", root, *mirror, timeout=300)
    assert made.returncode == 0, made.stdout[-3000:]
    for path in ("/etc/apt", "/usr/share/keyrings"):
        shutil.copytree(path, f"{root}{path}", dirs_exist_ok=True)
    (root / "etc/apt/sources.list").unlink() if not Path("/etc/apt/sources.list").exists() else None
    (root / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")
    wheels = ["--only-binary=:all:", "--python-version=3.11", "--dest", root / "wheels"]
    made = run(
        sys.executable,
        "-m",
        "pip",
        "download",
        *wheels,
        "--requirement",
        "requirements.txt",
        timeout=300,
    )
    assert made.returncode == 0, made.stderr
    (root / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    made = run(
        "bash",
        "-c",
        f"tar --directory={root} --create . | docker import - {name}",
        env=environment(**engine),
    )
    assert made.returncode == 0, made.stderr
    shutil.rmtree(root)
    yield name
    run("docker", "image", "rm", name, env=environment(**engine))


@pytest.fixture(scope="module")
def clone(tmp_path_factory, mnist_full, tiny) -> Path:
    """A clone that belongs to an ordinary user, with MNIST and a few images. The text is left to
    the commands."""
    folder = copy_of_repository(tmp_path_factory.mktemp("clone"))
    shutil.copytree(mnist_full, folder / "data/mnist")
    shutil.copytree(tiny, folder / "data/tiny")
    run("chown", "--recursive", f"{OWNER}:{OWNER}", folder)
    return folder


class Nodes(Cluster):
    """The containers of one Compose project; commands run in node-1, as whoever `docker exec` is
    there."""

    def __init__(self, clone: Path, variables: dict):
        self.clone, self.environment, self.jobs = clone, environment(**variables), []

    def compose(self, *command: object, tool: tuple = (), **variables):
        options = {"cwd": self.clone, "env": self.environment | variables, "timeout": 300}
        done = run(*(tool or COMPOSES[0]), *command, **options)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def docker(self, *command: object, **options):
        return run("docker", *command, env=self.environment, **options)

    def exec(
        self,
        *command: object,
        node: str = "node-1",
        env: dict | None = None,
        cwd: Path | None = None,
        **options,
    ):
        return self.docker("exec", node, *command, **options)

    def show(self, job: int) -> dict[str, str]:
        """The clone is /data in there."""
        return {
            name: value.replace("/data", str(self.clone), 1)
            for name, value in super().show(job).items()
        }

    def states(self) -> list[str]:
        return self.exec("sinfo", "--noheader", "--Node", "--format=%N %c %T").stdout.splitlines()

    def left(self) -> list[str]:
        """The project's containers, volumes and networks."""
        label = (
            f"--filter=label=com.docker.compose.project={self.environment['COMPOSE_PROJECT_NAME']}"
        )
        kinds = (["ps", "--all"], ["volume", "ls"], ["network", "ls"])
        return [
            line
            for kind in kinds
            for line in self.docker(*kind, "--quiet", label).stdout.splitlines()
        ]


@pytest.fixture(scope="module")
def project(clone, engine, base_image):
    """Nothing of it is up yet; afterwards nothing of it is left, its images included."""
    nodes = Nodes(
        clone, engine | {"COMPOSE_PROJECT_NAME": f"tests-{os.getpid()}", "BASE_IMAGE": base_image}
    )
    yield nodes
    nodes.compose("--profile", "more", "down", "--volumes", "--rmi", "local")
    assert nodes.left() == []


def test_readme(project):
    """Builds the image; the block of docs/docker.md ends with the cluster's end."""
    [step] = steps(REPOSITORY / "docs/docker.md")
    shown = try_block(*step, project.clone, **project.environment)
    assert len(re.findall(r"^node-[12] +1 +train\* +idle 2 ", shown, re.M)) == 2
    assert set(re.findall(r"SLURMD_NODENAME: (\S+)", shown)) == {"node-1", "node-2"}
    assert "\nFinished: " in shown, shown
    log = next(project.clone.glob("launch_slurm_to_torch.sh_*.out")).read_text()
    assert "VERDICT: all well, 4 ranks started by srun" in log, log
    assert (project.clone / "data/shakespeare/vocabulary.json").exists()
    assert project.left() == []


@pytest.fixture(scope="module")
def nodes(project) -> Nodes:
    project.compose("up", "--detach")
    made = project.exec("python3", "/data/aux/prepare_data.py")
    assert made.returncode == 0, made.stdout + made.stderr
    return project


def test_up_returns_when_the_nodes_are_idle(nodes):
    assert nodes.states() == ["node-1 2 idle", "node-2 2 idle"]
    for node in ("node-1", "node-2"):
        shown = json.loads(nodes.docker("inspect", node).stdout)[0]
        assert shown["State"]["Health"]["Status"] in ("starting", "healthy")
        assert not shown["HostConfig"]["PortBindings"] and not shown["NetworkSettings"]["Ports"]


def test_tensor_parallel_over_both_nodes(nodes, cluster):
    """The losses of the namespace cluster, where the same two ranks are on two nodes too."""
    size = ["--ntasks-per-node=1", "--gpus-per-node=0", "--output=%j.out", LAUNCHERS["srun"]]
    here = nodes.sbatch(*size, *TENSOR_PARALLEL, "--checkpoint-dir", "checkpoints/docker")
    there = cluster.sbatch(
        *size, *TENSOR_PARALLEL, "--checkpoint-dir", "checkpoints/namespaces", cwd=nodes.clone
    )
    assert here.state == there.state == "COMPLETED", here.log + there.log
    assert re.findall(r"SLURMD_NODENAME: (\S+)", here.log) == ["node-1", "node-2"]
    losses = [
        [
            event["loss"]
            for event in read_metrics(nodes.clone / "checkpoints" / name)
            if "loss" in event
        ]
        for name in ("docker", "namespaces")
    ]
    assert len(losses[0]) == 5 and losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_the_log_of_fixed_name(nodes):
    """Read on a node as on the host."""
    job = nodes.submit("local/cluster/train.sh", "--steps", 20)
    assert nodes.wait(job).state == "COMPLETED"
    log = "/data/training_job.log"
    for command in (["grep", "SLURMD_NODENAME", log], ["timeout", 3, "tail", "-n", 99, "-f", log]):
        shown = nodes.exec(*command).stdout
        assert re.findall(r"SLURMD_NODENAME: (\S+)", shown) == ["node-1", "node-2"], shown


@pytest.mark.parametrize("way", ["torchrun", "spawn"])
def test_the_other_ways(way, nodes):
    job = nodes.sbatch(LAUNCHERS[way], "aux/check_ranks.py")
    assert job.state == "COMPLETED" and f"VERDICT: all well, 2 ranks started by {way}" in job.log, (
        job.log
    )
    assert re.findall(r"^\d +\d +(node-\d)  ", job.log, re.M) == ["node-1", "node-2"]


def test_jobs_are_an_ordinary_users_and_their_files_the_owners(nodes):
    script = "srun id --user; sudo --non-interactive id"
    job = nodes.sbatch("--nodes=2", "--ntasks=2", "--output=whoami.out", f"--wrap={script}")
    assert job.log.splitlines()[:2] == [str(OWNER)] * 2 and job.state == "FAILED", job.log
    assert (nodes.clone / "whoami.out").stat().st_uid == OWNER
    assert nodes.exec("id", "--user").stdout.strip() == str(OWNER)
    assert (
        "munge.key"
        in nodes.docker("exec", "--user=root", "node-1", "ls", "/run/slurm-cluster/key").stdout
    )
    assert nodes.exec("cat", "/run/slurm-cluster/key/munge.key").returncode != 0


def test_the_munge_key_is_not_in_the_image(nodes, tmp_path):
    """Nor in one of its layers."""
    image = json.loads(nodes.docker("inspect", "node-1").stdout)[0]["Image"]
    assert nodes.docker("save", "--output", tmp_path / "image.tar", image).returncode == 0
    names = []
    with tarfile.open(tmp_path / "image.tar") as archive:
        for member in archive:
            if member.name.endswith("layer.tar"):
                with tarfile.open(fileobj=archive.extractfile(member)) as layer:
                    names += layer.getnames()
    assert "usr/sbin/munged" in names
    assert not [name for name in names if "munge.key" in name]


def test_a_node_restarts_in_mid_job(nodes):
    """The job is requeued or fails, in time; the node is used again, with the key that it had,
    by the next job."""
    command = [
        "--ntasks-per-node=1",
        LAUNCHERS["srun"],
        "distributed/train_ddp.py",
        "--epochs",
        1000,
        "--data-dir",
        "data/tiny",
    ]
    job = nodes.submit(*command)
    log = nodes.clone / f"{LAUNCHERS['srun']}_{job}.out"
    wait_until(lambda: log.exists() and "step=" in log.read_text(), 60, "it trains")
    assert nodes.docker("restart", "node-2").returncode == 0
    wait_until(
        lambda: (shown := nodes.show(job))["Restarts"] == "1" or "FAIL" in shown["JobState"],
        60,
        "it has ended",
    )
    nodes.exec("scancel", job)
    wait_until(
        lambda: nodes.states() == ["node-1 2 idle", "node-2 2 idle"], 60, "both nodes are idle"
    )
    job = nodes.sbatch("--nodes=2", "--ntasks=2", "--output=%j.out", "--wrap=srun hostname")
    assert sorted(job.log.split()) == ["node-1", "node-2"], job.log


def test_three_nodes(nodes):
    nodes.compose("up", "--detach", "ready", "node-3", NODES="3")
    assert nodes.states() == [f"node-{node} 2 idle" for node in (1, 2, 3)]
    job = nodes.sbatch("--nodes=3", "--ntasks-per-node=1", LAUNCHERS["srun"], "aux/check_ranks.py")
    assert "VERDICT: all well, 3 ranks started by srun" in job.log, job.log
    shown = nodes.exec("srun", "--nodes=3", "--cores-per-socket=2", "hostname").stdout
    assert sorted(shown.split()) == ["node-1", "node-2", "node-3"]
    nodes.compose("--profile", "more", "down", "--volumes")
    assert nodes.left() == []


def test_troubles(nodes):
    """Each row of the table in docs/docker.md, made to happen: what is seen, and that the remedy
    helps."""
    nodes.compose("--profile", "more", "down", "--volumes")
    nodes.compose("up", "--detach")
    two = ["--ntasks=2", "--output=%j.out", "--wrap=srun hostname"]
    assert sorted(nodes.sbatch(*two).log.split()) == ["node-1", "node-1"]
    assert sorted(nodes.sbatch("--nodes=2", *two).log.split()) == ["node-1", "node-2"]

    for more, why in (
        ("--nodes=3", "Node count specification"),
        ("--cpus-per-task=3", "CPU count per node"),
    ):
        refused = nodes.exec("sbatch", more, "--wrap=true")
        assert refused.returncode != 0 and why in refused.stderr, refused.stderr
    everything = ["--nodes=2", "--ntasks-per-node=2", "--output=%j.out"]
    first = nodes.submit(*everything, "--wrap=srun sleep 60")
    second = nodes.submit(*everything, "--wrap=srun hostname")
    wait_until(lambda: nodes.show(first)["JobState"] == "RUNNING", 60, "the first job runs")
    queue = lambda: nodes.exec("squeue", "--noheader", "--format=%i %r").stdout  # noqa: E731
    wait_until(lambda: f"{second} Resources" in queue(), 60, "the second one waits for its CPUs")
    nodes.exec("scancel", first)
    assert nodes.wait(second).state == "COMPLETED"

    new_key = (
        "cd /run/slurm-cluster/key && rm munge.key && head --bytes=1024 /dev/urandom >munge.key && "
        "chmod 400 munge.key"
    )
    assert nodes.docker("exec", "--user=root", "node-1", "sh", "-c", new_key).returncode == 0
    checksum = ["--user=root", "node-1", "sha256sum", "/run/slurm-cluster/key/munge.key"]
    key = lambda: nodes.docker("exec", *checksum).stdout  # noqa: E731
    replaced = key()
    assert nodes.docker("restart", "node-2").returncode == 0
    logs = lambda: (done := nodes.docker("logs", "node-1")).stdout + done.stderr  # noqa: E731
    wait_until(lambda: "Munge decode failed" in logs(), 90, "node-2 has another key")
    wait_until(
        lambda: any(re.match("node-2 .* down", x) for x in nodes.states()), 90, "node-2 is down"
    )
    nodes.compose("build", "--no-cache")
    nodes.compose("up", "--detach", "--force-recreate")
    assert key() == replaced, "it is in the volume"
    nodes.compose("down", "--volumes")

    nodes.compose("up", "--detach", CPUS="1")
    assert key() not in (replaced, "")
    assert nodes.states() == ["node-1 1 idle", "node-2 1 idle"]
    assert sorted(nodes.sbatch(*two).log.split()) == ["node-1", "node-2"]


@pytest.mark.parametrize("tool", COMPOSES, ids=" ".join)
def test_compose(tool, nodes):
    """The three commands as one types them. The last one keeps the volumes."""
    nodes.compose("--profile", "more", "down", "--volumes")
    nodes.compose("build", tool=tool)
    nodes.compose("up", "-d", tool=tool)
    assert nodes.states() == ["node-1 2 idle", "node-2 2 idle"]
    nodes.compose("down", tool=tool)
    assert nodes.exec("true").returncode != 0 and nodes.left(), (
        "no node, but a volume with their key"
    )
