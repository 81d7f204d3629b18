"""job_end.py and watch_job.py: why a job waits, how it ended, also when Slurm has forgotten it."""

import itertools
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

import job_end
from slurm import REPOSITORY, Cluster, stand_ins, wait_for, write_heartbeat

WATCH = REPOSITORY / "aux/watch_job.py"
LOGS = re.findall(
    r"^== (\w+) (\w+) (\w+) (\S+)\n((?:(?!==).*\n)*)",
    (REPOSITORY / "tests/ends.txt").read_text(),
    re.M,
)
# As scontrol 22.05.8 showed it, of a job whose name is a trap
RECORD = (
    "JobId=7 JobName=a JobState=X UserId=root(0) GroupId=root(0) MCS_label=N/A"
    " Priority=4294901759 Nice=0 Account=(null) QOS=(null) JobState={state} Reason={reason}"
    " Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode={code}"
    " RunTime=00:00:27 TimeLimit=01:00:00 TimeMin=N/A SubmitTime=2026-11-29T13:51:13"
    " EligibleTime=2026-11-29T13:51:13 AccrueTime=2026-11-29T13:51:13 StartTime={start}"
    " EndTime=2026-11-29T13:51:42 Deadline=N/A PreemptEligibleTime=2026-11-29T13:51:15"
    " PreemptTime={preempted} SuspendTime=None SecsPreSuspend=0 Scheduler=Main Partition=train"
    " AllocNode:Sid=node-1:0 NodeList=node-[1-2] NumNodes=2 NumCPUs=2 CPUs/Task=1"
    " TRES=cpu=2,mem=2400M,node=2,billing=2 Command=/home/me/my project/launch.sh ends.py"
    " WorkDir=/home/me/my project StdErr={log} StdIn=/dev/null StdOut={log} Power= \n"
)
DEFAULTS = {"state": "FAILED", "reason": "NonZeroExitCode", "code": "1:0", "restarts": 0}
DEFAULTS |= {"start": "2026-11-29T13:51:15", "preempted": "None", "log": "my log.out"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """In which jobs were submitted, and job 7 has begun."""
    monkeypatch.chdir(tmp_path)
    Path("log/7").mkdir(parents=True)
    Path("log/7/start-0").write_text("began 1795960276 node-[1-2] my log.out\n")
    return tmp_path


def note(line: str, start: int = 0):
    with Path(f"log/7/start-{start}").open("a") as file:
        file.write(f"{line}\n")


def answers(monkeypatch, said: dict[str, str | None]):
    """What Slurm's commands answer. Of node-[1-2] the names are those of its nodes."""
    monkeypatch.setattr(job_end, "ask", lambda command, *_: said.get(command))


CAUSES = {"segv_srun": "killed", "limit_torchrun": "time_limit", "node_lost": "node"}
CAUSES |= {"sentence": "exit", "requeued": "cancelled", "completed": None}


@pytest.mark.parametrize(
    ("name", "state", "reason", "code", "log"), LOGS, ids=[row[0] for row in LOGS]
)
def test_known_and_forgotten(name, state, reason, code, log, folder, monkeypatch):
    """Slurm's answer, and the same ten minutes later without accounting."""
    Path("my log.out").write_text(log)
    note(f"ended 1795960302 {code.partition(':')[0]}")
    preempted = "2026-11-29T14:09:44" if name == "preempted" else "None"
    record = {"state": state, "reason": reason, "code": code, "preempted": preempted}
    # It was cancelled before it began again.
    record["restarts"] = int(name == "requeued")
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | record)})
    known = job_end.look("7")
    answers(monkeypatch, {"scontrol": ""})
    forgotten = job_end.look("7")

    cause = CAUSES.get(name, name.partition("_")[0])
    cause = {"kill": "killed"}.get(cause, cause)
    assert (known["state"], known["ended"], known["cause"]) == (state, True, cause)
    assert known["known_by"] == ["scontrol", "log/7/start-0", "my log.out"]
    assert ("by" in known["unknown"]) == (cause == "cancelled")
    [start] = known["starts"]
    assert (start["start"], start["cause"], start["ended"]) == (0, cause, 1795960302)
    if name == "preempted":
        assert forgotten["cause"] == "terminated"  # Only Slurm knows why it sent SIGTERM.
    else:
        assert forgotten["cause"] == cause
    assert (forgotten["state"], forgotten["ended"]) == (state, True)
    assert "state" in forgotten["unknown"] and "state" not in known["unknown"]
    assert forgotten["first"] == known["first"] and forgotten["error"] == known["error"]
    assert job_end.sentences(known)[0].startswith(f"Job 7 is {state}")


