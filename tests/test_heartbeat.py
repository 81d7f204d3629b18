"""heartbeat.py: the rank that hangs is named, and what others write there is not believed."""

import contextlib
import fcntl
import json
import math
import os
import re
import runpy
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import check_ranks
import heartbeat
import job_processes
import ledger
from ddp_runs import submit
from slurm import REPOSITORY, environment, heartbeat_of, run, wait_for, write_heartbeat

WATCH = REPOSITORY / "aux/watch_job.py"


@pytest.mark.parametrize(("device", "statuses"), [("cpu", [0]), ("cuda", [])])
def test_the_last_line_of_a_script(device, statuses, monkeypatch, capsys):
    """On a CPU Python does not shut down, but all that was printed is there."""
    left, flushed = [], []
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.append("group"))
    monkeypatch.setattr(os, "_exit", left.append)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "flush", lambda stream=stream: flushed.append(stream))
    heartbeat.leave(torch.device(device))
    assert left == ["group", *statuses] and flushed == [sys.stdout, sys.stderr]


def test_the_least_memory_until_the_next_moment(monkeypatch):
    """A moment's own, even if the memory is given back later."""
    has = iter([9, 7, 5])
    monkeypatch.setattr(heartbeat, "main_memory", lambda: next(has))
    monkeypatch.setattr(heartbeat, "gpu_memory", lambda: [None, 3])
    memory = heartbeat.Memory()
    for now in (10, 20, 30):
        memory.look(now, paused=False)
    never = [10**9, 10**9]
    assert [mark[3:] for mark in memory.marks] == [[9, 3, 7, 3], [7, 3, 5, 3], [5, 3, *never]]


@pytest.mark.parametrize("module", [heartbeat, check_ranks])
def test_a_node_has_slurm_s_name(module, monkeypatch):
    """Which --exclude takes, and which need not be the host's."""
    for name, host in (("n7", "n7"), ("", socket.gethostname())):
        monkeypatch.setenv("SLURMD_NODENAME", name)
        assert runpy.run_path(module.__file__)["HOST"] == host


