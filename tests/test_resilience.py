"""The package resilience by itself, without a cluster: what it imports, how ranks meet and wait for
each other, and its sentences."""

import re
import shutil
import subprocess
import sys
import time
import zlib
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import preemption
import resilience.group
import resilience.ranks
from conftest import REPOSITORY, environment, free_port, read_metrics, run
from heartbeat import read_beats
from resilience import arguments, checkpoint_files, torch_private
from resilience.checkpoint_files import find_checkpoints, measure_files
from resilience.checkpoints import Checkpoints
from resilience.group import Group, device_fault, faults_of
from resilience.progress import Progress
from resilience.ranks import Ranks, find_ranks, stop_if_independent

FSDP = "train_fsdp.py"
SMALL = "--layers 1 --heads 2 --width 16 --context 16 --batch-size 4 --eval-windows 4 --device cpu "
SMALL = (SMALL + "--precision fp32 --log-every 1").split()
ALONE = Ranks(0, 0, 1, 1, "hand")


@pytest.fixture
def command(text, tmp_path) -> list:
    """A run of a tiny model, into tmp_path/out."""
    train = [REPOSITORY / "distributed" / FSDP, *SMALL, "--data-dir", text]
    return [*train, "--checkpoint-dir", tmp_path / "out"]


def test_light_modules_import_no_torch():
    modules = "arguments, checksums, ranks"
    code = f"import sys; from resilience import {modules}; sys.exit('torch' in sys.modules)"
    assert run(sys.executable, "-c", code, cwd=REPOSITORY / "distributed").returncode == 0


WRONG = ["one", "nan", "1_", "½", "", "-1", "1e400", "9" * 5000, "\x1b[2J\x07", "$(touch canary)"]


@pytest.mark.parametrize("option", ["whole", "number", "often", "unknown"])
def test_an_argument_that_is_wrong_is_one_sentence(option, capsys):
    """Without control characters."""
    parser = arguments.ArgumentParser()
    parser.add_argument("--whole", type=arguments.whole_number(1))
    parser.add_argument("--number", type=arguments.number(0))
    parser.add_argument("--often", type=arguments.interval)
    for wrong in WRONG:
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([f"--{option}={wrong}"])
        sentence = capsys.readouterr().err.removesuffix("\n")
        assert f"--{option}" in sentence and sentence.isprintable()


def test_a_loss_that_is_not_finite_ends_the_run(command, tmp_path):
    """With one sentence and status 1, and no checkpoint of weights that are not finite."""
    command += ["--learning-rate", 1e8, "--clip", 0, "--warmup-steps", 0, "--checkpoint-every", 5]
    done = run("./torchrun.sh", *command)
    assert done.returncode == 1 and "Finished" not in done.stdout, done.stderr
    sentence = r"^\[Rank 0 on .*the loss is (?:nan|inf) at step \d+: try a lower"
    assert len(re.findall(sentence, done.stderr, re.M)) == 1, done.stderr
    assert not find_checkpoints(tmp_path / "out")