def test_what_is_gone(folder, monkeypatch):
    """A job that was killed with its launcher, one that never was, and a Slurm that is silent."""
    Path("my log.out").write_text(LOGS[0][4] + "rank 0 runs\n")
    answers(monkeypatch, {"scontrol": ""})
    killed, never = job_end.look("7"), job_end.look("8")
    assert (killed["ended"], killed["state"], killed["cause"]) == (True, None, "killed")
    assert killed["unknown"] == ["state", "cause"]
    said = job_end.sentences(killed)
    assert said[0] == "Job 7 is over, because it was killed." and "noted no end" in said[2]
    assert "after exec" in said[3]
    assert never["ended"] is None and never["unknown"] == ["state", "ended", "cause"]
    where = f"Slurm does not know it, and there is no log/8 in {folder}."
    said = [
        f"Nobody knows whether job 8 has ended. {where}",
        "Next: check the number, and the folder.",
    ]
    assert job_end.sentences(never) == said
    answers(monkeypatch, {})
    silent = job_end.look("7")
    assert silent["ended"] is None and silent["known_by"][0] == "log/7/start-0"
    said = job_end.sentences(silent)
    assert said[0].endswith("has ended. Slurm does not answer.")
    assert said[-1] == "Next: ask again, on a login node."


def test_a_script_that_says_nothing(folder, monkeypatch):
    """Slurm knows its status, or which signal has ended its shell."""
    Path("my log.out").write_text("no module is loaded\n")
    for code, cause, what in (
        ("200:0", "exit", "it ended with status 200"),
        ("0:9", "killed", "it was killed by SIGKILL"),
        ("139:0", "killed", "it was killed by SIGSEGV"),
        ("143:0", "terminated", "Slurm or somebody told its ranks to stop"),
    ):
        answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | {"code": code})})
        found = job_end.look("7")
        assert found["cause"] == cause and "cause" not in found["unknown"]
        assert job_end.sentences(found)[0] == f"Job 7 is FAILED, because {what}."
        assert found["error"] == ("no module is loaded" if cause == "exit" else None)
    Path("my log.out").rename("elsewhere")
    assert job_end.look("7")["unknown"] == ["cause"]
    Path("elsewhere").rename("my log.out")
    note("ended 1795960302 3")
    answers(monkeypatch, {"scontrol": ""})
    said = job_end.sentences(job_end.look("7"))
    assert said[:2] == [
        "Job 7 is FAILED, because it ended with status 3.",
        "    Perhaps: no module is loaded",
    ]


REQUEUED = (
    "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-29T14:09:57 DUE TO JOB REQUEUE"
)


def test_a_launcher_without_env_sh_is_requeued(folder, monkeypatch):
    """Its log does not say where a start begins, but where one has ended."""
    Path("log/7/start-0").unlink()
    Path("my log.out").write_text(
        f"ImportError: the first\n{REQUEUED} ***\nValueError: the second\n"
    )
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | {"restarts": 1})})
    found = job_end.look("7")
    assert (found["cause"], found["error"]) == ("error", "ValueError: the second")
    assert [row["cause"] for row in found["starts"]] == ["stopped", "error"]
    Path("my log.out").write_text(f"{REQUEUED} ***\n")
    record = {"restarts": 1, "state": "PENDING", "reason": "BeginTime"}
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | record)})
    [row] = job_end.look("7")["starts"]
    assert (row["start"], row["cause"]) == (0, "stopped")


