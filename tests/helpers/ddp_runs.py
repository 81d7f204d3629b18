"""Runs of train_ddp.py and train_preemptible.py, and of projects that copy files."""

import re
import shutil
from pathlib import Path

import pytest

from copies import THREE_FILES, copy_file
from prepare_data import draw_images
from slurm import LAUNCHERS, REPOSITORY, ranks


def copies(folder: Path, way: str):
    """What a copier has: a launcher's three files, two files from here, and a script."""
    for name in THREE_FILES[way]:
        copy_file(name, folder)
    for name in ("distributed/preemption.py", "distributed/heartbeat.py"):
        shutil.copy(REPOSITORY / name, folder)
    shutil.copy(REPOSITORY / "tests/scripts/resnet.py", folder / "train.py")


ONE_NODE = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=2", "--output=log.out"]


def submit(cluster, way: str, folder: Path, **env) -> int:
    copies(folder, way)
    command = [*ONE_NODE, "--ntasks-per-node=1", LAUNCHERS[way], "train.py"]
    # One thread a rank, so that sums are rounded alike.
    edited = (folder / "env.sh").read_text() + "export OMP_NUM_THREADS=1\n"
    (folder / "env.sh").write_text(edited)
    return cluster.submit(*command, cwd=folder, env=env)


SINGLE, DDP = "local/train_single.py", "distributed/train_ddp.py"
PREEMPTIBLE = "distributed/train_preemptible.py"
STEPS = ["--epochs", "1", "--log-every", "1", "--seed", "7"]


def losses(log: str) -> dict[tuple[int, int], float]:
    """The losses of a log by epoch and step. A step that is logged twice is a failure."""
    line = r"^epoch=(\d+) step=(\d+)/\d+ loss=(\S+) images_per_second=\d+ time_left=\S+$"
    found = re.findall(line, log, re.M)
    assert len({row[:2] for row in found}) == len(found), log
    return {(int(epoch), int(step)): float(loss) for epoch, step, loss in found}


def evaluations(log: str) -> list[list[float]]:
    """Test loss and accuracy after every epoch of a log."""
    found = re.findall(r"^epoch=\d+ test_loss=(\S+) test_accuracy=(\S+)$", log, re.M)
    return [[float(value) for value in row] for row in found]


@pytest.fixture(scope="session")
def one_process(mnist, tmp_path_factory) -> str:
    """The log of train_ddp.py as one process: the curve that all others must repeat."""
    folder = tmp_path_factory.mktemp("one-process")
    options = ["--data-dir", mnist, *STEPS, "--checkpoint-dir", folder / "out"]
    alone = ranks(0, DDP, *options)
    assert alone.returncode == 0, alone.stderr
    # 1,003 images in batches of 64.
    assert list(losses(alone.stdout)) == [(1, step) for step in range(1, 16)]
    assert [path.name for path in (folder / "out").iterdir()] == ["checkpoint.pt"]
    return alone.stdout


def assert_same_curve(log: str, expected: str):
    """Equal losses, and of five test images each is counted once."""
    assert losses(log) == pytest.approx(losses(expected), rel=2e-4), log
    (test_loss, accuracy), (loss, share) = evaluations(log)[0], evaluations(expected)[0]
    assert test_loss == pytest.approx(loss, rel=1e-3), log
    assert accuracy == share, log


def small_project(script: str, folder: Path, images: tuple[int, int] = (96, 20)) -> Path:
    """A script of chapter 2 in a folder of its own with JPEGs, six steps of small ones in each of
    two epochs."""
    if not (folder / "data").exists():
        draw_images(folder / "data/images", *images)
    text = (REPOSITORY / "examples" / script).read_text()
    for old, new in (('"resnet18", 64 ', '"resnet18", 16 '), ("BATCH = 3, 64", "BATCH = 2, 16")):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / script).write_text(text)
    return folder / script


EVALUATED = r"epoch=\d loss=\d+\.\d{4} accuracy=\d\.\d{4}"
