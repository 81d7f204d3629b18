"""run_script.sh on the real cluster; the stand-in for Enroot really enters a Debian image.
test_apptainer.py has Apptainer."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from containers import STAND_INS, Site, documented
from copies import NASTY, NOTHING, copy_file
from pages import steps, try_block
from slurm import (
    DIST_PACKAGES,
    LAUNCHERS,
    NAMESPACES,
    REPOSITORY,
    Cluster,
    environment,
    run,
    stand_ins,
    wait_for,
)

INSIDE = "tests/scripts/inside.py"
PACKAGES = "base-files bash coreutils dash libstdc++6 python3"


@pytest.fixture(scope="module")
def site(memory):
    """This machine's Python is in the image, and the virtual environment's torch is mounted."""
    machine = run("/usr/bin/python3", "-c", "import sys; print(sys.version_info.minor)").stdout
    assert int(machine) == sys.version_info.minor, "the virtual environment is not of python3"
    folder = memory / "site"
    (folder / "registry").mkdir(parents=True)
    torch = f"{sysconfig.get_path('purelib')}:{DIST_PACKAGES}"
    site = Site(folder, folder / "image.sqsh", torch)
    make_image(small_debian(folder / "root"), site.image)
    # The default of import_image.sh.
    (folder / "registry/nvcr.io+nvidia+pytorch:26.09-py3").symlink_to(site.image)
    return site


def small_debian(root: Path) -> Path:
    """A root file system with these packages of this machine, and what they depend on."""
    root.mkdir()
    # /bin is a link to /usr/bin, and packages know of both.
    pack = f"""
        apt-cache depends --recurse --installed --important {PACKAGES} | grep '^[a-z]' |
        xargs dpkg-query --listfiles | sed -E 's#^/(bin|lib|lib64|sbin)/#/usr/\\1/#' |
        grep -v -e '^/usr/share' -e /gconv -e '^[^/]' | cat - <(echo /etc/profile) | sort -u |
        tar --create --directory=/ --no-recursion --ignore-failed-read --files-from=- |
        tar --extract --directory={root}"""
    packed = run("bash", "-c", f"set -o pipefail; {pack}")
    assert packed.returncode == 0, packed.stderr
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    for name, target in (("python", "python3"), ("sh", "dash")):
        (root / "usr/bin" / name).unlink(missing_ok=True)
        (root / "usr/bin" / name).symlink_to(target)
    return root


def make_image(root: Path, image: Path):
    """As `enroot import` does: with /etc/environment, and an /etc/rc that runs the command."""
    files = {
        "etc/which-image": "first",
        "etc/environment": r"PYTORCH_VERSION=2.4.0\nPATH=/usr/local/bin:/usr/bin:/bin\n",
        "etc/rc": r'cd /var && exec "$@"\n',
    }
    options = ["-noI", "-noD", "-noF", "-noX", "-no-progress", "-quiet"]
    for path, text in files.items():
        options += ["-p", f"{path} f 644 0 0 printf {shlex.quote(text)}"]
    made = run("mksquashfs", root, image, *options)
    assert made.returncode == 0, made.stderr


def submit(cluster: Cluster, site: Site, clone: Path, *command: object, **env) -> int:
    size = ["--nodelist=node-[1-2]", "--nodes=2", "--gpus-per-node=1"]
    return cluster.submit(*size, "run_script.sh", *command, cwd=clone, env=site.environment | env)


def test_what_is_inside(cluster, site):
    """The container's files and not the host's, env.sh's sizes, what is named, every argument."""
    clone = site.clone("inside", ENV="OWN,OWN_TOO")
    # run_script.sh's settings are its own. The folder is a login node's, which the node lacks.
    stray = {f"CONTAINER_{name}": "stray" for name in ("NAME", "IMAGE", "MOUNTS", "FOLDER", "ENV")}
    stray |= {"XDG_RUNTIME_DIR": "/proc/user/0", "LEAK": "leak"}
    named = {"NCCL_DEBUG": "INFO", "OWN": "a b", "OWN_TOO": "", "NVIDIA_VISIBLE_DEVICES": "void"}
    before = os.umask(0o007)
    try:
        job = submit(cluster, site, clone, INSIDE, *NASTY, **named, **stray)
    finally:
        os.umask(before)
    job = cluster.wait(job)
    assert job.state == "COMPLETED", job.log
    sizes = {"NNODES": "2", "NPROC_PER_NODE": "1", "CPUS_PER_NODE": "16", "OMP_NUM_THREADS": "1"}
    sizes |= {"MASTER_ADDR": "node-1", "MASTER_PORT": str(61000 + job.id % 4536)}
    sizes |= {"CUDA_VISIBLE_DEVICES": "0", "PYTHONUNBUFFERED": "1", "SLURM_JOB_ID": str(job.id)}
    seen = re.findall(r"^SEEN (.*)$", job.log, re.M)
    ranks = sorted((json.loads(Path(x).read_text()) for x in seen), key=lambda x: x["variables"])
    assert len(ranks) == 2, job.log
    for index, rank in enumerate(ranks):
        assert rank["variables"] == [index, 0, 2] and rank["host"] == f"node-{index + 1}"
        assert rank["image"] == "first" and rank["folder"] == "/workspace/mnt"
        assert rank["arguments"] == NASTY
        inside = rank["environment"]
        assert {name: inside.get(name) for name in named | sizes} == named | sizes
        assert not {*stray, "VIRTUAL_ENV", "ENROOT_STAND_IN"} & set(inside)
        assert str(STAND_INS) not in inside["PATH"]
    # Of the umask in which sbatch was typed, and not of the image's.
    assert (clone / f"seen-{job.id}-0.json").stat().st_mode & 0o777 == 0o660
    assert not (clone / "canary").exists()


