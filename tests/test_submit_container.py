"""Packaging as a container: what is built for whom; the Dockerfile on a small Debian, and
run_script.sh inside it."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from conftest import REPOSITORY, environment, run
from test_docker import engine  # noqa: F401  a fixture
from test_readme import copy_of_repository
from test_submit import job_of, laptop, one_sentence  # noqa: F401  the former is a fixture

INSIDE = """
import json, os, jinja2
facts = {"jinja2": jinja2.__file__, "built": os.path.exists("/workspace/inside.py")}
facts["rank"] = os.environ["RANK"]
facts |= {"marker": os.environ.get("MARKER"), "folder": os.getcwd(), "data": os.listdir("data")}
print("INSIDE", json.dumps(facts))
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


SLURMFILE = """
[production.cluster]
backend = "local"
job_base_dir = "jobs"
[production.packaging]
type = "container"
dockerfile = "Dockerfile"
image = "IMAGE"
"""
DOCKER = """#!/bin/sh
echo "$@" >>"$ENGINE_LOG"
[ "$1" = build ] || exit 0
echo "exec /bin/sh: Exec format error"
exit 1
"""
ON_ARM = (
    "import platform, sys; platform.machine = lambda: 'arm64'; sys.path.insert(0, 'aux'); import "
    "submit; "
)
ON_ARM += "sys.exit(submit.main(sys.argv[1:]))"


@pytest.fixture
def packed(tmp_path):
    """submit.py, train_task.py or other Python code in a copy of the repository, with an engine
    that cannot build."""
    clone = copy_of_repository(tmp_path / "clone")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/docker").write_text(DOCKER)
    (tmp_path / "bin/docker").chmod(0o755)
    subprocess.run(["git", "init", "--quiet"], cwd=clone, check=True)
    log = tmp_path / "log"

    def submit(*command: object, image: str = "registry.example.org/me/torch:1", more: str = ""):
        (clone / "Slurmfile.toml").write_text(SLURMFILE.replace("IMAGE", image) + more)
        env = environment(ENGINE_LOG=log)
        return run(
            sys.executable,
            *command,
            cwd=clone,
            env=env | {"PATH": f"{tmp_path / 'bin'}:{env['PATH']}"},
        )

    return submit, clone, log


SUBMIT = ["aux/submit.py", "--env", "production"]


def test_what_is_pushed_and_what_is_copied(packed):
    """type, dockerfile and image are enough."""
    submit, _, _ = packed
    dry = [*SUBMIT, "--dry-run", "run_script.sh"]
    hub, pushed, squashed = "me/torch:1", "push = true\n", "squashfs = true\n"
    for image in ("registry.example.org/me/torch:1", "localhost/torch", "10.0.0.1:5000/torch"):
        shown = submit(*dry, image=image)
        assert shown.returncode == 0 and f"\ndocker push {image}\n" in shown.stdout, shown.stderr
        host, rest = image.split("/", 1)
        assert f"docker://{host}#{rest}" in shown.stdout
        assert "docker push" not in submit(*dry, image=image, more=squashed).stdout
    for image in (hub, "torch"):
        shown = submit(*dry, image=image)
        assert (
            "docker build" in shown.stdout
            and "docker push" not in shown.stdout
            and "docker://" not in shown.stdout
        )
    assert f"docker push {hub}" in submit(*dry, image=hub, more=pushed).stdout
    one_sentence(submit(*dry, more=pushed + squashed), "say how the image gets to the cluster")


def test_a_job_that_would_not_be_in_the_image_is_refused(packed):
    """Before anything is built; @task takes the launcher that is."""
    submit, clone, log = packed
    one_sentence(
        submit(*SUBMIT, "launch_slurm_with_torchrun.sh", "distributed/train_ddp.py"),
        "launch_slurm_with_torchrun.sh runs nothing in a container",
        "name run_script.sh",
    )
    task = ["distributed/train_task.py", "--submit", "--env", "production", "--dry-run"]
    shown = submit(*task, "--epochs", 2)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.endswith(
        " --ntasks-per-node=2 run_script.sh distributed/train_task.py --epochs 2\n"
    ), shown.stdout
    settings = (clone / "run_script.sh").read_text()
    (clone / "run_script.sh").write_text(
        settings.replace("CONTAINER_IMAGE=$PWD/pytorch.sqsh", "CONTAINER_IMAGE=/images/x.sqsh")
    )
    one_sentence(
        submit(*SUBMIT, "run_script.sh"), "run_script.sh says CONTAINER_IMAGE=/images/x.sqsh"
    )
    assert not log.exists()


