"""run_script.sh on the real cluster; the stand-ins for Enroot, Pyxis and Apptainer really enter a Debian image."""

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

from conftest import LAUNCHERS, NAMESPACES, REPOSITORY, Cluster, Job, environment, read_metrics, run, wait_for
from test_launchers import NASTY
from test_readme import CHAPTERS, steps, try_block

STAND_INS = REPOSITORY / "tests/stand-ins"
INSIDE = "tests/scripts/inside.py"
UNUSED = ["var/cache/*", "var/lib/apt/*", "usr/share/*/*", "usr/lib/*/gconv", "usr/lib/*/perl*", "usr/bin/perl*"]
UNUSED += ["usr/sbin/*", "usr/lib/locale/*", "usr/lib/apt", "usr/lib/*/libapt*", "var/lib/dpkg/info", "etc/environment"]


@dataclass
class Site:
    """A folder for stand-ins and images, and what containers are made of."""

    folder: Path
    image: Path
    torch: str
    data: str

    @property
    def environment(self) -> dict[str, str]:
        path = f"{STAND_INS / 'bin'}:{environment()['PATH']}"
        return {"PATH": path, "ENROOT_STAND_IN": str(self.folder)}

    def clone(
        self,
        name: str,
        image: object = None,
        mounts: str | None = None,
        container: str | None = "shared",
        env: str = "",
    ) -> Path:
        """A copy of the repository with the settings edited in env.sh, as a user would; None leaves env.sh's name."""
        clone = self.folder / name
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True).stdout
        for path in filter(None, tracked.split("\0")):
            (clone / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / path, clone / path)
        settings = {
            "IMAGE": image or self.image,
            "NAME": f"{container}-{os.getpid()}",
            "MOUNTS": f"{self.torch},{self.data}" if mounts is None else mounts,
            "ENV": env,
        }
        if container is None:
            del settings["NAME"]
        text = (clone / "env.sh").read_text()
        for setting, value in settings.items():
            text, count = re.subn(
                rf"^export CONTAINER_{setting}=\S*", f"export CONTAINER_{setting}={value}", text, flags=re.M
            )
            assert count == 1
        (clone / "env.sh").write_text(text)
        return clone

    def creations(self, container: str) -> list[str]:
        """The nodes on which the stand-in was told to create this container, as often as it was."""
        log = (self.folder / "log").read_text()
        return re.findall(rf"^(\S+) create --name {container}-{os.getpid()} ", log, re.M)


@pytest.fixture(scope="module")
def site(tmp_path_factory, debian, tiny):
    """The image has Python; torch is mounted from this virtual environment, so its Python has to be Debian 12's."""
    assert sys.version_info[:2] == (3, 11), "the image has Python 3.11, and so must the virtual environment"
    folder = tmp_path_factory.mktemp("site")
    (folder / "registry").mkdir()
    (folder / "torchrun").write_text("#!/usr/bin/python3\nfrom torch.distributed.run import main\n\nmain()\n")
    (folder / "torchrun").chmod(0o755)
    packages = f"{sysconfig.get_path('purelib')}:/usr/local/lib/python3.11/dist-packages"
    site = Site(folder, folder / "image.sqsh", f"{packages},{folder}/torchrun:/usr/local/bin/torchrun", f"{tiny}:/tiny")
    make_image(debian, site.image, "first")
    (folder / "log").touch()
    (folder / "registry/nvcr.io+nvidia+pytorch:25.06-py3").symlink_to(site.image)  # import_image.sh's default
    yield site
    run("rm", "--recursive", "--force", folder, timeout=120)  # ten containers of ten thousand files


def make_image(debian: Path, image: Path, name: str):
    """As `enroot import` makes them: variables in /etc/environment, an /etc/rc that runs the command."""
    files = {
        "etc/which-image": name,
        "etc/environment": r"PYTORCH_VERSION=2.4.0\nPATH=/usr/local/bin:/usr/bin:/bin\n",
        "etc/rc": r'cd /var && exec "$@"\n',
    }
    options = ["-noI", "-noD", "-noF", "-noX", "-no-progress", "-quiet", "-wildcards"]
    for path, text in files.items():
        options += ["-p", f"{path} f 644 0 0 printf {shlex.quote(text)}"]
    options += ["-p", "usr/bin/python s 777 0 0 python3"]
    made = run("mksquashfs", debian, image, *options, "-e", *UNUSED)
    assert made.returncode == 0, made.stderr


