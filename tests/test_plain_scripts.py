"""train_single.py and train_ddp.py: the same losses whoever starts the ranks, and what a plain script promises."""

import ast
import datetime
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from argparse import Namespace
from pathlib import Path
from unittest.mock import Mock

import pytest

from conftest import LAUNCHERS, REPOSITORY, cells, environment, first_images, read_metrics, run, wait_for

SINGLE, DDP = "local/train_single.py", "distributed/train_ddp.py"
FAST = "distributed/train_fast.py"
STEPS = ["--epochs", "1", "--log-every", "1", "--dropout", "0", "--seed", "7"]
BY_HAND = {"torchrun": ["./torchrun.sh"], "spawn": [sys.executable, "distributed/spawn_ranks.py"]}


def losses(log: str) -> dict[tuple[int, int], float]:
    """The losses of a log by epoch and step. A step that is logged twice is a failure."""
    found = re.findall(r"^epoch=(\d+) step=(\d+)/\d+ loss=(\S+) images_per_second=\d+ time_left=\S+$", log, re.M)
    assert len({row[:2] for row in found}) == len(found), log
    return {(int(epoch), int(step)): float(loss) for epoch, step, loss in found}


def evaluations(log: str) -> list[list[float]]:
    """Test loss and accuracy after every epoch of a log."""
    found = re.findall(r"^epoch=\d+ test_loss=(\S+) test_accuracy=(\S+)$", log, re.M)
    return [[float(value) for value in row] for row in found]


def speeds(log: str, epochs: int, batch_size: int = 64) -> list[int]:
    """The images per second in a log. At that speed the images that are left take time_left; both are rounded."""
    line = r"^epoch=(\d+) step=(\d+)/(\d+) loss=\S+ images_per_second=(\d+) time_left=(\d+):(\d+):(\d+)$"
    found = [list(map(int, row)) for row in re.findall(line, log, re.M)]
    for epoch, step, steps, speed, hours, minutes, seconds in found:
        left, images = 3600 * hours + 60 * minutes + seconds, batch_size * ((epochs - epoch + 1) * steps - step)
        assert abs(left * speed - images) <= (left + speed) / 2 + 1, log
    return [row[3] for row in found]


def local(way: str, ranks: int, script: str, *arguments: object, **variables: object):
    variables |= {"NPROC_PER_NODE": ranks, "OMP_NUM_THREADS": 1}
    return run(*BY_HAND[way], script, *arguments, env=environment(**variables))


@pytest.fixture(scope="session")
def one_process(mnist, tmp_path_factory) -> str:
    """The log of train_ddp.py as one process: the curve that all others must repeat."""
    folder = tmp_path_factory.mktemp("one-process")
    alone = run(sys.executable, DDP, "--data-dir", mnist, *STEPS, "--checkpoint-dir", folder / "out")
    assert alone.returncode == 0, alone.stderr
    assert "SYNTHETIC" in alone.stdout and "\r" not in alone.stdout
    assert list(losses(alone.stdout)) == [(1, step) for step in range(1, 16)]  # 1,003 images in batches of 64
    assert [path.name for path in (folder / "out").iterdir()] == ["checkpoint_epoch_1.pt"]
    return alone.stdout


def assert_same_curve(log: str, expected: str):
    """Equal losses, and of 501 test images each is counted once."""
    assert losses(log) == pytest.approx(losses(expected), rel=2e-4), log
    (test_loss, accuracy), (loss, share) = evaluations(log)[0], evaluations(expected)[0]
    assert test_loss == pytest.approx(loss, rel=1e-3) and accuracy * 501 == pytest.approx(share * 501, abs=1.1), log


def test_one_process_without_torch_distributed(one_process, mnist, tmp_path):
    alone = run(sys.executable, SINGLE, "--data-dir", mnist, *STEPS, "--checkpoint-dir", tmp_path / "out")
    assert alone.returncode == 0, alone.stderr
    assert losses(alone.stdout) == pytest.approx(losses(one_process), rel=1e-5)
    assert evaluations(alone.stdout)[0] == pytest.approx(evaluations(one_process)[0], rel=1e-5)
    assert alone.stdout.splitlines()[-1] == f"Finished: epoch=1, checkpoints in {tmp_path / 'out'}"


HANDS = [(way, ranks) for way in BY_HAND for ranks in (2, 4)]


