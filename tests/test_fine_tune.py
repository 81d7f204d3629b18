"""docs/fine_tuning.md: a tiny Hugging Face model is tuned on any number of ranks, resumes, and is
loaded by transformers again."""

import re
import subprocess

import pytest

from models import python
from slurm import ranks

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


# One rank of a job that is to stop after its first step, and what it would tell Slurm
STOPS = """
import runpy, sys
sys.path.append("distributed")
import checkpoint, preemption
preemption.asked = lambda *_: True
preemption.requeue = lambda *_: print("REQUEUE") is None
if "fails" in sys.argv[1]:
    checkpoint.Folder.publish = lambda *_: False
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_stopped(packages, qwen, tmp_path):
    """A job whose save fails is not requeued. Another run does not resume this one, and a text that
    is too short is a sentence."""
    for name in ("text", "other"):
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "short").write_text("1 is less than 2.")
    (tmp_path / "stops.py").write_text(STOPS)

    def tune(what: str, text: str, steps: int = 2) -> subprocess.CompletedProcess:
        options = ["--model", qwen, "--text", tmp_path / text, "--context", 32, "--batch-size", 2]
        options += ["--steps", steps, "--out", tmp_path / "out"]
        command = [tmp_path / "stops.py", what, "examples/fine_tune.py", *options]
        return ranks(1, *command, **packages)

    fails, stops = tune("fails", "text"), tune("saves", "text")
    assert fails.returncode == 1 and "REQUEUE" not in fails.stdout, fails
    assert "\nThe last steps are not saved\n" in fails.stdout
    assert stops.returncode == 0 and stops.stdout.endswith("\nREQUEUE\n"), stops
    assert "\nStopped after step 1, saved\n" in stops.stdout
    other, short = tune("saves", "other"), tune("saves", "short")
    said = f"step_1 has text {tmp_path}/text, not {tmp_path}/other: resume it with its own, or "
    assert other.returncode == 1 and said in other.stderr, other
    said = rf"{tmp_path}/short has \d+ tokens, which is less than --context 32\n"
    assert short.returncode == 1 and re.fullmatch(said, short.stderr), short
    # It has no step left, and is asked while it writes the model.
    last = tune("saves", "text", steps=1)
    assert last.returncode == 0 and last.stdout.endswith("\nREQUEUE\n"), last
    assert f"\nFinished: {tmp_path}/out/model\n" in last.stdout
