"""The same losses, whoever starts the ranks and however many there are; checkpoints; what a run
says of itself."""

import re
import socket
import subprocess
import sys
import zipfile

import pytest

from conftest import LAUNCHERS, REPOSITORY, at_once, environment, read_metrics, run

SCRIPT = "distributed/train_preemptible.py"
STEPS = ["--epochs", 1, "--log-every", 1, "--dropout", 0, "--seed", 7]


def losses(folder) -> list[float]:
    return [event["loss"] for event in read_metrics(folder) if "loss" in event]


def train(data, folder, *options: object, ranks: int = 1) -> subprocess.CompletedProcess:
    """A run on this machine."""
    launch = [sys.executable] if ranks == 1 else ["./torchrun.sh"]
    command = [*launch, SCRIPT, "--data-dir", data, "--checkpoint-dir", folder, *options]
    return run(*command, env=environment(NPROC_PER_NODE=ranks, OMP_NUM_THREADS=1))


@pytest.fixture(scope="session")
def one_process(mnist, tmp_path_factory):
    """The losses as one process: the curve that every launcher must repeat; and the last line of
    the metrics."""
    folder = tmp_path_factory.mktemp("one-process")
    alone = train(mnist, folder, *STEPS)
    assert alone.returncode == 0 and "SYNTHETIC" in alone.stdout, alone.stderr
    return losses(folder), read_metrics(folder)[-1]


SHAPES = [(way, shape) for shape in ("2x2", "1x2", "2x1", "4x1") for way in LAUNCHERS]
OTHERS = [
    pytest.param(cases, marks=pytest.mark.matrix)
    for cases in (SHAPES[:1] + SHAPES[2:7], SHAPES[7:])
]


@pytest.mark.parametrize("cases", [SHAPES[1:2], *OTHERS], ids=["one", "some", "others"])
def test_equal_losses(cases, cluster, one_process, mnist, tmp_path):
    def scenario(way, shape):
        folder = tmp_path / f"{way}-{shape}"
        folder.mkdir()
        nodes, ranks = map(int, shape.split("x"))
        size = [f"--nodes={nodes}", f"--gpus-per-node={ranks}", f"--output={folder}/log"]
        if way == "srun":
            size += [f"--ntasks-per-node={ranks}"]
        command = [LAUNCHERS[way], "tests/scripts/digest.py", SCRIPT, "--data-dir", mnist, *STEPS]
        job = cluster.sbatch(*size, *command, "--checkpoint-dir", folder / "out")
        assert job.state == "COMPLETED", job.log
        expected, last = one_process
        assert len(expected) == 15  # 1,003 images in batches of 64, the rest dropped
        assert losses(folder / "out") == pytest.approx(expected, rel=2e-4), job.log
        found = read_metrics(folder / "out")[-1]
        assert found["test_loss"] == pytest.approx(last["test_loss"], rel=1e-3)
        right = last["test_accuracy"] * 501
        assert found["test_accuracy"] * 501 == pytest.approx(right, abs=1.01)
        digests = re.findall(r"^WEIGHTS (\w+)$", job.log, re.M)
        assert len(digests) == nodes * ranks and len(set(digests)) == 1, job.log
        line = r"^\[Rank: (\d+) \| SLURMD_NODENAME: (\S+) \| world size: .* launcher: (\w+)\]$"
        table = re.findall(line, job.log, re.M)
        assert [int(row[0]) for row in table] == list(range(nodes * ranks)), job.log
        assert len({row[1] for row in table}) == nodes and {row[2] for row in table} == {way}

    at_once(scenario, cases)


@pytest.mark.matrix
def test_srun_typed_by_hand(cluster, one_process, mnist, tmp_path):
    """`srun python SCRIPT`, no launcher: address, port and threads come from Slurm's variables."""
    options = ["--data-dir", mnist, *STEPS, "--max-steps", 3, "--checkpoint-dir", tmp_path]
    hand = cluster.exec("srun", "--nodes=2", "--ntasks-per-node=2", "python", SCRIPT, *options)
    assert hand.returncode == 0, hand.stderr
    assert losses(tmp_path) == pytest.approx(one_process[0][:3], rel=2e-4)


def test_metrics_and_final_lines(mnist, tmp_path):
    done = train(mnist, tmp_path, "--epochs", 2, "--log-every", 10, ranks=2)
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(tmp_path)
    events = [event for event in metrics if "loss" in event]
    assert [event["step"] for event in events] == [10, 20, 30]
    assert all({"step", "epoch", "loss", "images_per_second"} <= event.keys() for event in events)
    assert "time_left=" in done.stdout and "\r" not in done.stdout
    final = re.search(r"^Finished: epoch=2 average_loss=(\S+) accuracy=(\S+)$", done.stdout, re.M)
    assert float(final[1]) == pytest.approx(metrics[-1]["test_loss"], abs=1e-4)
    saved = sorted(path.name for path in tmp_path.glob("*.pt"))
    assert saved == ["checkpoint_step_15.pt", "checkpoint_step_30.pt"]