@pytest.mark.parametrize(("way", "ranks"), cells(HANDS, ("spawn", 2)))
def test_equal_losses_by_hand(way, ranks, one_process, mnist, tmp_path):
    options = ["--data-dir", mnist, *STEPS, "--checkpoint-dir", tmp_path / "out"]
    counted = {"PYTHONPATH": REPOSITORY / "tests/scripts/opened"}
    done = local(way, ranks, "tests/scripts/counters.py", "tests/scripts/digest.py", DDP, *options, **counted)
    assert done.returncode == 0, done.stderr
    assert_same_curve(done.stdout, one_process)
    digests = re.findall(r"^WEIGHTS (\w+)$", done.stdout, re.M)
    assert len(digests) == ranks and len(set(digests)) == 1, done.stdout
    # torchrun starts a session for each rank. Spawned ranks have their spawner and its resource tracker besides.
    assert_costs(done.stdout, ranks, 1 if way == "torchrun" else ranks + 2)


def assert_costs(log: str, ranks: int, processes: int):
    """Counted, and so the same on every machine: what a rank of train_ddp.py opens, runs and holds.

    `processes` are those of a rank's session.
    """
    found = [json.loads(line) for line in re.findall(r"^COUNTERS (.*)$", log, re.M)]
    assert len(found) == ranks, log
    for rank in found:
        assert not rank["torchvision"], "as slow to import as torch"
        assert rank["files"] < 2200, "1,850 were seen: Python's, torch's, the script's"
        assert rank["operations"] < 11500, "of the file system: 9,600 were seen"
        assert rank["memory"] < 350e6, "shared with no other process: 285 MB were seen"
        assert rank["peak"] < 500e6, "at any time: 410 MB were seen"
        assert rank["kernels"] == {"aten::_fused_sgd_": 1}, "one for all weights"
        assert rank["processes"] == processes, "what starts the ranks, and they: no more"


@pytest.mark.parametrize("shape", ["2x2", *(pytest.param(x, marks=pytest.mark.matrix) for x in ("1x2", "2x1", "4x1"))])
def test_equal_losses_on_the_cluster(shape, cluster, one_process, mnist, tmp_path):
    """By all launchers at once."""
    nodes, ranks = map(int, shape.split("x"))
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        size = [f"--nodes={nodes}", f"--gpus-per-node={ranks}", f"--output={tmp_path}/{way}.log"]
        size += [f"--ntasks-per-node={ranks}"] if way == "srun" else []
        script = ["tests/scripts/counters.py", "tests/scripts/digest.py", DDP, "--data-dir", mnist, *STEPS]
        script += ["--checkpoint-dir", tmp_path / way]
        submitted[way] = cluster.submit(
            *size, launcher, *script, env={"PYTHONPATH": REPOSITORY / "tests/scripts/opened"}
        )
    for way, number in submitted.items():
        job = cluster.wait(number)
        assert job.state == "COMPLETED", job.log
        assert_same_curve(job.log, one_process)
        # slurmstepd and its ranks; torchrun starts a session for each; slurmstepd, spawner, resource tracker and ranks.
        processes = {"srun": 1 + ranks, "torchrun": 1, "spawn": 3 + ranks}[way]
        assert_costs(job.log, nodes * ranks, processes)
        digests = re.findall(r"^WEIGHTS (\w+)$", job.log, re.M)
        assert len(digests) == nodes * ranks and len(set(digests)) == 1, job.log
        table = r"^\[Rank: (\d+) \| (\S+) \| world size: (\d+) \| local rank: (\d+) \| device: cpu\]$"
        rows = sorted(re.findall(table, job.log, re.M))
        assert [(int(row[0]), int(row[3])) for row in rows] == [(i, i % ranks) for i in range(nodes * ranks)], way
        assert len({row[1] for row in rows}) == nodes and {int(row[2]) for row in rows} == {nodes * ranks}


def test_srun_typed_by_hand(cluster, one_process, mnist, tmp_path):
    """Without a launcher Slurm's own names are the ranks'. The rendezvous has to be said."""
    command = ["srun", "--nodes=2", "--nodelist=node-[1-2]", "--ntasks-per-node=2", "python", DDP]
    command += ["--data-dir", mnist, *STEPS, "--checkpoint-dir", tmp_path / "out"]
    bad = cluster.exec(*command)
    assert bad.returncode != 0, bad.stdout
    assert "this is one of 4 ranks, but MASTER_ADDR or MASTER_PORT is not set" in bad.stderr, bad.stderr
    assert "Traceback" not in bad.stderr
    hand = cluster.exec(*command, env={"MASTER_ADDR": "node-1", "MASTER_PORT": "60123", "OMP_NUM_THREADS": "1"})
    assert hand.returncode == 0, hand.stderr
    assert_same_curve(hand.stdout, one_process)


