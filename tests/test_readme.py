"""The commands of README and docs, run as they stand, block by block, in a copy of the repository."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from conftest import NAMESPACES, REPOSITORY, cells, environment, run

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", "\n".join(path.read_text() for path in DOCUMENTS), re.M | re.S)


def copy_of_repository(folder: Path) -> Path:
    """The files that git tracks."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True).stdout
    for path in filter(None, tracked.split("\0")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / path, folder / path)
    return folder


@pytest.fixture(scope="module")
def clone(tmp_path_factory, tiny) -> Path:
    """A copy with the virtual environment of the tests, and small data where the README has them."""
    folder = copy_of_repository(tmp_path_factory.mktemp("clone") / "repository")
    (folder / ".venv").symlink_to(REPOSITORY / ".venv")
    shutil.copytree(tiny, folder / "data/mnist")
    return folder


def bash(script: str, clone: Path, prefix: tuple = (), **variables):
    done = run(*prefix, "bash", "-euo", "pipefail", "-c", script, cwd=clone, env=environment(**variables), timeout=300)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def block(containing: str) -> str:
    found = [text for text in BLOCKS if containing in text]
    assert len(found) == 1, f"one block of the documents has {containing!r}"
    return found[0]


def test_every_block_is_run():
    """Here, but three: containers in test_containers.py, Docker in test_docker.py, the laptop in test_submit.py."""
    assert len(BLOCKS) == 10 and block("import_image.sh") and block("docker exec") and block("submit.py")


def test_make_train(clone):
    shown = bash(block("make train"), clone)
    assert "SYNTHETIC" in shown and re.search(
        r"^epoch=3 test_loss=\S+ test_accuracy=0\.\d+\nFinished: epoch=3, ", shown, re.M
    )


def test_by_hand(clone):
    shown = bash(block("./torchrun.sh distributed/train_ddp.py"), clone)
    assert len(re.findall(r"^epoch=1 test_loss=\S+ test_accuracy=0\.\d+\nFinished: epoch=1, ", shown, re.M)) == 3


def test_language_model(clone):
    """Without internet, as here, the first line falls back on the text that Python brings along."""
    shown = bash(block("--sample 200"), clone)
    losses = [float(loss) for loss in re.findall(r"^Finished: step=100 val_loss=(\S+)$", shown, re.M)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02) and losses[0] < 3.2
    assert re.search(r"^Sample from checkpoints/fsdp/checkpoint_step_100:$", shown, re.M)
    assert "step=100 loss_whole=" in shown


def test_local_cluster(clone):
    variables = {"CLUSTER": f"readme-{os.getpid()}"}
    try:
        shown = bash(block("make cluster\n"), clone, **variables)
        assert len(re.findall(r"^node-[12] .* idle ", shown, re.M)) == 2
        assert len(re.findall(r"^\[Rank: [0-3] \| node-[12] \| world size: 4 \|.*\]$", shown, re.M)) == 4
        assert re.search(r"^Finished: epoch=1, ", shown, re.M)
        logs = "".join(log.read_text() for log in clone.glob("launch_slurm_with_torchrun.sh_*.out"))
        assert "VERDICT: 4 ranks" in logs
        assert not Path(f"/run/slurm-cluster-{variables['CLUSTER']}").exists()
    finally:
        run(NAMESPACES, "down", env=environment(**variables))


def test_on_a_cluster(clone, cluster):
    """The commands for a login node, typed on one, except the first: the (small) data are there already."""
    script = block("sbatch launch_slurm_to_torch.sh")
    prepare, jobs = script.split("\n", 1)
    assert prepare.startswith("python aux/prepare_data.py mnist ")
    before = time.time()
    shown = bash(jobs, clone, prefix=(NAMESPACES, "exec"), **cluster.environment)
    ids = [int(job) for job in re.findall(r"Submitted batch job (\d+)", shown)]
    assert len(ids) == 5 and all(str(job) in shown.split("JOBID")[1] for job in ids)
    ended = [cluster.wait(job, timeout=240) for job in ids]
    assert [job.state for job in ended] == ["COMPLETED"] * 5, [job.log for job in ended]
    finals = [re.search(r"^epoch=1 test_loss=(\S+) .*\nFinished: epoch=1, ", job.log, re.M)[1] for job in ended[1:]]
    assert len(finals) == 4 and time.time() - before < 240


