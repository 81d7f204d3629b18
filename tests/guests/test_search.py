"""docs/recipes.md: Optuna's trials on two ranks, and two jobs that share a study."""

import re
import sys

import pytest

from conftest import environment, ranks, run

pytestmark = pytest.mark.matrix
COUNT = """
import sys
from optuna import load_study
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
study = load_study(storage=JournalStorage(JournalFileBackend(sys.argv[1])), study_name="rate")
print(len(study.trials), sum(trial.state.is_finished() for trial in study.trials))
"""


def test_search(packages, tmp_path):
    """All ranks train with what rank 0 was told, and a second job continues."""
    for _ in range(2):
        done = ranks(2, "tests/guests/search.py", tmp_path / "study.log", **packages)
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^rank (\d): (\S+)$", done.stdout, re.M)
        both = [[line for rank, line in found if rank == number] for number in "01"]
        assert len(set(both[0])) == 5 and both[0] == both[1]
    count = run(
        sys.executable, "-c", COUNT, tmp_path / "study.log", env=environment(**packages)
    ).stdout
    assert count == "10 10\n"
