"""The package resilience by itself, without a cluster: what it imports, the order of the data,
and its sentences."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

from conftest import REPOSITORY, cells, environment, free_port, read_metrics, run
from resilience import heartbeat, stop_request
from resilience.checkpoint_files import find_checkpoints, remove
from resilience.checkpoints import Checkpoints
from resilience.place import Place
from resilience.progress import Progress
from resilience.ranks import Ranks, find_ranks
from resilience.samplers import RunSampler
from resilience.sharded_checkpoints import measure_files

SCRIPT = REPOSITORY / "distributed/train_preemptible.py"
SMALL_MODEL = ["--layers", 1, "--heads", 2, "--width", 16, "--context", 16, "--batch-size", 4]
ALONE = Ranks(0, 0, 1, 1, "none")


def test_light_modules_import_no_torch():
    modules = "arguments, checksums, heartbeat, job, ranks, stop_request"
    code = f"import sys; from resilience import {modules}; sys.exit('torch' in sys.modules)"
    assert run(sys.executable, "-c", code, cwd=REPOSITORY / "distributed").returncode == 0


@pytest.mark.parametrize(("size", "batch_size", "world_size"), [(1003, 64, 4), (23, 6, 3)])
def test_run_sampler_is_distributed_sampler_over_all_epochs(size, batch_size, world_size):
    per_epoch = size // batch_size
    for rank in range(world_size):
        expected = []
        for epoch in (1, 2, 3):
            whole = DistributedSampler(range(size), world_size, rank, seed=7, drop_last=True)
            whole.set_epoch(epoch)
            expected += list(BatchSampler(whole, batch_size // world_size, drop_last=True))
        sampler = RunSampler(size, batch_size, range(3 * per_epoch), 7, rank, world_size)
        assert [indices.tolist() for indices in sampler] == expected
        first = per_epoch + per_epoch // 2  # in the midst of an epoch
        sampler.steps = range(first, len(expected))
        assert [indices.tolist() for indices in sampler] == expected[first:]
    with pytest.raises(ValueError, match=f"a batch of {size + 1} is larger than the data set"):
        RunSampler(size, size + 1, range(1), 0, 0, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run(ranks, tiny, tmp_path):
    """With one sentence and status 1, and no checkpoint of weights that are not finite."""
    launch = [sys.executable] if ranks == 1 else ["./torchrun.sh"]
    options = ["--learning-rate", 1e8, "--batch-size", 20, "--checkpoint-every", 3]
    options += ["--data-dir", tiny, "--checkpoint-dir", tmp_path / "out"]
    done = run(*launch, SCRIPT, *options, env=environment(NPROC_PER_NODE=ranks, OMP_NUM_THREADS=1))
    assert done.returncode == 1 and "Finished" not in done.stdout, done.stderr
    sentence = r"^\[Rank \d on .*the loss is (?:nan|inf) at step \d+: try a lower"
    assert len(re.findall(sentence, done.stderr, re.M)) == 1, done.stderr
    assert not list((tmp_path / "out").glob("*.pt"))


def test_the_time_that_saving_and_evaluation_take_is_in_no_throughput(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def take(seconds: float):
        clock[0] += seconds

    args = Namespace(checkpoint_dir=tmp_path, log_every=1, tensorboard=False, save_timeout=9)
    alone = Place(ALONE, torch.device("cpu"), 9)
    monkeypatch.setattr(Checkpoints, "save_files", lambda *_: take(100))
    checkpoints = Checkpoints(args, alone, {}, 4)
    progress = Progress(args, alone, "tokens", 1000, 0, 4, flops_per_unit=2e-6)
    for step in (1, 2):
        take(2)
        progress.add(step, torch.tensor(1.0))
        progress.log(step, 1)
        checkpoints.save(step, {})
        take(50)
        progress.log_evaluation(step, 1, val_loss=1.0)
    rates = [event["tokens_per_second"] for event in read_metrics(tmp_path) if "loss" in event]
    assert rates == [500, 500] and read_metrics(tmp_path)[0]["mfu"] == pytest.approx(1e-3)


# --- ranks that do not meet ---


def start_rank(rank: int, *arguments: object, cwd=REPOSITORY, **variables) -> subprocess.Popen:
    """One rank on this machine, as a launcher of somebody's own would start it."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
    place |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, *(str(argument) for argument in arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=environment(**place, **variables), **pipes)