@pytest.mark.matrix
def test_precision(mnist_full, tmp_path):
    """The same curve, a little coarser."""
    data, curves = first_images(mnist_full, tmp_path / "data", 64, 20), {}
    for precision in ("fp32", "bf16"):
        options = [*STEPS, "--batch-size", 16, "--precision", precision, "--checkpoint-dir", tmp_path / precision]
        done = run(sys.executable, DDP, "--data-dir", data, *options)
        assert done.returncode == 0, done.stderr
        curves[precision] = list(losses(done.stdout).values())
    assert curves["bf16"] == pytest.approx(curves["fp32"], rel=0.02)
    assert curves["bf16"] != pytest.approx(curves["fp32"], rel=1e-6)


@pytest.mark.parametrize("script", cells([(SINGLE,), (DDP,)], (DDP,)))
def test_resume(script, mnist, tmp_path):
    """One epoch and then another, with dropout: the second is that of two epochs at once, and all are kept."""

    def train(*arguments: object):
        options = ["--data-dir", mnist, "--log-every", 5, *arguments]
        return local("torchrun", 2, script, *options) if script == DDP else run(sys.executable, script, *options)

    both = train("--epochs", 2, "--checkpoint-dir", tmp_path / "a")
    first = train("--epochs", 1, "--checkpoint-dir", tmp_path / "b")
    again = run(sys.executable, script, "--data-dir", mnist, "--checkpoint-dir", tmp_path / "b")
    assert again.returncode != 0 and again.stderr.count("has checkpoints: say --resume") == 1, again.stderr
    second = train("--epochs", 2, "--checkpoint-dir", tmp_path / "b", "--resume")
    assert both.returncode == first.returncode == second.returncode == 0, both.stderr + first.stderr + second.stderr
    assert "Resumed after epoch 1\n" in second.stdout and [key[0] for key in losses(second.stdout)] == [2, 2, 2]
    assert losses(first.stdout) | losses(second.stdout) == pytest.approx(losses(both.stdout), rel=1e-5)
    assert len(speeds(both.stdout, epochs=2)) == 6 and len(speeds(second.stdout, epochs=2)) == 3
    assert evaluations(second.stdout)[0] == pytest.approx(evaluations(both.stdout)[1], rel=1e-5)
    for folder in ("a", "b"):
        kept = [f"checkpoint_epoch_{epoch}.pt" for epoch in (1, 2)]
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == kept


@pytest.mark.matrix
def test_requeued_job_resumes_by_itself(cluster, tiny, tmp_path):
    """By all launchers: it goes on after its last epoch as if nothing had been."""
    train = [DDP, "--data-dir", tiny, "--epochs", 3, "--log-every", 2, "--checkpoint-dir"]
    reference = local("torchrun", 2, *train, tmp_path / "reference")
    assert reference.returncode == 0, reference.stderr
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        size = ["--nodes=2", "--gpus-per-node=1", f"--output={tmp_path}/{way}.log"]
        size += ["--ntasks-per-node=1"] if way == "srun" else []
        command = [*size, launcher, "tests/scripts/batches.py", *train, tmp_path / way]
        submitted[way] = cluster.submit(*command, env={"SLOW": "1.5"})
    for way, number in submitted.items():
        wait_for(lambda folder=tmp_path / way: (folder / "checkpoint_epoch_1.pt").exists())
        requeued = cluster.exec("scontrol", "requeue", number)
        assert requeued.returncode == 0, requeued.stderr + (tmp_path / f"{way}.log").read_text()
    for way, number in submitted.items():
        job = cluster.wait(number)
        assert job.state == "COMPLETED" and cluster.show(number)["Restarts"] == "1", job.log
        log = re.split(r"^Resumed after epoch (\d)\n", job.log, flags=re.M)
        assert len(log) == 3 and log[1] in "12", job.log
        assert max(speeds(log[0], epochs=3)) <= 43 and speeds(log[2], epochs=3), "64 images in 1.5 s or more"
        expected = {key: loss for key, loss in losses(reference.stdout).items() if key[0] > int(log[1])}
        assert losses(log[2]) == pytest.approx(expected, rel=1e-5), job.log
        assert sorted(path.name for path in (tmp_path / way).iterdir()) == [
            f"checkpoint_epoch_{i}.pt" for i in (1, 2, 3)
        ]


