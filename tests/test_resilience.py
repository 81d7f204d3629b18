"""The package resilience by itself, without a cluster: what it imports, the order of the data,
and its sentences."""

import datetime
import fcntl
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from argparse import Namespace
from collections import Counter
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

from char_transformer import peak_flops
from conftest import REPOSITORY, cells, environment, free_port, read_metrics, run
from resilience import heartbeat, place, sharded_checkpoints, stop_request
from resilience.checkpoint_files import find_checkpoints, remove
from resilience.progress import Progress
from resilience.ranks import Ranks, find_ranks
from resilience.samplers import RunSampler
from resilience.sharded_checkpoints import ShardedCheckpoints, measure_files


@pytest.mark.parametrize(
    "module", ["arguments", "ranks", "stop_request", "heartbeat", "checksums", "job"]
)
def test_light_modules_import_no_torch(module):
    code = (
        f"import sys; sys.path.insert(0, 'distributed'); import resilience.{module}; "
        "sys.exit('torch' in sys.modules)"
    )
    assert run(sys.executable, "-c", code, cwd=REPOSITORY / "distributed").returncode == 0


@pytest.mark.parametrize(
    ("size", "batch_size", "world_size"), [(1003, 64, 4), (300, 20, 2), (23, 6, 3), (64, 64, 1)]
)
def test_run_sampler_is_distributed_sampler_over_all_epochs(size, batch_size, world_size):
    per_epoch = size // batch_size
    for rank in range(world_size):
        expected = []
        for epoch in (1, 2, 3):
            whole = DistributedSampler(range(size), world_size, rank, seed=7, drop_last=True)
            whole.set_epoch(epoch)
            expected += list(BatchSampler(whole, batch_size // world_size, drop_last=True))
        assert len(expected) == 3 * per_epoch
        sampler = RunSampler(size, batch_size, range(len(expected)), 7, rank, world_size)
        assert [indices.tolist() for indices in sampler] == expected
        first = per_epoch + per_epoch // 2  # in the midst of an epoch
        sampler.steps = range(first, len(expected))
        assert [indices.tolist() for indices in sampler] == expected[first:] and len(
            sampler
        ) == len(expected) - first


def test_run_sampler_refuses_a_batch_that_is_larger_than_the_data():
    with pytest.raises(ValueError, match="a batch of 64 is larger than the data set of 63"):
        RunSampler(63, 64, range(1), 0, 0, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run(ranks, tiny, tmp_path):
    """With one sentence and status 1, and no checkpoint of weights that are not finite."""
    command = [
        "distributed/train_preemptible.py",
        "--data-dir",
        tiny,
        "--checkpoint-dir",
        tmp_path / "out",
    ]
    command += [
        "--learning-rate",
        1e8,
        "--batch-size",
        20,
        "--log-every",
        100,
        "--checkpoint-every",
        3,
    ]
    launch = [sys.executable] if ranks == 1 else ["./torchrun.sh"]
    done = run(*launch, *command, env=environment(NPROC_PER_NODE=ranks, OMP_NUM_THREADS=1))
    assert done.returncode == 1 and "Finished" not in done.stdout, done.stderr
    said = re.findall(
        r"^\[Rank \d on .*the loss is (?:nan|inf) at step \d+: try a lower", done.stderr, re.M
    )
    assert len(said) == 1 and "Traceback" not in re.sub(r"(?s)^.*elastic.*", "", done.stderr), (
        done.stderr
    )
    assert not list((tmp_path / "out").glob("*.pt"))


@pytest.mark.parametrize(
    "script", cells([("train_fsdp.py",), ("train_preemptible.py",)], ("train_fsdp.py",))
)
def test_time_that_saving_and_evaluation_take_is_in_no_throughput(script, text, request, tmp_path):
    """A second for each save, one save after every step, and two seconds for each evaluation,
    one in two steps."""
    code = (
        "import runpy, sys, time; sys.path.insert(0, 'distributed')\n"
        "from resilience import progress, sharded_checkpoints\n"
        "def slower(method, seconds):\n"
        "    return lambda *args, **options: (time.sleep(seconds), method(*args, **options))[1]\n"
        "for kind in (sharded_checkpoints.Checkpoints, sharded_checkpoints.ShardedCheckpoints):\n"
        "    kind.save_files = slower(kind.save_files, 1)\n"
        "progress.Progress.log_evaluation = slower(progress.Progress.log_evaluation, 2)\n"
        "sys.argv[0] = 'distributed/' + sys.argv.pop(1)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [
        script,
        "--batch-size",
        12,
        "--steps",
        4,
        "--eval-every",
        2,
        "--eval-windows",
        8,
        "--data-dir",
        text,
    ]
    if script == "train_preemptible.py":  # 300 images: an epoch, with its evaluation, is two steps
        command = [
            script,
            "--batch-size",
            150,
            "--epochs",
            2,
            "--data-dir",
            request.getfixturevalue("tiny"),
        ]
    command += ["--checkpoint-dir", tmp_path, "--log-every", 2, "--checkpoint-every", 1]
    done = run(sys.executable, "-c", code, *command)
    assert done.returncode == 0, done.stderr
    rates = [
        event[name]
        for event in read_metrics(tmp_path)
        for name in event
        if name.endswith("_per_second")
    ]
    per_step = 150 if script == "train_preemptible.py" else 12 * 64
    # Of the second line, two steps come with two saves and an evaluation: with one of these, less
    # than a step a second.
    assert len(rates) == 2 and rates[1] > 1.1 * per_step, rates


def test_mfu_is_that_of_the_steps(tmp_path, monkeypatch, capsys):
    """The time that saving has taken is in it no more than in the throughput. A GPU of unknown
    speed has none."""
    args, clock = Namespace(checkpoint_dir=tmp_path, log_every=1, tensorboard=False), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    alone = place.Place(Ranks(0, 0, 1, 1, "none"), torch.device("cpu"), 9)
    progress = Progress(args, alone, "tokens", 1000, 0, 4, 2e-6)
    progress.add(1, torch.tensor(1.0))
    clock[0], alone.seconds_saving = 3.0, 2.0
    progress.log(1, 1)
    assert read_metrics(tmp_path)[0]["mfu"] == pytest.approx(2e-3)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: torch.tensor(0.0))
    alone.device = torch.device("cuda")
    Progress(args, alone, "tokens", 1000, 1, 4, math.nan)
    assert capsys.readouterr().out.count("No MFU in the log") == 1


SCRIPT = REPOSITORY / "distributed/train_preemptible.py"


def start_rank(
    rank: int, *arguments: object, cwd=REPOSITORY, **variables: object
) -> subprocess.Popen:
    """One rank on this machine, as a launcher of somebody's own would start it."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
    place |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, *(str(argument) for argument in arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=environment(**place, **variables), **pipes)


def test_ranks_that_never_come_are_named(tiny, tmp_path):
    """With their hosts, which those know that are on the same node."""
    options = (
        SCRIPT,
        "--data-dir",
        tiny,
        "--batch-size",
        20,
        "--init-timeout",
        8,
        "--checkpoint-dir",
        tmp_path,
    )
    world, start = (
        {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": free_port()},
        time.monotonic(),
    )
    with (
        start_rank(0, *options, **world) as first,
        start_rank(3, *options, **world, SLURMD_NODENAME="n2") as other,
    ):
        said = [rank.communicate(timeout=60)[1] for rank in (first, other)]
    named = (
        r"\[Rank 0 on (\S+)\] 2 of 4 ranks did not join within 0:00:08: rank 1 on \1, rank 2 on "
        r"n2\n"
    )
    assert re.fullmatch(named, said[0]) and said[1] == "", said
    assert first.returncode == other.returncode == 1 and time.monotonic() - start < 60


@pytest.mark.matrix
@pytest.mark.parametrize("agent", [False, True])
def test_rank_0_that_never_comes(agent, tiny, tmp_path):
    """One of the others says so, soon after --init-timeout. torchrun's agent has a store without
    it, too."""
    port, start = free_port(), time.monotonic()
    store = dist.TCPStore("127.0.0.1", port, 3, True, wait_for_workers=False) if agent else None
    options = (
        SCRIPT,
        "--data-dir",
        tiny,
        "--batch-size",
        21,
        "--init-timeout",
        3,
        "--checkpoint-dir",
        tmp_path,
    )
    world = {"WORLD_SIZE": 3, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": agent}
    with start_rank(1, *options, **world) as other, start_rank(2, *options, **world) as last:
        said = "".join(rank.communicate(timeout=60)[1] for rank in (other, last))
    what = "rank 0 has not come to" if store else "no rendezvous at"
    sentences = re.findall(r"^\[Rank (\d) on \S+\] (.*) within 0:00:03", said, re.M)
    assert sentences == [("2", f"{what} 127.0.0.1:{port}")], said
    assert other.returncode == 0 and last.returncode == 1 and time.monotonic() - start < 30


def test_ranks_that_cannot_connect(tiny, tmp_path):
    """One sentence from one of them, with the interfaces. For want of NCCL, which would hang, a
    patched gloo does."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "class Hook:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'resilience.place':\n"
        "            import torch.distributed as dist\n"
        "            dist.all_reduce = lambda *_: time.sleep(100)\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    world = {
        "WORLD_SIZE": 2,
        "MASTER_PORT": free_port(),
        "PYTHONPATH": tmp_path,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    world |= {"SLURM_JOB_ID": 7, "cwd": tmp_path}
    options = (
        SCRIPT,
        "--data-dir",
        tiny,
        "--batch-size",
        20,
        "--init-timeout",
        5,
        "--checkpoint-dir",
        tmp_path / "o",
    )
    with (
        start_rank(0, *options, **world, SLURMD_NODENAME="n1") as first,
        start_rank(1, *options, **world, SLURMD_NODENAME="n2") as second,
    ):
        said = [rank.communicate(timeout=60)[1] for rank in (first, second)]
    both = "".join(said)
    sentence = (
        r"\[Rank \d on n\d\] all ranks joined, but their first all-reduce did not finish within "
        r"0:00:05. "
    )
    sentence += r"The interface is lo: GLOO_SOCKET_IFNAME in env.sh chooses .*\n"
    assert (
        len(re.findall(sentence, both)) == both.count("all ranks joined") == 1
        and "Traceback" not in both
    ), both
    assert first.returncode == 1 and second.returncode == 0
    assert (
        both.count("no step for 2 s. First to look at: rank 0 on n1 (step None), rank 1 on n2") == 1
    ), both
    assert {path.name for path in (tmp_path / "log/7/ranks-0").iterdir()} == {"0", "1"}, (
        "heartbeats begin before it"
    )


SAVING = {
    "checkpoint_every": (1, "steps"),
    "keep_checkpoints": 2,
    "init_timeout": 20,
    "save_timeout": 7200,
}


def test_compiled_where_it_pays(monkeypatch):
    """On CUDA with what Triton needs, on the CPU not."""
    import recipe

    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(recipe.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(recipe.Path, "exists", lambda path: True)
    assert recipe.can_compile(torch.device("cuda:0"))
    assert not recipe.can_compile(torch.device("cpu"))
    capability[0] = (6, 1)
    assert not recipe.can_compile(torch.device("cuda:0"))


def test_sizes_are_compared_where_checksums_are_not(text, tiny, tmp_path):
    """Local rank 0 of a node reads every file whole; the others look at the lengths."""
    import characters
    import mnist

    folder = Path(shutil.copytree(text, tmp_path / "text"))
    assert characters.missing_data(folder, 16, local_rank=1) is None
    os.truncate(folder / "train.bin", 100)
    fault = characters.missing_data(folder, 16, local_rank=1)
    assert fault.startswith(
        f"{folder}/train.bin is not as long as in vocabulary.json beside it; "
    ), fault

    images = Path(shutil.copytree(tiny, tmp_path / "images"))
    mnist.load(images)
    os.truncate(images / "MNIST/raw/train-labels-idx1-ubyte", 100)
    with pytest.raises(ValueError, match="is incomplete or damaged"):
        mnist.load(images)


def test_ranks_of_a_node(monkeypatch):
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    step = {"STEP_ID": 0, "STEP_NUM_NODES": 2, "NTASKS": 8, "PROCID": 6, "LOCALID": 2}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    assert find_ranks() == Ranks(6, 2, 8, 4, "srun") and find_ranks().of_this_node() == range(4, 8)


def test_barrier_names_its_device(monkeypatch):
    """Else NCCL warns on every job, and may take device 0 for all ranks of a node."""
    seen = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda device_ids=None: seen.append(device_ids))
    for device in ("cuda:3", "cpu"):
        place.Place(Ranks(3, 3, 4, 4, "srun"), torch.device(device), 9).barrier()
    assert seen == [[3], None]


def test_the_timeout_of_each_phase(monkeypatch):
    """In longer_timeout that of the default group, of the mesh's, and of the heartbeat; then as
    it was."""
    seen = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "barrier", lambda device_ids=None: seen.append("barrier"))
    monkeypatch.setattr(
        dist.distributed_c10d,
        "_set_pg_timeout",
        lambda time, group: seen.append((time.total_seconds(), group)),
    )
    ranks = place.Place(Ranks(0, 0, 4, 4, "srun"), torch.device("cpu"), 300)
    ranks.groups = ["data", "tensor"]
    with ranks.longer_timeout(1800):
        assert (
            seen == [(1800, group) for group in (None, "data", "tensor")]
            and ranks.beat.timeout == 1800
        )
    assert (
        seen[3:] == ["barrier", *((300, group) for group in (None, "data", "tensor"))]
        and ranks.beat.timeout == 300
    )


TIMED = [("train_fsdp.py",), ("train_tp.py",), ("train_preemptible.py",)]


@pytest.mark.parametrize("script", cells(TIMED, TIMED[0]))
def test_which_timeout_holds_when(script, text, request, tmp_path):
    """The first step has that of the rendezvous, evaluation, save and load a long one, all other
    steps a short one."""
    code = (
        "import runpy, sys; sys.path.insert(0, 'distributed')\n"
        "from torch.nn import functional\n"
        "from resilience import heartbeat, sharded_checkpoints\n"
        "beats, begin = [], heartbeat.Heartbeat.__init__\n"
        "heartbeat.Heartbeat.__init__ = lambda *args: beats.append(args[0]) or begin(*args)\n"
        "def shown(name, function):\n"
        "    def call(*args, **options):\n"
        "        print('evaluate' if options.get('reduction') == 'sum' else name, "
        "beats[-1].timeout)\n"
        "        return function(*args, **options)\n"
        "    return call\n"
        "functional.cross_entropy = shown('step', functional.cross_entropy)\n"
        "for kind in (sharded_checkpoints.Checkpoints, sharded_checkpoints.ShardedCheckpoints):\n"
        "    kind.load_files = shown('load', kind.load_files)\n"
        "    kind.save_files = shown('write', kind.save_files)\n"
        "sys.argv[0] = 'distributed/' + sys.argv.pop(1)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [
        sys.executable,
        "-c",
        code,
        script,
        "--checkpoint-dir",
        tmp_path,
        "--checkpoint-every",
        1,
    ]
    command += [
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--init-timeout",
        20,
        "--timeout",
        7,
        "--save-timeout",
        50,
    ]
    if script == "train_preemptible.py":  # 300 images: two steps
        command += [
            "--batch-size",
            150,
            "--epochs",
            1,
            "--data-dir",
            request.getfixturevalue("tiny"),
        ]
    else:
        command += [
            "--batch-size",
            6,
            "--steps",
            2,
            "--eval-every",
            2,
            "--eval-windows",
            6,
            "--data-dir",
            text,
        ]
    done = run(*command)
    saved, end = ("write", "50.0"), [("evaluate", "50.0"), ("write", "50.0")]
    assert timeouts(done) == [("step", "20.0"), saved, ("step", "7.0"), *end], done
    remove(find_checkpoints(tmp_path)[0])
    done = run(*command, "--resume")
    assert timeouts(done) == [("load", "50.0"), ("step", "20.0"), *end], done


def timeouts(done: subprocess.CompletedProcess) -> list[tuple[str, str]]:
    return re.findall(r"^(step|evaluate|write|load) ([\d.]+)$", done.stdout, re.M)


def test_memory_is_in_the_log_of_a_gpu(monkeypatch):
    from recipe import log_values

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.25}])
    logged = {"learning_rate": 0.25, "grad_norm": 2.0}
    assert log_values(optimizer, torch.tensor(2.0)) == logged
    norm = SimpleNamespace(item=lambda: 2.0, device=torch.device("cuda", 1))
    assert log_values(optimizer, norm) == logged | {"peak_memory_gib": 3.0}


