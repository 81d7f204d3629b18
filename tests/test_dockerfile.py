"""The Dockerfile on a small Debian: an image with the code, in which a training runs."""

import os
import re
import sys
import sysconfig

import pytest

from engines import succeed
from pages import copy_of_repository
from slurm import DIST_PACKAGES, environment, run


@pytest.fixture(scope="module")
def base_image(engine, debian, tmp_path_factory):
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


@pytest.mark.matrix  # two minutes, most of them for images
def test_built_by_hand(engine, base_image, tiny, tmp_path):
    """`docker build` takes the code, and nothing that git ignores; a training runs in it."""
    clone, image, env = copy_of_repository(tmp_path), f"{base_image}:ours", environment(**engine)
    (clone / "requirements.txt").write_text("jinja2\n")
    ignored = [".venv/x", "log/x", "checkpoints/7/x", "a/slurm-jobs/x", "a.out", "a.sqsh"]
    for path in [clone / name for name in [*ignored, "aux/__pycache__/x"]]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    build = ["build", f"--build-arg=BASE={base_image}", "-f", "Dockerfile", "-t", image, "."]
    built = run("docker", *build, cwd=clone, timeout=300, env=env)
    assert built.returncode == 0, built.stderr[-3000:]
    volumes = [f"{sysconfig.get_path('purelib')}:/opt/torch", f"{tiny}:/workspace/data/mnist"]
    options = ["--rm", "--network=none", "--env=PYTHONPATH=/opt/torch"]
    options += [f"--volume={volume}:ro" for volume in volumes]
    train = ["python3", "local/train_single.py", "--epochs", 1, "--device", "cpu"]
    trained = run("docker", "run", *options, image, *train, env=env)
    assert "Finished: epoch=1" in trained.stdout, trained
    inside = ["sh", "-c", "find /workspace -printf '%P\\n'; cat /etc/environment"]
    listed = run("docker", "run", "--rm", image, *inside, env=env)
    files = set(listed.stdout.split("\n"))
    assert {"env.sh", "distributed/train_ddp.py", "MARKER=from_the_base"} < files, listed.stderr
    folders = r"^(\.git|\.venv|data|log|checkpoints|a/slurm-jobs)\b"
    assert not [x for x in files if re.search(rf"{folders}|\.(out|sqsh)$|cache", x)]
