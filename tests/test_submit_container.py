"""Packaging as a container: the Dockerfile on a small Debian, by a real engine, and run_script.sh inside it."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from conftest import REPOSITORY, environment, run
from test_docker import engine  # noqa: F401  a fixture
from test_submit import job_of, laptop, one_sentence  # noqa: F401  the former is a fixture

pytestmark = pytest.mark.matrix  # two minutes, most of them for images

INSIDE = """
import json, os, jinja2
facts = {"jinja2": jinja2.__file__, "built": os.path.exists("/workspace/inside.py"), "rank": os.environ["RANK"]}
print("INSIDE", json.dumps(facts | {"marker": os.environ.get("MARKER"), "folder": os.getcwd()}))
"""
ENVIRONMENT = """
[boxed.cluster]
job_base_dir = "BOXES"
environment = ["PATH", "ENROOT_STAND_IN"]
[boxed.packaging]
type = "container"
image = "IMAGE"
squashfs = true
build_args = ["BASE=BASE_IMAGE"]
[pushed.packaging]
type = "container"
image = "127.0.0.1:1/nowhere:1"
push = true
build_args = ["BASE=BASE_IMAGE"]
"""


@pytest.fixture(scope="module")
def base_image(engine, debian, tmp_path_factory):  # noqa: F811
    """Debian with Python, pip and uv, and a package that uv finds without a network."""
    root = tmp_path_factory.mktemp("base")
    packages = root / "usr/local/lib/python3.11/dist-packages"
    packages.mkdir(parents=True)
    packages.with_name("site-packages").symlink_to("dist-packages")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--ignore-installed", "--no-warn-script-location"]
    made = run(*pip, "--root", root, "--prefix=/usr/local", "pip", "uv", timeout=200)
    assert made.returncode == 0, made.stderr
    made = run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", root / "wheels", "jinja2")
    assert made.returncode == 0, made.stderr
    (root / "etc/uv").mkdir(parents=True)
    (root / "etc/uv/uv.toml").write_text('no-index = true\nfind-links = ["/wheels"]\n')
    name = f"tests-{os.getpid()}-small"
    script = f"tar --create --exclude=./proc/* --exclude=./sys/* --directory={debian} . | docker import - {name}:bare"
    made = run("bash", "-o", "pipefail", "-c", script, env=environment(**engine))
    assert made.returncode == 0, made.stderr
    (root / "Dockerfile").write_text(f"FROM {name}:bare\nCOPY . /\nENV MARKER=from_the_base\n")
    made = run("docker", "build", "--tag", name, root, env=environment(**engine))
    assert made.returncode == 0, made.stderr
    yield name
    run("docker", "image", "rm", "--force", name, f"{name}:bare", f"{name}:ours", env=environment(**engine))


@pytest.fixture(scope="module")
def boxed(laptop, engine, base_image, tmp_path_factory):  # noqa: F811
    """The laptop with an engine, requirements that the base has a wheel of, and Enroot's stand-in on the cluster."""
    site = tmp_path_factory.mktemp("enroot")
    clone = laptop.clone
    settings = ENVIRONMENT.replace("BASE_IMAGE", base_image).replace("IMAGE", f"{base_image}:ours")
    settings = settings.replace("BOXES", str(tmp_path_factory.mktemp("boxes")))  # Enroot takes no blank in a mount
    (clone / "Slurmfile.toml").write_text((clone / "Slurmfile.toml").read_text() + settings)
    (clone / "requirements.txt").write_text("jinja2\n")
    (clone / "inside.py").write_text(INSIDE)
    (site / "torch.pth").write_text("/opt/torch\n")  # searched last: the image's own packages win
    for tool, command in (("python", "python3"), ("torchrun", "python3 -m torch.distributed.run")):
        (site / tool).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (site / tool).chmod(0o755)
    mounted = [f"{sysconfig.get_path('purelib')}:/opt/torch"]
    mounted += [f"{site}/{tool}:/usr/local/bin/{tool}" for tool in ("python", "torchrun")]
    mounts = ",".join([*mounted, f"{site}/torch.pth:/usr/local/lib/python3.11/dist-packages/torch.pth"])
    text = (clone / "env.sh").read_text()
    for setting, value in (("MOUNTS", mounts), ("NAME", f"submitted-{os.getpid()}")):
        name = f"export CONTAINER_{setting}="
        text, count = re.subn(rf"^{name}\S*", name + value, text, flags=re.M)
        assert count == 1
    (clone / "env.sh").write_text(text)
    path = f"{REPOSITORY / 'tests/stand-ins/bin'}:{environment()['PATH']}"
    return engine | {"ENROOT_STAND_IN": site, "PATH": path}