def test_a_start_that_fails_in_env_sh(folder, monkeypatch):
    """Before its line, so the log has only those of the start before."""
    note("began 1795960400 node-[1-2] my log.out", 1)
    lines = [
        "t: 1 ranks on n1, rank 0 at n1:6. Each node: ranks 1, GPUs 0 of 0, CPUs 1",
        f"{REQUEUED} ***",
        "srun: error: n1: task 0: Terminated",
        "env.sh: site.sh, line 3 failed: module load gone",
    ]
    Path("my log.out").write_text("\n".join(lines) + "\n")
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | {"restarts": 1})})
    found = job_end.look("7")
    assert (found["cause"], found["error"]) == ("exit", lines[-1])
    assert found["first"]["rank"] is None


def test_starts_that_save_nothing(folder, monkeypatch):
    """Without heartbeats: those that have begun since the newest checkpoint."""
    for number in (1, 2, 3):
        note(f"began {1795960276 + number} node-[1-2] my log.out", number)
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | {"restarts": 3})})
    assert job_end.look("7")["without_progress"] is None
    Path("checkpoints/7").mkdir(parents=True)
    Path("checkpoints/7/last.pt").touch()
    os.utime("checkpoints/7/last.pt", (0, 1795960277.5))
    found = job_end.look("7")
    assert found["without_progress"] == 2
    assert found["next"].startswith("the last 2 starts have saved nothing")
    record = {"restarts": 3, "state": "RUNNING"}
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | record)})
    assert job_end.look("7")["without_progress"] == 1


def test_what_only_slurm_knows(folder, monkeypatch):
    """Whether SIGTERM came from a preemption, and that a job has not begun at all."""
    log = {row[0]: row[4] for row in LOGS}["preempted"]
    for values, cause in (({}, "terminated"), ({"code": "0:53"}, "not_started")):
        Path("my log.out").write_text(log if cause == "terminated" else "")
        answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | values)})
        found = job_end.look("7")
        assert (found["cause"], found["first"]) == (cause, None)


# squeue's manual: the states of a job that waits, those of one that has nodes, and how one ends
STATES = {None: "PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT"}
STATES[False] = "RUNNING COMPLETING SUSPENDED STOPPED SIGNALING RESIZING STAGE_OUT"
STATES[True] = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED"
STATES[True] += " REVOKED TIMEOUT"
WHEN = [(state, ended) for ended, states in STATES.items() for state in states.split()]


@pytest.mark.parametrize(("state", "ended"), WHEN)
def test_every_state_of_slurm(state, ended, folder, monkeypatch):
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | {"state": state})})
    found = job_end.look("7")
    assert found["ended"] == bool(ended) and (found["reason"] is None) == (ended is not None)
    assert (found["cause"] is None) == (not ended or state == "COMPLETED")


def test_where_the_log_is(folder, monkeypatch):
    """Where Slurm says, where env.sh has noted it, or by its name."""
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | {"log": "slurm's"})})
    Path("launch.sh_7.out").touch()
    assert job_end.look("7")["log"] == "launch.sh_7.out"
    Path("my log.out").touch()
    assert job_end.look("7")["log"] == "my log.out"
    Path("slurm's").touch()
    assert job_end.look("7")["log"] == "slurm's"
    record = RECORD.format(**DEFAULTS | {"log": "%N_7"}).replace(
        " NumNodes", " BatchHost=n1 NumNodes"
    )
    answers(monkeypatch, {"scontrol": record})
    Path("n1_7").touch()
    assert job_end.look("7")["log"] == "n1_7"