def test_what_is_pushed_is_imported_by_the_cluster(packed, tmp_path, monkeypatch):
    submit, clone, _ = packed
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry/registry.example.org+me+torch:1").write_text("an image")
    for program, line in {"docker": "exit 0", "sbatch": "echo 7", "scontrol": "exit 0"}.items():
        (tmp_path / "bin" / program).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / program).chmod(0o755)
    (tmp_path / "bin/enroot").symlink_to(REPOSITORY / "tests/stand-ins/bin/enroot")
    monkeypatch.setenv("ENROOT_STAND_IN", str(tmp_path))
    done = submit(
        *SUBMIT, "run_script.sh", more='[default.cluster]\nenvironment = ["ENROOT_STAND_IN"]\n'
    )
    assert done.returncode == 0, done.stderr
    (file,) = (clone / "jobs").glob("*/pytorch.sqsh")
    assert file.read_text() == "an image"


def test_another_processor_without_emulation(packed):
    submit, _, log = packed
    failed = submit("-c", ON_ARM, *SUBMIT[1:], "run_script.sh")
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    last = failed.stderr.splitlines()[-1]
    assert (
        "no container image: its programs are for another processor than this machine's, arm64"
        in last
    ), failed.stderr
    assert "tonistiigi/binfmt" in last and " --platform linux/amd64 " in log.read_text()
    assert "\nexec /bin/sh: Exec format error\n" in failed.stderr, "the engine's log is kept"


@pytest.fixture(scope="module")
def base_image(engine, debian, tmp_path_factory):  # noqa: F811
    """Debian with Python, pip and uv, and a package that uv finds without a network."""
    root = tmp_path_factory.mktemp("base")
    packages = root / "usr/local/lib/python3.11/dist-packages"
    packages.mkdir(parents=True)
    packages.with_name("site-packages").symlink_to("dist-packages")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--ignore-installed",
        "--no-warn-script-location",
    ]
    made = run(*pip, "--root", root, "--prefix=/usr/local", "pip", "uv", timeout=200)
    assert made.returncode == 0, made.stderr
    made = run(
        sys.executable, "-m", "pip", "download", "--quiet", "--dest", root / "wheels", "jinja2"
    )
    assert made.returncode == 0, made.stderr
    (root / "etc/uv").mkdir(parents=True)
    (root / "etc/uv/uv.toml").write_text('no-index = true\nfind-links = ["/wheels"]\n')
    name = f"tests-{os.getpid()}-small"
    script = (
        f"tar --create --exclude=./proc/* --exclude=./sys/* --directory={debian} . | docker import "
        f"- {name}:bare"
    )
    made = run("bash", "-o", "pipefail", "-c", script, env=environment(**engine))
    assert made.returncode == 0, made.stderr
    (root / "Dockerfile").write_text(f"FROM {name}:bare\nCOPY . /\nENV MARKER=from_the_base\n")
    made = run("docker", "build", "--tag", name, root, env=environment(**engine))
    assert made.returncode == 0, made.stderr
    yield name
    run(
        "docker",
        "image",
        "rm",
        "--force",
        name,
        f"{name}:bare",
        f"{name}:ours",
        env=environment(**engine),
    )


