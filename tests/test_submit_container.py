"""Packaging as a container: what is built for whom; the Dockerfile on a small Debian, and
run_script.sh in it."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from conftest import DIST_PACKAGES, REPOSITORY, environment, run, stand_ins
from test_docker import engine, succeed  # noqa: F401  the first is a fixture
from test_readme import copy_of_repository
from test_submit import laptop, one_sentence  # noqa: F401  the first is a fixture

# --- without an engine ---

SLURMFILE = """
[production.cluster]
backend = "local"
job_base_dir = "jobs"
[production.packaging]
type = "container"
dockerfile = "Dockerfile"
image = "IMAGE"
"""
CANNOT_BUILD = """[ "$1" = build ] || exit 0
echo what went wrong
exit 7"""
SUBMIT = ["aux/submit.py", "--env", "production"]


@pytest.fixture
def packed(tmp_path):
    """submit.py or train_task.py in a copy of the repository, with an engine that cannot build."""
    clone = copy_of_repository(tmp_path / "clone")
    subprocess.run(["git", "init", "--quiet"], cwd=clone, check=True)
    path = f"{stand_ins(tmp_path / 'bin', {'docker': CANNOT_BUILD})}:{environment()['PATH']}"

    def submit(*command: object, image="registry.example.org/me/torch:1", more="", PATH=path):
        (clone / "Slurmfile.toml").write_text(SLURMFILE.replace("IMAGE", image) + more)
        return run(sys.executable, *command, cwd=clone, env=environment(PATH=PATH))

    return submit, clone


def test_what_is_pushed_and_what_is_copied(packed):
    """Pushed if the name has a registry, or the Slurmfile says so."""
    submit, _ = packed
    dry = [*SUBMIT, "--dry-run", "run_script.sh"]
    for image in ("registry.example.org/me/torch:1", "10.0.0.1:5000/torch"):
        shown = submit(*dry, image=image).stdout
        host, name = image.split("/", 1)
        assert f"\ndocker push {image}\n" in shown and f"docker://{host}#{name}" in shown
    assert "docker push" not in submit(*dry, more="push = false\n").stdout
    shown = submit(*dry, image="me/torch:1").stdout
    assert "docker build" in shown and "docker push" not in shown and "docker://" not in shown
    assert "docker push me/torch:1" in submit(*dry, image="me/torch:1", more="push = true\n").stdout


def test_a_job_that_would_not_be_in_the_image_is_refused(packed):
    """@task takes the launcher that is."""
    submit, clone = packed
    outside = submit(*SUBMIT, "launch_slurm_with_torchrun.sh", "distributed/train_ddp.py")
    one_sentence(outside, "does not run CONTAINER_IMAGE=$PWD/pytorch.sqsh", "name run_script.sh")
    task = ["distributed/train_task.py", "--submit", "--env", "production", "--dry-run"]
    shown = submit(*task, "--epochs", 2)
    assert shown.stdout.endswith(" run_script.sh distributed/train_task.py --epochs 2\n"), shown
    launcher = clone / "run_script.sh"
    launcher.write_text(launcher.read_text().replace("$PWD/pytorch.sqsh", "/images/x.sqsh"))
    one_sentence(submit(*SUBMIT, launcher.name), "does not run CONTAINER_IMAGE=$PWD/pytorch.sqsh")


def test_what_is_pushed_is_imported_by_the_cluster(packed, tmp_path, monkeypatch):
    submit, clone = packed
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry/registry.example.org+me+torch:1").write_text("an image")
    shutil.rmtree(tmp_path / "bin")
    stand_ins(tmp_path / "bin", {"docker": "", "sbatch": "echo 7", "scontrol": ""})
    (tmp_path / "bin/enroot").symlink_to(REPOSITORY / "tests/scripts/stand-ins/bin/enroot")
    monkeypatch.setenv("ENROOT_STAND_IN", str(tmp_path))
    settings = '[default.cluster]\nenvironment = ["ENROOT_STAND_IN"]\n'
    done = submit(*SUBMIT, "run_script.sh", more=settings)
    assert done.returncode == 0, done.stderr
    [file] = (clone / "jobs").glob("*/pytorch.sqsh")
    assert file.read_text() == "an image"


def test_failed_build_podman_and_no_engine(packed, tmp_path):
    submit, clone = packed
    failed = submit(*SUBMIT, "run_script.sh")
    one_sentence(failed, "no container image: docker build ended with exit status 7")
    assert "what went wrong" in failed.stderr and not (clone / "jobs").exists()
    tools = stand_ins(tmp_path / "tools", {"git": f'exec {shutil.which("git")} "$@"'})
    one_sentence(submit(*SUBMIT, "run_script.sh", PATH=tools), "needs docker or podman")
    podman = f"{stand_ins(tmp_path / 'podman', {'podman': ''})}:{tools}"
    assert "podman build" in submit(*SUBMIT, "--dry-run", "run_script.sh", PATH=podman).stdout


# --- with one ---

INSIDE = """
import json, os, jinja2
facts = {"jinja2": jinja2.__file__, "built": os.path.exists("/workspace/inside.py")}
facts |= {"rank": os.environ["RANK"], "marker": os.environ.get("MARKER")}
facts |= {"folder": os.getcwd(), "data": os.listdir("data")}
print("INSIDE", json.dumps(facts))
"""
ENVIRONMENT = """
[boxed.cluster]
job_base_dir = "{boxes}"
environment = ["ENROOT_STAND_IN", "ENROOT_DATA_PATH"]
[boxed.packaging]
type = "container"
image = "{image}:ours"
build_args = ["BASE={image}"]
"""
BOXED = ["--env", "boxed", "--nodes=1", "--gpus-per-node=1", "--follow"]


@pytest.fixture(scope="module")
def base_image(engine, debian, tmp_path_factory):  # noqa: F811
    """Debian with Python, pip and uv, and a package that uv finds without a network."""
    root, variables = tmp_path_factory.mktemp("base"), environment(**engine)
    packages = root / DIST_PACKAGES[1:]
    packages.mkdir(parents=True)
    packages.with_name("site-packages").symlink_to("dist-packages")
    pip = [sys.executable, "-m", "pip"]
    install = ["install", "--quiet", "--ignore-installed", "--no-warn-script-location"]
    succeed(*pip, *install, "--root", root, "--prefix=/usr/local", "pip", "uv", timeout=200)
    succeed(*pip, "download", "--quiet", "--dest", root / "wheels", "jinja2")
    (root / "etc/uv").mkdir(parents=True)
    (root / "etc/uv/uv.toml").write_text('no-index = true\nfind-links = ["/wheels"]\n')
    name = f"tests-{os.getpid()}-small"
    pack = f"tar --create --exclude=./proc/* --exclude=./sys/* --directory={debian} ."
    succeed("bash", "-o", "pipefail", "-c", f"{pack} | docker import - {name}:bare", env=variables)
    (root / "Dockerfile").write_text(f"FROM {name}:bare\nCOPY . /\nENV MARKER=from_the_base\n")
    succeed("docker", "build", "--tag", name, root, env=variables)
    yield name
    images = [name, f"{name}:bare", f"{name}:ours"]
    run("docker", "image", "rm", "--force", *images, env=variables)


@pytest.fixture(scope="module")
def boxed(laptop, engine, base_image, tmp_path_factory):  # noqa: F811
    """The laptop with an engine, requirements that the base has a wheel of, and Enroot's stand-
    in on the cluster. The container sees the torch of the tests, behind its own packages."""
    clone, site = laptop.clone, tmp_path_factory.mktemp("enroot")
    boxes = tmp_path_factory.mktemp("boxes")  # Enroot takes no blank in a mount
    (boxes / "data/mine").mkdir(parents=True)
    with (clone / "Slurmfile.toml").open("a") as slurmfile:
        slurmfile.write(ENVIRONMENT.format(boxes=boxes, image=base_image))
    (clone / "requirements.txt").write_text("jinja2\n")
    (clone / "inside.py").write_text(INSIDE)
    (site / "torch.pth").write_text("/opt/torch\n")
    tools = stand_ins(site / "tools", {"python": 'exec python3 "$@"'})
    mounts = f"{sysconfig.get_path('purelib')}:/opt/torch,"
    mounts += f"{site}/torch.pth:{DIST_PACKAGES}/torch.pth,{tools}/python:/usr/local/bin/python"
    text = (clone / "run_script.sh").read_text()
    text, count = re.subn(r"^export CONTAINER_MOUNTS=", rf"\g<0>{mounts}", text, flags=re.M)
    assert count == 1
    (clone / "run_script.sh").write_text(text)
    # The cluster has Enroot, and the laptop no Slurm.
    bashrc = clone.parent / "there/.bashrc"
    path = f"export PATH={REPOSITORY / 'tests/scripts/stand-ins/bin'}:$PATH\n"
    bashrc.write_text(path + bashrc.read_text())
    return engine | {"ENROOT_STAND_IN": site, "ENROOT_DATA_PATH": site / "containers"}


@pytest.mark.matrix  # two minutes together, most of them for images
def test_built_copied_and_run(laptop, boxed):  # noqa: F811
    done = laptop.submit(*BOXED, "run_script.sh", "inside.py", timeout=300, **boxed)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    facts = json.loads(re.search("^INSIDE (.*)$", done.stdout, re.M)[1])
    assert facts["jinja2"].startswith("/usr/local/lib/python3") and facts["built"]
    assert facts["data"] == ["mine"], "the folder of the Slurmfile's link"
    assert facts["marker"] == "from_the_base" and facts["folder"] == "/workspace/mnt"
    assert facts["rank"] == "0"
    task = ["tests/scripts/context.py", "--submit", *BOXED]
    done = laptop.run(sys.executable, *task, timeout=300, **boxed)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    places = [json.loads(line) for line in re.findall(r"^CONTEXT (.*)$", done.stdout, re.M)]
    assert places and all(place["world_size"] == len(places) for place in places), done.stdout


@pytest.mark.matrix
def test_built_by_hand(laptop, boxed, base_image, tiny):  # noqa: F811
    """`docker build` takes the code, and nothing that git ignores; a training runs in it."""
    clone, image = laptop.clone, f"{base_image}:ours"
    ignored = [".venv/x", "log/x", "checkpoints/7/x", "slurm-jobs/x", "a.out", "a.sqsh"]
    for path in [clone / name for name in [*ignored, "aux/__pycache__/x"]]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    build = ["build", f"--build-arg=BASE={base_image}", "-f", "Dockerfile", "-t", image, "."]
    built = laptop.run("docker", *build, timeout=300, **boxed)
    assert built.returncode == 0, built.stderr[-3000:]
    volumes = [f"{sysconfig.get_path('purelib')}:/opt/torch", f"{tiny}:/workspace/data/mnist"]
    options = ["--rm", "--network=none", "--env=PYTHONPATH=/opt/torch"]
    options += [f"--volume={volume}:ro" for volume in volumes]
    train = ["python3", "local/train_single.py", "--epochs", 1, "--device", "cpu"]
    trained = laptop.run("docker", "run", *options, image, *train, **boxed)
    assert "Finished: epoch=1" in trained.stdout, trained
    find = ["find", "/workspace", "-printf", "%P\\n"]
    listed = laptop.run("docker", "run", "--rm", image, *find, **boxed)
    files = set(listed.stdout.split("\n"))
    assert {"env.sh", "distributed/train_ddp.py", "requirements.txt"} < files, listed.stderr
    folders = r"^(\.git|\.venv|data|log|checkpoints|slurm-jobs)\b"
    assert not [x for x in files if re.search(rf"{folders}|\.(out|sqsh)$|cache", x)]