@pytest.mark.matrix
def test_chapter_has_the_losses_of_torchrun(cluster, site, tiny, tmp_path):
    """The page's commands, with a line in the log for every step."""
    [(language, commands, shown)] = steps(REPOSITORY / "docs/containers.md")
    assert commands.count("train_ddp.py --epochs 1") == 1
    commands = commands.replace("train_ddp.py --epochs 1", "train_ddp.py --epochs 1 --log-every 1")
    clone = site.clone("documented", IMAGE="$PWD/pytorch.sqsh")
    shutil.copytree(tiny, clone / "data/mnist")
    train = ["distributed/train_ddp.py", "--epochs", 1, "--log-every", 1]
    other = cluster.submit(f"--output={tmp_path}/log", LAUNCHERS["torchrun"], *train, cwd=clone)
    variables = cluster.environment | site.environment
    printed = try_block(language, commands, shown, clone, (NAMESPACES, "exec"), **variables)
    logs = [printed, cluster.wait(other).log]
    losses = [re.findall(r"^epoch=1 step=\d+/\d+ loss=(\S+)", log, re.M) for log in logs]
    assert len(losses[0]) >= 4 and losses[0] == losses[1]


def test_stopped_and_requeued(cluster, site, tiny):
    """SIGTERM reaches the ranks, and the shell outside requeues the job: each step once."""
    clone = site.clone("requeued", MOUNTS=f"{site.torch},{tiny}:/tiny")
    train = ["distributed/train_preemptible.py", "--data-dir", "/tiny", "--epochs", 2]
    train += ["--batch-size", 20, "--log-every", 1]
    number = submit(cluster, site, clone, "tests/scripts/slowly.py", 0.3, *train)
    log = clone / f"run_script.sh_{number}.out"
    wait_for(lambda: log.exists() and "\nepoch=1 step=7/" in log.read_text())
    assert cluster.exec("scancel", "--signal=TERM", number).returncode == 0
    job = cluster.wait(number, 180)
    assert job.state == "COMPLETED" and cluster.show(number)["Restarts"] == "1", job.log
    assert "\nRequeued: it resumes by itself\n" in job.log and "\nResumed after step" in job.log
    steps = re.findall(r"^epoch=(\d) step=(\d+)/15 loss=", job.log, re.M)
    assert steps == [(epoch, str(step)) for epoch in "12" for step in range(1, 16)]