@pytest.fixture(scope="module")
def boxed(laptop, engine, base_image, tmp_path_factory):  # noqa: F811
    """The laptop with an engine, requirements that the base has a wheel of, and Enroot's stand-
    in on the cluster."""
    site = tmp_path_factory.mktemp("enroot")
    clone = laptop.clone
    settings = ENVIRONMENT.replace("BASE_IMAGE", base_image).replace("IMAGE", f"{base_image}:ours")
    boxes = tmp_path_factory.mktemp("boxes")  # Enroot takes no blank in a mount
    (boxes / "data/mine").mkdir(parents=True)
    settings = settings.replace("BOXES", str(boxes))
    (clone / "Slurmfile.toml").write_text((clone / "Slurmfile.toml").read_text() + settings)
    (clone / "requirements.txt").write_text("jinja2\n")
    (clone / "inside.py").write_text(INSIDE)
    (site / "torch.pth").write_text("/opt/torch\n")  # searched last: the image's own packages win
    for tool, command in (("python", "python3"), ("torchrun", "python3 -m torch.distributed.run")):
        (site / tool).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (site / tool).chmod(0o755)
    mounted = [f"{sysconfig.get_path('purelib')}:/opt/torch"]
    mounted += [f"{site}/{tool}:/usr/local/bin/{tool}" for tool in ("python", "torchrun")]
    mounts = ",".join(
        [*mounted, f"{site}/torch.pth:/usr/local/lib/python3.11/dist-packages/torch.pth"]
    )
    text = (clone / "run_script.sh").read_text()
    text, count = re.subn(r"^export CONTAINER_MOUNTS=", rf"\g<0>{mounts}", text, flags=re.M)
    assert count == 1
    (clone / "run_script.sh").write_text(text)
    path = f"{REPOSITORY / 'tests/stand-ins/bin'}:{environment()['PATH']}"
    return engine | {"ENROOT_STAND_IN": site, "PATH": path}


@pytest.mark.matrix  # two minutes together, most of them for images
def test_built_copied_and_run(laptop, boxed):  # noqa: F811
    options = ["--env", "boxed", "--nodes=1", "--gpus-per-node=1", "--follow", "--fetch"]
    done = laptop.submit(*options, "run_script.sh", "inside.py", timeout=300, **boxed)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    job = job_of(done.stdout)
    fetched = laptop.clone / f"slurm-jobs/boxed-{job}"
    [log] = fetched.glob(f"*_{job}.out")
    log = log.read_text()
    facts = json.loads(re.search("^INSIDE (.*)$", log, re.M)[1])
    assert facts["jinja2"].startswith("/usr/local/lib/python3") and facts["built"]
    assert facts["data"] == ["mine"], "the folder of the Slurmfile's link"
    assert (
        facts["marker"] == "from_the_base"
        and facts["folder"] == "/workspace/mnt"
        and facts["rank"] == "0"
    )
    done = laptop.run(
        "python", "tests/scripts/context.py", "--submit", *options, timeout=300, **boxed
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    places = [json.loads(line) for line in re.findall(r"^CONTEXT (.*)$", done.stdout, re.M)]
    assert places and all(place["world_size"] == len(places) for place in places), done.stdout


@pytest.mark.matrix  # two minutes together, most of them for images
def test_built_by_hand(laptop, boxed, base_image, tiny):  # noqa: F811
    """`docker build .` takes the code, and nothing of what git ignores. It trains, with the
    torch of the tests."""
    clone, image = laptop.clone, f"{base_image}:ours"
    ignored = [
        ".venv/x",
        "data/x",
        "log/x",
        "checkpoints/7/x",
        "slurm-jobs/x",
        "a.out",
        "a.sqsh",
        "aux/__pycache__/x",
    ]
    for path in ignored:
        if not (clone / path).parent.is_symlink():
            (clone / path).parent.mkdir(parents=True, exist_ok=True)
            (clone / path).write_text("")
    build_and_train("docker", laptop, boxed, base_image, tiny)
    listed = laptop.run(
        "docker", "run", "--rm", image, "find", "/workspace", "-printf", "%P\\n", **boxed
    )
    files = set(listed.stdout.split("\n"))
    assert {
        "env.sh",
        "distributed/train_ddp.py",
        "aux/submission/remote.sh",
        "requirements.txt",
    } < files, listed.stderr
    assert not [
        x
        for x in files
        if re.search(r"^(\.git|\.venv|data|log|checkpoints|slurm-jobs)\b|\.(out|sqsh)$|cache", x)
    ]


def build_and_train(engine, laptop, variables, base_image, tiny):  # noqa: F811
    """`docker build -f Dockerfile -t test .`, or the same with podman, on a small base."""
    image = f"{base_image}:ours"
    command = [
        engine,
        "build",
        f"--build-arg=BASE={base_image}",
        "-f",
        "Dockerfile",
        "-t",
        image,
        ".",
    ]
    built = laptop.run(*command, timeout=300, **variables)
    assert built.returncode == 0, built.stderr[-3000:]
    mounts = [
        f"--volume={sysconfig.get_path('purelib')}:/opt/torch:ro",
        f"--volume={tiny}:/workspace/data/mnist:ro",
    ]
    command = ["python3", "local/train_single.py", "--epochs", 1, "--device", "cpu"]
    run_it = [
        engine,
        "run",
        "--rm",
        "--network=none",
        "--env=PYTHONPATH=/opt/torch",
        *mounts,
        image,
    ]
    trained = laptop.run(*run_it, *command, **variables)
    assert trained.returncode == 0 and "Finished: epoch=1" in trained.stdout, (
        trained.stdout + trained.stderr
    )


@pytest.mark.matrix
def test_podman(laptop, boxed, base_image, tiny, tmp_path):  # noqa: F811
    """By hand, and by submit.py where there is no docker."""
    storage = tmp_path / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{tmp_path}/images"\nrunroot = '
        f'"{tmp_path}/run"\n'
    )
    # Docker's, whatever control groups this machine has, with no higher limits.
    runtime = tmp_path / "containers.conf"
    limits = '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'
    runtime.write_text(limits + '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n')
    variables = boxed | {"CONTAINERS_STORAGE_CONF": storage, "CONTAINERS_CONF": runtime}
    loaded = laptop.run(
        "bash", "-o", "pipefail", "-c", f"docker save {base_image} | podman load", **variables
    )
    assert loaded.returncode == 0, loaded.stderr
    build_and_train("podman", laptop, variables, base_image, tiny)

    hidden = [
        docker
        for x in variables["PATH"].split(":")
        if (docker := Path(x, "docker").resolve()).is_file()
    ]
    for docker in hidden:  # from the laptop alone
        assert laptop.run("mount", "--bind", "/dev/null", docker).returncode == 0
    options = ["--env", "boxed", "--nodes=1", "--gpus-per-node=1", "--follow", "--fetch"]
    done = laptop.submit(*options, "run_script.sh", "inside.py", timeout=300, **variables)
    for docker in hidden:
        assert laptop.run("umount", docker).returncode == 0
    assert done.returncode == 0 and "+ podman build " in done.stderr, (
        done.stdout[-3000:] + done.stderr[-3000:]
    )
    assert json.loads(re.search("^INSIDE (.*)$", done.stdout, re.M)[1])["marker"] == "from_the_base"