def test_built_copied_and_run(laptop, boxed):  # noqa: F811
    options = ["--env", "boxed", "--nodes=1", "--gpus-per-node=1", "--follow", "--fetch"]
    done = laptop.submit(*options, "run_script.sh", "inside.py", timeout=300, **boxed)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    job = job_of(done.stdout)
    fetched = laptop.clone / f"slurm-jobs/boxed-{job}"
    log = (fetched / f"log/{job}/node-1.out").read_text()
    facts = json.loads(re.search("^INSIDE (.*)$", log, re.M)[1])
    assert facts["jinja2"].startswith("/usr/local/lib/python3") and facts["built"]
    assert facts["marker"] == "from_the_base" and facts["folder"] == "/workspace/mnt" and facts["rank"] == "0"


def test_built_by_hand(laptop, boxed, base_image):  # noqa: F811
    """`docker build .` takes the code, and nothing of what git ignores."""
    clone, image = laptop.clone, f"{base_image}:ours"
    ignored = [".venv/x", "data/x", "log/x", "checkpoints/7/x", "slurm-jobs/x", "a.out", "a.sqsh", "aux/__pycache__/x"]
    for path in ignored:
        if not (clone / path).parent.is_symlink():
            (clone / path).parent.mkdir(parents=True, exist_ok=True)
            (clone / path).write_text("")
    built = laptop.run("docker", "build", f"--build-arg=BASE={base_image}", "--tag", image, clone, timeout=300, **boxed)
    assert built.returncode == 0, built.stderr[-3000:]
    listed = laptop.run("docker", "run", "--rm", image, "find", "/workspace", "-printf", "%P\\n", **boxed)
    files = set(listed.stdout.split("\n"))
    assert {"env.sh", "distributed/train_ddp.py", "aux/submission/remote.sh", "requirements.txt"} < files, listed.stderr
    assert not [
        x for x in files if re.search(r"^(\.git|\.venv|data|log|checkpoints|slurm-jobs)\b|\.(out|sqsh)$|cache", x)
    ]


def test_failed_build_push_and_no_engine(laptop, boxed):  # noqa: F811
    before = laptop.job_folders()
    pushed = laptop.submit("--env", "pushed", "sleep.sh", timeout=300, **boxed)
    one_sentence(pushed, "no container image: docker push ended with exit status")
    dockerfile = laptop.clone / "Dockerfile"
    kept = dockerfile.read_text()
    dockerfile.write_text(kept + "RUN echo what went wrong; exit 7\n")
    failed = laptop.submit("--env", "boxed", "sleep.sh", timeout=300, **boxed)
    one_sentence(failed, "no container image: docker build ended with exit status", "see its log above")
    assert "what went wrong" in failed.stderr
    dockerfile.write_text(kept)
    tools = laptop.clone.parent / "tools"
    tools.mkdir()
    for tool in ("git", "sqfstar", "ssh", "sh", "nsenter"):
        (tools / tool).symlink_to(shutil.which(tool))
    missing = laptop.run(sys.executable, "aux/submit.py", "--env", "boxed", "sleep.sh", **boxed | {"PATH": tools})
    one_sentence(missing, "needs docker or podman")
    assert laptop.job_folders() == before
    kinds = subprocess.run(["docker", "ps", "--all", "--quiet"], capture_output=True, env=environment(**boxed))
    assert kinds.stdout == b""