@pytest.fixture
def in_a_job(tmp_path):
    """Runs run_script.sh in a folder of its own, as a job of one node, with stand-ins for Slurm."""
    for name in ("run_script.sh", "env.sh", "distributed/preemption.py", "docs/containers.md"):
        copy_file(name, tmp_path)

    def start(*arguments: object, **programs: str) -> subprocess.CompletedProcess:
        programs |= {"getent": "true", "squeue": f"echo $SLURM_JOB_ID {NOTHING}"}
        path = f"{stand_ins(tmp_path, programs)}:{environment()['PATH']}"
        slurm = {"SLURM_JOB_ID": 7, "SLURM_JOB_NAME": "n", "SLURM_JOB_NUM_NODES": 1}
        slurm |= {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "2", "PATH": path}
        return run("./run_script.sh", *arguments, cwd=tmp_path, env=environment(**slurm))

    start.folder = tmp_path
    return start


def test_not_requeued(in_a_job):
    """The shell outside the container says what to type, and fails."""
    slurm = "if [[ $1 == requeue ]]; then echo no requeue is allowed >&2; exit 1; fi; "
    slurm += "echo JobId=7 JobState=RUNNING Restarts=0 Command=/run.sh"
    srun = "mkdir --parents log/7 && echo train.py --resume >log/7/requeue"
    done = in_a_job("train.py", srun=srun, scontrol=slurm)
    *_, said, typed = done.stdout.splitlines()
    assert said.startswith("Not requeued: no requeue is allowed. To resume it"), done.stderr
    assert typed == "    sbatch /run.sh train.py --resume" and done.returncode == 1


def test_its_status_is_that_of_srun(in_a_job):
    assert in_a_job("train.py", srun="exit 3", scontrol="echo n1").returncode == 3


def test_the_file_for_a_requeue(in_a_job):
    """Is a new one: others who may write to log/ can have put a link there."""
    mine, asks = in_a_job.folder / "mine", in_a_job.folder / "log/7/requeue"
    mine.write_text("precious")
    asks.parent.mkdir(parents=True)
    asks.symlink_to(mine)
    done = in_a_job("train.py", srun="test -f log/7/requeue", scontrol="echo n1")
    assert done.returncode == 0 and mine.read_text() == "precious", done.stderr
    assert not asks.is_symlink()


def test_pyxis(in_a_job):
    """The documented lines, as they are, in the place of the one they name."""
    folder = documented("--container-image", in_a_job.folder)
    done = in_a_job(*NASTY, srun="""printf '%s\\0' "$@" >given""", scontrol="echo n1")
    assert done.returncode == 0, done.stderr
    given = (folder / "given").read_text().split("\0")
    expected = [f"--container-image={folder}/pytorch.sqsh", "--container-workdir=/workspace/mnt"]
    expected += [f"--container-mounts={folder}:/workspace/mnt", "./torchrun.sh", *NASTY, ""]
    assert given[-len(expected) :] == expected


def test_import_image(site, tmp_path):
    """The default is run_script.sh's file; what fails leaves none, and what is there stays."""
    clone = site.clone("import")
    env = environment(**site.environment)
    command, in_clone = [clone / "aux/import_image.sh"], {"cwd": clone, "env": env}
    missing = run(*command, "docker://nvcr.io#nvidia/none:1", **in_clone)
    assert missing.returncode == 1 and not list(clone.glob("*.sqsh*"))
    said = "import_image.sh: enroot cannot import docker://nvcr.io#nvidia/none:1"
    assert missing.stderr.splitlines()[-1].startswith(said)

    (site.folder / "registry/debian:12").write_text("an image")
    imported = run(*command, "docker://debian:12", **in_clone)
    assert imported.returncode == 0, imported.stderr
    assert (clone / "pytorch.sqsh").read_text() == "an image"
    again = run(*command, "docker://debian:12", **in_clone)
    assert again.returncode == 1 and "exists already" in again.stderr
    assert len(list(clone.glob("*.sqsh*"))) == len(again.stderr.splitlines()) == 1

    without = run(*command, "docker://debian", tmp_path / "x.sqsh")
    assert without.returncode == 1 and "no enroot on" in without.stderr
    wrong = run(*command, "debian", tmp_path / "x.sqsh", env=env)
    assert wrong.returncode == 1 and "does not begin with docker://" in wrong.stderr


# --- enroot.sh without a cluster: what it tells Enroot ---

