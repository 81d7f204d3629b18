"""aux/launch/stage.sh: once on each node, whole, and found again; and compilers' caches."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm import REPOSITORY, environment, mounted_in_memory, run, stand_ins, wait_for

SOURCE = f"set -euo pipefail; source {REPOSITORY}/aux/launch/stage.sh"


@pytest.fixture
def job(tmp_path) -> dict[str, str]:
    """Of one node, where tar counts how often it unpacks, and waits for a file to be gone. Slurm
    has the jobs of the file `jobs`, or without it does not answer."""
    srun = 'while [[ "$1" == --* ]]; do shift; done; exec "$@"'
    tar = f"""if [[ "$1" == --extract ]]; then echo x >>{tmp_path}/unpacked; fi
while [[ -e {tmp_path}/wait ]]; do sleep 0.05; done
exec {run("bash", "-c", "type -P tar").stdout.strip()} "$@\""""
    (tmp_path / "jobs").write_text("7\n")
    programs = {"srun": srun, "tar": tar, "squeue": f"cat {tmp_path}/jobs"}
    folder = stand_ins(tmp_path / "bin", programs)
    path = f"{folder}:{os.environ['PATH']}"
    return environment(SLURM_JOB_ID=7, SLURM_JOB_NUM_NODES=1) | {"PATH": path}


@pytest.fixture
def archive(tmp_path) -> Path:
    (tmp_path / "data").mkdir()
    for number in range(50):
        (tmp_path / "data" / str(number)).write_text("x" * 10_000)
    run("tar", "--create", "--file", tmp_path / "a.tar", "--directory", tmp_path / "data", ".")
    return tmp_path / "a.tar"


def lines(local: Path, *commands: str) -> list[str]:
    return ["bash", "-c", "; ".join([SOURCE, f"LOCAL={local}", *commands])]


def unpacked(tmp_path: Path) -> int:
    path = tmp_path / "unpacked"
    return len(path.read_text().split()) if path.exists() else 0