@pytest.fixture
def command(tiny, tmp_path) -> list:
    return [SCRIPT, "--data-dir", tiny, "--batch-size", 12, "--checkpoint-dir", tmp_path / "out"]


def test_ranks_that_never_come_are_named(command):
    """With their hosts, which those know that are on the same node."""
    world = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": free_port()}
    command += ["--init-timeout", 8]
    with (
        start_rank(0, *command, **world) as first,
        start_rank(3, *command, **world, SLURMD_NODENAME="n2") as other,
    ):
        said = [rank.communicate(timeout=60)[1] for rank in (first, other)]
    named = r"\[Rank 0 on (\S+)\] 2 of 4 ranks did not join within 0:00:08: rank 1 on \1, rank 2 on"
    assert re.fullmatch(named + r" n2\n", said[0]) and said[1] == "", said
    assert first.returncode == other.returncode == 1


@pytest.mark.matrix
@pytest.mark.parametrize("agent", [False, True])
def test_rank_0_that_never_comes(agent, command):
    """One of the others says so. torchrun's agent has a store without it, too."""
    port, start = free_port(), time.monotonic()
    store = dist.TCPStore("127.0.0.1", port, 3, True, wait_for_workers=False) if agent else None
    command += ["--init-timeout", 3]
    world = {"WORLD_SIZE": 3, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": agent}
    with start_rank(1, *command, **world) as other, start_rank(2, *command, **world) as last:
        said = "".join(rank.communicate(timeout=60)[1] for rank in (other, last))
    what = "rank 0 has not come to" if store else "no rendezvous at"
    sentences = re.findall(r"^\[Rank (\d) on \S+\] (.*) within 0:00:03", said, re.M)
    assert sentences == [("2", f"{what} 127.0.0.1:{port}")], said
    assert other.returncode == 0 and last.returncode == 1 and time.monotonic() - start < 30


def test_ranks_that_cannot_connect(command, tmp_path):
    """One sentence with the interface, and heartbeats before it. For want of NCCL, which would
    hang, a patched gloo does."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "class Hook:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'resilience.place':\n"
        "            import torch.distributed as dist\n"
        "            dist.all_reduce = lambda *_: time.sleep(100)\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    world = {"WORLD_SIZE": 2, "MASTER_PORT": free_port(), "PYTHONPATH": tmp_path, "cwd": tmp_path}
    world |= {"GLOO_SOCKET_IFNAME": "lo", "SLURM_JOB_ID": 7}
    command += ["--init-timeout", 5]
    with (
        start_rank(0, *command, **world, SLURMD_NODENAME="n1") as first,
        start_rank(1, *command, **world, SLURMD_NODENAME="n2") as second,
    ):
        said = "".join(rank.communicate(timeout=60)[1] for rank in (first, second))
    sentence = r"\[Rank 0 on n1\] all ranks joined, but their first all-reduce did not finish "
    sentence += r"within 0:00:05. The interface is lo: set GLOO_SOCKET_IFNAME in env.sh to .*\n"
    assert len(re.findall(sentence, said)) == said.count("all ranks joined") == 1, said
    assert first.returncode == 1 and second.returncode == 0
    stuck = "no step for 2 s. First to look at: rank 0 on n1 (step None), rank 1 on n2"
    assert said.count(stuck) == 1 and "Traceback" not in said, said


@pytest.mark.parametrize("known", [["NTASKS"], ["NTASKS", "PROCID", "LOCALID"]])
def test_several_tasks_without_a_rendezvous_are_no_world_of_one(known, command, tmp_path):
    """As in a container without scontrol, or one in which only some of Slurm's variables are."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    task = {"NTASKS": "4", "PROCID": "0", "LOCALID": "0"}
    inside = {f"SLURM_{name}": task[name] for name in known}
    inside |= {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n1"}
    inside |= {"PATH": str(tmp_path / "bin")}
    done = run(sys.executable, *command, env=environment() | inside)
    assert done.returncode == 1 and "Step 0" not in done.stdout
    assert re.fullmatch(r".* is not set: use a launcher\n", done.stderr), done.stderr


def test_ranks_of_a_node(monkeypatch):
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    step = {"STEP_ID": 0, "STEP_NUM_NODES": 2, "NTASKS": 8, "PROCID": 6, "LOCALID": 2}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert find_ranks() == Ranks(6, 2, 8, 4, "srun") and find_ranks().of_this_node() == range(4, 8)


# --- how long they wait for each other ---


def test_the_groups_of_a_mesh_have_the_timeout_of_the_phase(monkeypatch):
    seen = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda device_ids=None: seen.append("barrier"))
    set_timeout = "_set_pg_timeout"
    monkeypatch.setattr(dist.distributed_c10d, set_timeout, lambda *call: seen.append(call))
    place = Place(ALONE, torch.device("cpu"), 300)
    place.groups = ["data", "tensor"]
    with place.longer_timeout(1800):
        assert place.beat.timeout == 1800
    times = [call[0].total_seconds() for call in seen if call != "barrier"]
    assert times == [1800] * 3 + [300] * 3 and seen[3] == "barrier" and place.beat.timeout == 300
    assert [call[1] for call in seen if call != "barrier"] == [None, "data", "tensor"] * 2


SHOW_TIMEOUTS = """
import runpy, sys; sys.path.insert(0, 'distributed')
from torch.nn import functional
from resilience import heartbeat, sharded_checkpoints
beats, begin = [], heartbeat.Heartbeat.__init__
heartbeat.Heartbeat.__init__ = lambda *args: beats.append(args[0]) or begin(*args)
def shown(name, function):
    def call(*args, **options):
        print('evaluate' if options.get('reduction') == 'sum' else name, beats[-1].timeout)
        return function(*args, **options)
    return call
functional.cross_entropy = shown('step', functional.cross_entropy)
for kind in (sharded_checkpoints.Checkpoints, sharded_checkpoints.ShardedCheckpoints):
    kind.load_files = shown('load', kind.load_files)
    kind.save_files = shown('write', kind.save_files)
sys.argv[0] = 'distributed/' + sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name='__main__')
"""
TIMED = [("train_fsdp.py",), ("train_tp.py",), ("train_preemptible.py",)]


@pytest.mark.parametrize("script", cells(TIMED, TIMED[0]))
def test_which_timeout_holds_when(script, text, tiny, tmp_path):
    """The first step has that of the rendezvous, evaluation, save and load a long one, all other
    steps a short one."""
    command = [sys.executable, "-c", SHOW_TIMEOUTS, script, "--checkpoint-dir", tmp_path]
    command += ["--device", "cpu", "--precision", "fp32", "--checkpoint-every", "1"]
    command += ["--init-timeout", "20", "--timeout", "7", "--save-timeout", "50"]
    if script == "train_preemptible.py":  # 300 images: two steps
        command += ["--data-dir", tiny, "--batch-size", 150, "--epochs", 1]
    else:
        command += [*SMALL_MODEL, "--data-dir", text, "--steps", 2, "--eval-every", 2]
        command += ["--eval-windows", 4]

    def timeouts(*options: str) -> list[tuple[str, str]]:
        done = run(*command, *options)
        return re.findall(r"^(step|evaluate|write|load) ([\d.]+)$", done.stdout, re.M)

    saved, end = ("write", "50.0"), [("evaluate", "50.0"), ("write", "50.0")]
    assert timeouts() == [("step", "20.0"), saved, ("step", "7.0"), *end]
    remove(find_checkpoints(tmp_path)[0])
    assert timeouts("--resume") == [("load", "50.0"), ("step", "20.0"), *end]


SLOW_DISK = """
import os, time
fsync = os.fsync
def slow_fsync(file):
    time.sleep(5 if os.environ.get("RANK") == "0" else 0)
    fsync(file)
os.fsync = slow_fsync
"""
SLOW = [("train_preemptible.py",), ("train_fsdp.py",)]


@pytest.mark.parametrize("script", cells(SLOW, SLOW[0]))
def test_a_slow_save_lives_and_a_stuck_rank_does_not(script, tiny, text, tmp_path):
    """A disk on which a save takes ten seconds, --timeout 6, and after the save a rank that
    stays in step 8."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    delay = 6 if script == "train_fsdp.py" else 0  # of a step: its thread has written before step 8
    command = [REPOSITORY / "tests/scripts/slowly.py", delay, REPOSITORY / "distributed" / script]
    command += ["--timeout", 6, "--checkpoint-every", 5, "--checkpoint-dir", tmp_path / "out"]
    command += ["--log-every", 1, "--data-dir"]
    command += [tiny, "--batch-size", 20] if script == SLOW[0][0] else [text, *SMALL_MODEL]
    world = {"WORLD_SIZE": 2, "MASTER_PORT": free_port(), "PYTHONPATH": tmp_path, "STUCK": 1}
    world |= {"SLURM_JOB_ID": 7, "cwd": tmp_path}
    with start_rank(0, *command, **world) as first, start_rank(1, *command, **world) as stuck:
        try:
            for line in first.stdout:
                if line.startswith("step=8/"):
                    break
            start = time.monotonic()
            said = first.communicate(timeout=60)[1]
            seconds = time.monotonic() - start
        finally:
            first.kill()
            stuck.kill()
    assert list((tmp_path / "out").glob("checkpoint_step_5*")) and line.startswith("step=8/"), said
    assert first.returncode == 1 and 5 < seconds - delay < 12, (seconds, said)
    looked_at = r"no step for \d s. First to look at: rank 1 on \S+ \(step 7\), in$"
    assert re.search(looked_at, said, re.M), said
    assert delay or said.count("no step for") == 1, "the save, which takes longer, is no step"
    where = heartbeat.read_beat(tmp_path / "log/7/ranks-0/1")["frame"]  # not one of a library
    assert where.startswith("wait_for_ever (") and f"\n    {where}\n" in said, (where, said)


# --- heartbeats ---


@pytest.fixture
def beats(tmp_path, monkeypatch):
    """Heartbeats at a clock that the test sets, in a job of 4,096 ranks; rank 1's by default."""
    monkeypatch.chdir(tmp_path)
    clock = [1e6]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(heartbeat.time, "time", lambda: clock[0])

    def make(rank=1, world_size=4096, local_rank=0) -> heartbeat.Heartbeat:
        ranks = Ranks(rank, local_rank, world_size, local_rank + 1, "srun")
        beat = heartbeat.Heartbeat(ranks, 120.0)
        beat.open_file()
        return beat

    make.clock = clock
    return make


@pytest.mark.parametrize("seconds", [20, 40, 70])
def test_what_heartbeats_cost_the_file_system(seconds, beats, monkeypatch):
    """At 4,096 ranks less than ten operations a second per thousand of them, whatever a step takes.

    One that then takes longer is noticed before three quarters of the timeout are over.
    """
    operations, pwrite = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *what: operations.append("write") or pwrite(*what))
    monkeypatch.setattr(heartbeat, "read_beat", lambda path: operations.append("read"))
    beat = beats()
    for second in range(10_000):
        beats.clock[0] += 1
        beat.step = second // seconds
        beat.look()
    assert 50 < len(operations) < 10_000 * 0.01, len(operations)
    operations.clear()
    beat.step = 1000
    for _ in range(90):
        beats.clock[0] += 1
        beat.look()
    assert operations.count("read") == 1, operations