def submit(cluster: Cluster, site: Site, clone: Path, *command: object, nodes: str = "node-[1-2]", **env) -> int:
    size = [f"--nodelist={nodes}", f"--nodes={2 if '[' in nodes else 1}", "--gpus-per-node=1"]
    return cluster.submit(*size, "run_script.sh", *command, cwd=clone, env=site.environment | env)


def sbatch(cluster: Cluster, *args, **kwargs) -> Job:
    return cluster.wait(submit(cluster, *args, **kwargs))


def seen(clone: Path, job: Job) -> list[dict]:
    """What inside.py has printed, by rank, from the logs of the nodes."""
    logs = [path.read_text() for path in (clone / f"log/{job.id}").iterdir()]
    found = [json.loads(line) for log in logs for line in re.findall(r"^SEEN (.*)$", log, re.M)]
    return sorted(found, key=lambda one: one["variables"][0])


def test_a_strangers_script(cluster, site):
    """Ten lines of torch that read RANK, LOCAL_RANK and the like run in the container as under the other launchers."""
    clone = site.clone("stranger")
    job = sbatch(cluster, site, clone, "tests/scripts/stranger.py")
    logs = "".join(path.read_text() for path in (clone / f"log/{job.id}").iterdir())
    found = re.findall(r"^rank (\d) of 2, local rank 0: the sum is 1$", logs, re.M)
    assert job.state == "COMPLETED" and sorted(found) == ["0", "1"], job.log + logs


@pytest.mark.matrix
def test_all_reduce_in_containers(cluster, site):
    """As under the other launchers (test_scaling.py); a relative file lands in the repository, which is mounted."""
    clone = site.clone("allreduce", container="allreduce")
    small = ["--largest", "4K", "--factor", 8, "--rounds", 1, "--seconds", 0, "--json", "allreduce.json"]
    job = sbatch(cluster, site, clone, "aux/bench/allreduce.py", "--device", "cpu", *small)
    assert job.state == "COMPLETED", job.log
    (group,) = json.loads((clone / "allreduce.json").read_text())["groups"]
    assert (group["name"], group["ranks"]) == ("across nodes", 2) and len(group["sizes"]) == 4
    for row in group["sizes"]:
        assert row["busbw"] == pytest.approx(row["bytes"] / row["seconds"])  # 2 (n - 1) / n is 1 for two ranks


