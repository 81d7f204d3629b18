"""run_script.sh on the real cluster; the stand-ins for Enroot and Pyxis really enter a Debian
image. test_apptainer.py has Apptainer."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import (
    DIST_PACKAGES,
    LAUNCHERS,
    NAMESPACES,
    REPOSITORY,
    Cluster,
    Job,
    environment,
    run,
    stand_ins,
    wait_for,
)
from test_launchers import NASTY, NOTHING, copy_file
from test_readme import copy_of_repository, steps, try_block

STAND_INS = REPOSITORY / "tests/stand-ins"
INSIDE = "tests/scripts/inside.py"
PACKAGES = ["base-files", "bash", "coreutils", "dash", "libstdc++6", "python3"]


@dataclass
class Site:
    """A folder for stand-ins and images, and what containers are made of."""

    folder: Path
    root: Path
    image: Path
    torch: str

    @property
    def environment(self) -> dict[str, str]:
        path = f"{STAND_INS / 'bin'}:{environment()['PATH']}"
        return {"PATH": path, "ENROOT_STAND_IN": str(self.folder)}

    @property
    def without_torch(self) -> str:
        return f"{STAND_INS}/python3:/usr/local/bin/python3"

    def clone(
        self,
        name: str,
        image: object = None,
        mounts: str | None = None,
        container: str = "",
        env="",
    ) -> Path:
        """A copy of the repository with the settings edited in run_script.sh, as a user would."""
        clone = copy_of_repository(self.folder / name)
        settings = {"IMAGE": image or self.image, "NAME": container, "ENV": env}
        settings["MOUNTS"] = self.without_torch if mounts is None else mounts
        text = (clone / "run_script.sh").read_text()
        for setting, value in settings.items():
            line = rf"^export CONTAINER_{setting}=\S*"
            text, count = re.subn(line, f"export CONTAINER_{setting}={value}", text, flags=re.M)
            assert count == 1
        (clone / "run_script.sh").write_text(text)
        return clone

    def copy(self, name: str) -> Path:
        """A copy of the image, from which jobs make a container of its own."""
        shutil.copy2(self.image, self.folder / f"{name}.sqsh")
        return self.folder / f"{name}.sqsh"

    def creations(self, container: str) -> list[str]:
        """The nodes on which the stand-in was told to create a container from this image, as
        often as it was."""
        log = (self.folder / "log").read_text()
        return re.findall(rf"^(\S+) create .*/{container}\.sqsh$", log, re.M)


@pytest.fixture(scope="module")
def site(memory):
    """The image has this machine's Python; torch is mounted from this virtual environment, whose
    Python has to be of the same version."""
    machine = run("/usr/bin/python3", "-c", "import sys; print(sys.version_info.minor)").stdout
    assert int(machine) == sys.version_info.minor, "the virtual environment is not of python3"
    folder = memory / "site"
    (folder / "registry").mkdir(parents=True)
    torch = f"{sysconfig.get_path('purelib')}:{DIST_PACKAGES}"
    site = Site(folder, small_debian(folder / "root"), folder / "image.sqsh", torch)
    make_image(site.root, site.image, "first")
    (folder / "log").touch()
    # The default of import_image.sh.
    (folder / "registry/nvcr.io+nvidia+pytorch:26.09-py3").symlink_to(site.image)
    return site


def small_debian(root: Path) -> Path:
    """The root file system of a Debian with Python: these packages of this machine, and what
    they depend on."""
    depends = run("apt-cache", "depends", "--recurse", "--installed", "--important", *PACKAGES)
    packages = [line for line in depends.stdout.splitlines() if re.match(r"[a-z]", line)]
    listed = run("dpkg-query", "--listfiles", *packages)
    assert depends.returncode == listed.returncode == 0, depends.stderr + listed.stderr
    paths = {Path(line) for line in listed.stdout.splitlines() if line.startswith("/")}
    # /bin is a link to /usr/bin, and packages know of both.
    paths = {path.parent.resolve() / path.name for path in paths}
    files = [path for path in paths if path.is_symlink() or path.is_file()]
    files = [
        path
        for path in files
        if not path.is_relative_to("/usr/share") and "gconv" not in path.parts
    ]
    files += [Path("/etc/profile"), *map(Path, ("/bin", "/lib", "/lib64", "/sbin"))]
    for folder in ("dev", "etc", "proc", "root", "sys", "tmp", "usr/sbin"):
        (root / folder).mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "usr/bin").mkdir()
    (root / "usr/bin/python").symlink_to("python3")
    (root / "usr/bin/sh").symlink_to("dash")
    names = "\0".join(str(path).lstrip("/") for path in files)
    copy = (
        "tar --create --directory=/ --null --no-recursion --files-from=- | tar --extract "
        '--directory="$1"'
    )
    copied = subprocess.run(
        ["bash", "-c", copy, "bash", root], input=names, text=True, stderr=subprocess.PIPE
    )
    assert copied.returncode == 0, copied.stderr
    return root


def make_image(root: Path, image: Path, name: str):
    """As `enroot import` makes them: variables in /etc/environment, an /etc/rc that runs the
    command."""
    files = {
        "etc/which-image": name,
        "etc/environment": r"PYTORCH_VERSION=2.4.0\nPATH=/usr/local/bin:/usr/bin:/bin\n",
        "etc/rc": r'cd /var && exec "$@"\n',
    }
    options = ["-noI", "-noD", "-noF", "-noX", "-no-progress", "-quiet"]
    for path, text in files.items():
        options += ["-p", f"{path} f 644 0 0 printf {shlex.quote(text)}"]
    made = run("mksquashfs", root, image, *options)
    assert made.returncode == 0, made.stderr


def submit(
    cluster: Cluster, site: Site, clone: Path, *command: object, nodes: str = "node-[1-2]", **env
) -> int:
    size = [f"--nodelist={nodes}", f"--nodes={2 if '[' in nodes else 1}", "--gpus-per-node=1"]
    return cluster.submit(*size, "run_script.sh", *command, cwd=clone, env=site.environment | env)


def sbatch(cluster: Cluster, *args, **kwargs) -> Job:
    return cluster.wait(submit(cluster, *args, **kwargs))


def seen(job: Job) -> list[dict]:
    """What inside.py has printed, by rank."""
    found = [
        json.loads(Path(path).read_text()) for path in re.findall(r"^SEEN (.*)$", job.log, re.M)
    ]
    return sorted(found, key=lambda one: one["variables"][0])


def test_a_strangers_script(cluster, site):
    """Ten lines of torch that read RANK, LOCAL_RANK and the like run in the container as under
    the other launchers."""
    clone = site.clone("stranger", mounts=site.torch)
    job = sbatch(cluster, site, clone, "tests/scripts/stranger.py")
    found = re.findall(r"^rank (\d) of 2, local rank 0: the sum is 1$", job.log, re.M)
    assert job.state == "COMPLETED" and sorted(found) == ["0", "1"], job.log


def test_what_is_inside(cluster, site):
    """The container's files and not the host's, nothing of the host's environment but what is
    named, every argument."""
    clone = site.clone("inside", env="OWN,OWN_TOO")
    settings = ("NAME", "IMAGE", "MOUNTS", "FOLDER", "ENV")
    stray = {f"CONTAINER_{name}": "stray" for name in settings}
    # A login node's, which the node lacks.
    stray |= {"XDG_RUNTIME_DIR": "/proc/user/0"}
    stray |= {"LEAK": "leak", "CUDA_HOME": "/usr/local/cuda-of-the-node", "OWN_": "not named"}
    named = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_NCCL_TIMEOUT": "9"}
    named |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_LAUNCH_BLOCKING": "1"}
    named |= {"OWN": "a b", "OWN_TOO": "", "NVIDIA_VISIBLE_DEVICES": "void"}
    before = os.umask(0o007)
    try:
        job = submit(cluster, site, clone, INSIDE, *NASTY, **named, **stray)
    finally:
        os.umask(before)
    job = cluster.wait(job)
    assert job.state == "COMPLETED", job.log
    # env.sh's.
    sizes = {"NNODES": "2", "NPROC_PER_NODE": "1", "CPUS_PER_NODE": "16", "OMP_NUM_THREADS": "1"}
    sizes |= {"MASTER_ADDR": "node-1", "MASTER_PORT": str(61000 + job.id % 4536)}
    sizes |= {"CUDA_VISIBLE_DEVICES": "0", "PYTHONUNBUFFERED": "1", "SLURM_JOB_ID": str(job.id)}
    ranks = seen(job)
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
    """The page's commands: import the default image, train in it, with a line in the log for every
    step."""
    [(language, commands, shown)] = steps(REPOSITORY / "docs/containers.md")
    commands, count = re.subn(
        r"(distributed/train_ddp.py --epochs 1)", r"\1 --log-every 1", commands
    )
    assert count == 1
    clone = site.clone("documented", image="$PWD/pytorch.sqsh", mounts=site.torch)
    shutil.copytree(tiny, clone / "data/mnist")
    train = ["distributed/train_ddp.py", "--epochs", 1, "--log-every", 1]
    other = cluster.submit(f"--output={tmp_path}/log", LAUNCHERS["torchrun"], *train, cwd=clone)
    prefix = (NAMESPACES, "exec")
    printed = try_block(
        language, commands, shown, clone, prefix, **cluster.environment, **site.environment
    )
    logs = [printed, cluster.wait(other).log]
    losses = [re.findall(r"^epoch=1 step=\d+/\d+ loss=(\S+)", log, re.M) for log in logs]
    assert len(losses[0]) >= 4 and losses[0] == losses[1]


def test_two_jobs_create_one_container(cluster, site):
    """At once, on the same nodes: it is created once on each, and both jobs run in it."""
    clone = site.clone("twice", image=site.copy("twice"))
    ids = [submit(cluster, site, clone, INSIDE, nodes="node-[3-4]") for _ in range(2)]
    jobs = [cluster.wait(job) for job in ids]
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, jobs[0].log + jobs[1].log
    assert [len(seen(job)) for job in jobs] == [2, 2]
    assert sorted(site.creations("twice")) == ["node-3", "node-4"]


def test_killed_while_it_is_created(cluster, site):
    """Half a container is left; the next job does not take it for a whole one."""
    clone = site.clone("killed", image=site.copy("killed"))
    (site.folder / "hold").touch()
    try:
        job = submit(cluster, site, clone, INSIDE, nodes="node-5")
        wait_for(lambda: list((site.folder / "node-5").glob("*killed*/usr/bin/true")))
        cluster.exec("scancel", "--signal=KILL", job)
        assert cluster.wait(job).state in ("CANCELLED", "FAILED")
    finally:
        (site.folder / "hold").unlink()
    assert cluster.left_over(job) == []
    job = sbatch(cluster, site, clone, INSIDE, nodes="node-5")
    assert job.state == "COMPLETED" and [rank["image"] for rank in seen(job)] == ["first"], job.log
    assert len(site.creations("killed")) == 2


def test_image_replaced_between_jobs(cluster, site):
    """The next job gets the new image, and the one that is running keeps its own."""
    image = site.copy("replaced")
    clone = site.clone("replaced", image=image)
    first = submit(cluster, site, clone, INSIDE, "wait", nodes="node-6")
    log = clone / f"run_script.sh_{first}.out"
    wait_for(lambda: log.exists() and "SEEN" in log.read_text())
    make_image(site.root, site.folder / "new.sqsh", "second")
    (site.folder / "new.sqsh").rename(image)
    for _ in range(2):  # the second time it is there
        job = sbatch(cluster, site, clone, INSIDE, nodes="node-6")
        assert [rank["image"] for rank in seen(job)] == ["second"], job.log
    (clone / "stop").touch()
    assert [rank["image"] for rank in seen(cluster.wait(first))] == ["first"]
    assert len(site.creations("replaced")) == 2 and cluster.left_over(first) == []


def test_container_made_by_hand(cluster, site):
    """It is used as it is, with what its owner has installed in it. A node that lacks it says
    so, in Enroot's words."""
    clone = site.clone("by-hand", container="mine", image=Path("/no/image"))
    made = cluster.exec(
        "enroot", "create", "--name", "mine", site.image, node="node-7", env=site.environment
    )
    assert made.returncode == 0, made.stderr
    (site.folder / "node-7/mine/etc/which-image").write_text("mine")
    ids = [submit(cluster, site, clone, INSIDE, nodes=f"node-{node}") for node in (7, 10)]
    job, lacking = map(cluster.wait, ids)
    assert [rank["image"] for rank in seen(job)] == ["mine"], job.log
    assert lacking.state == "FAILED" and "No such file or directory: " in lacking.log, lacking.log