def test_the_time_that_saving_and_evaluation_take_is_in_no_throughput(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def take(seconds: float):
        clock[0] += seconds

    args = Namespace(checkpoint_dir=tmp_path, log_every=1, tensorboard=False, save_timeout=9)
    alone, model = Group(ALONE, torch.device("cpu"), 9), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setattr(Checkpoints, "begin_writing", lambda *_: take(100))
    checkpoints = Checkpoints(args, alone, {}, 4)
    progress = Progress(args, alone, "tokens", 1000, 0, 4, flops_per_unit=2e-6)
    for step in (1, 2):
        take(2)
        progress.add(step, torch.tensor(1.0))
        progress.log(step, 1)
        checkpoints.save(step, model, optimizer)
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


def test_a_rank_that_never_comes(command):
    """torch says how many have joined, within the timeout."""
    command += ["--init-timeout", 3]
    with start_rank(0, *command, WORLD_SIZE=2, MASTER_PORT=free_port()) as rank:
        said = rank.communicate(timeout=60)[1]
    assert rank.returncode == 1 and "1/2 clients joined" in said, said


def test_ranks_that_cannot_connect(command, tmp_path):
    """They end and show where they wait. A patched gloo hangs, as NCCL would."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "class Hook:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'resilience.group':\n"
        "            import torch.distributed as dist\n"
        "            dist.all_reduce = lambda *_, **__: time.sleep(100)\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    world = {"WORLD_SIZE": 2, "MASTER_PORT": free_port(), "PYTHONPATH": tmp_path}
    command += ["--init-timeout", 1]
    with start_rank(0, *command, **world) as first, start_rank(1, *command, **world) as second:
        said = [rank.communicate(timeout=60)[1] for rank in (first, second)]
    assert first.returncode == second.returncode == 1
    for stack in said:
        assert "Timeout (0:00:11)!" in stack and re.search(r"group.py\W.* in connect$", stack, re.M)


def test_a_fault_of_one_rank_ends_all(command):
    """It says it itself, and the others say nothing."""
    world = {"WORLD_SIZE": 2, "MASTER_PORT": free_port()}
    command += ["--device", "auto"]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": 2}
    with (
        start_rank(0, *command, **world) as first,
        start_rank(1, *command, **world, **hidden) as bad,
    ):
        said = [rank.communicate(timeout=60)[1] for rank in (first, bad)]
    assert first.returncode == bad.returncode == 1 and said[0] == "", said
    assert re.fullmatch(r"\[Rank 1 on \S+\] Slurm granted GPUs, but torch sees none: .*\n", said[1])


def test_ranks_are_compared():
    def known(**changed) -> list[dict]:
        same = {"host": "n1", "fault": None, "torch": "2.13.0", "gpu": None}
        return [same | {"gpu": "a"}, same | {"gpu": "b"}, same | {"gpu": "c"} | changed]

    assert faults_of(known()) == faults_of(known(gpu="a", host="n2")) == [None] * 3
    assert faults_of(known(fault="no data", torch="2.9.0")) == [None, None, "no data"]
    assert "torch 2.9.0, but rank 0 on n1 has 2.13.0" in faults_of(known(torch="2.9.0"))[2]
    assert "ranks 1 and 2 are on one device, GPU b: ask" in faults_of(known(gpu="b"))[2]


def test_two_ranks_on_one_device(monkeypatch, capsys):
    """One of them says so, before NCCL would hang."""
    gpu = SimpleNamespace(uuid="b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(Group, "gathered", lambda self, mine: [mine, mine])
    monkeypatch.setattr(resilience.group, "end", sys.exit)
    second = Group(Ranks(1, 1, 2, 2, "srun"), torch.device("cuda", 0), 9)
    with pytest.raises(SystemExit):
        second.compare(None)
    assert "ranks 0 and 1 are on one device, GPU b: ask" in capsys.readouterr().err


def test_a_rank_without_a_gpu(monkeypatch):
    """Three ranks share a node's two GPUs, or each sees its own as number 0."""
    ranks = [Ranks(rank, rank, 3, 3, "srun") for rank in range(3)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    *first, last = (device_fault("auto", rank) for rank in ranks)
    assert first == [None, None] and last.startswith("local rank 2 has no GPU: torch sees 2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [device_fault("auto", rank) for rank in ranks] == [None] * 3


def test_independent_runs(monkeypatch, capsys):
    """Two nodes, and on each a torchrun that knows of one: srun's first task says so."""
    step = {"SLURM_STEP_ID": 0, "SLURM_NTASKS": 2, "SLURM_PROCID": 0, "GROUP_WORLD_SIZE": 1}
    for name, value in step.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(resilience.ranks, "end", sys.exit)
    with pytest.raises(SystemExit):
        stop_if_independent(Ranks(0, 0, 2, 2, "torchrun"))
    assert "2 independent training runs instead of one" in capsys.readouterr().err
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    stop_if_independent(Ranks(0, 0, 2, 2, "torchrun"))


def test_ranks_of_a_node(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    step = {"STEP_NUM_NODES": 2, "NTASKS": 8, "PROCID": 6, "LOCALID": 2}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    # The last ones are a batch shell's, of Slurm 26.05 and before.
    for step_id, ranks in (("0", Ranks(6, 2, 8, 4, "srun")), ("-5", ALONE), ("4294967291", ALONE)):
        monkeypatch.setenv("SLURM_STEP_ID", step_id)
        assert find_ranks() == ranks


# --- how long they wait for each other ---


def test_the_groups_of_a_mesh_have_the_timeout_of_the_phase(monkeypatch):
    seen = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda values: seen.append("barrier"))
    monkeypatch.setattr(torch_private, "set_timeout", lambda *call: seen.append(call))
    group = Group(ALONE, torch.device("cpu"), 300)
    group.groups = ["data", "tensor"]
    with group.longer_timeout(1800):
        assert group.timeout == 1800
    long, short = ([(time, name) for name in (None, "data", "tensor")] for time in (1800, 300))
    assert seen == [*long, "barrier", *short] and group.timeout == 300


SHOW_TIMEOUTS = """
import runpy, sys; sys.path.insert(0, 'distributed')
from torch.nn import functional
from resilience import checkpoints, group
groups, begin = [], group.Group.__init__
group.Group.__init__ = lambda *args: groups.append(args[0]) or begin(*args)
def shown(name, function):
    def call(*args, **options):
        print('evaluate' if options.get('reduction') == 'sum' else name, groups[-1].timeout)
        return function(*args, **options)
    return call
functional.cross_entropy = shown('step', functional.cross_entropy)
checkpoints.Checkpoints.load = shown('load', checkpoints.Checkpoints.load)
checkpoints.Checkpoints.begin_writing = shown('write', checkpoints.Checkpoints.begin_writing)
sys.argv[0] = 'distributed/' + sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_which_timeout_holds_when(text, tmp_path):
    """The first step has that of the rendezvous, evaluation, save and load a long one, all other
    steps a short one."""
    command = [sys.executable, "-c", SHOW_TIMEOUTS, FSDP, "--checkpoint-dir", tmp_path, *SMALL]
    command += ["--data-dir", text, "--steps", 2, "--eval-every", 2, "--checkpoint-every", "1"]
    command += ["--init-timeout", "20", "--timeout", "7", "--save-timeout", "50"]

    def timeouts(*options: str) -> list[tuple[str, str]]:
        done = run(*command, *options)
        return re.findall(r"^(step|evaluate|write|load) ([\d.]+)$", done.stdout, re.M)

    saved, end = ("write", "50.0"), [("write", "50.0"), ("evaluate", "50.0")]
    assert timeouts() == [("step", "20.0"), saved, ("step", "7.0"), *end]
    shutil.rmtree(find_checkpoints(tmp_path)[0])
    assert timeouts("--resume") == [("load", "50.0"), ("step", "20.0"), *end]


SLOW_DISK = """
import os, time
fsync = os.fsync
def slow_fsync(file):
    time.sleep(5 if os.environ.get("RANK") == "0" else 0)
    fsync(file)
os.fsync = slow_fsync
"""


def test_a_slow_save_lives_and_a_stuck_rank_does_not(command, tmp_path):
    """A disk on which a save takes ten seconds, --timeout 6, and after the save a rank that
    stays in step 8."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    # The thread has written before step 8.
    command = [REPOSITORY / "tests/scripts/slowly.py", 6, *command]
    command += ["--timeout", 6, "--checkpoint-every", 5]
    port = free_port()
    world = {"WORLD_SIZE": 2, "MASTER_PORT": port, "PYTHONPATH": tmp_path, "STUCK": 1}
    world |= {"cwd": tmp_path}
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
    assert (tmp_path / "out/checkpoint_step_5").exists() and line.startswith("step=8/"), said
    assert first.returncode == 1 and 5 < seconds - 6 < 12, (seconds, said)
    looked_at = r"no step for \d+ s. First to look at: rank 1 on \S+ \(step 7\), which is in$"
    assert re.search(looked_at, said, re.M), said
    stuck = read_beats(tmp_path / f"log/local/ranks-{port}")[1]
    assert "wait_for_ever" in stuck["stack"][-3], said


# --- stopped ---


RANK_1_IS_ASKED = """
import os, runpy, sys; sys.path.insert(0, 'distributed')
import preemption
from resilience.checkpoints import Checkpoints
due = Checkpoints.due
def asked_in_step_2(self, step):
    if step == 2:
        preemption.received, self.agree_next = os.environ['RANK'] == '1', 3
    return due(self, step)
Checkpoints.due = asked_in_step_2
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_one_rank_is_asked_to_stop(command, tmp_path):
    """Both save when they next agree, and evaluate when they resume, for which Slurm may not leave
    time before. The losses are those of an uninterrupted run."""
    hooked = tmp_path / "hooked.py"
    hooked.write_text(RANK_1_IS_ASKED)
    command += ["--steps", 6, "--eval-every", 3, "--dropout", 0.2]
    stopped = run("./torchrun.sh", hooked, *command)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.endswith("\nStopped after step 3, saved\n")
    assert "val_loss" not in stopped.stdout
    assert [path.name for path in find_checkpoints(tmp_path / "out")] == ["checkpoint_step_3"]
    resumed = run("./torchrun.sh", *command, "--resume")
    assert "\nResumed after step 3\n" in resumed.stdout, resumed.stderr
    whole = run("./torchrun.sh", *command, "--checkpoint-dir", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    found, expected = (
        [
            (event["step"], event.get("loss"), event.get("val_loss"))
            for event in read_metrics(folder)
        ]
        for folder in (tmp_path / "out", tmp_path / "whole")
    )
    assert found == expected and len(found) == 8


def test_a_superseded_start_publishes_nothing(tmp_path, monkeypatch):
    """A later start of the job may claim the folder while this one writes."""
    written = tmp_path / "written"
    written.mkdir()
    (tmp_path / "owner").write_text("job 7, start 2, node-3:4711")
    monkeypatch.setattr(checkpoint_files, "end", sys.exit)
    with pytest.raises(SystemExit):
        checkpoint_files.publish(written, tmp_path / "checkpoint_step_5")
    assert find_checkpoints(tmp_path) == []


# Steps that are done of 4, the launcher, whether a signal came and Slurm can requeue: the status,
# and whether Slurm was asked.
ENDS = [
    (2, "srun", True, True, 0, True),
    (2, "srun", True, False, 1, True),
    (4, "srun", True, True, 0, False),
    (4, "torchrun", False, True, 0, False),
    # torchrun fails, once it was told to stop.
    (4, "torchrun", True, True, 0, True),
    (4, "torchrun", True, False, 0, True),
]


@pytest.mark.parametrize(("step", "launcher", "told", "can", "status", "asked"), ENDS)
def test_which_end_is_requeued(step, launcher, told, can, status, asked, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(preemption, "received", told)
    monkeypatch.setattr(preemption, "requeue", lambda words: calls.append(words) or can)
    group = Group(ALONE._replace(launcher=launcher), torch.device("cpu"), 9)
    args = Namespace(checkpoint_dir=tmp_path, save_timeout=9)
    checkpoints = Checkpoints(args, group, {}, total_steps=4)
    checkpoints.step = step
    checkpoints.finish("all")
    assert group.status == status
    assert calls == ([f"--resume --checkpoint-dir {tmp_path}"] if asked else [])


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
