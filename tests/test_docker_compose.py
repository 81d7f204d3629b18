"""The Docker Compose cluster on a real engine: one that is running already, or one started for
these tests."""

import json
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from engines import succeed
from mend_torchvision import DECLARATIONS
from pages import copy_of_repository, steps, try_block
from slurm import LAUNCHERS, REPOSITORY, Cluster, environment, run

pytestmark = pytest.mark.matrix  # an image is built
OWNER = 1234  # whom the clone belongs to, and so the number of the jobs' user
# v2 and 1.29, as far as they are there.
COMPOSES = [
    tool
    for tool in (["docker", "compose"], ["docker-compose"])
    if shutil.which(tool[0]) and run(*tool, "version").returncode == 0
]


def mend(wheel: Path):
    """torchvision's wheel, as `make` mends it for a torch without CUDA."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(f"{wheel}.new", "w") as target:
        for name in source.namelist():
            added = DECLARATIONS if name == "torchvision/extension.py" else ""
            target.writestr(name, source.read(name) + added.encode())
    os.replace(f"{wheel}.new", wheel)


@pytest.fixture(scope="module")
def base_image(engine, debian, tmp_path_factory):
    """debian:bookworm-slim, with this machine's packages: no registry is needed."""
    name = f"tests-{os.getpid()}-base"
    root = tmp_path_factory.mktemp("base") / "root"
    succeed("cp", "--archive", debian, root)
    shutil.rmtree(root / "etc/apt")
    for path in ("/etc/apt", "/usr/share/keyrings"):
        shutil.copytree(path, f"{root}{path}", dirs_exist_ok=True)
    (root / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")
    (root / "etc/pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    [library] = (root / "usr/lib").glob("python3.*")
    version = library.name.removeprefix("python")
    wheels = ["--only-binary=:all:", f"--python-version={version}", "--dest", root / "wheels"]
    download = [sys.executable, "-m", "pip", "download", *wheels]
    download += ["--requirement=requirements.txt", "--constraint=dev/constraints.txt"]
    succeed(*download, timeout=300)
    mend(*(root / "wheels").glob("torchvision-*"))
    imports = f"tar --create --directory={root} . | docker import - {name}"
    succeed("bash", "-o", "pipefail", "-c", imports, env=environment(**engine))
    shutil.rmtree(root)
    yield name
    run("docker", "image", "rm", name, env=environment(**engine))


@pytest.fixture(scope="module")
def clone(tmp_path_factory, tiny) -> Path:
    """It belongs to an ordinary user, and has images, so that nobody looks for MNIST's server."""
    folder = copy_of_repository(tmp_path_factory.mktemp("clone"))
    shutil.copytree(tiny, folder / "data/mnist")
    run("chown", "--recursive", f"{OWNER}:{OWNER}", folder)
    return folder


class Nodes(Cluster):
    """The containers of a Compose project; commands run in node-1, as `docker exec` does."""

    def __init__(self, clone: Path, variables: dict):
        self.clone, self.environment, self.jobs = clone, environment(**variables), []

    def compose(self, *command: object, tool: tuple = ()):
        options = {"cwd": self.clone, "env": self.environment, "timeout": 300}
        succeed(*(tool or COMPOSES[0]), *command, **options)

    def docker(self, *command: object, **options):
        return run("docker", *command, env=self.environment, **options)

    def exec(self, *command: object, node: str = "node-1", **_):
        return self.docker("exec", node, *command)

    def show(self, job: int) -> dict[str, str]:
        """The clone is /data in there."""
        shown = super().show(job)
        return {name: value.replace("/data", str(self.clone), 1) for name, value in shown.items()}

    def states(self) -> list[str]:
        return self.exec("sinfo", "--noheader", "--Node", "--format=%N %c %T").stdout.splitlines()

    def left(self) -> list[str]:
        """The project's containers, volumes and networks."""
        name = self.environment["COMPOSE_PROJECT_NAME"]
        options = ["--quiet", f"--filter=label=com.docker.compose.project={name}"]
        kinds = (["ps", "--all"], ["volume", "ls"], ["network", "ls"])
        shown = [self.docker(*kind, *options).stdout for kind in kinds]
        return "".join(shown).splitlines()


@pytest.fixture(scope="module")
def project(clone, engine, base_image):
    """Nothing of it is up yet; afterwards nothing of it is left, its images included."""
    variables = {"COMPOSE_PROJECT_NAME": f"tests-{os.getpid()}", "BASE_IMAGE": base_image}
    nodes = Nodes(clone, engine | variables)
    yield nodes
    nodes.compose("--profile", "more", "down", "--volumes", "--rmi", "local")
    assert nodes.left() == []


def test_readme(project):
    """Builds the image; the block of local/cluster/README.md ends with the cluster's end."""
    [step] = steps(REPOSITORY / "local/cluster/README.md")
    shown = try_block(*step, project.clone, **project.environment)
    assert len(re.findall(r"^node-[12] +1 +train\* +idle 16 ", shown, re.M)) == 2
    trained = (project.clone / "training_job.log").read_text()
    assert set(re.findall(r"^\[Rank: \d+ \| (\S+) \|", trained, re.M)) == {"node-1", "node-2"}
    assert "\nFinished: " in shown, shown
    log = next(project.clone.glob("launch_slurm_to_torch.sh_*.out")).read_text()
    assert "VERDICT: all well, 4 ranks started by srun" in log, log
    assert (project.clone / "data/shakespeare/vocabulary.json").exists()
    assert project.left() == []


@pytest.mark.parametrize("tool", COMPOSES, ids=" ".join)
def test_compose(tool, project):
    """`up` returns when the nodes are idle, no port is open, and `down` keeps the volumes."""
    project.compose("build", tool=tool)
    project.compose("up", "-d", tool=tool)
    assert project.states() == ["node-1 16 idle", "node-2 16 idle"]
    for node in json.loads(project.docker("inspect", "node-1", "node-2").stdout):
        assert not node["HostConfig"]["PortBindings"] and not node["NetworkSettings"]["Ports"]
    project.compose("down", tool=tool)
    assert project.exec("true").returncode != 0
    assert project.left(), "no node, but a volume with their key"
    project.compose("down", "--volumes", tool=tool)


@pytest.fixture(scope="module")
def nodes(project) -> Nodes:
    project.compose("up", "--detach")
    return project


@pytest.mark.parametrize("way", ["torchrun", "spawn"])
def test_the_other_ways(way, nodes):
    job = nodes.sbatch(LAUNCHERS[way], "aux/check_ranks.py")
    assert f"VERDICT: all well, 2 ranks started by {way}" in job.log, job.log
    assert re.findall(r"^\d +\d +(node-\d)  ", job.log, re.M) == ["node-1", "node-2"]


def test_jobs_are_an_ordinary_users_and_their_files_the_owners(nodes):
    script = "srun id --user; sudo --non-interactive id"
    job = nodes.sbatch("--nodes=2", "--ntasks=2", "--output=whoami.out", f"--wrap={script}")
    assert job.log.splitlines()[:2] == [str(OWNER)] * 2 and job.state == "FAILED", job.log
    assert (nodes.clone / "whoami.out").stat().st_uid == OWNER
    assert nodes.exec("id", "--user").stdout.strip() == str(OWNER)
    key = "/run/slurm-cluster/key/munge.key"
    assert nodes.docker("exec", "--user=root", "node-1", "test", "-r", key).returncode == 0
    assert nodes.exec("test", "-r", key).returncode == 1


def test_the_munge_key_is_not_in_the_image(nodes, tmp_path):
    """Nor in one of its layers."""
    image = json.loads(nodes.docker("inspect", "node-1").stdout)[0]["Image"]
    unpack = f"docker save {image} | tar --extract --directory {tmp_path}"
    unpack += f"; find {tmp_path} -type f -exec tar --list --file '{{}}' ';' 2>/dev/null"
    names = run("bash", "-c", unpack, env=nodes.environment).stdout.split()
    assert "usr/sbin/munged" in names
    assert not [name for name in names if "munge.key" in name]


def test_three_nodes(nodes):
    make = {"cwd": nodes.clone, "env": nodes.environment}
    succeed("make", "docker-cluster", "NODES=3", **make)
    assert nodes.states() == [f"node-{node} 16 idle" for node in (1, 2, 3)]
    job = nodes.sbatch("--nodes=3", "--ntasks-per-node=1", LAUNCHERS["srun"], "aux/check_ranks.py")
    assert "VERDICT: all well, 3 ranks started by srun" in job.log, job.log
    succeed("make", "docker-cluster-down", **make)
    assert nodes.left() == []