def test_nodes_that_share_their_containers(cluster, site):
    """ENROOT_DATA_PATH is one folder for all: the container is created once."""
    clone = site.clone("common", image=site.copy("common"))
    where = {"ENROOT_DATA_PATH": site.folder / "common-data"}
    job = sbatch(cluster, site, clone, INSIDE, nodes="node-[8-9]", **where)
    assert job.state == "COMPLETED", job.log
    assert [rank["image"] for rank in seen(job)] == ["first"] * 2, job.log
    assert len(site.creations("common")) == 1


def test_what_is_mounted(cluster, site):
    """Folders, read-only or not, what a link leads to, and all of one's home instead."""
    folders = [site.folder / "mounted" / name for name in ("a", "b", "link")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / f"in {folder.name}").touch()
    mounts = f"{site.without_torch},{folders[0]}:/aaa:ro,{folders[1]}:/bbb:rw,{folders[1]}:/ccc"
    clones = [site.clone(name, mounts=mounts) for name in ("mounted/repository", "mounted/at-home")]
    (site.folder / "mounted/a blank").mkdir()
    for clone, target in zip(clones, (folders[2], folders[2]), strict=True):
        (clone / "data").symlink_to(target)
        (clone / "relative").symlink_to("docs")
        (clone / "never").symlink_to(site.folder / "mounted/a blank")
    script = (clones[1] / "run_script.sh").read_text()
    assert script.count("export CONTAINER_FOLDER=$PWD\n") == 1
    edited = script.replace("export CONTAINER_FOLDER=$PWD\n", "export CONTAINER_FOLDER=$HOME\n")
    (clones[1] / "run_script.sh").write_text(edited)
    (site.folder / "home").symlink_to(site.folder / "mounted")
    ids = [
        submit(cluster, site, clone, INSIDE, nodes=f"node-{node}", HOME=site.folder / "home")
        for node, clone in enumerate(clones, start=11)
    ]
    jobs = [cluster.wait(job) for job in ids]
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, jobs[0].log + jobs[1].log
    log = (site.folder / "log").read_text()
    for job, below in zip(jobs, ("", "/at-home"), strict=True):
        (rank,) = seen(job)
        assert {"aaa", "bbb", "ccc"} <= set(rank["root"]) and {"aaa", "bbb", "ccc"} & set(
            rank["read_only"]
        ) == {"aaa"}
        assert rank["folder"] == f"/workspace/mnt{below}"
        assert rank["data"] == ["in link"]
        assert job.log.count(": never is not mounted: ") == 1, job.log
        assert f":/workspace/mnt{below}/data" in log