@pytest.mark.parametrize("script", cells([(SINGLE,), (DDP,)], (DDP,)))
def test_full_disk(script, tiny, tmp_path):
    """The second checkpoint has no room: the first stays and is whole, nothing is named as one that is not."""
    folder, out = tmp_path / "full", tmp_path / "out"
    folder.mkdir()
    train = f"{sys.executable} {script} --data-dir {tiny} --epochs 3 --checkpoint-dir {folder}"
    script = (
        f"mount -t tmpfs -o size=15m full {folder} && {train}; status=$?; cp --recursive {folder} {out}; exit $status"
    )
    done = run("unshare", "--mount", "sh", "-c", script)
    assert done.returncode not in (0, 77), done.stdout
    assert [path.name for path in out.glob("*.pt")] == ["checkpoint_epoch_1.pt"], done.stderr
    assert zipfile.ZipFile(out / "checkpoint_epoch_1.pt").testzip() is None


SENTENCES = {
    "no data": (["--data-dir", "/nowhere"], "no MNIST data at /nowhere/MNIST/raw"),
    "batch": (["--batch-size", "7"], "--batch-size 7 must divide by 2 ranks, and be at most 300 images"),
    "mps": (["--device", "mps"], "--device mps is for one process without a launcher"),
    "too large": (
        ["--batch-size", "1000"],
        r"--batch-size 1000 (is more than all|must divide by \d ranks, and be at most) 300 images",
    ),
    "not finite": (["--learning-rate", "1e8"], "the loss is "),
    "unknown": (["--devise", "cpu"], "unrecognized arguments: --devise cpu"),
    "no number": (["--epochs", "many"], "--epochs: invalid int value: 'many'"),
    "zero": (["--epochs", "0"], "--epochs, --batch-size and --log-every are 1 or more"),
    "dropout": (["--dropout", "1"], "--dropout is below 1"),
    "nan": (["--learning-rate", "nan"], "the loss is nan"),
    "precision": (["--precision", "fp8"], "--precision: invalid choice: 'fp8'"),
}
TWO_RANKS = [(way, case) for way in BY_HAND for case in SENTENCES]
QUICK = [("torchrun", "not finite"), ("torchrun", "batch"), ("spawn", "unknown")]


@pytest.mark.parametrize(("way", "case"), cells(TWO_RANKS, *QUICK))
def test_one_sentence_of_two_ranks(way, case, tiny, tmp_path):
    arguments, sentence = SENTENCES[case]
    bad = local(way, 2, DDP, "--data-dir", tiny, *arguments, "--checkpoint-dir", tmp_path / "out")
    assert bad.returncode == 1, bad.stderr
    # Both ranks have the same fault. Then the launcher says which one has failed.
    lines = re.findall(r"^\[Rank .*", bad.stderr, re.M)
    assert 1 <= len(lines) <= 2, bad.stderr
    assert all(re.match(rf"\[Rank [01] on \S+\] .*{sentence}", line) for line in lines), bad.stderr
    assert not list((tmp_path / "out").glob("*"))


ONE_RANK = [(script, case) for script in (SINGLE, DDP) for case in SENTENCES if case not in ("batch", "mps")]


@pytest.mark.parametrize(("script", "case"), cells(ONE_RANK, (SINGLE, "no data"), (SINGLE, "unknown"), (DDP, "zero")))
def test_one_sentence_of_one_process(script, case, tiny, tmp_path):
    arguments, sentence = SENTENCES[case]
    bad = run(sys.executable, script, "--data-dir", tiny, *arguments, "--checkpoint-dir", tmp_path / "out")
    assert bad.returncode in (1, 2) and re.search(sentence, bad.stderr), bad.stderr
    assert len(bad.stderr.splitlines()) == 1 and not list((tmp_path / "out").glob("*")), bad.stderr


BATCH_OF_EACH = [DDP, FAST, "distributed/train_preemptible.py", "distributed/train_task.py"]