def test_errors_in_a_file_of_their_own(folder, monkeypatch):
    """By --error."""
    header = "t: 2 ranks on node-[1-2], rank 0 at n:6. Each node: ranks 1, GPUs 0 of 0, CPUs 1\n"
    Path("my log.out").write_text(f"{header}step 7\n{header}step 9\n")
    note("began 1795960400 node-[1-2] my log.out", 1)
    its = f"[rank0]: OSError: the first\n{REQUEUED} ***\n[rank1]: ValueError: the second\n"
    Path("my log.err").write_text(its)
    record = RECORD.format(**DEFAULTS | {"restarts": 1})
    record = record.replace("StdErr=my log.out", "StdErr=my log.err")
    answers(monkeypatch, {"scontrol": record})
    found = job_end.look("7")
    assert (found["cause"], found["error"]) == ("error", "ValueError: the second")
    assert [row["cause"] for row in found["starts"]] == ["stopped", "error"]
    assert (found["log"], found["known_by"][-2:]) == ("my log.out", ["my log.out", "my log.err"])
    Path("my log.out").unlink()
    assert job_end.look("7")["error"] == "ValueError: the second"


def test_a_folder_that_is_closed(folder, monkeypatch):
    """Another user's."""
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS)})
    look = os.stat

    def refuse(path, **options):
        if str(path).endswith("my log.out"):
            raise PermissionError(13, "Permission denied", path)
        return look(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert job_end.look("7")["log"] is None


def test_who_has_cancelled_it(folder, monkeypatch):
    """Accounting knows, and why earlier starts ended."""
    note("began 1795960400 node-[1-2] my log.out", 1)
    said = "5|COMPLETED\n7|PREEMPTED\n7|CANCELLED by 0\n"
    for record in ("", RECORD.format(**DEFAULTS | {"state": "CANCELLED", "restarts": 1})):
        answers(monkeypatch, {"scontrol": record, "sacct": said})
        found = job_end.look("7")
        assert (found["state"], found["cause"], found["by"]) == ("CANCELLED", "cancelled", "root")
        assert [row["cause"] for row in found["starts"]] == ["preempted", "cancelled"]
        assert "by" not in found["unknown"] and "state" not in found["unknown"]
        assert job_end.sentences(found)[0] == "Job 7 is CANCELLED, because root cancelled it."
    answers(monkeypatch, {"scontrol": "", "sacct": "7|NODE_FAIL\n7|NODE_FAIL\n"})
    said = job_end.sentences(job_end.look("7"))
    assert (said[0], said[-1]) == (
        "Job 7 is NODE_FAIL, because it lost a node.",
        "Next: submit it again.",
    )


def test_why_a_job_waits(folder, monkeypatch):
    """Each reason of the page in words, and when Slurm expects to start it."""
    page = (REPOSITORY / "docs/troubleshooting.md").read_text()
    reasons = re.findall(r"`\((\w+)\.*\)`", page.partition("### A job stays in the queue")[2])
    assert len(reasons) > 60
    values = {"state": "PENDING", "code": "0:0", "restarts": 1}
    for reason in [*reasons, "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved"]:
        start = "Unknown" if reason == "Priority" else "2026-11-29T15:10:00"
        record = RECORD.format(**DEFAULTS | values | {"reason": reason, "start": start})
        answers(monkeypatch, {"scontrol": record})
        found = job_end.look("7")
        said = job_end.sentences(found)
        assert said[0].startswith(f"Job 7 is PENDING ({reason}). It waits ")
        assert "as docs/troubleshooting.md says" not in said[0]
        never = re.search(r"never(\.| \(|, if .scontrol)", row_of(page, reason)) is not None
        assert ("for ever" in said[0] or "never starts" in said[0]) >= never, said
        expected = "Slurm expects to start it at 2026-11-29 15:10:00."
        assert (expected in said) == (reason != "Priority")
        assert found["ended"] is False and [row["start"] for row in found["starts"]] == [0]


def row_of(page: str, reason: str) -> str:
    return next((row for row in page.splitlines() if f"`({reason}" in row), "")


def beats(start: int, first: int | None, last: int | None, **values: object):
    values = {"began": 1000.0, "first_time": 1010.0, "time": 1110.0} | values
    write_heartbeat(Path(f"log/7/ranks-{start}"), 0, first_step=first, step=last, **values)


def test_all_starts(folder, monkeypatch):
    """Steps, those that were done twice, and starts that got no further."""
    Path("checkpoints/7/step_40").mkdir(parents=True)
    Path("checkpoints/7/.step_50.part").mkdir()
    Path("checkpoints/7/latest").symlink_to("gone")
    Path("checkpoints/7_TRAINER/step_9").mkdir(parents=True)
    for number, steps in enumerate([(1, 51), (41, 91), (81, 91), (81, 91)]):
        beats(number, *steps)
        note(f"began {1000 + number} node-[1-2] my log.out", number)
        note(f"ended {1200 + number} 1", number)
    record = {"state": "RUNNING", "reason": "None", "restarts": 3}
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | record)})
    runs = job_end.look("7")
    # 11 steps of start 0 and of start 1, 11 of start 2, with two ranks; 50, 50 and 10 in 100 s
    hours = 2 * (11 / 0.5 + 11 / 0.5 + 11 / 0.1) / 3600
    assert (runs["step"], runs["steps_lost"]) == (91, 33)
    assert runs["hours_lost"] == round(hours, 3) and runs["without_progress"] == 1
    assert runs["starts"][-1]["ended"] is None and runs["next"] is None
    assert runs["saved"] == "checkpoints/7/step_40"
    assert job_end.look("7", "TRAINER")["saved"] == "checkpoints/7_TRAINER/step_9"

    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | {"restarts": 3})})
    ended = job_end.look("7")
    assert ended["without_progress"] == 2
    assert ended["next"].startswith("the last 2 starts got no further than step 91: look at")
    note("ended 1300 0", 3)
    record = {"state": "COMPLETED", "restarts": 3, "code": "0:0"}
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | record)})
    done = job_end.look("7")
    assert done["next"] is None and done["starts"][3]["cause"] is None
    said = job_end.sentences(ended)
    line = r"Start 1, \S+ \S+, 200 s, steps 41 to 91, 0\.5 steps a second, its log .*"
    assert re.fullmatch(line, said[2]), said
    assert "It did 33 steps twice, which cost 0.086 rank-hours." in said
    assert "The newest checkpoint is checkpoints/7/step_40." in said