@pytest.mark.matrix
def test_benchmark_of_launches(site, tmp_path):
    """aux/bench/launch.py has rows of way 4 where there are Enroot and an image."""
    clone = site.clone("bench")
    command = [sys.executable, clone / "aux/bench/launch.py", "--rounds", 1]
    done = run(*command, env=environment() | site.environment | {"BENCH_ROWS": str(tmp_path / "rows")}, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [one["name"] for one in found if "way 4" in one["name"]] == [
        f"launch to first step, way 4, {ranks} ranks" for ranks in (2, 4)
    ]
    assert len(found) == 8 and all(one["good"] and one["ours"][0][0] > 0.5 for one in found), found


def test_what_is_inside(cluster, site):
    """The container's files and not the host's, nothing of the host's environment but what is named, every argument."""
    clone = site.clone("inside", env="OWN,OWN_TOO")
    stray = {
        "CONTAINER_NAME": "stray",
        "CONTAINER_IMAGE": "stray",
        "CONTAINER_MOUNTS": "stray",
        "CONTAINER_ENV": "LEAK",
    }
    stray |= {"LEAK": "leak", "CUDA_HOME": "/usr/local/cuda-of-the-node", "OWN_": "not named"}
    named = {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TORCH_NCCL_TIMEOUT": "9",
    }
    named |= {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    named |= {"CUDA_LAUNCH_BLOCKING": "1", "OWN": "a b", "OWN_TOO": ""}
    job = sbatch(cluster, site, clone, INSIDE, *NASTY, **named, **stray)
    assert job.state == "COMPLETED", job.log
    ranks = seen(clone, job)
    assert [rank["variables"] for rank in ranks] == [[0, 0, 2], [1, 0, 2]]
    assert [rank["host"] for rank in ranks] == ["node-1", "node-2"]
    for index, rank in enumerate(ranks):
        assert rank["image"] == "first" and rank["folder"] == "/workspace/mnt" and "workspace" in rank["root"]
        assert rank["arguments"] == NASTY
        inside = rank["environment"]
        assert {name: inside.get(name) for name in named} == named
        assert inside["SLURM_JOB_ID"] == str(job.id) and inside["SLURM_NODEID"] == str(index)
        assert inside["CUDA_VISIBLE_DEVICES"] == "0" and inside["PYTHONUNBUFFERED"] == "1"
        assert {"JOB_OUTCOME", "JOB_FAILURE", "JOB_SAVED_STEP"} <= set(inside), "between the launcher and the ranks"
        assert inside["MASTER_ADDR"] == "node-1" and int(inside["MASTER_PORT"]) == 61000 + job.id % 4536, "env.sh's"
        sizes = {"NNODES": "2", "NPROC_PER_NODE": "1", "CPUS_PER_NODE": "2", "OMP_NUM_THREADS": "2"}
        assert {name: inside.get(name) for name in sizes} == sizes and inside["SLURM_RESTART_COUNT"] == "0"
        assert not {*stray, "VIRTUAL_ENV", "ENROOT_STAND_IN"} & set(inside)
        assert str(STAND_INS) not in inside["PATH"]
        assert f"node-{index + 1} hook RANK={index} LOCAL_RANK=0\n" in (site.folder / "log").read_text(), "harmless"
    logs = {path.name for path in (clone / f"log/{job.id}").iterdir()}
    assert logs == {"node-1.out", "node-2.out"} and "rendezvous at node-1:" in job.log
    assert not (clone / "canary").exists()


@pytest.mark.matrix
def test_chapter_has_the_losses_of_way_2(cluster, site, tiny, tmp_path):
    """Chapter 8: import the default image, train in it, with a line in the log for every step; nodes without Enroot."""
    (language, commands, shown), without_enroot = steps(CHAPTERS[8])
    commands, count = re.subn(r"(distributed/train_ddp.py --epochs 1)", r"\1 --log-every 1", commands)
    assert count == 1
    clone = site.clone("documented", image="$PWD/pytorch.sqsh", container=None)
    shutil.copytree(tiny, clone / "data/mnist")
    train = ["distributed/train_ddp.py", "--epochs", 1, "--log-every", 1]
    way2 = cluster.submit(f"--output={tmp_path}/log", LAUNCHERS["torchrun"], *train, cwd=clone)
    prefix = (NAMESPACES, "exec")
    printed = try_block(language, commands, shown, clone, prefix, **cluster.environment, **site.environment)
    logs = [printed, cluster.wait(way2).log]
    losses = [re.findall(r"^epoch=1 step=\d/4 loss=(\S+)", log, re.M) for log in logs]
    assert len(losses[0]) == 4 and losses[0] == losses[1]
    try_block(*without_enroot, clone, prefix, **cluster.environment)


def test_two_jobs_create_one_container(cluster, site):
    """At once, on the same nodes: it is created once on each, and both jobs run in it."""
    clone = site.clone("twice", container="twice")
    ids = [submit(cluster, site, clone, INSIDE, nodes="node-[3-4]") for _ in range(2)]
    jobs = [cluster.wait(job) for job in ids]
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, jobs[0].log + jobs[1].log
    assert [len(seen(clone, job)) for job in jobs] == [2, 2]
    assert sorted(site.creations("twice")) == ["node-3", "node-4"]


def test_killed_while_it_is_created(cluster, site):
    """Half a container is left, and Enroot lists it; the next job does not take it for a whole one.

    Unless the shell around `enroot create` is the last to be killed: then it has seen that fail, and removed the half.
    """
    clone = site.clone("killed", container="killed")
    container = site.folder / f"node-5/killed-{os.getpid()}"
    (site.folder / "hold").touch()
    try:
        job = submit(cluster, site, clone, INSIDE, nodes="node-5")
        wait_for(lambda: (container / "usr/bin/true").exists())
        cluster.exec("scancel", "--signal=KILL", job)
        assert cluster.wait(job).state in ("CANCELLED", "FAILED")
    finally:
        (site.folder / "hold").unlink()
    assert not (container / "etc/which-image").exists()
    assert cluster.left_over(job) == []
    job = sbatch(cluster, site, clone, INSIDE, nodes="node-5")
    assert job.state == "COMPLETED" and [rank["image"] for rank in seen(clone, job)] == ["first"], job.log
    assert seen(clone, job)[0]["whole"] and len(site.creations("killed")) == 2


def test_image_replaced_between_jobs(cluster, site, debian):
    """The container is not taken from under a job that runs in it; after that job the next one gets the new image."""
    image = site.folder / "replaced.sqsh"
    shutil.copy2(site.image, image)
    clone = site.clone("replaced", image=image, container="replaced")
    first = submit(cluster, site, clone, INSIDE, "wait", nodes="node-6")
    log = clone / f"log/{first}/node-6.out"
    wait_for(lambda: log.exists() and "SEEN" in log.read_text())
    make_image(debian, site.folder / "new.sqsh", "second")
    (site.folder / "new.sqsh").rename(image)
    cluster.exec("scancel", "--signal=TERM", first)  # whoever holds the lock stays
    refused = sbatch(cluster, site, clone, INSIDE, nodes="node-6")
    assert refused.state == "FAILED" and refused.log.count("but another job is in container") == 1, refused.log
    (clone / "stop").touch()
    assert [rank["image"] for rank in seen(clone, cluster.wait(first))] == ["first"]
    assert cluster.left_over(first) == []
    for creations in (2, 2):  # the second time it is there
        job = sbatch(cluster, site, clone, INSIDE, nodes="node-6")
        assert [rank["image"] for rank in seen(clone, job)] == ["second"], job.log
        assert len(site.creations("replaced")) == creations


def replaced_while_a_job_starts(cluster, site, debian, clone: Path, image: Path, nodes: list[str], **env):
    """The image is, when a job on nodes[0] waits in `enroot start`. One on nodes[1] does not take its container."""
    hold, log = site.folder / "hold-start", site.folder / "log"
    starts = re.compile(rf"^{nodes[0]} start --root .* {clone.name}-{os.getpid()} ", re.M)
    before = len(starts.findall(log.read_text()))
    hold.touch()
    try:
        first = submit(cluster, site, clone, INSIDE, nodes=nodes[0], **env)
        wait_for(lambda: len(starts.findall(log.read_text())) > before)
        make_image(debian, site.folder / "new.sqsh", "second")
        (site.folder / "new.sqsh").rename(image)
        refused = cluster.wait(submit(cluster, site, clone, INSIDE, nodes=nodes[1], **env), timeout=40)
    finally:
        hold.unlink()
    ended = cluster.wait(first)
    assert refused.state == "FAILED" and "but another job is in container" in refused.log, refused.log
    assert ended.state == "COMPLETED" and [rank["image"] for rank in seen(clone, ended)] == ["first"], ended.log


def test_image_replaced_while_a_job_starts(cluster, site, debian):
    """Enroot has closed all descriptors, a lock with them, and the job is not in the container yet."""
    image = site.folder / "starting.sqsh"
    shutil.copy2(site.image, image)
    clone = site.clone("starting", image=image, container="starting")
    replaced_while_a_job_starts(cluster, site, debian, clone, image, ["node-10", "node-10"])


def test_container_made_by_hand_is_kept(cluster, site):
    """With what its owner has installed in it. A job on another cluster's node of the same name changes nothing."""
    clone = site.clone("by-hand", container="by-hand")
    name = f"by-hand-{os.getpid()}"
    other = site.clone("other-cluster", image=site.folder / "other.sqsh", container="by-hand")
    shutil.copy2(site.image, site.folder / "other.sqsh")
    job = sbatch(cluster, site, other, INSIDE, nodes="node-7", ENROOT_DATA_PATH=site.folder / "other-cluster-data")
    assert [rank["image"] for rank in seen(other, job)] == ["first"], job.log
    made = cluster.exec("enroot", "create", "--name", name, site.image, node="node-7", env=site.environment)
    assert made.returncode == 0, made.stderr
    (site.folder / f"node-7/{name}/etc/which-image").write_text("mine")
    job = sbatch(cluster, site, clone, INSIDE, nodes="node-7")
    assert [rank["image"] for rank in seen(clone, job)] == ["mine"], job.log


def test_nodes_that_share_their_containers(cluster, site, debian):
    """ENROOT_DATA_PATH is one folder for all: created once, not taken from a job on the other node."""
    image, shared = site.folder / "common.sqsh", {"ENROOT_DATA_PATH": site.folder / "common"}
    shutil.copy2(site.image, image)
    clone = site.clone("common", image=image, container="common")
    job = sbatch(cluster, site, clone, INSIDE, nodes="node-[11-12]", **shared)
    assert job.state == "COMPLETED" and [rank["image"] for rank in seen(clone, job)] == ["first"] * 2, job.log
    assert len(site.creations("common")) == 1
    replaced_while_a_job_starts(cluster, site, debian, clone, image, ["node-11", "node-12"], **shared)
    (record,) = (site.folder / "common").glob(".*.image")
    record.write_text("creating on node-11\n")  # where the nodes' locks do not meet, it may be creating it now
    refused = sbatch(cluster, site, clone, INSIDE, nodes="node-12", **shared)
    said = "is half made, by node-11"
    assert said in refused.log and "ENROOT_DATA_PATH must be a folder of each node's own" in refused.log, refused.log
    job = sbatch(cluster, site, clone, INSIDE, nodes="node-11", **shared)
    assert [rank["image"] for rank in seen(clone, job)] == ["second"], job.log


def test_two_images_with_the_name_that_env_sh_gives(cluster, site, debian):
    """At once, on one node: each file has a container of its own."""
    clones = [site.clone(f"own-{name}", image="$PWD/pytorch.sqsh", container=None) for name in ("first", "second")]
    shutil.copy2(site.image, clones[0] / "pytorch.sqsh")
    make_image(debian, clones[1] / "pytorch.sqsh", "second")
    ids = [submit(cluster, site, clone, INSIDE, nodes="node-17") for clone in clones]
    jobs = [cluster.wait(job) for job in ids]
    images = [rank["image"] for clone, job in zip(clones, jobs, strict=True) for rank in seen(clone, job)]
    assert images == ["first", "second"], jobs[0].log + jobs[1].log
    assert f"in container pytorch{re.sub('[^A-Za-z0-9_.]', '-', str(clones[0]))}-pytorch.sqsh," in jobs[0].log


def test_what_is_mounted(cluster, site):
    """Read-only in Docker's and in Enroot's spelling, what a link leads to, and all of one's home instead."""
    folders = [site.folder / "mounted" / name for name in ("a", "b", "link")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / f"in {folder.name}").touch()
    mounts = f"{site.torch},{folders[0]}:/aaa:ro,{folders[1]}:/bbb:none:x-create=auto,rbind,ro,{folders[1]}:/ccc:rw"
    clones = [site.clone(name, mounts=mounts, container="mounts") for name in ("mounted/repository", "mounted/at-home")]
    (site.folder / "mounted/a blank").mkdir()
    for clone, target in zip(clones, (folders[2], folders[2]), strict=True):
        (clone / "data").symlink_to(target)
        (clone / "relative").symlink_to("docs")
        (clone / "never").symlink_to(site.folder / "mounted/a blank")
    script = (clones[1] / "run_script.sh").read_text()
    assert script.count(" folder=$PWD ") == 1 and re.search(r" folder=\$PWD .*# EDIT: .*folder=\$HOME", script)
    (clones[1] / "run_script.sh").write_text(script.replace(" folder=$PWD ", " folder=$HOME "))
    (site.folder / "home").symlink_to(site.folder / "mounted")
    ids = [
        submit(cluster, site, clone, INSIDE, nodes=f"node-{node}", HOME=site.folder / "home")
        for node, clone in enumerate(clones, start=18)
    ]
    jobs = [cluster.wait(job) for job in ids]
    assert [job.state for job in jobs] == ["COMPLETED"] * 2, jobs[0].log + jobs[1].log
    log = (site.folder / "log").read_text()
    for clone, job, below in zip(clones, jobs, ("", "/at-home"), strict=True):
        (rank,) = seen(clone, job)
        assert {"aaa", "bbb", "ccc"} <= set(rank["root"]) and {"aaa", "bbb"} <= set(rank["read_only"])
        assert "ccc" not in rank["read_only"] and rank["folder"] == f"/workspace/mnt{below}"
        assert rank["data"] == ["in link"]
        assert job.log.count("Enroot mounts no path with a blank or a colon") == 1, job.log
        assert f":/workspace/mnt{below}/data" in log and f":/workspace/mnt{below}/relative" not in log


@pytest.mark.matrix
def test_stopped_and_requeued(cluster, site):
    """USR1 ends nothing between srun and the ranks in their containers. Their outcome file has it requeued."""
    clone = site.clone("requeued")
    command = ["tests/scripts/slowly.py", 0.3, "distributed/train_preemptible.py", "--data-dir", "/tiny"]
    command += ["--epochs", 3, "--batch-size", 20, "--log-every", 1, "--checkpoint-dir", "checkpoints/requeued"]
    job, first = submit(cluster, site, clone, *command), clone / "checkpoints/requeued/metrics.jsonl"
    wait_for(lambda: first.exists() and len(first.read_text().splitlines()) >= 7)
    assert cluster.exec("scancel", "--signal=USR1", job).returncode == 0
    ended = cluster.wait(job)
    assert ended.state == "COMPLETED" and cluster.show(job)["Restarts"] == "1", ended.log
    assert re.search(r"^Stopped after step \d+, saved, requeued$", ended.log, re.M), ended.log
    assert "Resumed after step" in (clone / f"log/{job}/node-1.out").read_text()
    steps = [event["step"] for event in read_metrics(first.parent) if "loss" in event]
    assert steps == list(range(1, 46))


def test_a_failing_script_fails_the_job(cluster, site):
    job = sbatch(cluster, site, site.clone("failing"), "tests/scripts/fail.py", "exit", nodes="node-[8-9]")
    assert job.state == "FAILED" and job.exit_code == 3 and job.seconds < 30, job.log
    assert job.log.endswith(f"run_script.sh, job {job.id}: rank 1 on node-9 ended with status 3\n"), job.log
    assert cluster.left_over(job.id) == []


def test_what_goes_wrong_is_one_sentence(cluster, site):
    """With the host's name, in the job's log and in the node's; nothing half made is left."""
    bad = site.folder / "bad.sqsh"
    bad.write_text("no squashfs")
    clones = {
        "no enroot on this node": (site.clone("no-enroot"), {"PATH": environment()["PATH"]}),
        "no image /no/image: run ./aux/import_image.sh": (site.clone("no-image", image=Path("/no/image")), {}),
        "Invalid image format": (site.clone("bad-image", image=bad, container="bad"), {}),
        "no torch here": (site.clone("no-torch", mounts=""), {}),
        "containers is full, or your quota": (site.clone("full"), {}),
        "no container from": (site.clone("corrupt"), {}),
        "is full, or your quota of it": (site.clone("quota"), {}),
        "no /no/folder on this node": (site.clone("no-folder", mounts=f"{site.torch},/no/folder:/data"), {}),
        "at /x/y: No such file or directory": (site.clone("start"), {}),
        "no container from /": (site.clone("unpack"), {}),
        "is being created by another node: ENROOT_DATA_PATH must": (site.clone("both"), {}),
        "uncompress failed": (site.clone("packed"), {}),
    }
    statistics = "created 12 files\ncreated 2 hardlinks\n"
    create = {26: "FATAL ERROR: writer: failed to read", 27: "Write on output file failed because Disk quota exceeded"}
    create[30] = "Could not uncompress block"  # without ERROR: the line is found by these words
    create[32] = "xz uncompress failed with error code 9"
    for node, text in create.items():
        (site.folder / f"node-{node}.create").write_text(f"lzo: -3\n{text}\n{statistics}")
    (site.folder / "node-31.create").write_text("[ERROR] File already exists: /common/shared\n")
    mount_fails = "enroot-mount: failed to mount: /x at /x/y: No such file or directory\n"
    (site.folder / "node-29.start").write_text(mount_fails)
    (site.folder / "node-25").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", site.folder / "node-25"]
    assert cluster.exec(*mount, node="node-25").returncode == 0
    try:
        ids = [
            submit(cluster, site, clone, INSIDE, nodes=f"node-{node}", **env)
            for node, (clone, env) in enumerate(clones.values(), start=21)
        ]
        jobs = [cluster.wait(job) for job in ids]
        left = cluster.exec("ls", site.folder / "node-25", node="node-25").stdout
    finally:
        cluster.exec("umount", site.folder / "node-25", node="node-25")
    for node, (job, (sentence, (clone, _))) in enumerate(zip(jobs, clones.items(), strict=True), start=21):
        assert job.state == "FAILED" and job.exit_code == 1, job.log
        said = [line for line in job.log.splitlines() if sentence in line]
        assert len(said) == 1 and f" on node-{node}: " in said[0], job.log
        assert "Traceback" not in job.log and len(job.log.splitlines()) <= 5, job.log
        own = (clone / f"log/{job.id}/node-{node}.out").read_text()
        assert said[0] in own or "torch here" in sentence
        assert node not in create or f"{create[node]}\n{statistics}" in own, "and all that enroot create has said"
    assert left == "" and not any((site.folder / f"node-{node}/shared-{os.getpid()}").exists() for node in create)
    (site.folder / "node-31.create").unlink()
    both = clones["is being created by another node: ENROOT_DATA_PATH must"][0]
    again = sbatch(cluster, site, both, INSIDE, nodes="node-31")
    assert "is half made, by another node: enroot remove" in again.log, again.log
    assert (site.folder / f"node-31/shared-{os.getpid()}").exists(), "the other node may be in it"
    assert f": {create[30]}\n" in jobs[9].log
    assert f": {create[26]}" in jobs[5].log and "PATH, which a login shell may reset, is /" in jobs[3].log


def documented(runtime: str, clone: Path) -> Path:
    """The clone, its run_script.sh edited as docs/containers.md says."""
    script = (clone / "run_script.sh").read_text()
    blocks = re.findall(r"^```\n(    .*?)^```$", (clone / "docs/containers.md").read_text(), re.M | re.S)
    (lines,) = [
        text for text in blocks if {"Pyxis": "--container-image", "Apptainer": "apptainer exec"}[runtime] in text
    ]
    taken = r"^    \./aux/run_task\.sh bash .*?\"\$@\" \|\| status=\$\?[^\n]*\n"
    script, count = re.subn(taken, lambda _: lines, script, flags=re.M | re.S)
    assert count == 1
    (clone / "run_script.sh").write_text(script)
    return clone


@pytest.mark.parametrize("runtime", ["Pyxis", "Apptainer"])
def test_other_runtimes(runtime, cluster, site):
    """The documented lines, as they are, in the place of the one they name. The stand-ins know no other options."""
    clone = documented(runtime, site.clone(runtime.lower()))
    path = f"{STAND_INS / 'pyxis'}:{site.environment['PATH']}" if runtime == "Pyxis" else site.environment["PATH"]
    job = sbatch(cluster, site, clone, INSIDE, *NASTY, nodes="node-[13-14]", PATH=path)
    assert job.state == "COMPLETED", job.log
    ranks = seen(clone, job)
    assert [rank["variables"] for rank in ranks] == [[0, 0, 2], [1, 0, 2]]
    assert all(rank["image"] == "first" and rank["folder"] == "/workspace/mnt" for rank in ranks)
    assert all(rank["arguments"] == NASTY and "tiny" in rank["root"] for rank in ranks)


def test_registry_image_and_no_python_on_the_nodes(cluster, site):
    """Pyxis imports the image itself, so CONTAINER_IMAGE is no file; Python is in the container alone."""
    image = "nvcr.io#nvidia/pytorch:25.06-py3"
    clone = documented("Pyxis", site.clone("registry", image=image))
    programs = site.folder / "programs"
    programs.mkdir()
    for folder in ("/usr/sbin", "/usr/bin"):
        for program in Path(folder).iterdir():
            if not program.name.startswith("py") and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    path = f"{STAND_INS / 'pyxis'}:{STAND_INS / 'bin'}:{programs}"
    job = cluster.wait(
        cluster.submit(
            *("--nodelist=node-[15-16]", "--gpus-per-node=1", f"--export=ALL,PATH={path}", "run_script.sh", INSIDE),
            cwd=clone,
            env=site.environment,
        )
    )
    assert job.state == "COMPLETED", job.log
    assert [(rank["image"], rank["variables"]) for rank in seen(clone, job)] == [
        ("first", [0, 0, 2]),
        ("first", [1, 0, 2]),
    ]


def test_import_image(site, tmp_path):
    """The file is by default the one in env.sh; what fails leaves none, what is there stays."""
    clone = site.clone("import")
    env = environment(**site.environment)
    command, in_clone = [clone / "aux/import_image.sh"], {"cwd": clone, "env": env}
    missing = run(*command, "docker://nvcr.io#nvidia/none:1", **in_clone)
    assert missing.returncode == 1 and "404 Not Found" in missing.stderr and not list(clone.glob("*.sqsh*"))
    assert missing.stderr.splitlines()[-1].startswith(
        "import_image.sh: enroot cannot import docker://nvcr.io#nvidia/none:1"
    )
    (site.folder / "registry/debian:12").write_text("an image")
    imported = run(*command, "docker://debian:12", **in_clone)
    assert imported.returncode == 0, imported.stderr
    (name,) = re.findall(r"^export CONTAINER_IMAGE=\$PWD/(\S+)", (REPOSITORY / "env.sh").read_text(), re.M)
    assert (clone / name).read_text() == "an image" and len(list(clone.glob("*.sqsh*"))) == 1
    again = run(*command, "docker://debian:12", **in_clone)
    assert again.returncode == 1 and "exists already" in again.stderr and len(again.stderr.splitlines()) == 1
    without = run(*command, "docker://debian", tmp_path / "x.sqsh")
    assert without.returncode == 1 and "no enroot on" in without.stderr
    wrong = run(*command, "debian", tmp_path / "x.sqsh", env=env)
    assert wrong.returncode == 1 and "does not begin with docker://" in wrong.stderr


@pytest.mark.matrix  # thirty jobs, one after the other
def test_all_ways_agree(cluster, site, mnist_full, text):
    """The proof of docs/09_do_all_ways_agree.md, with way 4."""
    clone = site.clone("convergence", mounts=site.torch, container="convergence")
    command = [sys.executable, "aux/figures/prove_convergence.py", "--container", "--out", clone / "out"]
    command += ["--images", mnist_full, "--text", text]
    done = cluster.exec(*command, cwd=clone, env=site.environment, timeout=1800)
    assert done.returncode == 0 and "VERDICT: all ways agree" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count(". container, ") == 4 and (clone / "out/convergence.svg").exists()
    assert not list(clone.glob("checkpoints/*")) and not list(clone.glob("log/*")), "nothing is left behind"