STEP = r"^epoch=(\d) step=(\d+)/15 loss="


def test_stopped_and_requeued(cluster, site, tiny):
    """SIGTERM reaches the ranks in their containers, and the shell outside requeues the job, which
    takes each of 30 steps once."""
    clone = site.clone("requeued", mounts=f"{site.torch},{tiny}:/tiny")
    train = ["distributed/train_preemptible.py", "--data-dir", "/tiny", "--epochs", 2]
    train += ["--batch-size", 20, "--log-every", 1]
    number = submit(cluster, site, clone, "tests/scripts/slowly.py", 0.3, *train)
    log = clone / f"run_script.sh_{number}.out"
    wait_for(lambda: log.exists() and "\nepoch=1 step=7/" in log.read_text())
    assert cluster.exec("scancel", "--signal=TERM", number).returncode == 0
    job = cluster.wait(number, 180)
    assert job.state == "COMPLETED" and cluster.show(number)["Restarts"] == "1", job.log
    assert "\nRequeued: it resumes by itself\n" in job.log and "\nResumed after step" in job.log
    steps = [15 * int(epoch) - 15 + int(step) for epoch, step in re.findall(STEP, job.log, re.M)]
    assert steps == list(range(1, 31))


def test_not_requeued(tmp_path):
    """The shell outside the container says what to type, and fails. It needs no cluster."""
    for name in ("run_script.sh", "env.sh", "distributed/preemption.py"):
        copy_file(name, tmp_path)
    programs = {"srun": "mkdir --parents log/7 && echo train.py --resume >log/7/requeue"}
    refuses = "if [[ $1 == requeue ]]; then echo no requeue is allowed >&2; exit 1; fi; "
    programs["scontrol"] = f"{refuses} echo JobState=RUNNING Restarts=0 Command=/run.sh"
    stand_ins(tmp_path, programs | {"getent": "true", "squeue": f"echo $SLURM_JOB_ID {NOTHING}"})
    slurm = {"SLURM_JOB_ID": 7, "SLURM_JOB_NAME": "n", "SLURM_JOB_NUM_NODES": 1}
    slurm |= {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "2"}
    env = environment(PATH=f"{tmp_path}:{environment()['PATH']}", **slurm)
    done = run("./run_script.sh", "train.py", cwd=tmp_path, env=env)
    *_, said, typed = done.stdout.splitlines()
    assert said.startswith("Not requeued: no requeue is allowed. To resume it"), done.stderr
    assert typed == "    sbatch /run.sh train.py --resume" and done.returncode == 1