def test_starts_of_a_script_of_one_s_own(folder, monkeypatch):
    """Without env.sh heartbeats count them, and the log's end is the last one's."""
    Path("log/7/start-0").unlink()
    for number in (0, 1, 2):
        beats(number, 1, 9)
    Path("mine_7.out").write_text("[rank1]: ValueError: bad sample 17\n")
    answers(monkeypatch, {"scontrol": ""})
    rows = job_end.look("7")["starts"]
    expected = [(0, "unknown"), (1, "unknown"), (2, "error")]
    assert [(row["start"], row["cause"]) for row in rows] == expected


def test_starts_of_the_spare_launcher(folder, monkeypatch):
    """It numbers its own from 10000 times Slurm's number on."""
    note("ended 1795960302 1")
    note("began 1795960400 node-[1-2] my log.out", 1)
    Path("log/7/spare.json").write_text("{}")
    for number in (0, 101, 10000):
        beats(number, 1, 5)
    record = {"state": "RUNNING", "reason": "None", "restarts": 1}
    answers(monkeypatch, {"scontrol": RECORD.format(**DEFAULTS | record)})
    rows = job_end.look("7")["starts"]
    assert [(row["start"], row["status"]) for row in rows] == [(0, None), (101, 1), (10000, None)]
    assert rows[1]["ended"] == 1795960302 and rows[2]["began"] == 1795960400


