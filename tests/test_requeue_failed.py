"""requeue_failed.sh and .py: a job that has failed runs again if it has saved, and never loops."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

import job_processes
import requeue_failed
from copies import copy_file
from slurm import LAUNCHERS, REPOSITORY, environment, run, stand_ins, wait_for


def job_shell(folder: Path, lines: str, requeues: int = 0, state: str = "RUNNING"):
    """A job's shell that ends with status 5, in a folder with log/7 and aux."""
    programs = {"squeue": f"echo {state} {requeues}", "scontrol": 'echo "$*" >>asked'}
    path = f"{stand_ins(folder / 'bin', programs)}:{environment()['PATH']}"
    if not (folder / "aux").exists():
        (folder / "aux").symlink_to(REPOSITORY / "aux")
        (folder / "log/7").mkdir(parents=True)
    env = environment(PATH=path, SLURM_JOB_ID=7, SLURM_RESTART_COUNT=requeues)
    return run("bash", "-euc", f"{lines}; exit 5", cwd=folder, env=env)


SAVED = ("checkpoint.pt", "step_5/0.distcp")
NOT_SAVED = ("old.pt", "owner", "checkpoint.pt.part", ".step_5/0.distcp", "step_5/.metadata")
NOT_SAVED += ("train.log", "events.out.tfevents.1")
# Of work_list.py: a job without an answer would run again for ever.
NOT_SAVED += (".000000000.1.begun", ".list")


@pytest.mark.parametrize("file", SAVED + NOT_SAVED)
def test_what_counts_as_saved(file, tmp_path):
    """In a folder or a link to it, and for requeue_failed.sh, which keeps the status."""
    saved = file in SAVED
    (tmp_path / "a folder" / file).parent.mkdir(parents=True)
    (tmp_path / "link").symlink_to("a folder")
    lines = 'touch "a folder/old.pt"; sleep 0.02; source aux/launch/requeue_failed.sh "a folder"'
    if file != "old.pt":
        lines += f'; sleep 0.02; touch "a folder/{file}"'
    done = job_shell(tmp_path, lines)
    said = "Failed with status 5, and requeued: it resumes by itself\n"
    assert done.stderr == (said if saved else "Not requeued: the run has saved nothing\n")
    assert done.returncode == 5
    assert (tmp_path / "asked").exists() == saved

    started = tmp_path / "log/7/started"
    assert requeue_failed.has_saved(tmp_path / "link", started) == saved
    assert requeue_failed.has_saved(tmp_path / "absent", started) is False
    if file in ("checkpoint.pt", "old.pt"):
        assert requeue_failed.has_saved(tmp_path / "a folder" / file, started) == saved
        (tmp_path / "last.pt").symlink_to(f"a folder/{file}")
        assert requeue_failed.has_saved(tmp_path / "last.pt", started) == saved


def test_the_end_is_noted(tmp_path):
    """By env.sh."""
    lines = 'note_end() { echo "$1"; }; source aux/launch/requeue_failed.sh saves'
    done = job_shell(tmp_path, f"{lines}; sleep 0.02; touch saves")
    assert (done.returncode, done.stdout) == (5, "5\n")
    assert done.stderr == "Failed with status 5, and requeued: it resumes by itself\n"


def test_three_requeues_without_a_save(tmp_path):
    """A job that has saved once is requeued four times."""
    lines = "source aux/launch/requeue_failed.sh saves; sleep 0.02; [[ -e saves ]] || touch saves"
    said = [job_shell(tmp_path, lines, requeues).stderr for requeues in range(5)]
    assert all("status 5, and requeued" in line for line in said[:4]), said
    assert said[4] == "Not requeued: three requeues without a save\n"


@pytest.mark.parametrize(("ends", "state"), [("exit 0", "RUNNING"), ("exit 5", "COMPLETING")])
def test_a_job_that_is_not_requeued(ends, state, tmp_path):
    """One that has finished, and one that scancel ends."""
    lines = f"source aux/launch/requeue_failed.sh saves; sleep 0.02; touch saves; {ends}"
    done = job_shell(tmp_path, lines, state=state)
    assert f"exit {done.returncode}" == ends and done.stderr == ""
    assert not (tmp_path / "asked").exists()


def slurm_answers(monkeypatch, *answers):
    """Instead of Slurm, one answer after the other. Returns the commands."""
    asked, answers = [], iter(answers)

    def slurm(*command: str) -> str | None:
        asked.append(command)
        return next(answers)

    monkeypatch.setattr(requeue_failed, "slurm", slurm)
    monkeypatch.setattr(requeue_failed.time, "sleep", lambda seconds: None)
    return asked