def test_once_for_all_jobs(job, archive, tmp_path):
    """Two at once, and one later. A new archive is another folder."""
    stage = lines(tmp_path / "local", f"stage {archive}", "ls $STAGED | wc --lines", "echo $STAGED")
    (tmp_path / "wait").touch()
    both = [subprocess.Popen(stage, env=job, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    wait_for(lambda: unpacked(tmp_path) == 1)
    time.sleep(0.3)
    (tmp_path / "wait").unlink()
    said = {process.communicate(timeout=30)[0] for process in both}
    said.add(run(*stage, env=job).stdout)
    assert len(said) == 1 and said.pop().startswith("50\n")
    assert unpacked(tmp_path) == 1
    os.utime(archive, (1, 1))
    assert run(*stage, env=job).returncode == 0 and unpacked(tmp_path) == 2


def test_a_link_to_an_archive(job, archive, tmp_path):
    """A new archive behind it is another folder as well. And the shell outlives a SIGTERM."""
    (tmp_path / "link").symlink_to(archive)
    stage = lines(tmp_path / "local", f"stage {tmp_path}/link", "kill -TERM $$", "echo $STAGED")
    first = run(*stage, env=job).stdout
    os.utime(archive, (1, 1))
    second = run(*stage, env=job).stdout
    assert first and second and first != second


def test_killed_in_the_middle(job, archive, tmp_path):
    """The next job unpacks the whole again."""
    stage = lines(tmp_path / "local", f"stage {archive}", "ls $STAGED | wc --lines")
    (tmp_path / "wait").touch()
    first = subprocess.Popen(stage, env=job, start_new_session=True)
    wait_for(lambda: unpacked(tmp_path) == 1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    (tmp_path / "wait").unlink()
    again = run(*stage, env=job)
    assert again.stdout == "50\n" and unpacked(tmp_path) == 2, again.stderr


@pytest.mark.slurm
def test_a_full_disk(job, archive, tmp_path):
    """Says so, ends the job, and leaves nothing that a later job takes for whole."""
    (tmp_path / "local").mkdir()
    with mounted_in_memory(tmp_path / "local", "200k") as local:
        stage = lines(local, f"stage {archive}", "echo not reached")
        done = run(*stage, env=job)
        assert done.returncode == 1 and done.stdout == ""
        assert "No space left on device" in done.stderr
        assert re.search(rf"^stage.sh: \S+: cannot unpack {archive}$", done.stderr, re.M)
        assert {path.suffix for path in local.iterdir()} == {".lock", ".jobs"}


@pytest.mark.parametrize("lost", ["7", "its list"])
def test_a_cleaner_of_old_files(lost, job, archive, tmp_path):
    """What it takes is noticed by the next job, although others have left files there."""
    stage = lines(tmp_path / "local", f"stage {archive}", "echo $STAGED")
    folder = Path(run(*stage, env=job).stdout.strip())
    for number in range(10):
        (folder / f"{number}.pyc").touch()
    (folder / "7" if lost == "7" else folder.with_name(f"{folder.name}.files")).unlink()
    with (folder / "8").open() as in_use:
        again = run(*stage, env=job)
        assert again.returncode == 0 and unpacked(tmp_path) == 2, again.stderr
        assert (folder / "7").read_text() == in_use.read() == "x" * 10_000
    said = rf"stage.sh: \S+: {folder} has lost files, and is unpacked again\n"
    assert re.fullmatch(said, again.stderr), again.stderr
    assert run(*stage, env=job).stderr == "" and unpacked(tmp_path) == 2
    assert {path.suffix for path in folder.parent.iterdir()} - {folder.suffix} == {
        ".files",
        ".jobs",
        ".lock",
    }


@pytest.mark.parametrize(
    ("jobs", "other", "there"),
    [
        ("7\n8\n", "", 1),
        # The first job still runs.
        ("6\n7\n", "", 2),
        # Slurm does not answer.
        (None, "", 2),
        # An archive in another folder has the same name.
        ("7\n", "other/", 2),
    ],
)
def test_old_versions_are_deleted(jobs, other, there, job, archive, tmp_path):
    """If no job uses them."""
    (tmp_path / "other").mkdir()
    shutil.copy(archive, tmp_path / "other")
    os.utime(archive, (1, 1))
    first, second = (
        lines(tmp_path / "local", f"cd {tmp_path}", f"stage {folder}a.tar", "ls $STAGED | wc -l")
        for folder in ("", other)
    )
    assert run(*first, env=job | {"SLURM_JOB_ID": "6"}).stdout == "50\n"
    if jobs is None:
        (tmp_path / "jobs").unlink()
    else:
        (tmp_path / "jobs").write_text(jobs)
    if not other:
        os.utime(archive, (2, 2))
    assert run(*second, env=job).stdout == "50\n"
    local = tmp_path / "local"
    assert len([path for path in local.iterdir() if path.is_dir()]) == there
    for kind in ("files", "jobs"):
        assert len([*local.glob(f"*.{kind}")]) == there


def test_on_each_node(cluster, tmp_path):
    """Of a job that has two tasks a node, three nodes, and other options in its environment."""
    script = f"#!/bin/bash\n{SOURCE}\non_each_node hostname\non_each_node cat <<<word\n"
    (tmp_path / "job.sh").write_text(script)
    size = ["--nodes=3", "--ntasks-per-node=2", "--cpus-per-task=2", f"--output={tmp_path}/log"]
    done = cluster.sbatch(*size, tmp_path / "job.sh")
    hosts = done.log.split()[:3]
    assert done.state == "COMPLETED" and len({*hosts}) == 3, done.log
    assert done.log.split()[3:] == ["word"] * 3, done.log


def test_who_keeps_caches_on_the_local_disk(job, tmp_path):
    """Compilers, whose caches `pack` packs, and Hugging Face, also before a job has packed them."""
    done = run(*lines(tmp_path / "local", "caches absent.tar", "env"), env=job)
    folders = dict(re.findall(rf"^(\w+)={tmp_path}/local/(\S+)$", done.stdout, re.M))
    assert folders.pop("TORCHINDUCTOR_CACHE_DIR") == "absent.tar/inductor", done
    assert folders.pop("TRITON_CACHE_DIR") == "absent.tar/triton"
    assert folders == {"HF_DATASETS_CACHE": "datasets", "HF_MODULES_CACHE": "modules"}


def test_nothing_to_unpack(job, tmp_path):
    done = run(*lines(tmp_path / "local", "stage absent.tar", "echo not reached"), env=job)
    assert done.returncode == 1 and done.stdout == "" and "absent.tar" in done.stderr


def test_a_node_that_does_not_see_the_archive(job, archive, tmp_path):
    """For a moment: a later job does not find an empty folder there. Here srun is that node."""
    gone = archive.with_name("gone.tar")
    hides = f'if mv {archive} {gone}; then "$@"; s=$?; mv {gone} {archive}; exit $s; fi'
    stand_ins(tmp_path / "bin", {"srun": f'while [[ "$1" == --* ]]; do shift; done; {hides}'})
    stage = lines(tmp_path / "local", f"stage {archive}", "ls $STAGED | wc --lines")
    done = run(*stage, env=job)
    assert (done.returncode, done.stdout) == (1, ""), done
    assert re.search(rf"^stage.sh: \S+: cannot unpack {archive}$", done.stderr, re.M), done
    stand_ins(tmp_path / "bin", {"srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"'})
    assert run(*stage, env=job).stdout == "50\n"


COMPILES = """
import torch
from torch._dynamo.utils import counters
torch.compile(lambda x: (x.sin() + x.cos()).sum())(torch.ones(100))
print(dict(counters["inductor"]).get("fxgraph_cache_hit", 0))
"""


@pytest.mark.matrix
def test_a_compiled_model_is_not_compiled_again(job, tmp_path):
    """On another node, which has the caches of the first one."""
    (tmp_path / "compiles.py").write_text(COMPILES)

    def compiles(node: str) -> str:
        commands = [f"caches {tmp_path}/compiled.tar", f"{sys.executable} {tmp_path}/compiles.py"]
        commands.append(f"pack {tmp_path}/compiled.tar")
        done = run(*lines(tmp_path / node, *commands), env=job)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert [compiles("node-1"), compiles("node-2")] == ["0\n", "1\n"]
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slurm
def test_a_pack_without_room(job, tmp_path):
    """The one before stays."""
    (tmp_path / "shared").mkdir()
    with mounted_in_memory(tmp_path / "shared", "100k") as shared:
        pack = [f"caches {shared}/a.tar", f"head -c $1 /dev/urandom >{tmp_path}/local/a.tar/x"]
        pack.append(f"pack {shared}/a.tar")
        assert run(*lines(tmp_path / "local", "set -- 1000", *pack), env=job).returncode == 0
        before = (shared / "a.tar").read_bytes()
        done = run(*lines(tmp_path / "local", "set -- 200000", *pack), env=job)
        assert done.returncode == 0 and f"stage.sh: {shared}/a.tar stays as it was" in done.stderr
        assert [path.name for path in shared.iterdir()] == ["a.tar"]
        assert (shared / "a.tar").read_bytes() == before