def test_what_others_write(folder, monkeypatch):
    """Neither lines that env.sh does not write, nor a FIFO, a folder or a link to /dev/zero."""
    note("ended 99999999999999 1\nended 1 x\nbegan 1 a b\x1b[2Jc")
    os.mkfifo("log/7/start-1")
    Path("log/7/start-2").symlink_to("/dev/zero")
    Path("log/7/start-x").mkdir()
    Path("log/7/start-3").mkdir()
    Path("b\x1b[2Jc").write_text("[rank0]: \x1b[2JError: x\n")
    answers(monkeypatch, {"scontrol": ""})
    found = job_end.look("7")
    assert len(found["starts"]) == 4 and found["error"] == "?[2JError: x"
    assert "\x1b" not in "".join(job_end.sentences(found))


def asked(monkeypatch, folder: Path, lines: str) -> str | None:
    path = stand_ins(folder / "bin", {"scontrol": lines})
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return job_end.ask("scontrol", "show", "job", "7")


BUSY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def test_a_slurm_that_is_busy(monkeypatch, tmp_path):
    """It is asked four times at the most. One that refuses is not asked again."""
    monkeypatch.chdir(tmp_path)
    once = f"echo x >>asked; [[ $(wc -l <asked) == 3 ]] && echo yes || (echo '{BUSY}' >&2; exit 1)"
    once = once.replace("|| (", "|| { ").replace("exit 1)", "exit 1; }")
    assert asked(monkeypatch, tmp_path, once) == "yes\n"
    Path("asked").unlink()
    assert asked(monkeypatch, tmp_path, f"echo x >>asked; echo '{BUSY}' >&2; exit 1") is None
    assert len(Path("asked").read_text().split()) == 4
    said = "slurm_load_jobs error: Invalid job id specified"
    assert asked(monkeypatch, tmp_path, f"echo x >>asked; echo '{said}' >&2; exit 1") == ""
    assert len(Path("asked").read_text().split()) == 5
    said = "Slurm accounting storage is disabled"
    assert asked(monkeypatch, tmp_path, f"echo x >>asked; echo '{said}' >&2; exit 1") is None
    assert len(Path("asked").read_text().split()) == 6
    monkeypatch.setenv("PATH", str(tmp_path))
    assert job_end.ask("scontrol") is None


def test_a_slurm_that_is_down(commands_hang, monkeypatch):
    """Its commands try to connect for a minute by themselves, so they are not started again."""
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert job_end.ask("scontrol", "show", "job", "7") is None and pauses == [0]


def test_wait(folder, monkeypatch):
    """Until it has ended for good: not while it is requeued, which may begin as an end by the time
    limit, nor when Slurm is silent."""
    states = ["PENDING", "RUNNING", None, "TIMEOUT", "COMPLETING", "RUNNING", "FAILED", "FAILED"]
    # Each look at an end is ten seconds after the one before.
    clock = itertools.count(-5, 10)
    pauses, end = [], re.search(r" EndTime=(\S+)", RECORD)[1]
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "time", lambda: job_end.seconds(end) + next(clock))
    monkeypatch.setattr(job_end.shutil, "which", lambda name: name)
    said = iter([state and RECORD.format(**DEFAULTS | {"state": state}) for state in states])
    monkeypatch.setattr(job_end, "ask", lambda *command: next(said))
    job_end.wait_for_end("7")
    assert next(said, None) is None and pauses == [2, 5, 10, 20, 30, 60, 60]
    monkeypatch.setattr(job_end.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="no scontrol here"):
        job_end.wait_for_end("7")