def test_rehearsal(clone, cluster):
    shown = bash(block("scancel --signal=USR1"), clone, prefix=(NAMESPACES, "exec"), **cluster.environment)
    assert re.search(r"^All 4 ranks are alive, at step \d+\.$", shown, re.M), shown
    log = (clone / "rehearsal.out").read_text()
    assert re.search(r"^Stopped after step \d+, saved, requeued$", log, re.M)


def test_files_of_a_copy(clone):
    """`cp` of the files that a project of one's own takes along; test_plain_scripts.py trains with them."""
    bash(block("../my-project"), clone)
    taken = {str(path.relative_to(clone.parent / "my-project")) for path in (clone.parent / "my-project").rglob("*.*")}
    launchers = {path.name for path in REPOSITORY.glob("launch_slurm_*.sh")}
    assert taken == launchers | {
        *("env.sh", "torchrun.sh", "aux/job.sh", "aux/run_task.sh", "aux/quiet_torchrun.py"),
        *("distributed/train_ddp.py", "distributed/mnist.py", "distributed/spawn_ranks.py"),
    }


def test_the_changed_copy_is_the_one_shown():
    """Its diff, without what git says of files and functions; test_plain_scripts.py trains it."""
    shown = re.search(r"^```diff\n(.*?)^```$", (REPOSITORY / "README.md").read_text(), re.M | re.S)[1]
    compared = run("git", "diff", "--no-index", "-U0", "distributed/train_ddp.py", "tests/scripts/train_images.py")
    hunks = compared.stdout[compared.stdout.index("\n@@") + 1 :]
    assert shown == re.sub(r"^(@@ \S+ \S+ @@).*$", r"\1", hunks, flags=re.M)


def habits() -> list[str]:
    """The commands in the middle column of docs/coming-from.md."""
    page = (REPOSITORY / "docs/coming-from.md").read_text()
    cells = re.findall(r"^\| .+? \| (.+?) \| .+? \|$", page, re.M)
    return list(dict.fromkeys(span for cell in cells for span in re.findall(r"`([^`]+)`", cell) if " " in span))


ELSEWHERE = (
    "docker ",
    "sbatch run_script.sh",
    "python distributed/train_task.py --submit",
    "@task",
    "sys.path",
    "from ",
)


def test_habits_that_other_tests_run():
    """Containers, Docker and submission have tests of their own."""
    others = [command for command in habits() if command.startswith(ELSEWHERE)]
    assert len(others) == 7 and len(habits()) == 18, habits()
    for command in others:
        if command.startswith(("docker exec", "sbatch", "python")):
            script = next(word for word in command.split() if word.endswith((".py", ".sh"))).removeprefix("/data/")
            assert any(script in text for text in BLOCKS), command


@pytest.mark.parametrize(
    "command",
    cells(
        [(command,) for command in habits() if not command.startswith(ELSEWHERE)],
        ("torchrun --nproc_per_node=2 distributed/train_task.py --epochs 1",),
    ),
)
def test_habits(command, clone, cluster, tmp_path):
    if not command.startswith("sbatch "):
        shown = bash(f"source .venv/bin/activate; {command}", clone)
        assert re.search(r"^Finished: ", shown, re.M), shown
        return
    options = ["--nodes=2", "--gpus-per-node=2", f"--output={tmp_path}/log"]
    typed = command.split()
    job = cluster.sbatch(*options, *typed[1:], cwd=clone)
    assert job.state == "COMPLETED" and re.search(r"^(Finished: |VERDICT: )", job.log, re.M), job.log
