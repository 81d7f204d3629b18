"""docs/data_at_scale.md: ranks share a stream, and a run goes on in the middle of it."""

import sys

import pytest

from conftest import environment, run

pytestmark = pytest.mark.matrix

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
    command = ["tests/guests/stream.py", tmp_path]
    first, second = (python(variables, *command, 0, 0, RANK=rank, WORLD_SIZE=2) for rank in (0, 1))
    assert len(first) == len(second) == 32 and sorted(first + second) == list(range(64))
    resumed = python(variables, *command, 0, 11, RANK=0, WORLD_SIZE=2)
    assert resumed == first[11:]
    assert python(variables, *command, 1, 0, RANK=0, WORLD_SIZE=2) != first
