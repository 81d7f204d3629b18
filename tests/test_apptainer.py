"""run_script.sh with the real Apptainer, on the lines that docs/containers.md shows. Only Debian's
sid has it: `make test-slurm SLURM=sid`."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from containers import Site, documented
from slurm import LAUNCHERS, run, wait_for

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(not shutil.which("apptainer"), reason="no Apptainer on this system"),
]
# Two ranks on two nodes, as fast as they can, or half a second slower in each step.
SIZE = ["--nodes=2", "--gpus-per-node=1", "--output=log-%j"]
TRAIN = ["distributed/train_preemptible.py", "--batch-size=20", "--log-every=1"]
SLOWLY = ["tests/scripts/slowly.py", "0.5", *TRAIN]
VENV = Path(sys.prefix)
ENVIRONMENT = {
    "APPTAINERENV_PREPEND_PATH": VENV / "bin",
    # Without it Apptainer, if started by root, wants CAP_SYS_RESOURCE.
    "APPTAINER_USERNS": 1,
}


@pytest.fixture(scope="module")
def clone(memory, tiny) -> Path:
    """The image is this system without Slurm. The virtual environment and Python are mounted."""
    folder = memory / "apptainer"
    folder.mkdir()
    system = [f"/{name}" for name in ("bin", "etc", "lib", "lib64", "sbin", "usr", "var")]
    options = ["-noI", "-noD", "-noF", "-noX", "-no-progress", "-quiet", "-all-root"]
    options += ["-e", "/usr/bin/scontrol"]
    made = run("mksquashfs", *system, folder / "image.sqsh", *options)
    assert made.returncode == 0, made.stderr
    site = Site(folder, folder / "image.sqsh", f"{VENV},{sys.base_prefix}")
    clone = documented("apptainer exec", site.clone("clone"))
    shutil.copytree(tiny, clone / "data/mnist")
    return clone


def submit(cluster, clone: Path, *command: object) -> tuple[int, Path]:
    job = cluster.submit(*SIZE, *command, cwd=clone, env=ENVIRONMENT)
    return job, clone / f"log-{job}"


def losses(log: str) -> list[str]:
    return re.findall(r"^epoch=\d step=\d+/\d+ loss=(\S+)", log, re.M)


def test_losses_of_torchrun(cluster, clone):
    train = [*TRAIN, "--epochs=1"]
    jobs = [
        submit(cluster, clone, launcher, *train)[0]
        for launcher in ("run_script.sh", LAUNCHERS["torchrun"])
    ]
    inside, outside = map(cluster.wait, jobs)
    assert inside.state == outside.state == "COMPLETED", inside.log + outside.log
    assert len(losses(inside.log)) == 15 and losses(inside.log) == losses(outside.log)


def trains(log: Path):
    wait_for(lambda: log.exists() and len(losses(log.read_text())) > 2)


def test_told_to_stop(cluster, clone):
    """SIGTERM goes through Apptainer's own process: saved, requeued, resumed."""
    number, log = submit(cluster, clone, "run_script.sh", *SLOWLY, "--epochs=3")
    trains(log)
    assert cluster.exec("scancel", "--signal=TERM", number).returncode == 0
    job = cluster.wait(number)
    assert job.state == "COMPLETED" and cluster.show(number)["Restarts"] == "1", job.log
    [step] = re.findall(r"^Stopped after step (\d+), saved$", job.log, re.M)
    assert f"Resumed after step {step}\n" in job.log
    assert len(losses(job.log)) == 45


def test_cancelled(cluster, clone):
    number, log = submit(cluster, clone, "run_script.sh", *SLOWLY, "--epochs=100")
    trains(log)
    assert cluster.exec("scancel", number).returncode == 0
    job = cluster.wait(number)
    assert job.state == "CANCELLED", job.log
    assert re.search(r"^Stopped after step \d+, saved$", job.log, re.M), job.log
    assert cluster.left_over(number) == []