@pytest.mark.matrix
@pytest.mark.parametrize("script", BATCH_OF_EACH[::3])
def test_the_batch_of_each_rank(script, tiny):
    """Ten on each of two ranks are twenty."""
    logs = [
        local("torchrun", 2, script, "--data-dir", tiny, "--epochs", 1, "--log-every", 1, *batch).stdout
        for batch in (["--batch-size", 20], ["--batch-size-per-rank", 10])
    ]
    curves = [re.findall(r"^epoch=1 step=\d+/15 loss=(\S+)", log, re.M) for log in logs]
    assert len(curves[0]) == 15 and curves[0] == curves[1], logs


@pytest.mark.parametrize(
    ("script", "size"),
    cells([(script, 256 if script == FAST else 64) for script in BATCH_OF_EACH], (DDP, 64)),
)
def test_the_batch_of_all_ranks_or_of_each(script, size):
    """One of the two options, also where the first has its default."""
    bad = run(sys.executable, script, "--batch-size", size, "--batch-size-per-rank", 8)
    assert bad.returncode in (1, 2) and len(bad.stderr.splitlines()) == 1, bad.stderr
    assert "--batch-size-per-rank: not allowed with argument --batch-size" in bad.stderr


def test_granted_gpus_that_torch_does_not_see(tiny, tmp_path):
    options = ["--data-dir", tiny, "--epochs", 1, "--checkpoint-dir", tmp_path / "out"]
    granted = environment(SLURM_GPUS_ON_NODE=2)
    bad = run(sys.executable, DDP, *options, env=granted)
    assert bad.returncode == 1 and len(bad.stderr.splitlines()) == 1, bad.stderr
    assert "Slurm granted GPUs here, but torch sees none: say --device cpu if that is meant" in bad.stderr
    done = run(sys.executable, DDP, *options, "--device", "cpu", env=granted)  # jobs here have TRAIN_DEVICE=cpu
    assert done.returncode == 0, done.stderr


def test_the_gpu_of_a_rank():
    """Number local_rank, or number 0 where Slurm shows each rank one GPU alone. torch is a mock: it takes no GPU."""
    lines = re.search(r"^# --- process group -+\n(.*?)^# --- ", (REPOSITORY / DDP).read_text(), re.M | re.S)[1]
    for local_rank, count, index in ((1, 2, 1), (1, 1, 0), (3, 4, 3)):
        script = {"args": Namespace(device="cuda"), "os": os, "torch": Mock(), "distributed": False}
        script |= {"rank": 0, "local_rank": local_rank, "world_size": 1}
        script["torch"].device = lambda *device: device
        script["torch"].cuda.device_count.return_value = count
        exec(lines, script)
        script["torch"].cuda.set_device.assert_called_once_with(("cuda", index))
        assert script["device"] == ("cuda", index)


def test_what_plain_scripts_import():
    """torch, the standard library and the data; the one for one process nothing of torch.distributed."""
    for script in (SINGLE, DDP, "distributed/mnist.py"):
        modules = imports(REPOSITORY / script)
        ours = {name.split(".")[0] for name in modules} - sys.stdlib_module_names - {"torch"}
        assert ours == ({"mnist"} if script != "distributed/mnist.py" else set()), modules
        assert script == DDP or not any("distributed" in name or "parallel" in name for name in modules), modules
    assert "sys.path" not in (REPOSITORY / DDP).read_text()
    assert (REPOSITORY / SINGLE).read_text().count("sys.path") == 1  # for the data


def imports(path: Path) -> set[str]:
    """The names of all modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def test_who_imports_torchvision():
    """It takes as long as torch itself: of the code of jobs only what decodes images does."""
    files = [path for folder in ("distributed", "local") for path in (REPOSITORY / folder).rglob("*.py")]
    wanted = {"torchvision", "torchvision_on_cpu"}
    assert [path.name for path in files if wanted & imports(path)] == ["torchvision_on_cpu.py"]


def test_a_line_is_one_write(tiny, tmp_path):
    """The line that every rank prints, its place: in a log that ranks share, another one's would come in between."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # it keeps writes apart
    command = [sys.executable, DDP, "--data-dir", tiny, "--epochs", "1", "--checkpoint-dir", tmp_path / "out"]
    variables = environment(PYTHONUNBUFFERED=1, OMP_NUM_THREADS=1)
    with subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=there, stderr=there) as process:
        there.close()
        here.settimeout(120)
        writes = [part.decode() for part in iter(lambda: here.recv(65536), b"")]
    assert process.returncode == 0, writes
    assert [part.find("\n") == len(part) - 1 for part in writes if part.startswith("[Rank: 0 |")] == [True], writes


