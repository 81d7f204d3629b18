"""The recipes that a cluster without GPUs, accounting and internet can run, as they stand."""

import re
import shutil

import pytest

from conftest import NAMESPACES, REPOSITORY, environment, run
from test_readme import clone, steps, try_block  # noqa: F401  a fixture

PAGE = REPOSITORY / "docs/recipes.md"


@pytest.mark.matrix
def test_recipes(clone, cluster, text):  # noqa: F811  the fixture
    """One after the other; each shows what the page has below it."""
    shutil.copytree(text, clone / "data/shakespeare")
    prefix = (NAMESPACES, "exec")
    blocks = [step for step in steps(PAGE) if step[0] == "bash"]
    printed = [try_block(*step, clone, prefix, **cluster.environment) for step in blocks]
    allocation, sweep, draw, server, chain, own_text, staged = printed
    assert "VERDICT: all well, 4 ranks" in allocation

    losses = re.findall(r"_([012])\.out:test_loss=(\S+) ", sweep)
    assert [task for task, _ in losses] == ["0", "1", "2"]
    assert len({loss for _, loss in losses}) == 3, "each with its own learning rate"

    drawn = re.findall(r"^draw_([012])\.out:test_loss=(\S+) ", draw, re.M)
    assert [task for task, _ in drawn] == ["0", "1", "2"]
    assert len({loss for _, loss in drawn}) == 3

    assert "Submitted" in server
    assert (clone / "both.out").read_text().count("\nFinished: epoch=1") == 1

    assert re.search(r"^Sample from checkpoints/\d+/step_20:\n", chain, re.M), chain
    assert "not found" not in chain, chain

    assert "\nSample from checkpoints/text/step_100:\n" in own_text, own_text

    assert "in /tmp/data-" in staged
    assert (clone / "staged.out").read_text().count("\nFinished: epoch=1") == 1
    [job] = re.findall(r"/tmp/data-(\d+)/", staged)
    assert run("ls", f"/tmp/data-{job}").returncode != 0, "the copy is removed"


@pytest.mark.matrix
def test_profile(clone, text, tmp_path):  # noqa: F811
    """The page's diff fits train_fsdp.py, and each rank writes a trace."""
    [diff] = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "diff").write_text(diff)
    patched = run("patch", "--strip=0", f"--input={tmp_path}/diff", cwd=clone)
    assert patched.returncode == 0, patched.stdout + patched.stderr
    options = ["--steps", 12, "--data-dir", text, "--checkpoint-dir", tmp_path / "checkpoints"]
    command = ["./torchrun.sh", "distributed/train_fsdp.py", *options]
    done = run(*command, cwd=clone, env=environment(), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    traces = {path.parent.name for path in clone.glob("trace/rank_*/*.pt.trace.json")}
    assert traces == {"rank_0", "rank_1"}