def test_the_last_task_of_an_array(folder, monkeypatch):
    """Its id stands for the array, so Slurm also shows other tasks. By its place in the array a
    task has no folder."""
    with pytest.raises(SystemExit, match="7_1 is no job's number"):
        job_end.look("7_1")
    others = [
        RECORD.format(**DEFAULTS | {"state": "RUNNING"}).replace("JobId=7 ", f"JobId={job} ")
        for job in (6, 77)
    ]
    done = RECORD.format(**DEFAULTS | {"state": "COMPLETED", "code": "0:0"})
    answers(monkeypatch, {"scontrol": others[0] + done + others[1]})
    found = job_end.look("7")
    assert (found["state"], found["others"]) == ("COMPLETED", {"6": "RUNNING", "77": "RUNNING"})
    assert "Of the same array or job: 6 RUNNING, 77 RUNNING." in job_end.sentences(found)
    # --wait waits for all.
    record = job_end.ask_scontrol("7")
    assert not job_end.is_over(record)
    assert job_end.is_over(record | {"others": {"6": "FAILED"}})


RANK = """import atexit, os, signal, sys, time
def wait_for_log(tries=600):
    log = f"launch_slurm_to_torch.sh_{os.environ['SLURM_JOB_ID']}.out"
    while tries and "ValueError: bad sample 17" not in open(log).read():
        tries -= 1
        time.sleep(0.1)
how = sys.argv[1] if os.environ["RANK"] == "1" else "run"
print("rank", os.environ["RANK"], "runs", flush=True)
hold = []
while how == "memory" and len(hold) < 100:  # at most 1 GB, if nothing ends it
    hold.append(bytearray(b"x" * 10_000_000))
if how == "error":
    # srun may lose the last lines of a task that ends at once: docs/troubleshooting.md has a cure.
    atexit.register(wait_for_log)
    raise ValueError("bad sample 17")
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "exit":
    sys.exit(3)
while how == "run" and sys.argv[1] != "completed":
    time.sleep(1)
"""


@pytest.fixture
def own_cluster():
    """Whose nodes and settings this test may break."""
    cluster = Cluster(f"ends-{os.getpid()}", nodes=16, cpus=2, gpus=0)
    yield cluster
    cluster.down()


