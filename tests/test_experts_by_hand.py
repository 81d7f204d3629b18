"""experts_by_hand.py is the unsplit loop on 1, 2 and 4 ranks, its four mistakes are seen in the
norm of the first step and not in its loss, and the traps of docs/is_my_split_right.md happen."""

import re

import pytest

from slurm import REPOSITORY, cells, ranks

PAGE = (REPOSITORY / "docs/is_my_split_right.md").read_text()
LINE = r"^step=(\d+) loss_whole=(\S+) loss_split_over_\d=(\S+) norm_whole=(\S+) norm_split=(\S+)$"


def steps(log: str) -> dict[int, list[float]]:
    """Losses and norms by step, each of the whole model and of the split one."""
    return {int(step): list(map(float, rest)) for step, *rest in re.findall(LINE, log, re.M)}


@pytest.mark.parametrize("count", cells([(1,), (2,), (4,)], (2,)))
def test_equal_to_the_whole_model(count):
    """A hundred steps, beside the same ones of the whole model. The page shows four ranks."""
    done = ranks(count, "distributed/experts_by_hand.py")
    assert done.returncode == 0, done.stderr
    found = steps(done.stdout)
    assert list(found) == [1, 20, 40, 60, 80, 100] and found[100][0] < found[1][0] - 1
    for loss_whole, loss_split, norm_whole, norm_split in found.values():
        assert loss_split == pytest.approx(loss_whole, abs=3e-6)
        assert norm_split == pytest.approx(norm_whole, rel=3e-5)
    for step, expected in steps(PAGE).items():
        assert found[step] == pytest.approx(expected, rel=1e-2)


KINDS = r"^(whole|split) model: norm (\S+) of experts, (\S+) of other weights$"


@pytest.mark.parametrize("letter", cells([("a",), ("b",), ("c",), ("d",)], ("b",)))
def test_a_mistake_is_in_the_norm_and_not_in_the_loss(letter):
    """Of the first step. By the kind of weights, and by the ranks, it is told from the others."""
    ratios = {}
    for count in (2, 4):
        done = ranks(count, "docs/labs/wrong_experts.py", letter)
        assert done.returncode == 0, done.stderr
        loss_whole, loss_split, norm_whole, norm_split = steps(done.stdout)[1]
        assert loss_split == pytest.approx(loss_whole, abs=2e-6)
        [(_, *whole), (_, *split)] = re.findall(KINDS, done.stdout, re.M)
        ratios[count] = [float(y) / float(x) for x, y in zip(whole, split, strict=True)]
        wrong = norm_split != pytest.approx(norm_whole, rel=2e-6)
        assert wrong == (count == 4 or letter != "b")
    # Of six printed digits
    right = pytest.approx(1, abs=5e-6)
    experts, others = zip(ratios[2], ratios[4], strict=True)
    if letter == "a":
        assert others[0] != right and others[1] != right
    else:
        assert others[0] == right and others[1] == right
    if letter == "b":
        assert experts[0] == right and experts[1] < 0.95
    elif letter == "c":
        assert max(experts) < 0.95
    elif letter == "d":
        assert experts == pytest.approx((2, 2), abs=1e-3)


def test_each_trap_and_its_cure():
    """The page shows what the script prints, but for the rest of torch's messages."""
    [shown] = re.findall(r"^```\n(mixed:\n.*?)^```$", PAGE, re.M | re.S)
    done = ranks(4, "docs/labs/traps.py")
    assert done.returncode == 0, done.stderr
    ends = r"(mixed torch.Tensor and DTensor|must have the same mesh).*"
    assert re.sub(ends, r"\1", done.stdout) == re.sub(ends, r"\1", shown)
