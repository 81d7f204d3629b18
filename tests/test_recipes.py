"""The recipes that a cluster without GPUs, accounting and internet can run, as they stand."""

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest

from pages import copy_of_repository, steps, try_block
from slurm import NAMESPACES, REPOSITORY, environment, run

PAGE = REPOSITORY / "docs/recipes.md"
BLOCKS = [step for step in steps(PAGE) if step[0] == "bash"]
pytestmark = pytest.mark.matrix


def recipe(word: str, clone, cluster) -> str:
    """Runs the block that has this word. Returns what it prints, which is what the page shows."""
    [(language, commands, shown)] = [step for step in BLOCKS if word in step[1]]
    return try_block(language, commands, shown, clone, (NAMESPACES, "exec"), **cluster.environment)


@pytest.fixture
def local_disk():
    """The nodes of the tests' cluster share it."""
    folder = Path(f"/tmp/staged-{os.getuid()}")
    shutil.rmtree(folder, ignore_errors=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_an_allocation(clone, cluster):
    assert "VERDICT: all well, 4 ranks" in recipe("salloc", clone, cluster)


def test_a_sweep(clone, cluster):
    losses = re.findall(r"_([012])\.out:test_loss=(\S+) ", recipe("sweep.sh", clone, cluster))
    assert [task for task, _ in losses] == ["0", "1", "2"]
    assert len({loss for _, loss in losses}) == 3, "each with its own learning rate"


DAEMON = """#!/bin/bash
if [[ "${1-}" == -d ]]; then sleep 1 && echo "start on $SLURMD_NODENAME"; else cat; fi >>"$MPS_SEEN"
[[ -d "$CUDA_MPS_PIPE_DIRECTORY" ]]
"""


@pytest.fixture
def daemon(tmp_path, monkeypatch, cluster) -> Path:
    """A stand-in for nvidia-cuda-mps-control, in the jobs' PATH, and the file with what it saw."""
    script = tmp_path / "nvidia-cuda-mps-control"
    script.write_text(DAEMON)
    script.chmod(0o755)
    monkeypatch.setitem(cluster.environment, "MPS_SEEN", str(tmp_path / "seen"))
    monkeypatch.setitem(cluster.environment, "PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "seen"


@pytest.mark.parametrize("fails", [False, True])
def test_several_runs_on_one_gpu(fails, clone, cluster, daemon):
    """The daemon, here a script in its place, ends with the job, also if a run fails. Each run
    learns at its own rate."""
    if fails:
        [commands] = [step[1] for step in BLOCKS if "share.sh" in step[1]]
        done = cluster.exec("bash", "-ec", commands.replace("0.02 0.05", "0.02 -1"), cwd=clone)
        assert done.returncode != 0
        assert "test_loss=" in (clone / "share_0.02.out").read_text()
    else:
        losses = re.findall(r"_(\S+)\.out:test_loss=(\S+) ", recipe("share.sh", clone, cluster))
        assert [rate for rate, _ in losses] == ["0.01", "0.02", "0.05"]
        assert len({loss for _, loss in losses}) == 3
    assert daemon.read_text() == "start on node-1\nquit\n", (clone / "share.out").read_text()
    assert not list(Path("/tmp").glob("mps-[0-9]*"))


def test_a_daemon_on_each_node(cluster, daemon, tmp_path):
    """One, however many ranks are there. All have its folder, and it ends with the job."""
    page = PAGE.read_text()
    [exports] = re.findall(r"^export CUDA_MPS_.*\n", page, re.M)
    [lines] = re.findall(r"^```sh\n(on_each_node\(.*?)^```$", page, re.M | re.S)
    rank = '[[ -e $MPS_READY ]] && echo "rank $SLURM_PROCID in $CUDA_MPS_PIPE_DIRECTORY"'
    ranks = f"srun --overlap bash -c '{rank}'\n"
    folder = tmp_path / "mps"
    exports = exports.replace("/tmp/mps-", f"{folder}-")
    script, log = tmp_path / "job.sh", tmp_path / "log"
    script.write_text(f"#!/bin/bash\nset -e\n{exports}{lines}{ranks}")
    size = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=1", "--cpus-per-task=1"]
    job = cluster.submit(*size, f"--output={log}", script)
    assert cluster.wait(job).state == "COMPLETED", log.read_text()
    seen = sorted(daemon.read_text().splitlines())
    assert seen == ["start on node-1", "start on node-2"], log.read_text()
    said = sorted(re.findall("^rank .*", log.read_text(), re.M))
    assert said == [f"rank {number} in {folder}-{job}" for number in range(4)]
    assert not cluster.left_over(job)


def test_scratch(tmp_path):
    """A second time, or beside another clone's folder, nothing moves."""
    lines = "".join(re.findall(r'^(?:mkdir|there=).*["}]/?.*\n', PAGE.read_text(), re.M))
    assert "mv data checkpoints" in lines
    project, scratch = tmp_path / "project", tmp_path / "scratch"
    for folder in (project / "checkpoints/7", scratch):
        folder.mkdir(parents=True)
    env = environment(SCRATCH=scratch)
    assert run("bash", "-ec", lines, cwd=project, env=env).returncode == 0
    assert (scratch / "project/checkpoints/7").is_dir() and (project / "checkpoints/7").is_dir()
    again = run("bash", "-ec", lines, cwd=project, env=env)
    assert again.returncode != 0 and (project / "checkpoints/7").is_dir(), again.stderr


@pytest.fixture
def shared():
    """A folder that other users reach as well, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    os.chown(folder, *MEMBERS[0])
    yield folder
    shutil.rmtree(folder)


MEMBERS = [(12001, 13000), (12002, 13000)]  # user and group, which need no names


def as_member(number: int, command: str, folder: Path, **variables):
    """As this user, who may also read what only root can, as the Python of the tests may be."""
    user, group = MEMBERS[number]
    become = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
    become += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    world = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    env = environment(**world, SHARED=folder, SLURM_JOB_ID=number, **variables)
    return run(*become, "bash", "-euc", command, cwd=folder, env=env)


@pytest.mark.parametrize("umask", ["002", "022"])
def test_a_folder_for_a_group(umask, shared):
    """With the page's lines a member goes on with another's run. Without them it stays whole."""
    [lines] = re.findall(r"^```sh\n(umask 002\n.*?)^```$", PAGE.read_text(), re.M | re.S)
    member = f"umask {umask}\n{sys.executable} {REPOSITORY}/tests/scripts/member.py"
    if umask == "002":
        made = as_member(0, f"{lines.replace(' lab ', ' 13000 ')}\nchmod g+rwxs .", shared)
        assert made.returncode == 0, made.stderr
    told = [as_member(number, member, shared) for number in (0, 1, 0)]
    assert told[0].stdout.endswith("step 0\nsaved True\n"), told[0]
    if umask == "002":
        said = [one.stdout for one in told[1:]]
        assert said == [f"Resumed after step {step}\nsaved True\n" for step in (1, 2)], told
        groups = {path.stat().st_gid for path in shared.rglob("*")}
        assert groups == {13000} and (shared / "log/1").is_dir()
    else:
        assert told[1].returncode == 1
        assert "no heartbeats: [Errno 13] Permission denied: 'log/1'" in told[1].stderr, told[1]
        assert "checkpoints/7 cannot be written: Permission denied" in told[1].stderr
        assert told[2].stdout == "Resumed after step 1\nsaved True\n", told[2]


def test_a_job_has_the_umask_of_its_sbatch(cluster, tmp_path):
    options = f"--wait --nodes=1 --output={tmp_path}/log --wrap 'umask; srun bash -c umask'"
    done = cluster.exec("bash", "-c", f"umask 002; sbatch {options}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text() == "0002\n0002\n"


def test_settings_that_are_drawn():
    """Each job's own, the same ones again after a requeue."""
    [line] = re.findall(r"^rate=\$\(python3.*\)$", PAGE.read_text(), re.M)
    jobs = [
        run("bash", "-c", f"{line}; echo $rate", env=environment(SLURM_ARRAY_TASK_ID=job)).stdout
        for job in (0, 1, 2, 0)
    ]
    assert len(set(jobs)) == 3 and jobs[0] == jobs[3]
    assert all(0.001 <= float(rate) <= 0.1 for rate in jobs)


def test_a_chain(clone, cluster, text):
    shutil.copytree(text, clone / "data/shakespeare")
    chain = recipe("afterok", clone, cluster)
    assert re.search(r"^Sample from checkpoints/\d+/step_20:\n", chain, re.M), chain
    assert "not found" not in chain, chain


def test_own_text(clone, cluster):
    printed = recipe("prepare_data.py text", clone, cluster)
    assert "\nSample from checkpoints/text/step_100:\n" in printed, printed


def test_data_on_local_disks(clone, cluster, local_disk):
    staged = recipe("staged.sh", clone, cluster)
    assert (clone / "staged.out").read_text().count("\nFinished: epoch=1") == 1
    assert f" {local_disk}/mnist.tar-" in staged


def test_jobs_that_start_fast(cluster, local_disk, tiny, tmp_path):
    """The ranks have the environment that was packed."""
    folder = copy_of_repository(tmp_path / "repository")
    shutil.copytree(tiny, folder / "data/mnist")
    assert run(sys.executable, "-m", "venv", "--without-pip", folder / "env").returncode == 0
    [packages] = folder.glob("env/lib/python3*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    run("tar", "--create", "--file", folder / "env.tar", "--directory", folder / "env", ".")
    shutil.rmtree(folder / "env")
    script = folder / "distributed/train_ddp.py"
    code = script.read_text()
    where = "\nimport sys\nprint(f'prefix {sys.prefix}')\nimport os\n"
    assert "\nimport os\n" in code
    script.write_text(code.replace("\nimport os\n", where, 1))
    recipe("fast.sh", folder, cluster)
    log = (folder / "fast.out").read_text()
    assert len(re.findall(rf"^prefix {local_disk}/env.tar-\S+$", log, re.M)) == 4, log
    assert (folder / "compiled.tar").exists() and (local_disk / "compiled.tar").is_dir()


def test_a_profile(clone, text, tmp_path):
    """Chapter 4's lines in train_fsdp.py, with a folder for each rank."""
    chapter = (REPOSITORY / "docs/04_faster.md").read_text()
    [before, after] = re.findall(r"^```python\n(.*?)^\.\.\.\n(.*?)^```$", chapter, re.M | re.S)[0]
    before = before.replace('"look"', 'f"look/{rank}"')
    script = clone / "distributed/train_fsdp.py"
    code = script.read_text()
    for place, lines in (
        (r"^for step in range\(first", before),
        (r"^    heartbeat\.step = step$", after),
    ):
        code, times = re.subn(place, lambda found, lines=lines: lines + found[0], code, flags=re.M)
        assert times == 1, place
    script.write_text(code)
    options = ["--steps", 12, "--batch-size", 4, "--context", 32, "--data-dir", text]
    options += ["--checkpoint-dir", tmp_path / "checkpoints"]
    command = ["./torchrun.sh", "distributed/train_fsdp.py", *options]
    done = run(*command, cwd=clone, env=environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    traces = {path.parent.name for path in clone.glob("look/*/*.pt.trace.json")}
    assert traces == {"0", "1"}
