"""train_preemptible.py: the ranks stop together, within an epoch and at its end, and save."""

import re

import pytest

import checkpoint
from ddp_runs import PREEMPTIBLE, STEPS, assert_same_curve, evaluations, losses
from slurm import mounted_in_memory, ranks

HOOKED = ["tests/scripts/slowly.py", 0, PREEMPTIBLE]


@pytest.mark.long
@pytest.mark.parametrize(("at", "stopped"), [(3, 10), (12, 15)])
def test_one_rank_is_asked(at, stopped, one_process, mnist, tmp_path):
    """Both stop after the same step, save and do not evaluate, for which there may be no time. The
    resumed run takes the steps that are left, and has the losses of one that was not stopped."""
    train = ["--data-dir", mnist, *STEPS, "--checkpoint-dir", tmp_path]
    first = ranks(2, *HOOKED, *train, TERM_AT=at, KILL="SIGKILL")
    assert first.returncode == 0, first.stderr
    assert f"\nStopped after step {stopped}, saved\n" in first.stdout
    assert list(losses(first.stdout)) == [(1, step) for step in range(1, stopped + 1)]
    assert checkpoint.steps(tmp_path)[0] == stopped

    second = ranks(2, PREEMPTIBLE, *train, "--resume")
    assert second.returncode == 0, second.stderr
    assert f"\nResumed after step {stopped}\n" in second.stdout
    assert list(losses(second.stdout)) == [(1, step) for step in range(stopped + 1, 16)]
    assert_same_curve(first.stdout + second.stdout, one_process)


@pytest.mark.long
def test_a_later_epoch(tiny, tmp_path):
    """Killed in its second epoch, a run resumes after the last checkpoint of that epoch, with the
    images that it would have read. Two slow steps are enough to write one."""
    train = ["--data-dir", tiny, "--epochs", 2, "--batch-size", 20, "--log-every", 1]
    train += ["--save-every", 8]
    whole = ranks(2, PREEMPTIBLE, *train, "--checkpoint-dir", tmp_path / "whole")
    train += ["--checkpoint-dir", tmp_path]
    killed = ranks(2, HOOKED[0], 0.3, PREEMPTIBLE, *train, KILL_AT=25)
    assert killed.returncode != 0
    resumed = ranks(2, PREEMPTIBLE, *train, "--resume")
    assert "\nResumed after step 23\n" in resumed.stdout, resumed.stderr
    expected = losses(whole.stdout)
    assert list(losses(resumed.stdout)) == list(expected)[23:]
    parts = losses(killed.stdout) | losses(resumed.stdout)
    assert parts == pytest.approx(expected, rel=2e-4)


def test_a_signal_in_the_last_evaluation(tiny, tmp_path):
    """All is saved, and torchrun will say that the ranks have failed: the job is requeued, and then
    it only evaluates."""
    train = ["--data-dir", tiny, "--epochs", 1, "--checkpoint-dir", tmp_path]
    first = ranks(2, *HOOKED, *train, KILL="SIGTERM")
    assert "\nStopped after step 4, saved\n" in first.stdout, first.stderr
    second = ranks(2, PREEMPTIBLE, *train, "--resume")
    assert not losses(second.stdout) and "\nFinished: step=" in second.stdout, second.stderr
    assert evaluations(second.stdout) == evaluations(first.stdout)


@pytest.mark.slurm
def test_a_stop_on_a_full_disk(tiny, tmp_path):
    """Is no stop that can be resumed: it fails, and says so. What was saved stays."""
    train = ["--data-dir", tiny, "--epochs", 9, "--checkpoint-dir", tmp_path]
    with mounted_in_memory(tmp_path, "15m"):
        done = ranks(2, *HOOKED, *train, TERM_AT=7)
        assert checkpoint.steps(tmp_path) == [4]
    assert done.returncode == 1 and "Stopped" not in done.stdout, done
    assert re.search(
        r"^warning: step 8 is not saved, older ones stay, \d MiB are", done.stderr, re.M
    )
    assert done.stdout.endswith("\nThe last steps are not saved\n")


@pytest.mark.slurm
def test_a_disk_that_is_full_from_the_start(tiny, tmp_path):
    """No run of days without a checkpoint."""
    train = ["--data-dir", tiny, "--epochs", 9, "--checkpoint-dir", tmp_path]
    with mounted_in_memory(tmp_path, "5m"):
        done = ranks(2, PREEMPTIBLE, *train)
    said = f"no checkpoint can be written to {tmp_path}, so the run ends\n"
    assert done.returncode == 1 and done.stderr.endswith(said), done
    assert len(evaluations(done.stdout)) == 1 and "Traceback" not in done.stderr