@pytest.mark.parametrize(
    ("answers", "running"),
    [
        (["RUNNING             2"], True),
        (["RUNNING             3"], False),
        (["COMPLETING          2"], False),
        ([None, None, "RUNNING 2"], True),
        ([None, "PENDING 3"], False),
        ([None] * 5, True),
    ],
)
def test_whether_the_job_still_runs(answers, running, monkeypatch):
    """This start of it. A Slurm that does not answer is asked five times."""
    job = "SLURM_JOB_ID=9 SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_ID=3 SLURM_RESTART_COUNT=20004 "
    for name, value in (word.split("=") for word in f"{job}JOB_RESTARTS=2".split()):
        monkeypatch.setenv(name, value)
    asked = slurm_answers(monkeypatch, *answers)
    assert requeue_failed.is_running() == running
    assert len(asked) == len(answers) and "--jobs=7_3" in asked[0]


def test_a_busy_slurm_is_asked_again_to_requeue(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "started").touch()
    time.sleep(0.02)
    (tmp_path / "saved").touch()
    asked = slurm_answers(monkeypatch, "RUNNING 0", None, "RUNNING 0", "")
    requeue_failed.requeue(tmp_path, 5, tmp_path / "saved")
    assert asked[1] == asked[3] == ("scontrol", "requeue", "7")
    assert "status 5, and requeued" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (["RUNNING 0", *[None, "RUNNING 0"] * 4], "Not requeued: Slurm refuses, see above\n"),
        # Slurm has requeued it although its answer was lost.
        (["RUNNING 0", None, "PENDING 1"], ""),
    ],
)
def test_a_slurm_that_does_not_requeue(answers, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (tmp_path / "started").touch()
    os.utime(tmp_path / "started", (0, 0))
    (tmp_path / "saved").touch()
    asked = slurm_answers(monkeypatch, *answers)
    requeue_failed.requeue(tmp_path, 5, tmp_path / "saved")
    assert len(asked) == len(answers) and capsys.readouterr().err == said


def test_what_is_no_save_of_this_run(tmp_path):
    """A link in the folder to a new file of others, and anything if the start was not noted."""
    (tmp_path / "saves").mkdir()
    (tmp_path / "new").touch()
    (tmp_path / "saves/linked.pt").symlink_to("../new")
    (tmp_path / "started").touch()
    os.utime(tmp_path / "started", (0, 0))
    assert not requeue_failed.has_saved(tmp_path / "saves", tmp_path / "started")
    (tmp_path / "saves/own.pt").touch()
    assert requeue_failed.has_saved(tmp_path / "saves", tmp_path / "started")
    assert not requeue_failed.has_saved(tmp_path / "saves", tmp_path / "absent")


@pytest.mark.matrix
def test_a_failed_job_is_requeued_if_it_has_saved(cluster, tiny, tmp_path):
    """By the line that all plain launchers have."""
    for name in [*LAUNCHERS.values(), "run_script.sh"]:
        assert (REPOSITORY / name).read_text().count("\n#source aux/launch/requeue_failed.sh") == 1
    requeues = "aux/launch/requeue_failed"
    for name in ("env.sh", "torchrun.sh", f"{requeues}.sh", f"{requeues}.py"):
        copy_file(name, tmp_path)
    for name in ("distributed", "tests", ".venv"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    text = (REPOSITORY / LAUNCHERS["torchrun"]).read_text()
    (tmp_path / "launch.sh").write_text(text.replace("\n#source aux/", "\nsource aux/"))

    command = ["--gpus-per-node=1", "--cpus-per-task=1", "--output=log.out", "launch.sh"]
    command += ["tests/scripts/slowly.py", 0.3, "distributed/train_preemptible.py"]
    command += ["--epochs", 2, "--batch-size", 20, "--log-every", 1, "--save-every", 5]
    command += ["--data-dir", tiny]
    job, log = cluster.submit(*command, cwd=tmp_path, env={"ALWAYS": 1}), tmp_path / "log.out"
    wait_for(lambda: log.exists() and "epoch=1 step=7/" in log.read_text(), 120)
    fault_at = time.monotonic()
    os.kill(max(job_processes.python(job, "slowly.py")), signal.SIGKILL)
    wait_for(lambda: re.search(r"(?s)^Resumed after .*^epoch", log.read_text(), re.M), 120)
    print(f"rank killed, requeued: {time.monotonic() - fault_at:.0f} s")
    ended = cluster.wait(job, 240)
    assert ended.state == "COMPLETED" and "\nResumed after step 5\n" in ended.log, ended.log
    assert ended.log.count("and requeued: it resumes by itself\n") == 1, ended.log
