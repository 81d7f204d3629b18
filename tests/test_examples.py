"""Scripts of examples/ that no other test has: Optuna's trials (docs/recipes.md), and a stream of
samples (docs/data_at_scale.md).

`make test-all` installs what they need into .venv-guests, beside the torch of .venv.
"""

import re
import sys

import pytest

from slurm import environment, ranks, run

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
        done = ranks(2, "examples/search.py", tmp_path / "study.log", **packages)
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^rank (\d): (\S+)$", done.stdout, re.M)
        both = [[line for rank, line in found if rank == number] for number in "01"]
        assert len(set(both[0])) == 5 and both[0] == both[1]
    count = run(
        sys.executable, "-c", COUNT, tmp_path / "study.log", env=environment(**packages)
    ).stdout
    assert count == "10 10\n"


SHARDS = """
import sys
from datasets import Dataset
numbers = Dataset.from_dict({"x": list(range(64))})
for shard in range(8):
    numbers.shard(8, shard).to_parquet(f"{sys.argv[1]}/{shard:03}.parquet")
"""


def python(packages: dict, *command: object, **variables: object) -> list[int]:
    env = environment(**packages, **variables)
    done = run(sys.executable, *command, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def test_stream(packages, tmp_path):
    """Each sample once, the same rest of an epoch after a stop, another order in the next."""
    variables = packages | {"HF_HOME": tmp_path}
    python(variables, "-c", SHARDS, tmp_path)
    command = ["examples/stream.py", tmp_path]
    first, second = (python(variables, *command, 0, 0, RANK=rank, WORLD_SIZE=2) for rank in (0, 1))
    assert len(first) == len(second) == 32 and sorted(first + second) == list(range(64))
    resumed = python(variables, *command, 0, 11, RANK=0, WORLD_SIZE=2)
    assert resumed == first[11:]
    assert python(variables, *command, 1, 0, RANK=0, WORLD_SIZE=2) != first