def test_every_end(own_cluster, tmp_path):
    """Each is caused, and known, also after Slurm has forgotten it."""
    cluster, jobs = own_cluster, {}
    for name in ("env.sh", "launch_slurm_to_torch.sh", "aux", "distributed"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "rank.py").write_text(RANK)
    size = ["--gpus-per-node=0", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=200"]

    def submit(name: str, how: str, *options: str):
        command = [*size, *options, "launch_slurm_to_torch.sh", "rank.py", how]
        jobs[name] = cluster.submit(*command, cwd=tmp_path)

    def watch(name: str, *options: str) -> dict:
        done = cluster.exec(sys.executable, WATCH, jobs[name], "--json", *options, cwd=tmp_path)
        assert done.stdout.count("\n") == 1, done
        return json.loads(done.stdout) | {"status": done.returncode}

    def is_known(name: str, expected: tuple, *options: str) -> dict:
        found = watch(name, *options)
        first = found["first"] and tuple(found["first"][key] for key in ("rank", "exit", "signal"))
        assert (found["state"], found["cause"], first) == expected, (name, found)
        return found

    ends = ["completed", "error", "exit", "kill", "memory"]
    for index, how in enumerate(ends):
        submit(how, how, f"--nodelist=node-[{8 + index % 2 * 2}-{9 + index % 2 * 2}]")
    submit("node", "run", "--no-requeue", "--nodelist=node-[1-2]")
    submit("first node", "run", "--no-requeue", "--nodelist=node-[3-4]")
    submit("time_limit", "run", "--nodelist=node-[5-6]")
    submit("cancelled", "run", "--nodelist=node-[5-6]")
    submit("preempted", "run", "--no-requeue", "--nodelist=node-[12-13]")
    submit("requeued", "run", "--nodelist=node-[14-15]")
    submit("not_started", "run", "--output=rank.py/x.out", "--nodelist=node-[14-15]")
    submit("held", "run", "--hold")
    running = ["node", "first node", "time_limit", "cancelled", "preempted", "requeued"]
    logs = {name: tmp_path / f"launch_slurm_to_torch.sh_{jobs[name]}.out" for name in running}

    def all_run() -> bool:
        return all(log.exists() and "rank 1 runs" in log.read_text() for log in logs.values())

    wait_for(all_run, 60)
    found = is_known("requeued", ("RUNNING", None, None))
    # Without heartbeats nobody knows whether all is well.
    assert found["ended"] is False and found["status"] == 1
    # With its first process a node loses all others.
    folder = Path(f"/run/slurm-cluster-{cluster.environment['CLUSTER']}")
    for node in ("node-2", "node-3"):
        os.kill(int((folder / f"{node}.pid").read_text()), signal.SIGKILL)
    cluster.exec("scontrol", "update", f"JobId={jobs['time_limit']}", "EndTime=now+1")
    cluster.exec("scancel", jobs["cancelled"])
    cluster.exec("scontrol", "requeue", jobs["requeued"])
    urgent = ["PartitionName=urgent", "Nodes=ALL", "PriorityTier=2", "State=UP"]
    assert cluster.exec("scontrol", "create", *urgent).returncode == 0
    taken = ["--partition=urgent", "--nodelist=node-[12-13]", "--nodes=2", "--exclusive"]
    assert cluster.sbatch(*taken, "--output=/dev/null", "--wrap=true").state == "COMPLETED"

    expected = {
        "completed": ("COMPLETED", None, None),
        "error": ("FAILED", "error", (1, 1, None)),
        "exit": ("FAILED", "exit", (1, 3, None)),
        "kill": ("FAILED", "killed", (1, None, 9)),
        "memory": ("FAILED", "memory", (1, None, 9)),
        "node": ("NODE_FAIL", "node", (None, None, None)),
        "first node": ("NODE_FAIL", "node", None),
        "time_limit": ("TIMEOUT", "time_limit", None),
        "cancelled": ("CANCELLED", "cancelled", None),
        "preempted": ("FAILED", "preempted", None),
        "not_started": ("FAILED", "not_started", None),
    }
    # Its ranks end at SIGTERM. Slurm 22.05 then calls it FAILED, and 26.05 PREEMPTED.
    state = watch("preempted", "--wait")["state"]
    assert state in ("FAILED", "PREEMPTED")
    expected["preempted"] = (state, "preempted", None)
    for name in expected:
        found = is_known(name, expected[name], "--wait")
        assert found["ended"] and found["status"] == (name != "completed")
    assert watch("error")["error"] == "ValueError: bad sample 17"
    assert watch("error")["first"]["node"] == "node-11"
    assert watch("node")["next"] == "submit it again, with --exclude=node-2"
    found = is_known("held", ("PENDING", None, None))
    assert found["reason"] == "JobHeldUser" and found["ended"] is False
    found = watch("requeued")
    assert not found["ended"] and found["starts"][0]["cause"] == "stopped"
    cluster.exec("scancel", jobs["requeued"])

    forget = "sed -i s/^MinJobAge=.*/MinJobAge=2/ $SLURM_CONF && scontrol reconfigure"
    assert cluster.exec("bash", "-c", forget).returncode == 0
    forgotten = [jobs[name] for name in expected]
    wait_for(lambda: not any(map(cluster.show, forgotten)), 60)
    # Without a log and a launcher it left nothing. SIGTERM alone does not say who sent it.
    expected["first node"] = (None, "killed", None)
    expected["preempted"] = ("FAILED", "terminated", None)
    expected["not_started"] = (None, None, None)
    for name in expected:
        found = is_known(name, expected[name])
        assert found["ended"] is (None if name == "not_started" else True)
        assert "state" in found["unknown"]
    never = cluster.exec(sys.executable, WATCH, 999999, cwd=tmp_path)
    assert never.returncode == 1 and "Slurm does not know it, and there is no log" in never.stdout
