"""aux/cluster_report.py: what is well, and what is broken, each in a row of the page."""

import getpass
import re
import shutil

import pytest

from conftest import LAUNCHERS, REPOSITORY

OPTIONS = ["--nodes=2", "--gpus-per-node=1", LAUNCHERS["torchrun"], "aux/cluster_report.py"]


@pytest.fixture
def copy(tmp_path):
    """What a reader copies, in a folder of its own."""
    for name in ("aux", "distributed"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    for name in ("env.sh", "torchrun.sh", LAUNCHERS["torchrun"]):
        shutil.copy(REPOSITORY / name, tmp_path)
    return tmp_path


def change(path, old: str, new: str):
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new))


def rows(log: str) -> dict[str, str]:
    """The results of the page, by their part."""
    page = log[log.index("# Cluster report") :]
    return dict(re.findall(r"^\| (.*?) \| (.*?) \| \d+ \|$", page, re.M))


def test_broken_scripts(cluster, copy):
    """A script that never ends, a wrong loss, and a rank that fails."""
    (copy / "aux/check_ranks.py").write_text("import time\ntime.sleep(600)\n")
    change(copy / "aux/cluster_report.py", '--timeout 60", 200', '--timeout 60", 5')
    change(copy / "aux/cluster_report.py", '"fsdp": TEXT, "tp"', '"tp"')
    change(copy / "distributed/train_ddp.py", "momentum=0.9", "momentum=0.5")
    fail = "if rank == 1:\n    sys.exit(f'no luck in {os.getcwd()}/a.py')\n# --- data ---"
    change(copy / "distributed/train_tp.py", "# --- data ---", fail)
    job = cluster.sbatch(*OPTIONS, "checks", "losses", cwd=copy, timeout=400)
    assert job.state == "FAILED", job.log
    found = rows(job.log)
    assert re.fullmatch(
        r"\*\*FAILED\*\*: rank \d has not ended after 5 s", found["`check_ranks.py`"]
    )
    assert "**FAILED**: losses, and in" in found["losses of `train_ddp.py`"]
    assert found["losses of `train_tp.py`"] == "**FAILED**: rank 1: no luck in a.py"
    well = found["losses of `train_preemptible.py`"]
    assert re.match(r"within 0\.0\d+% of one CPU's", well), well
    assert ": 3 of 4 rows FAILED\n" in job.log


@pytest.mark.matrix
def test_a_stop_that_is_not_heard_and_one_that_does_not_resume(cluster, copy):
    change(copy / "distributed/train_preemptible.py", "and preemption.asked(device)", "and False")
    change(copy / "distributed/train_fsdp.py", "first = runs.load(model, optimizer)", "first = 0")
    job = cluster.sbatch(*OPTIONS, "stop", cwd=copy, timeout=600)
    assert job.state == "FAILED", job.log
    found = rows(job.log)
    what = "stop and resume of `train_{}.py`"
    said = "**FAILED**: SIGTERM after step 5 did not stop it"
    assert found[what.format("preemptible")] == said
    said = r"\*\*FAILED\*\*: stopped after step \d0, and did not resume there"
    assert re.fullmatch(said, found[what.format("fsdp")])


@pytest.mark.matrix
def test_all_is_well(cluster, copy):
    job = cluster.sbatch(*OPTIONS, cwd=copy, timeout=900)
    assert job.state == "COMPLETED" and ": All is well\n" in job.log, job.log
    page = job.log[job.log.index("# Cluster report") :]
    assert (copy / f"log/{job.id}/report/page.md").read_text().strip() == page.strip()
    found = rows(job.log)
    assert len(found) == 11, page
    assert found["stop and resume of `train_fsdp.py`"].endswith("digit for digit")
    assert "First to look at: rank 1 on node 2 (step" in found["rank 1 is frozen"]
    hidden = (r"node-\d", re.escape(str(copy)), rf"\b{getpass.getuser()}\b", r"10\.7\.")
    assert not re.findall("|".join(hidden), page), page
    # The job's own requeue is not a part's.
    assert "Requeued" not in job.log and cluster.show(job.id)["Restarts"] == "0"