def test_what_goes_wrong(cluster, site):
    """One sentence with the host's name if it is ours, or Enroot's own. Nothing half made stays."""
    bad = site.folder / "bad.sqsh"
    bad.write_text("no squashfs")
    outside = site.clone("outside")
    script = (outside / "run_script.sh").read_text()
    edited, count = re.subn(r"^(export CONTAINER_FOLDER)=\S+", r"\1=$PWD/docs", script, flags=re.M)
    assert count == 1
    (outside / "run_script.sh").write_text(edited)
    lacking = site.clone("no-folder", mounts=f"{site.without_torch},/no/folder:/data")
    cases = [
        (
            "enroot.sh on node-15: no enroot on this node",
            site.clone("no-enroot"),
            {"PATH": environment()["PATH"]},
        ),
        (
            "enroot.sh on node-16: no image /no/image: run ",
            site.clone("no-image", image=Path("/no/image")),
            {},
        ),
        (
            f"enroot.sh on node-17: no container from {bad} in ",
            site.clone("bad-image", image=bad),
            {},
        ),
        (f"enroot.sh on node-18: no container from {site.image} in ", site.clone("full"), {}),
        ("enroot.sh on node-19: the repository, ", outside, {}),
        ("No module named 'torch'", site.clone("no-torch", mounts=""), {}),
        ("enroot-mount: failed to mount: /no/folder at ", lacking, {}),
    ]
    (site.folder / "node-18").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", site.folder / "node-18"]
    assert cluster.exec(*mount, node="node-18").returncode == 0
    try:
        ids = [
            submit(cluster, site, clone, INSIDE, nodes=f"node-{node}", **env)
            for node, (_, clone, env) in enumerate(cases, start=15)
        ]
        jobs = [cluster.wait(job) for job in ids]
        left = cluster.exec("ls", site.folder / "node-18", node="node-18").stdout
    finally:
        cluster.exec("umount", site.folder / "node-18", node="node-18")
    for node, ((said, _, _), job) in enumerate(zip(cases, jobs, strict=True), start=15):
        assert job.state == "FAILED" and job.log.count(said) == 1 and "Traceback" not in job.log, (
            job.log
        )
        assert (
            f"srun: error: node-{node}: task 0: Exited with exit code {job.exit_code}" in job.log
        ), job.log
    assert "[ERROR] Invalid image format" in jobs[2].log and left == ""


