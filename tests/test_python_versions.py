"""Jobs run on Python 3.10, as Ubuntu 22.04 has it, and aux/submit.py on 3.11."""

import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY, run

ON_SUBMISSION = ["aux/submit.py", "aux/submission/"]
FOLDERS = ["distributed/*.py", "local/*.py", "dev/*.py", "aux/*.py"]
LISTED = ["git", "ls-files", *FOLDERS]
TRACKED = subprocess.run(LISTED, cwd=REPOSITORY, capture_output=True, text=True).stdout.split()
IN_JOBS = [path for path in TRACKED if not path.startswith(tuple(ON_SUBMISSION))]


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
