"""aux/ledger.py: the steps and the hours of a job, over its starts."""

import json
import os
import sys
from datetime import datetime

import ledger
from slurm import run, stand_ins, write_heartbeat


def test_the_ledger_of_two_starts():
    """Of two ranks. The second start resumes at step 51, and 10 steps were lost."""
    beats = []
    for first, last, waited in ((1, 60, (0, 0)), (51, 150, (10, 40))):
        for rank in (0, 1):
            beat = {"rank": rank, "host": f"n{rank}", "world_size": 2, "first_step": first}
            beat |= {"step": last, "began": 1000.0, "time": 2800.0}
            beats.append(beat | {"counts": [100, 80, waited[rank]]})
    found = ledger.ledger([beats[:2], beats[2:]], ["start 1: status 1, n1 first"])
    assert found["rank_hours"] == 2.0 and found["share_in_steps"] == 0.8
    assert found["steps"] == 150 and found["steps_lost"] == 10
    assert found["slowest"] == {"rank": 0, "host": "n0", "waits": 0.125}
    assert found["others_wait"] == 0.5


def test_what_a_restart_costs():
    """The first one by a requeue, the second within the job. Slurm's record has two starts."""
    beats = []
    for began, first, last in ((120, 150, 400), (560, 580, 900), (940, 945, 1000)):
        two = [{"began": began - slow, "first_time": first, "time": last} for slow in (0, 10)]
        beats.append(two)
    assert ledger.phases(beats, [100, 530]) == [
        {"meet": 20, "first_step": 30},
        {"queue": 130, "meet": 30, "first_step": 20},
        {"meet": 40, "first_step": 5},
    ]
    # Without accounting, and with heartbeats that do not say when the first step began.
    for beat in (beat for two in beats for beat in two):
        del beat["first_time"]
    assert ledger.phases(beats, [530])[0] == {}
    assert ledger.phases(beats, [530])[1] == {"queue": 130, "meet": 30}


def test_when_slurm_started_the_job(monkeypatch, tmp_path):
    """By sacct, or without accounting by scontrol, in this machine's time."""
    refuses = "echo Slurm accounting storage is disabled >&2; exit 1"
    shows = "echo '   SubmitTime=2026-11-28T13:00:00'; echo '   StartTime=2026-11-28T14:00:00 End'"
    path = stand_ins(tmp_path / "bin", {"sacct": refuses, "scontrol": shows})
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    last = datetime(2026, 11, 28, 14).timestamp()
    assert ledger.slurm_starts("7") == [last]
    # A user's own format is for a terminal.
    sacct = "[[ $SLURM_TIME_FORMAT ]] || printf '2026-11-28T%s:00\n' 13:30 14:00"
    stand_ins(path, {"sacct": sacct})
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    assert ledger.slurm_starts("7") == [last - 1800, last]


def test_a_slurm_that_hangs(commands_hang):
    """At the end of a job, which would wait for it."""
    assert ledger.slurm_starts("7") == []


def test_what_the_ledger_cannot_show(tmp_path):
    """One sentence. A program in a job has heartbeats of its own."""
    write_heartbeat(tmp_path / "log/7/server/ranks-0", 0)
    said = {
        (): "usage: python aux/ledger.py JOB, or JOB/PROGRAM",
        ("8",): "ledger.py: no heartbeats in log/8",
        ("7",): "ledger.py: no heartbeats in log/7, but of its programs server",
    }
    for arguments, sentence in said.items():
        done = run(sys.executable, ledger.__file__, *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (1, f"{sentence}\n")


def test_ledger_counts_starts(tmp_path):
    """As numbers: a run with spare nodes has ranks-10000 and so on."""
    for start, first in ((0, 1), (2, 11), (10, 21), (10000, 31)):
        values = {"world_size": 1, "host": f"n{start}", "first_step": first, "step": first + 11}
        write_heartbeat(tmp_path / f"log/7/ranks-{start}", 0, **values)
    done = run(sys.executable, ledger.__file__, "7", cwd=tmp_path)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["starts"] == 4 and found["slowest"]["host"] == "n10000", done
    assert found["steps"] == 42 and found["steps_lost"] == 6
