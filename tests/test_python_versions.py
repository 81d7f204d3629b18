"""Jobs run on Python 3.10 and newer, as NVIDIA's images of 2024 and Ubuntu 22.04 have it, and on torch 2.4."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY, environment, run

TRACKED = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True).stdout.split()
ON_TOP = ("check_ranks", "lint_sbatch", "prepare_data", "quiet_torchrun", "slurm_task", "watch_job")
IN_JOBS = [path for path in TRACKED if path.startswith(("distributed/", "local/", "aux/figures/", "aux/bench/"))]
IN_JOBS = [path for path in [*IN_JOBS, *(f"aux/{name}.py" for name in ON_TOP)] if path.endswith(".py")]
ON_SUBMISSION = ["aux/submit.py", *(path for path in TRACKED if path.startswith("aux/submission/"))]
ON_SUBMISSION = [path for path in ON_SUBMISSION if path.endswith(".py")]


def violations(version: str, *paths: object) -> str:
    """What vermin finds that is newer than `version`; empty if nothing is."""
    options = ["--no-tips", "--eval-annotations", "--violations", f"--target={version}-"]
    done = run(Path(sys.executable).with_name("vermin"), *options, *paths)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_jobs_run_on_python_3_10():
    assert len(IN_JOBS) > 20 and violations("3.10", *IN_JOBS) == ""


def test_submission_runs_on_python_3_11():
    assert violations("3.11", *ON_SUBMISSION) == ""
    assert "tomllib" in violations("3.10", *ON_SUBMISSION), "the check can fail"


def test_a_task_in_a_job_imports_nothing_of_the_submission():
    script = "import sys, slurm_task; print({'tomllib', 'submit', 'submission'} & set(sys.modules))"
    done = run(sys.executable, "-c", script, cwd=REPOSITORY / "aux")
    assert done.stdout == "set()\n", done.stdout + done.stderr


OLDER, MATRIX = "tests/scripts/torch_2_4.py", pytest.mark.matrix


@pytest.mark.parametrize(
    "command",
    [
        ["./torchrun.sh", OLDER, "distributed/train_preemptible.py", "--batch-size", "20"],
        pytest.param(["./torchrun.sh", OLDER, "distributed/train_ddp.py", "--batch-size", "20"], marks=MATRIX),
        pytest.param([sys.executable, OLDER, "local/train_single.py"], marks=MATRIX),
        pytest.param([sys.executable, OLDER, "distributed/train_task.py"], marks=MATRIX),
    ],
    ids=lambda command: command[2],
)
def test_plain_and_hard_layers_run_on_torch_2_4(command, tiny, tmp_path):
    """With what torch has had since taken away."""
    where = ["--data-dir", tiny, *(["--checkpoint-dir", tmp_path / "c"] if "task" not in command[2] else [])]
    env = environment(NPROC_PER_NODE=2, OMP_NUM_THREADS=1, TRAIN_DEVICE="cpu")
    done = run(*command, "--epochs", 1, *where, env=env)
    assert done.returncode == 0 and re.search("^Finished: ", done.stdout, re.M), done.stdout + done.stderr


def test_the_older_torch_is_one(tmp_path):
    newer = ["torch.accelerator", "torch.cpu.get_capabilities()", "from torch.distributed.fsdp import fully_shard"]
    tries = [f"try: {line}\nexcept (AttributeError, ImportError): print('older')\n" for line in newer]
    (tmp_path / "newer.py").write_text("import torch\n" + "".join(tries))
    done = run(sys.executable, OLDER, tmp_path / "newer.py")
    assert done.stdout == "older\n" * 3, done.stdout + done.stderr


@pytest.mark.parametrize("script", ["train_fsdp.py", "train_tp.py"])
def test_large_layer_says_which_torch_it_needs(script, tmp_path):
    metadata = tmp_path / "torch-2.4.0a0+f70bd71a48.nv24.6.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0a0+f70bd71a48.nv24.6\n")
    done = run(sys.executable, f"distributed/{script}", env=environment(PYTHONPATH=tmp_path))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"{script}: needs torch 2.6 or newer, and this is 2.4.0a0+f70bd71a48.nv24.6: ")