def test_not_all_ranks_write_in_the_same_second(beats, monkeypatch):
    """64 ranks on as many nodes: 30 writes a second, after the first one, which all of them do
    when they start."""
    all_ranks, seconds = [beats(rank, 64) for rank in range(64)], []
    monkeypatch.setattr(os, "pwrite", lambda *what: seconds.append(beats.clock[0]))
    for second in range(100):
        beats.clock[0] += 1
        for beat in all_ranks:
            beat.step = second
            beat.look()
    after = Counter(seconds[64:])
    assert 2500 < sum(after.values()) < 3100 and max(after.values()) <= 32, after


def test_asked_to_stop_beside_a_silent_rank(beats, monkeypatch, capfd):
    """A rank ends after ten seconds of its own, and not while all are alive, or once the run has
    ended well."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(stop_request, "received", signal.SIGTERM)
    here, other = beats(3, 4, 1), beats(2, 4)

    def pass_seconds(seconds: int, *ranks: heartbeat.Heartbeat):
        for _ in range(seconds):
            beats.clock[0] += 1
            for beat in ranks:
                beat.look()

    pass_seconds(30, here, other)
    beats.clock[0] += 60  # all are suspended
    pass_seconds(5, here, other)
    here.finished = True
    pass_seconds(15, here)
    assert ended == []
    here.finished = False
    pass_seconds(1, here)
    assert ended == [1]
    said = (
        r"\[Rank 3 on \S+\] asked to stop, but rank 2 on this node has sent no heartbeat for 16 s"
    )
    assert re.search(said, capfd.readouterr().err)


def test_a_neighbour_that_was_not_asked_is_not_silent(beats, monkeypatch):
    """A signal may reach one rank only, and in a large job the others write once in minutes."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    here, other = beats(3, 4096, 1), beats(2, 4096)
    for _ in range(300):
        beats.clock[0] += 1
        for beat, signal_number in ((here, signal.SIGTERM), (other, 0)):
            monkeypatch.setattr(stop_request, "received", signal_number)
            beat.look()
    assert ended == []