# It keeps the image as the only file of a container, and prints a line for each word of `start`.
ENROOT = """
containers=${ENROOT_DATA_PATH:-$XDG_DATA_HOME/enroot}
case $1 in
    info) echo "  ENROOT_DATA_PATH=${SITE-}" ;;
    create)
        echo "$*" >>created
        mkdir -p "$containers/$4"
        if ! grep image "$5" >"$containers/$4/image"; then echo "[ERROR] no image" >&2; exit 1; fi
        for ((i = 0; i < 200; i++)); do if [[ -e hold ]]; then sleep 0.1; fi; done ;;
    remove) rm -r "$containers/$3" ;;
    start) printf '%s\\n' "$@" && trap -p TERM >ignored ;;
esac
"""


@pytest.fixture
def node(tmp_path):
    """Starts enroot.sh in the folder `code`, with run_script.sh's settings."""
    code = tmp_path / "home/code"
    (code / "aux").mkdir(parents=True)
    (code / "image.sqsh").write_text("image one\n")
    path = f"{stand_ins(tmp_path / 'tools', {'enroot': ENROOT})}:/usr/bin:/bin"
    settings = dict.fromkeys(("CONTAINER_NAME", "CONTAINER_ENV", "CONTAINER_MOUNTS"), "")
    settings |= {"CONTAINER_IMAGE": code / "image.sqsh", "CONTAINER_FOLDER": code, "PATH": path}
    settings |= {"XDG_DATA_HOME": tmp_path / "data", "SLURMD_NODENAME": "n1"}

    def start(script: str = "train.py", **changes: object) -> subprocess.Popen:
        env = {name: str(value) for name, value in (settings | changes).items()}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [REPOSITORY / "aux/launch/enroot.sh", script, *NASTY]
        return subprocess.Popen(command, cwd=code, env=env, start_new_session=True, **pipes)

    start.code, start.containers = code, tmp_path / "data/enroot"
    return start


def words(process: subprocess.Popen, option: str = "") -> list[str]:
    """The values of an option of `enroot start`, or what stands behind the options."""
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    if option:
        return re.findall(rf"^{option}\n(.*)$", out, re.M)
    return re.split(r"^--(?:root|rw|mount\n.*|env\n.*)\n", out, flags=re.M)[-1].splitlines()


# One of each family of names that a container gets.
FAMILIES = """RUN MASTER_ADDR MASTER_PORT NNODES NPROC_PER_NODE CPUS_PER_NODE OMP_NUM_THREADS
LOGLEVEL PYTHONUNBUFFERED PYTHONFAULTHANDLER HEARTBEAT_PROGRAM HF_HUB_OFFLINE WANDB_MODE
CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING CUDA_DEVICE_ORDER ROCR_VISIBLE_DEVICES
HIP_VISIBLE_DEVICES HSA_ENABLE_SDMA MIOPEN_USER_DB_PATH RCCL_MSCCL_ENABLE ZE_AFFINITY_MASK CCL_ROOT
SLURM_JOB_ID SLURMD_NODENAME NCCL_DEBUG GLOO_SOCKET_IFNAME TORCH_NCCL_TIMEOUT
PYTORCH_CUDA_ALLOC_CONF FI_PROVIDER NVIDIA_VISIBLE_DEVICES MELLANOX_VISIBLE_DEVICES
TRITON_CACHE_DIR OWN OWN_TOO"""


def test_which_variables_go_in(node):
    """Those, and no other."""
    others = ["LEAK", "CUDA_HOME", "WANDB_API_KEY", "HF_TOKEN"]
    variables = dict.fromkeys(FAMILIES.split() + others, "1")
    found = words(node(**variables, CONTAINER_ENV="OWN,OWN_TOO,UNSET"), "--env")
    assert sorted(found) == sorted(FAMILIES.split())


def test_two_jobs_create_one_container(node):
    """At once, and a third one finds it. Its name has the image's path and date."""
    both = [node(), node()]
    [name], [other] = [words(job)[:1] for job in both]
    assert name == other == words(node())[0]
    assert re.fullmatch(r".*home-code-image\.sqsh-\d{8}-\d{6}", name)
    assert (node.code / "created").read_text().count("--force") == 1
    assert [path.name for path in node.containers.glob("[!.]*")] == [name]


