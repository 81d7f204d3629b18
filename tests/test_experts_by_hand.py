"""experts_by_hand.py is the unsplit loop on 1, 2 and 4 ranks."""

import re

import pytest

from slurm import cells, ranks

LINE = r"^step=(\d+) loss_whole=(\S+) loss_split_over_\d=(\S+) norm_whole=(\S+) norm_split=(\S+)$"


def steps(log: str) -> dict[int, list[float]]:
    """Losses and norms by step, each of the whole model and of the split one."""
    return {int(step): list(map(float, rest)) for step, *rest in re.findall(LINE, log, re.M)}


@pytest.mark.parametrize("count", cells([(1,), (2,), (4,)], (4,)))
def test_equal_to_the_whole_model(count):
    """A hundred steps, beside the same ones of the whole model."""
    done = ranks(count, "distributed/experts_by_hand.py")
    assert done.returncode == 0, done.stderr
    found = steps(done.stdout)
    assert list(found) == [1, 20, 40, 60, 80, 100] and found[100][0] < found[1][0] - 1
    for loss_whole, loss_split, norm_whole, norm_split in found.values():
        assert loss_split == pytest.approx(loss_whole, abs=3e-6)
        assert norm_split == pytest.approx(norm_whole, rel=3e-5)