STUCK = [
    # NCCL: the others wait for a GPU, outside torch.distributed.
    ([9, 9, 9, 8, 9, 9], [False] * 6, [], "n1"),
    ([9, 9, 9, 8, 9, 9], [False] * 2 + [True] * 4, [], "n1"),
    # gloo: all are at one step, one of them in no collective.
    ([9] * 6, [True] * 3 + [False] + [True] * 2, [], "n1"),
    ([9] * 6, [True] * 6, [], None),
    ([9, 8, 9, 9, 9, 9], [False] * 6, [4], "n2"),
    ([9] * 6, [True] * 6, [0, 5], "n0,n2"),
]


@pytest.mark.parametrize(("steps", "waits", "silent", "exclude"), STUCK)
def test_watch_job_excludes_the_node_of_the_stuck_rank(steps, waits, silent, exclude, tmp_path):
    """All have stood still for two minutes."""
    folder = tmp_path / "log/7/ranks-0"
    folder.mkdir(parents=True)
    for rank in range(6):
        beat = {"rank": rank, "host": f"n{rank // 2}", "world_size": 6, "step": steps[rank]}
        beat |= {"time": time.time() - (100 if rank in silent else 0), "interval": 2}
        beat |= {"stack": ["f"], "frame": "f", "in_collective": waits[rank]}
        beat |= {"seconds_in_step": 120.0, "stalled": True}
        (folder / str(rank)).write_text(json.dumps(beat))
    done = run(sys.executable, REPOSITORY / "aux/watch_job.py", 7, cwd=tmp_path)
    assert done.returncode == (exclude is not None), done.stdout + done.stderr
    end = r"All 6 ranks are alive, at step 9\. No step for 12\d s\."
    end = rf".* sbatch --exclude={exclude}" if exclude else end
    assert re.fullmatch(end, done.stdout.splitlines()[-1]), done.stdout