@pytest.mark.matrix  # two minutes together, most of them for images
def test_failed_build_push_and_no_engine(laptop, boxed):  # noqa: F811
    before = laptop.job_folders()
    pushed = laptop.submit("--env", "pushed", "run_script.sh", "inside.py", timeout=300, **boxed)
    one_sentence(pushed, "no container image: docker push ended with exit status")
    dockerfile = laptop.clone / "Dockerfile"
    kept = dockerfile.read_text()
    dockerfile.write_text(kept + "RUN echo what went wrong; exit 7\n")
    failed = laptop.submit("--env", "boxed", "run_script.sh", "inside.py", timeout=300, **boxed)
    one_sentence(
        failed, "no container image: docker build ended with exit status", "see its log above"
    )
    assert "what went wrong" in failed.stderr
    dockerfile.write_text(kept)
    tools = laptop.clone.parent / "tools"
    tools.mkdir()
    for tool in ("git", "sqfstar", "ssh", "sh", "nsenter"):
        (tools / tool).symlink_to(shutil.which(tool))
    missing = laptop.run(
        sys.executable,
        "aux/submit.py",
        "--env",
        "boxed",
        "run_script.sh",
        **boxed | {"PATH": tools},
    )
    one_sentence(missing, "needs docker or podman")
    assert laptop.job_folders() == before
    kinds = subprocess.run(
        ["docker", "ps", "--all", "--quiet"], capture_output=True, env=environment(**boxed)
    )
    assert kinds.stdout == b""
