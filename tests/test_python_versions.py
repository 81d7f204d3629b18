"""Jobs run on Python 3.10, as Ubuntu 22.04 has it, and aux/submit.py on 3.11."""

import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY, run

TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True
).stdout.split()
ON_TOP = ("check_ranks", "lint_sbatch", "plot_runs", "prepare_data", "slurm_task", "watch_job")
IN_JOBS = [path for path in TRACKED if path.startswith(("distributed/", "local/", "dev/"))]
IN_JOBS = [
    path for path in [*IN_JOBS, *(f"aux/{name}.py" for name in ON_TOP)] if path.endswith(".py")
]
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