# --- stopped and requeued ---


REQUEUED = "Requeued: it resumes by itself"
STATES = {
    "RUNNING Reason=None Restarts=2": (0, REQUEUED, True),
    "COMPLETING Reason=TimeLimit Restarts=2": (0, REQUEUED, True),
    "COMPLETING Reason=None Restarts=2": (1, "Slurm is ending it", False),
    # Slurm has requeued it itself: one start more.
    "PENDING Reason=BeginTime Restarts=3": (0, REQUEUED, False),
}


@pytest.mark.parametrize("state", STATES)
def test_what_is_requeued(state, tmp_path):
    """By the state that scontrol shows, which does not answer at first: slurmctld is restarting."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        f"#!/bin/bash\necho $* >>{tmp_path}/calls\n"
        f"if (($(wc -l <{tmp_path}/calls) == 1)); then exit 1; fi\n"
        f"if [[ $1 == show ]]; then echo 'JobState={state} BatchFlag=1'; fi\n"
    )
    scontrol.chmod(0o755)
    array = {"SLURM_JOB_ID": 9, "SLURM_ARRAY_JOB_ID": 8, "SLURM_ARRAY_TASK_ID": 1}
    env = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_RESTART_COUNT=2, **array)
    done = run("distributed/resilience/requeue.sh", env=env)
    status, said, requeues = STATES[state]
    assert (done.returncode, done.stdout) == (status, f"{said}\n"), done.stderr
    assert Path(tmp_path / "calls").read_text() == "show job 8_1\n" * 2 + "requeue 8_1\n" * requeues


def test_a_rank_reads_its_own_file_of_a_sharded_checkpoint(tmp_path):
    """Of a checkpoint of twelve ranks, on fewer, as many and more of them: every file once,
    whoever has written it."""
    files = {f"__{rank}_{part}.distcp" for rank in range(12) for part in range(2)} | {".metadata"}
    for name in (*files, "manifest.json"):
        (tmp_path / name).write_text(name)
    for world_size in (1, 5, 12, 16):
        shares = [measure_files(tmp_path, rank, world_size) for rank in range(world_size)]
        assert sorted(name for share in shares for name in share) == sorted(files)
    assert shares[3] == {name: [12, zlib.crc32(name.encode())] for name in files if "_3_" in name}