SLOW_DISK = """
import os, time
fsync = os.fsync
def slow_fsync(file):
    time.sleep(5 if os.environ.get("RANK") == "0" else 0)
    fsync(file)
os.fsync = slow_fsync
"""


@pytest.mark.parametrize(
    ("script", "how"),
    [
        ("train_preemptible.py", "at once"),
        *(
            pytest.param("train_fsdp.py", how, marks=pytest.mark.matrix)
            for how in ("at once", "asynchronous")
        ),
    ],
)
def test_a_slow_save_lives_and_a_stuck_rank_does_not(script, how, tiny, text, tmp_path):
    """A disk on which a save takes ten seconds, --timeout 6, and after the save a rank that
    stays in step 8."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    delay = 6 if how == "asynchronous" else 0  # of a step: its thread has written before step 8
    command = [
        REPOSITORY / "tests/scripts/slowly.py",
        delay,
        REPOSITORY / "distributed" / script,
        "--timeout",
        6,
    ]
    command += ["--checkpoint-every", 5, "--checkpoint-dir", tmp_path / "out", "--log-every", 1]
    small = [
        "--data-dir",
        text,
        "--layers",
        1,
        "--heads",
        2,
        "--width",
        16,
        "--context",
        16,
        "--batch-size",
        4,
    ]
    command += (
        ["--data-dir", tiny, "--batch-size", 20] if script == "train_preemptible.py" else small
    )
    world = {
        "WORLD_SIZE": 2,
        "MASTER_PORT": free_port(),
        "PYTHONPATH": tmp_path,
        "SLURM_JOB_ID": 7,
        "STUCK": 1,
    }
    world |= {"HOLD": tmp_path} if how == "asynchronous" else {}
    with (
        start_rank(0, *command, cwd=tmp_path, **world) as first,
        start_rank(1, *command, cwd=tmp_path, **world) as stuck,
    ):
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
    assert "First to look at: rank 1 on" in said and "(step 7), in" in said, said


@pytest.mark.parametrize("variables", [{"SLURM_PROCID": 0, "SLURM_LOCALID": 0}, {}])
def test_several_tasks_without_a_rendezvous_are_no_world_of_one(variables, tiny, tmp_path):
    """As in a container without scontrol, or where only some of Slurm's variables have come in."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    inside = {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_ID": 0,
        "SLURM_NTASKS": 4,
        "SLURM_STEP_NODELIST": "n1",
        **variables,
    }
    inside |= {"PATH": tmp_path / "bin"}
    command = [
        sys.executable,
        "distributed/train_preemptible.py",
        "--data-dir",
        tiny,
        "--checkpoint-dir",
        tmp_path / "out",
    ]
    if variables:
        inside |= {"SLURM_PROCID": 0, "SLURM_LOCALID": 0}
    done = run(*command, env=environment() | {name: str(value) for name, value in inside.items()})
    assert (
        done.returncode == 1
        and len(done.stderr.splitlines()) == 1
        and "use a launcher" in done.stderr
    ), done.stderr
    assert "Step 0" not in done.stdout