@pytest.mark.matrix
def test_loader_workers_change_nothing(one_process, mnist, tmp_path):
    done = train(mnist, tmp_path, *STEPS, "--max-steps", 4, "--num-workers", 2, ranks=2)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(one_process[0][:4], rel=2e-4)


@pytest.mark.matrix
def test_resume_continues_the_curve(mnist, tmp_path):
    """Two epochs at once, and one and then another: the same losses, every step once."""
    a, b, options = tmp_path / "a", tmp_path / "b", ["--log-every", 5, "--dropout", 0]
    assert train(mnist, a, *options, "--epochs", 2, ranks=2).returncode == 0
    assert train(mnist, b, *options, "--epochs", 1, ranks=2).returncode == 0
    second = train(mnist, b, *options, "--epochs", 2, "--resume", ranks=2)
    assert second.returncode == 0 and "Resumed after step 15" in second.stdout, second.stderr
    assert losses(b) == pytest.approx(losses(a), rel=1e-4)
    steps_of_a, steps_of_b = ([x["step"] for x in read_metrics(folder)] for folder in (a, b))
    assert steps_of_a == steps_of_b


@pytest.mark.matrix
def test_killed_while_writing_a_checkpoint(cluster, tiny, tmp_path):
    """Rank 0 killed between first byte and rename of the second checkpoint: the first one is
    whole and goes on."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import os\n"
        "calls, fsync = [], os.fsync\n"
        "def killing(handle):\n"
        "    calls.append(handle)\n"
        "    # File and folder of the first checkpoint, then the file of the second.\n"
        "    if len(calls) == 3:\n"
        "        os.kill(os.getpid(), 9)\n"
        "    fsync(handle)\n"
        "os.fsync = killing\n"
    )
    out = tmp_path / "out"
    command = [f"--output={tmp_path}/log", LAUNCHERS["srun"], SCRIPT, "--data-dir", tiny]
    command += ["--epochs", 3, "--checkpoint-dir", out]
    job = cluster.sbatch(*command, env={"PYTHONPATH": tmp_path / "site"})
    assert job.state == "FAILED", job.log
    assert [path.name for path in out.glob("*.pt")] == ["checkpoint_step_4.pt"]
    assert zipfile.ZipFile(out / "checkpoint_step_4.pt").testzip() is None
    job = cluster.sbatch(*command, "--resume")
    assert job.state == "COMPLETED" and "Resumed after step 4" in job.log, job.log


def test_live_progress_on_a_terminal(mnist, tmp_path):
    command = f"{sys.executable} {SCRIPT} --data-dir {mnist} --epochs 1 --log-every 5"
    command += f" --checkpoint-dir {tmp_path}"
    shown = run("script", "--quiet", "--return", "--command", command, "/dev/null")
    assert shown.returncode == 0, shown.stdout
    # Three log events over each other, then the epoch's line.
    assert shown.stdout.count("\x1b[K") == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--dropout", "1"], "--dropout: '1' is not a number"),
        (["--checkpoint-every", "0m"], "--checkpoint-every: '0m' is neither a number of"),
        (["--resume"], "--resume needs the --checkpoint-dir"),
        (["--data-dir", "/nowhere"], "no MNIST data in /nowhere"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence, tmp_path):
    bad = run(sys.executable, REPOSITORY / SCRIPT, *arguments, cwd=tmp_path)
    assert bad.returncode in (1, 2)
    assert sentence in bad.stderr and len(bad.stderr.splitlines()) == 1, bad.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_does_not_divide(tiny):
    for launch in (["./torchrun.sh"], [sys.executable, "distributed/spawn_ranks.py"]):
        command = [*launch, SCRIPT, "--data-dir", tiny, "--batch-size", 7]
        bad = run(*command, env=environment(NPROC_PER_NODE=2))
        assert bad.returncode != 0
        assert bad.stderr.count("--batch-size 7 is not divisible by 2 ranks") == 1, bad.stderr


def test_a_line_is_one_write(tiny, tmp_path):
    """In a log that ranks share, another one's line would come in between: Python unbuffered
    makes several."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # it keeps writes apart
    command = [sys.executable, SCRIPT, "--data-dir", tiny, "--max-steps", "3"]
    command += ["--checkpoint-dir", tmp_path / "out"]
    options = {"cwd": REPOSITORY, "env": environment(PYTHONUNBUFFERED=1, OMP_NUM_THREADS=1)}
    with subprocess.Popen(command, stdout=there, stderr=there, **options) as process:
        there.close()
        here.settimeout(120)
        writes = [part.decode() for part in iter(lambda: here.recv(65536), b"")]
    assert process.returncode == 0 and len(writes) >= 6, writes
    assert [part for part in writes if part.find("\n") != len(part) - 1] == []