def test_where_containers_are(node, tmp_path):
    for variable in ("ENROOT_DATA_PATH", "SITE"):  # SITE is Enroot's own setting
        name = words(node(**{variable: tmp_path / variable}))[0]
        assert (tmp_path / variable / name / "image").exists()


def test_killed_while_it_is_created(node):
    """Half a container is left; the next job does not take it for a whole one."""
    (node.code / "hold").touch()
    killed = node()
    wait_for(lambda: list(node.containers.glob("*half*/image")), 20)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    (node.code / "hold").unlink()
    name = words(node())[0]
    assert (node.code / "created").read_text().count("--force") == 2
    assert [path.name for path in node.containers.glob("[!.]*")] == [name]


@pytest.mark.parametrize(
    ("script", "ignored"), [("./torchrun.sh", "trap -- '' SIGTERM\n"), ("train.py", "")]
)
def test_a_signal_while_it_is_created(script, ignored, node):
    """SIGTERM does not end the job, and is not ignored in a command that knows nothing of that."""
    (node.code / "hold").touch()
    job = node(script)
    wait_for(lambda: list(node.containers.glob("*half*/image")), 20)
    os.killpg(job.pid, signal.SIGTERM)
    (node.code / "hold").unlink()
    assert script in words(job)
    assert (node.code / "ignored").read_text() == ignored


def test_image_replaced_between_jobs(node):
    """The next job gets the new image, and the first container stays for who is in it."""
    first, image = words(node())[0], node.code / "image.sqsh"
    image.write_text("image two\n")
    os.utime(image, (1e9, 1e9))
    second = words(node())[0]
    held = [(node.containers / name / "image").read_text() for name in (first, second)]
    assert held == ["image one\n", "image two\n"]


def test_container_made_by_hand(node):
    """It is used as it is, and its command has every argument and this job's umask."""
    command = words(node(CONTAINER_NAME="mine", CONTAINER_IMAGE="/no/image"))
    assert command[:3] == ["mine", "bash", "-c"] and not (node.code / "created").exists()
    assert command[4:7] == [f"{os.umask(0o022) or 0:04o}", "/workspace/mnt", "train.py"]
    assert command[7:] == "\n".join(NASTY).split("\n")


def test_what_is_mounted(node):
    """The folder, what a link in it leads to, and more, read-only or not; or all of one's home."""
    home = node.code.parent
    for name in ("a blank", "real"):
        (home / name).mkdir()
    for link, target in (("data", "../real"), ("never", "../a blank"), ("dangling", "gone")):
        (node.code / link).symlink_to(target)
    job = node(CONTAINER_MOUNTS="/x:/aaa:ro,/y:/bbb:rw,/z:/ccc")
    more = ["/x:/aaa:none:x-create=auto,rbind,ro", "/y:/bbb", "/z:/ccc"]
    assert words(job, "--mount") == [
        f"{node.code}:/workspace/mnt", f"{home}/real:/workspace/mnt/data", *more
    ]  # fmt: skip
    job = node(CONTAINER_FOLDER=home)
    inside = f"{home}/real:/workspace/mnt/code/data"
    assert words(job, "--mount") == [f"{home}:/workspace/mnt", inside]
    assert words(node(CONTAINER_FOLDER=home))[5] == "/workspace/mnt/code"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"PATH": "/usr/bin:/bin"}, "no enroot on this node: ask for nodes that have it, or "),
        ({"CONTAINER_IMAGE": "/no/image"}, "no image /no/image: run ./aux/import_image.sh once, "),
        ({"CONTAINER_IMAGE": "/etc/hostname"}, "no container from /etc/hostname in "),
        ({"CONTAINER_FOLDER": "aux"}, "the repository, "),
    ],
)
def test_what_goes_wrong(changes, says, node):
    """One sentence with the host's name. Nothing half made stays."""
    job = node(**changes)
    _, said = job.communicate(timeout=30)
    assert job.returncode == 1 and f"enroot.sh on n1: {says}" in said.splitlines()[-1], said
    assert not [*node.containers.glob("*half*")]