def documented(runtime: str, clone: Path) -> Path:
    """The clone, its run_script.sh edited as docs/containers.md says."""
    script = (clone / "run_script.sh").read_text()
    blocks = re.findall(
        r"^```\n(    .*?)^```$", (clone / "docs/containers.md").read_text(), re.M | re.S
    )
    name = {"Pyxis": "--container-image", "Apptainer": "apptainer exec"}[runtime]
    (lines,) = [text for text in blocks if name in text]
    script, count = re.subn(r"^    .*\./aux/enroot\.sh .*\n", lambda _: lines, script, flags=re.M)
    assert count == 1
    (clone / "run_script.sh").write_text(script)
    return clone


def test_pyxis(cluster, site):
    """The documented lines, as they are, in the place of the one they name. The stand-in knows no
    other options. It imports the image of a registry itself. The nodes have no Python, only the
    container has one."""
    programs = site.folder / "programs"
    programs.mkdir()
    for folder in ("/usr/sbin", "/usr/bin"):
        for program in Path(folder).iterdir():
            if not program.name.startswith("py") and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    clone = documented("Pyxis", site.clone("pyxis", image="nvcr.io#nvidia/pytorch:26.09-py3"))
    path = f"{STAND_INS}/pyxis:{programs}"
    job = sbatch(cluster, site, clone, INSIDE, *NASTY, nodes="node-[13-14]", PATH=path)
    assert job.state == "COMPLETED", job.log
    ranks = seen(job)
    assert [rank["variables"] for rank in ranks] == [[0, 0, 2], [1, 0, 2]]
    assert all(rank["image"] == "first" and rank["folder"] == "/workspace/mnt" for rank in ranks)
    assert all(rank["arguments"] == NASTY for rank in ranks)


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