def test_ctrl_c_ends_all_ranks(tiny, tmp_path):
    options = ["--data-dir", tiny, "--epochs", "1000", "--log-every", "1", "--checkpoint-dir", tmp_path / "out"]
    for launch in BY_HAND.values():
        command = [*launch, DDP, *map(str, options), "--resume"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "start_new_session": True}
        with subprocess.Popen(command, cwd=REPOSITORY, env=environment(NPROC_PER_NODE=2), **pipes) as process:
            for line in process.stdout:
                if "loss=" in line:
                    break
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=60)
        left = run("pgrep", "--full", str(tmp_path)).stdout
        assert left == "", left


# --- the end of a run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [4, pytest.param(100, marks=pytest.mark.matrix)])
def test_the_end_of_two_local_ranks(times, tiny, tmp_path):
    """On gloo: all runs end with status 0."""
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 20000 + os.getpid() % 10000}
    command = [sys.executable, "tests/scripts/again.py", times, "--data-dir", tiny, "--epochs", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    ranks = []
    for rank in (0, 1):
        env = environment(**place, RANK=rank, LOCAL_RANK=rank, OMP_NUM_THREADS=1, FOLDER=tmp_path)
        ranks.append(subprocess.Popen([str(part) for part in command], env=env, **pipes))
    for rank, process in enumerate(ranks):
        out, err = process.communicate(timeout=60 + 10 * times)
        assert out == f"rank {rank} ended with {{0: {times}}}\n", out + err
    assert len(list(tmp_path.glob("*/checkpoint_epoch_1.pt"))) == times


@pytest.mark.matrix
def test_the_end_across_two_nodes(cluster, tiny, tmp_path):
    """Two hundred runs of two ranks on two nodes."""
    size = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", f"--output={tmp_path}/log"]
    script = ["tests/scripts/again.py", 200, "--data-dir", tiny, "--epochs", 1]
    job = cluster.sbatch(*size, LAUNCHERS["srun"], *script, env={"FOLDER": tmp_path}, timeout=1200)
    assert job.state == "COMPLETED", job.log
    assert job.log.count("ended with {0: 200}") == 2, job.log


RAISED = {
    "srun": r"^srun: error: node-\d+: task 1: Exited with exit code 1$",
    "torchrun": r"^  host      : node-\d+\n  rank      : 1 \(local_rank: 0\)\n  exitcode  : 1 ",
    "spawn": r"^spawn_ranks.py: rank 1 on node-\d+: process 0 terminated with exit code 1$",
}


@pytest.mark.matrix
@pytest.mark.parametrize("i", range(10))
def test_an_exception_on_one_rank_ends_the_job(i, cluster, tiny, tmp_path):
    """In step 5, by all launchers at once: FAILED within seconds, and the one who started the rank names it."""
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        size = ["--nodes=2", "--gpus-per-node=1", f"--output={tmp_path}/{way}.log"]
        size += ["--ntasks-per-node=1"] if way == "srun" else []
        train = [DDP, "--data-dir", tiny, "--batch-size", 16, "--checkpoint-dir", tmp_path / way]
        command = [*size, launcher, "tests/scripts/batches.py", *train]
        submitted[way] = cluster.submit(*command, env={"RAISE": "5"})
    for way, number in submitted.items():
        job = cluster.wait(number)
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        ended = datetime.datetime.fromisoformat(cluster.show(number)["EndTime"]).timestamp()
        assert ended - int(re.search(r"^raised at (\d+)$", job.log, re.M)[1]) < 15, job.log
        assert job.log.count("ValueError: boom on purpose") == 1, job.log
        assert re.search(RAISED[way], job.log, re.M), job.log
        assert cluster.left_over(number) == []


# --- copies -----------------------------------------------------------------------------------------------------------

TAKEN = ["distributed/train_ddp.py", "distributed/mnist.py", "distributed/spawn_ranks.py", "env.sh", "torchrun.sh"]
TAKEN += ["aux/slurm_rank.sh", *LAUNCHERS.values()]


def take(files: list[str], folder: Path) -> Path:
    """These files of the repository, in a folder of their own."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


@pytest.mark.matrix
def test_the_files_to_take_along(cluster, tiny, tmp_path):
    """Nothing but these, elsewhere: they train by all launchers, and by hand."""
    elsewhere = take(TAKEN, tmp_path / "elsewhere")
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        command = [f"--output={tmp_path}/{way}.log", launcher, DDP, "--data-dir", tiny, "--epochs", 1]
        submitted[way] = cluster.submit(*command, cwd=elsewhere)
    for number in submitted.values():
        job = cluster.wait(number)
        assert job.state == "COMPLETED", job.log
        assert job.log.splitlines()[-1] == f"Finished: epoch=1, checkpoints in checkpoints/{number}", job.log
        assert (elsewhere / f"checkpoints/{number}/checkpoint_epoch_1.pt").exists()
    for launch in BY_HAND.values():
        options = ["--data-dir", tiny, "--epochs", 1, "--checkpoint-dir", tmp_path / launch[-1].replace("/", "-")]
        done = run(*launch, DDP, *options, cwd=elsewhere, env=environment(NPROC_PER_NODE=2, OMP_NUM_THREADS=1))
        assert done.returncode == 0, done.stderr


@pytest.fixture
def images(tmp_path) -> Path:
    """Small PNG files in five classes, each of a colour of its own: train/CLASS/*.png and test/CLASS/*.png."""
    from PIL import Image

    generator = random.Random(0)
    for split, count in (("train", 40), ("test", 9)):
        for i, name in enumerate(("ant", "bee", "cat", "dog", "elk")):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for j in range(count):
                noise = Image.frombytes("RGB", (40, 36), generator.randbytes(40 * 36 * 3))
                colour = Image.new("RGB", (40, 36), f"hsl({72 * i}, 80%, 50%)")
                Image.blend(colour, noise, 0.3).save(folder / f"{j}.png")
    return tmp_path / "images"


COPY = REPOSITORY / "tests/scripts/train_images.py"


def test_what_a_changed_copy_changes():
    """The blocks of data and model, and above them what is marked EDIT."""
    theirs, ours = (re.split(r"^# --- (.+?) -+$", path.read_text(), flags=re.M) for path in (REPOSITORY / DDP, COPY))
    assert theirs[1::2] == ours[1::2]
    changed = [name for name, a, b in zip(theirs[1::2], theirs[2::2], ours[2::2], strict=True) if a != b]
    assert changed == ["data", "model"]
    above = zip(theirs[0].split('"""')[2].splitlines(), ours[0].split('"""')[2].splitlines(), strict=True)
    assert all("# EDIT" in line and "# EDIT" in other for line, other in above if line != other), "marked EDIT"


@pytest.mark.matrix
def test_a_changed_copy(cluster, images, tmp_path):
    """Other data and another model in a copy of train_ddp.py: by all launchers, and a requeue."""
    elsewhere = take([*TAKEN, "distributed/torchvision_on_cpu.py", "tests/scripts/batches.py"], tmp_path / "elsewhere")
    (elsewhere / DDP).unlink()
    (elsewhere / "distributed/mnist.py").unlink()
    script = shutil.copy(COPY, elsewhere / "distributed/train_images.py")
    train = [Path(script).relative_to(elsewhere), "--data-dir", images, "--epochs", 3, "--batch-size", 20]
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        # One CPU thread in every rank: sums are rounded alike.
        size = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", f"--output={tmp_path}/{way}.log"]
        size += ["--ntasks-per-node=1"] if way == "srun" else []
        command = [*size, launcher, "tests/scripts/batches.py", *train, "--log-every", 5]
        submitted[way] = cluster.submit(*command, env={"SLOW": "0.5"}, cwd=elsewhere)
    wait_for(lambda: (elsewhere / f"checkpoints/{submitted['torchrun']}/checkpoint_epoch_1.pt").exists())
    requeued = cluster.exec("scontrol", "requeue", submitted["torchrun"])
    assert requeued.returncode == 0, requeued.stderr
    curves = {}
    for way, number in submitted.items():
        job = cluster.wait(number)
        assert job.state == "COMPLETED" and job.log.splitlines()[-1].startswith("Finished: epoch=3"), job.log
        assert job.log.count("Resumed after epoch") == (way == "torchrun"), job.log
        curves[way] = losses(job.log.split("Resumed after epoch")[-1])
        assert evaluations(job.log)[-1][1] > 0.9, job.log
    assert curves["spawn"] == curves["srun"]
    assert curves["torchrun"] == {key: curves["spawn"][key] for key in curves["torchrun"]}
    assert curves["torchrun"], "the requeued run has logged nothing"


DATA = """    random = torch.Generator().manual_seed(1)
    images, labels = torch.randn(245, 3, 32, 32, generator=random), torch.randint(5, (245,), generator=random)
    train_set, test_set = map(torch.utils.data.TensorDataset, images.split([200, 45]), labels.split([200, 45]))
"""
MODEL = "model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5))\n"


@pytest.mark.matrix
def test_a_changed_copy_of_train_preemptible(tmp_path):
    """Stopped in the midst of an epoch and resumed, with other data and another model: the same losses, bit for bit."""
    script = shutil.copytree(REPOSITORY / "distributed", tmp_path / "distributed") / "train_preemptible.py"
    text = script.read_text()
    for old, new in (
        (r"^    train_set, test_set = mnist\..*\n", DATA),
        (r"^source = mnist\..*\n", 'source = "random images"\n'),
        (r"^convolutions = .*\nlinears = .*\nmodel = .*# EDIT: your model\n", MODEL),
    ):
        text, count = re.subn(old, new, text, flags=re.M)
        assert count == 1, old
    script.write_text(text)
    for folder, *options in (("a",), ("b", "--max-steps", 5), ("b", "--resume")):
        options += ["--data-dir", tmp_path, "--checkpoint-dir", tmp_path / folder]
        done = local("torchrun", 2, script, "--epochs", 3, "--log-every", 1, *options)
        assert done.returncode == 0, done.stderr
    assert "Resumed after step 5\n" in done.stdout
    a, b = ([(row["step"], row["loss"]) for row in read_metrics(tmp_path / x) if "loss" in row] for x in "ab")
    assert a == b and [step for step, _ in a] == list(range(1, 10))


# --- train_fast.py ----------------------------------------------------------------------------------------------------


def test_fast_starts(tiny, tmp_path):
    """One step of 256 images, and its checkpoint."""
    done = run(sys.executable, FAST, "--data-dir", tiny, "--epochs", 1, "--checkpoint-dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert list(losses(done.stdout)) == [(1, 1)] and len(evaluations(done.stdout)) == 1
    assert done.stdout.splitlines()[-1] == f"Finished: epoch=1, checkpoints in {tmp_path / 'out'}"


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fast_reaches_99_percent_in_one_epoch(seed, mnist_full, tmp_path):
    options = ["--data-dir", mnist_full, "--epochs", 1, "--seed", seed, "--checkpoint-dir", tmp_path / "out"]
    done = run(sys.executable, FAST, *options)
    assert done.returncode == 0, done.stderr
    assert evaluations(done.stdout)[0][1] >= 0.99, done.stdout


@pytest.mark.matrix
def test_fast_under_all_launchers(cluster, mnist_full, tmp_path):
    """On four ranks of two nodes, which all have the same weights and statistics at the end, and learn as well."""
    data, submitted = first_images(mnist_full, tmp_path / "data", 16_000, 2001), {}
    for way, launcher in LAUNCHERS.items():
        size = ["--nodes=2", "--gpus-per-node=2", f"--output={tmp_path}/{way}.log"]
        size += ["--ntasks-per-node=2"] if way == "srun" else []
        script = ["tests/scripts/digest.py", FAST, "--data-dir", data, "--epochs", 2]
        submitted[way] = cluster.submit(*size, launcher, *script, "--checkpoint-dir", tmp_path / way)
    for number in submitted.values():
        job = cluster.wait(number, timeout=240)
        assert job.state == "COMPLETED", job.log
        digests = re.findall(r"^WEIGHTS (\w+)$", job.log, re.M)
        assert len(digests) == 4 and len(set(digests)) == 1, job.log
        assert evaluations(job.log)[-1][1] > 0.97, job.log


@pytest.mark.matrix
def test_fast_resumes(mnist, tmp_path):
    """The learning rate goes on where it was."""
    train = [sys.executable, FAST, "--data-dir", mnist, "--log-every", 1]
    both = run(*train, "--epochs", 2, "--checkpoint-dir", tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b/checkpoint_epoch_2.pt").unlink()
    second = run(*train, "--epochs", 2, "--checkpoint-dir", tmp_path / "b", "--resume")
    assert both.returncode == second.returncode == 0, both.stderr + second.stderr
    assert list(losses(second.stdout)) == [(2, 1), (2, 2), (2, 3)]
    assert losses(second.stdout).items() <= losses(both.stdout).items()
