"""docs/fine_tuning.md: a tiny Hugging Face model is tuned on any number of ranks, resumes, and is
loaded by transformers again."""

import re

import pytest

from models import python

pytestmark = pytest.mark.matrix

TEXT = "".join(f"{number} is less than {number + 1}.\n" for number in range(2000))


@pytest.mark.parametrize("lora", [[], ["--lora", 4]], ids=["full", "lora"])
def test_tuned(lora, packages, qwen, tmp_path):
    """Two ranks learn what one learns, and transformers has the loss of a resumed model."""
    (tmp_path / "text").write_text(TEXT)
    options = ["--model", qwen, "--text", tmp_path / "text", "--batch-size", 8, "--context", 32]
    options += ["--learning-rate", 0.01, "--save-every", 10, *lora]

    def tune(out: str, steps: int, ranks: int) -> dict[int, float]:
        command = ["examples/fine_tune.py", *options, "--out", tmp_path / out, "--steps", steps]
        log = python(packages, *command, ranks=ranks)
        found = re.findall(r"^step=(\d+)/\d+ loss=(\S+)$", log, re.M)
        return {int(step): float(loss) for step, loss in found}

    one = tune("one", 30, ranks=1)
    assert one[30] < one[10] < 5.8
    tune("two", 20, ranks=2)
    resumed = tune("two", 30, ranks=1)
    assert list(resumed) == [30] and resumed[30] == pytest.approx(one[30], abs=1e-3)
    saved = [tmp_path / name / "model" for name in ("one", "two")]
    script, text = "tests/scripts/loss_of_a_step.py", tmp_path / "text"
    losses = [float(python(packages, script, path, text, 30)) for path in saved]
    assert losses[0] < one[30] and losses[1] == pytest.approx(losses[0], abs=1e-3)