def test_the_frame_of_a_heartbeat_is_never_a_library_s():
    seen = []
    thread = threading.Timer(0.2, lambda: seen.append(heartbeat.main_stack()))
    thread.start()
    thread.join()  # the main thread waits in threading.py
    [(stack, frame, waits)] = seen
    assert "threading.py" in stack[-1] and "test_resilience.py" in frame and not waits


@pytest.fixture
def signs(tmp_path, monkeypatch):
    """The files of heartbeats at a clock that the test sets, in a job of 4,096 ranks; rank 1's
    by default."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heartbeat, "JOB", "7")
    clock = [1e6]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(heartbeat.time, "time", lambda: clock[0])

    def make(rank=1, world_size=4096):
        return heartbeat.Files(heartbeat.Heartbeat(Ranks(rank, 0, world_size, 1, "srun"), 120.0))

    make.clock = clock
    return make


@pytest.mark.parametrize("seconds", [20, 40, 70])
def test_what_heartbeats_cost_the_file_system(seconds, signs, monkeypatch):
    """At 4,096 ranks less than ten operations a second per thousand of them, whatever a step takes.

    One that then takes longer is noticed before three quarters of the timeout are over.
    """
    operations, pwrite = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *what: operations.append("write") or pwrite(*what))
    monkeypatch.setattr(heartbeat, "read_beat", lambda path: operations.append("read"))
    files = signs()
    assert fcntl.fcntl(files.file, fcntl.F_GETFL) & os.O_DSYNC
    opened = []
    sys.addaudithook(
        lambda event, _: opened.append(event) if event == "open" and counting else None
    )
    counting = True
    for second in range(10_000):
        signs.clock[0] += 1
        files.heartbeat.step = second // seconds
        files.look()
    counting = False
    assert opened == [] and 50 < len(operations) < 10_000 * 0.01, len(operations)
    operations.clear()
    files.heartbeat.step = 1000
    for _ in range(90):
        signs.clock[0] += 1
        files.look()
    assert operations.count("read") == 1, operations


def test_not_all_ranks_write_in_the_same_second(signs, monkeypatch):
    """64 ranks on as many nodes: 30 writes a second, after the first one, which all of them do
    when they start."""
    files, seconds = [signs(rank, 64) for rank in range(64)], []
    monkeypatch.setattr(os, "pwrite", lambda *what: seconds.append(signs.clock[0]))
    for second in range(100):
        signs.clock[0] += 1
        for of_rank in files:
            of_rank.heartbeat.step = second
            of_rank.look()
    after = Counter(seconds[64:])
    assert 2500 < sum(after.values()) < 3100 and max(after.values()) <= 32, after


def test_a_step_that_takes_long_is_written_at_once(signs, monkeypatch, capfd):
    """A quarter of the timeout after it began; after a half, once, rank 0 names who is behind.
    Rank 1 dies here."""
    files = [signs(rank) for rank in range(3)]
    monkeypatch.setattr(heartbeat, "main_stack", lambda: (["in a step"], "-", True))
    for second in range(200):
        signs.clock[0] += 1
        for rank in (0, 1, 2):
            step = min(second, 99 if rank == 1 else 100)
            files[rank].heartbeat.step = step
            if second < 110 or rank != 1:
                files[rank].look()
        if second in (129, 130):
            assert read_stands(files[2]) == (second == 130)
    said = capfd.readouterr().err.splitlines()
    gone = r"\[Rank 2 on \S+\] rank 1 on \S+ has sent no heartbeat for \d\d s; its last step is 99"
    assert re.fullmatch(gone, said[2])
    assert re.fullmatch(
        r"\[Rank 0 on \S+\] no step for 60 s. First to look at: rank 1 on \S+ \(step 99\), in",
        said[0],
    )
    assert len(said) == 3, said


def read_stands(files: heartbeat.Files) -> bool:
    return heartbeat.read_beat(files.folder / str(files.ranks.rank))["stalled"]


def test_a_save_is_no_step_that_takes_long(signs, monkeypatch, capfd):
    files = signs(0, 3)
    files.heartbeat.step = 7
    for seconds, timeout in ((30, 120.0), (300, 1800.0), (50, 120.0)):
        files.heartbeat.timeout = timeout
        for _ in range(seconds):
            signs.clock[0] += 1
            files.look()
    assert capfd.readouterr().err == ""
    for _ in range(20):
        signs.clock[0] += 1
        files.look()
    assert "no step for 60 s" in capfd.readouterr().err


def sign(rank: int, step: int, waits: bool, **other: object) -> dict:
    """A heartbeat as of now, of a rank that has stood still for two minutes."""
    known = {
        "rank": rank,
        "host": f"n{rank // 2}",
        "step": step,
        "time": time.time(),
        "stack": ["f"],
        "frame": "f",
    }
    known |= {
        "in_collective": waits,
        "world_size": 6,
        "seconds_in_step": 120.0,
        "stalled": True,
        "interval": 2,
    }
    return known | other


@pytest.mark.parametrize(
    ("steps", "waits", "silent", "exclude"),
    [
        (
            [9, 9, 9, 8, 9, 9],
            [False] * 6,
            [],
            "n1",
        ),  # NCCL: the others wait for a GPU, outside torch.distributed
        ([9, 9, 9, 8, 9, 9], [False] * 2 + [True] * 4, [], "n1"),
        (
            [9] * 6,
            [True] * 3 + [False] + [True] * 2,
            [],
            "n1",
        ),  # gloo: all at one step, one of them in no collective
        ([9] * 6, [True] * 6, [], None),
        ([9, 8, 9, 9, 9, 9], [False] * 6, [4], "n2"),
        ([9] * 6, [True] * 6, [0, 5], "n0,n2"),
    ],
)
def test_watch_job_excludes_the_node_of_the_stuck_rank_alone(
    steps, waits, silent, exclude, tmp_path
):
    folder = tmp_path / "log/7/ranks-0"
    folder.mkdir(parents=True)
    for rank in range(6):
        old = {"time": time.time() - 100} if rank in silent else {}
        (folder / str(rank)).write_text(json.dumps(sign(rank, steps[rank], waits[rank], **old)))
    done = run(sys.executable, REPOSITORY / "aux/watch_job.py", 7, cwd=tmp_path)
    assert done.returncode == (exclude is not None), done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.endswith(
        f" sbatch --exclude={exclude}" if exclude else "All 6 ranks are alive, at step 9."
    ), last


def test_asked_to_stop_beside_a_silent_rank(monkeypatch, capfd):
    """It leaves after ten seconds of its own, and not when all are alive, or when the run has
    ended well."""
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(heartbeat, "JOB", f"test-{os.getpid()}")
    monkeypatch.setattr(stop_request, "received", signal.SIGTERM)
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(heartbeat.faulthandler, "dump_traceback_later", lambda timeout: None)
    beats = [heartbeat.Heartbeat(Ranks(rank, rank - 2, 4, 2, "srun"), 9.0) for rank in (2, 3)]
    ranks = [heartbeat.Datagrams(beat) for beat in beats]
    for _ in range(30):
        for rank in ranks:
            rank.look()
    assert ended == []
    for _ in range(9):
        ranks[0].look()
    assert ended == []
    beats[0].finished = True
    for _ in range(5):
        ranks[0].look()
    assert ended == []
    beats[0].finished = False
    ranks[0].look()
    assert ended == [1]
    gone = (
        "asked to stop, but rank 3 on this node has sent no heartbeat for 10 s: without it this "
        "rank cannot save"
    )
    assert f"[Rank 2 on {heartbeat.HOST}] {gone}" in capfd.readouterr().err


def test_a_request_that_the_main_thread_does_not_notice():
    """It waits in C, as in a collective, where Python runs no handler: another thread knows of
    the signal."""
    code = (
        "import ctypes, os, signal, threading, time\n"
        "from resilience import stop_request\n"
        "stop_request.listen()\n"
        "def watch():\n"
        "    assert not stop_request.came()\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    while not stop_request.came():\n"
        "        time.sleep(0.01)\n"
        "    print(stop_request.received, stop_request.came(), flush=True)\n"
        "    os._exit(0)\n"
        "threading.Timer(0.5, watch).start()\n"
        "lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)\n"
        "lock(mutex) or lock(mutex)  # for ever: it is locked already\n"
    )
    done = run(
        sys.executable,
        "-c",
        code,
        env=environment(PYTHONPATH=REPOSITORY / "distributed"),
        timeout=20,
    )
    assert done.stdout == "0 True\n", done.stderr


NAMES = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L40S": 362e12,
    "AMD Instinct MI300X": 1307e12,
    "AMD Instinct MI300X OAM": 1307e12,
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": None,
    "NVIDIA A10": None,
    "NVIDIA L40": None,
    "NVIDIA GH200 480GB": None,
    "NVIDIA H800": None,
    "NVIDIA GB300": None,
    "Tesla V100-SXM2-32GB": None,
    "AMD Instinct MI300A": None,
    "NVIDIA GeForce RTX 4090": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_peak_flops_are_those_of_the_data_sheet_or_unknown(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = peak_flops(torch.device("cuda"))
    assert found == NAMES[name] if NAMES[name] else math.isnan(found)
    assert math.isnan(peak_flops(torch.device("cpu")))


def test_how_a_sharded_checkpoint_is_written(tmp_path, monkeypatch):
    """From 100 MB on asynchronously, over a group of its own, in which a rank may take as long
    as --save-timeout."""
    groups, saved, done = [], [], Future()
    done.set_result(None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "new_group", lambda **options: groups.append(options) or "gloo's")
    monkeypatch.setattr(sharded_checkpoints, "state_of", lambda **parts: parts)
    dcp = sharded_checkpoints.dcp
    monkeypatch.setattr(dcp, "save", lambda state, checkpoint_id: saved.append("at once"))
    monkeypatch.setattr(
        dcp, "async_save", lambda state, **options: saved.append(options["process_group"]) or done
    )
    alone = place.Place(Ranks(0, 0, 1, 1, "none"), torch.device("cpu"), 9)
    checkpoints = ShardedCheckpoints(Namespace(**SAVING, checkpoint_dir=tmp_path), alone, {}, 9)
    for step, count in ((1, 24_999_999), (2, 25_000_000), (3, 25_000_000)):
        assert checkpoints.save_files(step, {"model": torch.empty(count, device="meta")}, {})
    checkpoints.end_writing()
    checkpoints.end_removing()
    assert saved == ["at once", "gloo's", "gloo's"]
    assert groups == [{"backend": "gloo", "timeout": datetime.timedelta(seconds=7200)}]
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_step_2", "checkpoint_step_3"}


def test_old_checkpoints_are_removed_while_the_steps_go_on(tmp_path, monkeypatch):
    """The next save waits for it, and so does the run's end."""
    prune, held = sharded_checkpoints.prune, threading.Event()
    monkeypatch.setattr(sharded_checkpoints, "prune", lambda *args: held.wait(20) and prune(*args))
    monkeypatch.setattr(sharded_checkpoints, "state_of", lambda **parts: parts)
    monkeypatch.setattr(sharded_checkpoints.dcp, "save", lambda state, checkpoint_id: None)
    alone = place.Place(Ranks(0, 0, 1, 1, "none"), torch.device("cpu"), 9)
    checkpoints = ShardedCheckpoints(Namespace(**SAVING, checkpoint_dir=tmp_path), alone, {}, 9)
    held.set()
    for step in (1, 2, 3):
        if step == 3:
            checkpoints.end_removing()
            held.clear()
        checkpoints.save(step, {"model": torch.empty(1)})
    assert {path.name for path in tmp_path.iterdir()} == {
        f"checkpoint_step_{step}" for step in (1, 2, 3)
    }
    save = partial(checkpoints.save, 4, {"model": torch.empty(1)})
    for step, work in ((1, save), (2, partial(checkpoints.finish, ""))):
        held.clear()
        threading.Timer(0.2, held.set).start()
        work()
        assert not (tmp_path / f"checkpoint_step_{step}").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_step_3", "checkpoint_step_4"}


def test_a_rank_reads_its_own_file_of_a_sharded_checkpoint(tmp_path):
    """Of a checkpoint of twelve ranks, on fewer, as many and more of them: every file once,
    whoever has written it."""
    for name in (
        ".metadata",
        "manifest.json",
        *(f"__{rank}_{part}.distcp" for rank in range(12) for part in range(2)),
    ):
        (tmp_path / name).write_text(name)
    for world_size in (1, 5, 12, 16):
        shares = [measure_files(tmp_path, rank, world_size) for rank in range(world_size)]
        assert sorted(name for share in shares for name in share) == sorted(
            path.name for path in tmp_path.iterdir() if path.name != "manifest.json"
        )
        for rank, share in enumerate(shares):
            assert world_size < 12 or share.keys() - {".metadata"} == {
                f"__{rank}_{part}.distcp" for part in range(2) if rank < 12
            }
    assert shares[3]["__3_0.distcp"] == [12, zlib.crc32(b"__3_0.distcp")]