def test_a_rank_that_hangs_is_named(cluster, tmp_path):
    """Rank 0 waits outside torch.distributed: DDP broadcasts BatchNorm's buffers from it."""
    number = submit(cluster, "srun", tmp_path, STUCK="1", AFTER="8")
    log = tmp_path / "log.out"
    said = (
        r"^\[Rank 0 on (\S+)\] no step for \d+ s\. First to look at: rank 1 on (\S+) \(step 7\), "
    )
    said += r"which is in\n(    .*\n)*    <module> \(\S+train\.py:\d+\)$"
    wait_for(lambda: log.exists() and re.search(said, log.read_text(), re.M), 120)
    found = re.search(said, log.read_text(), re.M)
    assert found[1] != found[2]
    watched = run(sys.executable, WATCH, number, "--after", 5, cwd=tmp_path)
    assert watched.returncode == 1, watched.stdout
    assert re.search(rf"^   1  {found[2]} +7 +\d s  <module> \(\S+train\.py:", watched.stdout, re.M)
    assert f"\n{found[2]}: rank 1 keeps the others waiting\n" in watched.stdout, watched.stdout
    assert watched.stdout.endswith(f"sbatch --exclude={found[2]}\n"), watched.stdout
    cluster.exec("scancel", number)
    # Slurm kills the rank that hangs only after KillWait's 30 seconds.
    for rank in job_processes.python(number, "train.py"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    job = cluster.wait(number)
    assert job.log.count("(step 7), which is in") == 1, job.log
    # Its heartbeats are seconds old. Slurm forgets a job some minutes after its end.
    forgotten = 999999999
    shutil.copytree(tmp_path / f"log/{number}", tmp_path / f"log/{forgotten}")
    for ended in (number, forgotten):
        watched = cluster.exec(sys.executable, WATCH, ended, cwd=tmp_path)
        said = f"Job {ended} is CANCELLED, because somebody cancelled it.\n"
        assert watched.returncode == 1 and watched.stdout.startswith(said), watched


LOOK = "no step for 65 s. First to look at: rank 0 on n0 (step 5), "
SILENT = "which sends no heartbeat"
NONE = "ranks have sent no heartbeat"


@pytest.mark.parametrize(
    ("rank", "of", "seconds", "waits", "says"),
    [
        # By hand, and on a node of its own. Otherwise rank 0 speaks.
        (1, 2, [65, 65], True, None),
        (1, 2, [20, 65], True, f"{LOOK}{SILENT}, last seen in\n    f"),
        # A node with two ranks is frozen: the first one that is not speaks.
        (3, 4, [20, 20, 65, 65], True, None),
        (
            2,
            4,
            [20, 20, 65, 65],
            True,
            f"{LOOK}rank 1 on n0 (step 5), {SILENT}, last seen in\n    f",
        ),
        # With NCCL they wait in a line of their own, such as `loss.item()`.
        (0, 2, [65, 65], False, "no step for 65 s: all ranks are in main (train.py:7)"),
        # An earlier run in this allocation had four ranks.
        (0, 2, [65, 65, 20, 20], False, "no step for 65 s: all ranks are in main (train.py:7)"),
        (0, 3, [65, None, 65], True, f"no step for 65 s: 1 of 3 {NONE}, the first is rank 1"),
        (0, 3, [None, 65, 65], True, f"no step for 65 s: 1 of 3 {NONE}, the first is rank 0"),
    ],
)
def test_who_speaks_of_whom(rank, of, seconds, waits, says, tmp_path, monkeypatch, capsys):
    """Of ranks that are in step 5 for so many seconds, two on each node. That, and no more."""
    monkeypatch.setenv("MASTER_PORT", "61000")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "log/local/ranks-61000"
    folder.mkdir(parents=True)
    for other, its in enumerate(seconds):
        values = {"world_size": len(seconds), "host": f"n{other // 2}", "seconds_in_step": its}
        values |= {"waits": waits, "frame": "main (train.py:7)"}
        # Who is not late has not written since. One has begun to write.
        beat = heartbeat_of(other, **values, time=time.time() - (65 - (its or 0)))
        (folder / str(other)).write_text(beat if its else "")
    heartbeat.Heart(60, rank, world_size=of).report(65)
    said = f"[Rank {rank} on {heartbeat.HOST}] {says}\n" if says else ""
    assert capsys.readouterr().err == said


def test_a_rank_that_evaluates_alone_is_not_silent(tmp_path, monkeypatch, capsys):
    """It counts its batches, and the other one waits."""
    monkeypatch.setenv("MASTER_PORT", "61000")
    monkeypatch.chdir(tmp_path)
    heart = heartbeat.Heart(60, 1, world_size=2)
    for rank, its in enumerate((0.1, 65)):
        values = {"seconds_in_step": its, "waits": rank == 1, "stack": [f"f{rank}"]}
        write_heartbeat(heart.folder, rank, **values)
    heart.report(65)
    said = capsys.readouterr().err
    assert "First to look at: rank 0 on n0 (step 5), which is in\n    f0" in said, said


def test_the_others_wait_for_the_few():
    """With NCCL nobody waits in torch: most ranks are at one place."""
    beats = [{"step": 5, "waits": False, "stack": [name], "rank": name} for name in "ffg"]
    assert [beat["rank"] for beat in heartbeat.holds_up(beats)] == ["g"]


def test_how_often_a_heart_beats(monkeypatch):
    """All ranks write 30 times a second at most. Who is late is known before a run ends."""
    assert [heartbeat.Heart(60, 0, n).interval for n in (1, 60, 4096)] == [2, 2, 4096 / 30]
    monkeypatch.setenv("HEARTBEAT_LIMIT", "30")
    assert heartbeat.Heart(60, 0, 2).after == 30
    monkeypatch.setenv("HEARTBEAT_LIMIT", "0")
    heart = heartbeat.Heart(60, 0, 2)
    assert (heart.after, heart.limit) == (60, math.inf), "no limit"


@pytest.mark.parametrize(
    ("waited", "named"), [([0.03, 0.8, 0.9], [0]), ([0.7, 0.8, 0.9], []), ([0.1, None, 0.9], [])]
)
def test_the_rank_that_waits_less_holds_the_others_back(waited, named):
    beats = [{"rank": rank, "waited": share} for rank, share in enumerate(waited)]
    assert [beat["rank"] for beat in heartbeat.holds_back(beats)] == named


IN_A_LIBRARY = ("wait", os.path.join(os.path.dirname(os.__file__), "threading.py"), 5)


@pytest.mark.parametrize(
    ("calls", "waits"),
    [
        ([("all_reduce", "/v/site-packages/torch/distributed/distributed_c10d.py", 70)], True),
        # With NCCL the ranks that ask each other whether to stop wait in the line that reads it.
        ([("asked", "/x/preemption.py", 70)], True),
        # For its own save, which all others wait for as well
        ([IN_A_LIBRARY, ("finish", "/x/checkpoint.py", 70)], True),
        ([IN_A_LIBRARY, ("forward", "/x/model.py", 70)], False),
        ([("forward", "/x/model.py", 70), ("save", "/x/checkpoint.py", 70)], False),
    ],
)
def test_where_a_rank_waits(calls, waits):
    assert heartbeat.describe([*calls, ("<module>", "/x/train.py", 9)])[2] is waits


def test_a_main_thread_that_has_ended(monkeypatch):
    """While C code prints its error, it has no frame. The thread of heartbeats goes on."""
    monkeypatch.setattr(sys, "_current_frames", dict)
    assert heartbeat.main_stack() == ([], "-", False)


@pytest.mark.parametrize(("age", "silent"), [(100, []), (130, []), (145, [1])])
def test_a_rank_of_a_large_job_is_silent_later(age, silent, tmp_path, monkeypatch):
    """Of 4,096 ranks each writes every 137 s."""
    monkeypatch.chdir(tmp_path)
    heart = heartbeat.Heart(60, 0, world_size=4096)
    write_heartbeat(heart.folder, 1, world_size=4096, time=time.time() - age)
    assert [its["rank"] for its in heart.look()[1]] == silent


STRANGE = {
    "1": "{}",
    "2": "[]",
    "3": "[" * 60_000,
    "4": heartbeat_of(4, world_size=10**9),
    "5": heartbeat_of(5, world_size=9, time=1e13),
    "6": heartbeat_of(6, world_size=9).replace('"step": 5', '"step": 1e400'),
    "7": heartbeat_of(7, world_size=9, time="now"),
    "8": heartbeat_of(8, world_size=9, host="n0;rm -r ~"),
    "9": heartbeat_of(9, world_size=10, frame=["f"] * 2, stack=[1]),
    "10": heartbeat_of(11, world_size=12),
    "12": heartbeat_of(12, world_size=13, counts=[1]),
    "20": heartbeat_of(20, world_size=21, counts=[1, 1, 1, 1]),
    "13": heartbeat_of(13, world_size=14, stack=["x" * 70_000]),
    "14": heartbeat_of(14, world_size=15).replace("5", "5" * 5000, 1),
    "-1": heartbeat_of(-1),
    "21": heartbeat_of(21, world_size=22, memory=[[1] * 6]),
    "22": heartbeat_of(22, world_size=23, memory=[[1] * 6 + ["1"]]),
    "23": heartbeat_of(23, world_size=24, memory={"1": 1}),
    "27": heartbeat_of(27, world_size=28, memory=[[1] * 7, [1] * 6]),
    "24": heartbeat_of(24, world_size=25, gpus=[1, "2"]),
    "25": heartbeat_of(25, world_size=26, began=9e11),
    "26": heartbeat_of(26, world_size=27, time=-9e11),
}


@pytest.fixture
def strange(tmp_path, monkeypatch) -> Path:
    """A folder of heartbeats in which others may write as well. Rank 0's is well formed, and has
    what a terminal obeys, and what print() refuses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_PORT", "0")
    folder = tmp_path / "log/local/ranks-0"
    folder.mkdir(parents=True)
    for name, text in STRANGE.items():
        (folder / name).write_text(text)
    (folder / "15").write_bytes(b"\xff\xfe")
    (folder / "16").symlink_to("17")
    (folder / "17").symlink_to(tmp_path / "whole")
    (tmp_path / "whole").write_text(heartbeat_of(17, world_size=18))
    (folder / "19").mkdir()
    values = {"frame": "\x1b]52;c;bHM=\x07f", "stack": ["\x1b[2Jf\ud800\u202e"], "world_size": 20}
    (folder / "0").write_text(heartbeat_of(0, **values, seconds_in_step=65, waits=True))
    (tmp_path / "log/local/ranks-7").symlink_to("gone")
    return folder


def test_what_others_write_is_no_heartbeat(strange):
    os.mkfifo(strange / "18")
    # Nothing waits for the FIFO's writer, and nothing is a traceback.
    watched = run(sys.executable, WATCH, "local", cwd=strange.parents[2], timeout=60)
    assert watched.returncode == 1, watched
    assert watched.stderr == "19 of 20 ranks have sent none, first rank 1.\n"
    assert watched.stdout.splitlines()[1].endswith("  ?]52;c;bHM=?f"), watched.stdout
    counted = run(sys.executable, ledger.__file__, "local", cwd=strange.parents[2], timeout=60)
    assert json.loads(counted.stdout.splitlines()[-1])["ranks"] == 20, counted
    [beat] = heartbeat.read_beats(strange)
    assert beat["frame"] == "?]52;c;bHM=?f" and beat["stack"] == ["?[2Jf??"]


def test_what_others_write_ends_no_reports(strange, capsys):
    """Of ranks that hang. The last one looks at those before it."""
    says = "no step for 65 s: 19 of 20 ranks have sent no heartbeat, the first is rank 1\n"
    heartbeat.Heart(60, 0, world_size=20).report(65)
    assert capsys.readouterr().err == f"[Rank 0 on {heartbeat.HOST}] {says}"
    (strange / "19").rmdir()
    write_heartbeat(strange, 19, world_size=20, seconds_in_step=65)
    (strange / "0").write_text("{}")
    heartbeat.Heart(60, 19, world_size=20).report(65)
    says = says.replace("rank 1", "rank 0")
    assert capsys.readouterr().err == f"[Rank 19 on {heartbeat.HOST}] {says}"


@pytest.mark.parametrize("kind", ["link", "hard link", "FIFO", "linked folder"])
def test_a_heartbeat_overwrites_no_other_file(kind, tmp_path, monkeypatch, capsys):
    """Somebody who may write to log/ knows the job's number, and was here before it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    mine, folder = tmp_path / "mine", tmp_path / "log/123/ranks-0"
    mine.mkdir()
    (mine / "0").write_text("precious")
    folder.parent.mkdir(parents=True)
    if kind == "linked folder":
        folder.symlink_to(mine)
    else:
        folder.mkdir()
    if kind == "link":
        (folder / "0").symlink_to(mine / "0")
    if kind == "hard link":
        (folder / "0").hardlink_to(mine / "0")
    if kind == "FIFO":
        os.mkfifo(folder / "0")
    heart = heartbeat.Heart(60, 0, world_size=1)
    monkeypatch.setattr(heart, "write", lambda seconds: sys.exit())
    thread = threading.Thread(target=heart.beat, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and (mine / "0").read_text() == "precious"
    if kind == "linked folder":
        assert "warning: no heartbeats: " in capsys.readouterr().err
    else:
        assert (folder / "0").is_file() and not (folder / "0").is_symlink()
        os.close(heart.file)


def test_nobody_else_writes_heartbeats(tmp_path, monkeypatch):
    """With a umask that gives a group all rights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    before = os.umask(0)
    try:
        file = heartbeat.Heart(60, 0, world_size=1).open()
    finally:
        os.umask(before)
    assert os.fstat(file).st_mode & 0o777 == 0o644
    assert Path("log/123/ranks-0").stat().st_mode & 0o777 == 0o755
    os.close(file)


@pytest.fixture
def heart(monkeypatch, tmp_path):
    """It beats in a job so large that it rarely writes. Its lists have seconds from its start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heartbeat, "step", 1)
    monkeypatch.setattr(heartbeat, "expected", (0.0, None))
    heart, start = heartbeat.Heart(1, rank=0, world_size=4096), time.monotonic()
    heart.writes, heart.reports = [], []
    heart.write = lambda _: heart.writes.append(time.monotonic() - start)
    heart.report = lambda _: heart.reports.append(time.monotonic() - start)
    threading.Thread(target=heart.beat, daemon=True).start()
    return heart


def test_a_late_rank_writes_at_once(heart):
    """Otherwise rank 0 would take it for one that cannot write any more."""
    wait_for(lambda: heart.reports, 10)
    assert len(heart.writes) == 2 and heart.writes[1] <= heart.reports[0]
    # An NFS client passes it on at once.
    assert fcntl.fcntl(heart.file, fcntl.F_GETFL) & os.O_DSYNC


def test_a_job_that_slurm_suspends(monkeypatch, heart):
    """Goes on where it was: that time was no step."""
    jump = []
    clock = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + 600 * bool(jump))
    clock.sleep = lambda seconds: jump.append(1) or time.sleep(seconds)
    heart.report = heart.reports.append  # the seconds
    wait_for(lambda: heart.writes, 10)
    monkeypatch.setattr(heartbeat, "time", clock)
    wait_for(lambda: heart.reports, 10)
    assert heart.reports[0] < 600
    # It writes at its beginning, after that time and when it is late, and makes up for nothing.
    time.sleep(1)
    assert 2 <= len(heart.writes) <= 3


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_looks_for_slow_ones(rank, monkeypatch, tmp_path):
    """For all: in a large job thousands of them would read the files of thousands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heartbeat, "step", 0)
    heart, looks = heartbeat.Heart(0.4, rank, world_size=2), []
    # It outlives the test.
    heart.look, heart.report = lambda: looks.append(rank) or ([], []), lambda _: None
    threading.Thread(target=heart.beat, daemon=True).start()
    for heartbeat.step in range(20):
        time.sleep(0.05)
    assert bool(looks) == (rank == 0)


def test_a_long_save_is_no_hang(heart):
    """A rank that says so may take longer. Its next step ends that."""
    heartbeat.step = 2
    heartbeat.alive(3)
    wait_for(lambda: heart.reports, 10)
    assert heart.reports[0] > 4
    heartbeat.alive(100)
    time.sleep(1)
    heartbeat.step = 3
    wait_for(lambda: len(heart.reports) == 2, 10)


def test_what_counts_as_a_step(heart):
    """For the ledger: neither a save nor an evaluation. It has the time of the first one."""
    wait_for(lambda: heart.counts[1] > 0, 10)
    assert heart.first_step == 1 and heart.began <= heart.first_time <= time.time()
    heartbeat.step, before = 2, heart.counts[1]
    wait_for(lambda: heart.counts[1] > before + 2, 10)
    assert heart.first_step == 1
    heartbeat.alive(100)
    time.sleep(0.3)
    before = list(heart.counts)
    time.sleep(0.5)
    assert heart.counts[0] > before[0] and heart.counts[1] == before[1]


def test_how_often_a_rank_waits_for_others(monkeypatch, heart):
    """For the ledger as well, and who waits less than the others holds them back."""
    wait_for(lambda: heart.counts[1] > 2, 10)
    assert heart.counts[2] == 0 and not any(heart.waits)
    monkeypatch.setattr(heartbeat, "main_stack", lambda: (["f"], "f", True))
    before = heart.counts[1]
    wait_for(lambda: heart.counts[1] > before + 2, 10)
    assert 0 < heart.counts[2] < heart.counts[1] and heart.waits[-1]


def test_the_limit_counts_from_the_first_step(monkeypatch, heart):
    """A script may compile or load for longer."""
    ended = []
    monkeypatch.setattr(heartbeat, "step", None)
    heart.limit, heart.end = 0.5, lambda _: ended.append(heartbeat.step)
    time.sleep(1.5)
    assert not ended
    heartbeat.step = 1
    wait_for(lambda: ended, 10)


def test_batches_of_an_evaluation(heart):
    for _ in range(20):
        heartbeat.alive()
        time.sleep(0.1)
    assert not heart.reports
    wait_for(lambda: heart.reports, 10)


def test_a_short_heartbeat_replaces_a_long_one(monkeypatch, tmp_path):
    """One that is longer than all are by plan, of files deep in folders."""
    heart = heartbeat.Heart(60, rank=0, world_size=1)
    heart.file = os.open(tmp_path / "0", os.O_WRONLY | os.O_CREAT)
    for length in (2 * heart.size, 10):
        stack = ["f" * length]
        monkeypatch.setattr(heartbeat, "main_stack", lambda stack=stack: (stack, "-", False))
        heart.write(1)
        [beat] = heartbeat.read_beats(tmp_path)
        assert beat["stack"] == stack
    os.close(heart.file)
    assert heartbeat.read_beats(tmp_path / "a server that is away") == []


@pytest.mark.matrix  # on a machine that is busy with other tests, any rank may be slow
@pytest.mark.parametrize("work", [(10, 10, 10), (10, 10, 30)], ids=["healthy", "slow"])
def test_a_rank_that_holds_the_others_back_is_named(work, tmp_path):
    """While the run goes on, once; a healthy run says nothing."""
    env = environment(NPROC_PER_NODE=3, OMP_NUM_THREADS=1, PYTHONPATH=REPOSITORY / "distributed")
    command = [REPOSITORY / "torchrun.sh", REPOSITORY / "tests/scripts/works.py", *work]
    watched = []
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run, *command, env=env, cwd=tmp_path)
        while not job.done():
            watched.append(run(sys.executable, WATCH, "local", cwd=tmp_path).stdout)
            time.sleep(1)
    done = job.result()
    assert done.returncode == 0, done.stderr
    said = re.findall(
        r"^\[Rank 0 on \S+\] rank (\d) on \S+ holds the others back: .*", done.stderr, re.M
    )
    assert said == (["2"] if work[2] > 10 else []), done.stderr
    assert any("rank 2 on" in text for text in watched) == (work[2] > 10), watched


def test_a_rank_s_memory(monkeypatch):
    """Its own, and not that of a file which it maps; and on each GPU that it has used. Nothing
    here starts CUDA."""
    before = heartbeat.main_memory()
    kept = bytearray(b"x") * 200_000_000
    assert 190 < heartbeat.main_memory() - before < 260, len(kept)
    assert heartbeat.gpu_memory() == []
    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 3)
    cuda.memory_reserved = lambda number: [7_900_000_000, 0, 2**21][number]
    monkeypatch.setattr("torch.get_device_module", lambda: cuda)
    assert heartbeat.gpu_memory() == [7900, None, 2]
    cuda.is_initialized = lambda: False
    assert heartbeat.gpu_memory() == []
