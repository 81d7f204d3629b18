"""The same losses, whoever starts the ranks and however many there are; checkpoints; what a run
says of itself."""

import os
import re
import signal
import socket
import subprocess
import sys
import zipfile

import pytest

from conftest import LAUNCHERS, REPOSITORY, at_once, environment, read_metrics, run

STEPS = ["--epochs", "1", "--log-every", "1", "--dropout", "0", "--seed", "7"]


def losses(folder) -> list[float]:
    return [event["loss"] for event in read_metrics(folder) if "loss" in event]


@pytest.fixture(scope="session")
def one_process(mnist, tmp_path_factory):
    """The losses as one process: the curve that every launcher must repeat; and the last line of
    the metrics."""
    folder = tmp_path_factory.mktemp("one-process")
    alone = run(
        sys.executable,
        "distributed/train_preemptible.py",
        "--data-dir",
        mnist,
        *STEPS,
        "--checkpoint-dir",
        folder / "out",
    )
    assert alone.returncode == 0, alone.stderr
    assert "SYNTHETIC" in alone.stdout
    return losses(folder / "out"), read_metrics(folder / "out")[-1]


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
        script = ["tests/scripts/digest.py", "distributed/train_preemptible.py"]
        job = cluster.sbatch(
            *size,
            LAUNCHERS[way],
            *script,
            "--data-dir",
            mnist,
            *STEPS,
            "--checkpoint-dir",
            folder / "out",
        )
        assert job.state == "COMPLETED", job.log
        expected, last = one_process
        assert len(expected) == 15  # 1,003 images in batches of 64, the rest dropped
        assert losses(folder / "out") == pytest.approx(expected, rel=2e-4), job.log
        metrics = read_metrics(folder / "out")
        assert metrics[-1]["test_loss"] == pytest.approx(last["test_loss"], rel=1e-3)
        assert metrics[-1]["test_accuracy"] * 501 == pytest.approx(
            last["test_accuracy"] * 501, abs=1.01
        )
        digests = re.findall(r"^WEIGHTS (\w+)$", job.log, re.M)
        assert len(digests) == nodes * ranks and len(set(digests)) == 1, job.log
        table = re.findall(
            r"^\[Rank: (\d+) \| SLURMD_NODENAME: (\S+) \| world size: (\d+) .* launcher: (\w+)\]$",
            job.log,
            re.M,
        )
        assert [int(row[0]) for row in table] == list(range(nodes * ranks)), job.log
        assert len({row[1] for row in table}) == nodes and {row[3] for row in table} == {way}

    at_once(scenario, cases)


@pytest.mark.matrix
def test_srun_typed_by_hand(cluster, one_process, mnist, tmp_path):
    """`srun python SCRIPT`, no launcher: address, port and threads come from Slurm's variables."""
    options = ["--data-dir", mnist, *STEPS, "--max-steps", 3, "--checkpoint-dir", tmp_path / "out"]
    hand = cluster.exec(
        "srun",
        "--nodes=2",
        "--ntasks-per-node=2",
        "python",
        "distributed/train_preemptible.py",
        *options,
    )
    assert hand.returncode == 0, hand.stderr
    assert losses(tmp_path / "out") == pytest.approx(one_process[0][:3], rel=2e-4)


def test_metrics_and_final_lines(mnist, tmp_path):
    options = ["--data-dir", mnist, "--epochs", 2, "--log-every", 10, "--checkpoint-dir", tmp_path]
    done = run(
        "./torchrun.sh",
        "distributed/train_preemptible.py",
        *options,
        env=environment(NPROC_PER_NODE=2),
    )
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(tmp_path)
    events = [event for event in metrics if "loss" in event]
    assert [event["step"] for event in events] == [10, 20, 30]
    assert all({"step", "epoch", "loss", "images_per_second"} <= event.keys() for event in events)
    assert "time_left=" in done.stdout and "\r" not in done.stdout
    final = re.search(r"^Finished: epoch=2 average_loss=(\S+) accuracy=(\S+)$", done.stdout, re.M)
    assert float(final[1]) == pytest.approx(metrics[-1]["test_loss"], abs=1e-4)
    assert sorted(path.name for path in tmp_path.glob("*.pt")) == [
        "checkpoint_step_15.pt",
        "checkpoint_step_30.pt",
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision(precision, one_process, mnist, tmp_path):
    options = [
        "--data-dir",
        mnist,
        *STEPS,
        "--max-steps",
        4,
        "--precision",
        precision,
        "--checkpoint-dir",
        tmp_path,
    ]
    done = run(sys.executable, "distributed/train_preemptible.py", *options, timeout=600)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(one_process[0][:4], rel=0.02)
    assert losses(tmp_path) != pytest.approx(one_process[0][:4], rel=1e-6)


@pytest.mark.matrix
def test_loader_workers_change_nothing(one_process, mnist, tmp_path):
    options = [
        "--data-dir",
        mnist,
        *STEPS,
        "--max-steps",
        4,
        "--num-workers",
        2,
        "--checkpoint-dir",
        tmp_path,
    ]
    done = run(
        "./torchrun.sh",
        "distributed/train_preemptible.py",
        *options,
        env=environment(NPROC_PER_NODE=2),
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == pytest.approx(one_process[0][:4], rel=2e-4)


@pytest.mark.matrix
def test_resume_continues_the_curve(mnist, tmp_path):
    """Two epochs at once, and one and then another: the same losses, every step once."""
    options = ["--data-dir", mnist, "--log-every", "5", "--dropout", "0"]
    two = environment(NPROC_PER_NODE=2)
    train = ["./torchrun.sh", "distributed/train_preemptible.py", *options, "--checkpoint-dir"]
    assert run(*train, tmp_path / "a", "--epochs", 2, env=two).returncode == 0
    train += [tmp_path / "b"]
    assert run(*train, "--epochs", 1, env=two).returncode == 0
    second = run(*train, "--epochs", 2, "--resume", env=two)
    assert second.returncode == 0 and "Resumed after step 15" in second.stdout, second.stderr
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), rel=1e-4)
    steps = [event["step"] for event in read_metrics(tmp_path / "b") if "loss" in event]
    assert (
        steps
        == sorted(set(steps))
        == [event["step"] for event in read_metrics(tmp_path / "a") if "loss" in event]
    )

    # Already finished: nothing to do, the same result.
    again = run(*train, "--epochs", 2, "--resume", env=two)
    assert again.returncode == 0
    assert again.stdout.splitlines()[-1] == second.stdout.splitlines()[-1]

    mixed = run(*train, "--epochs", 3, env=two)
    assert mixed.returncode != 0 and mixed.stderr.count("is of an earlier run") == 1
    assert len(list((tmp_path / "b").glob("*.pt"))) == 2


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
        "    if len(calls) == 3:  # file and folder of the first checkpoint, then the file of the "
        "second\n"
        "        os.kill(os.getpid(), 9)\n"
        "    fsync(handle)\n"
        "os.fsync = killing\n"
    )
    out = tmp_path / "out"
    command = [
        f"--output={tmp_path}/log",
        LAUNCHERS["srun"],
        "distributed/train_preemptible.py",
        "--data-dir",
        tiny,
    ]
    command += ["--epochs", 3, "--checkpoint-dir", out]
    job = cluster.sbatch(*command, env={"PYTHONPATH": tmp_path / "site"})
    assert job.state == "FAILED", job.log
    assert [path.name for path in out.glob("*.pt")] == ["checkpoint_step_4.pt"]
    assert zipfile.ZipFile(out / "checkpoint_step_4.pt").testzip() is None
    job = cluster.sbatch(*command, "--resume")
    assert job.state == "COMPLETED" and "Resumed after step 4" in job.log, job.log


def test_truncated_checkpoint_is_skipped(tiny, tmp_path):
    train = [
        sys.executable,
        "distributed/train_preemptible.py",
        "--data-dir",
        tiny,
        "--checkpoint-dir",
        tmp_path,
    ]
    assert run(*train, "--epochs", 2).returncode == 0
    newest = tmp_path / "checkpoint_step_8.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    again = run(*train, "--epochs", 2, "--resume")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("warning") == 1 and str(newest) in again.stderr
    assert "Resumed after step 4" in again.stdout
    assert zipfile.ZipFile(newest).testzip() is None  # written anew


def test_live_progress_on_a_terminal(mnist, tmp_path):
    command = (
        f"{sys.executable} distributed/train_preemptible.py --data-dir {mnist} --epochs 1 "
        "--log-every 5 "
    )
    command += f"--checkpoint-dir {tmp_path}"
    shown = run("script", "--quiet", "--return", "--command", command, "/dev/null")
    assert shown.returncode == 0, shown.stdout
    # Three log events over each other, then the epoch's line.
    assert shown.stdout.count("\x1b[K") == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--epochs", "0"], "--epochs: '0' is not a whole number of at least 1"),
        (["--epochs", "many"], "--epochs: 'many' is not a whole number"),
        (["--learning-rate", "nan"], "--learning-rate: 'nan' is not a number"),
        (["--dropout", "1"], "--dropout: '1' is not a number of at least 0 and less than 1"),
        (["--precision", "fp8"], "--precision: invalid choice: 'fp8'"),
        (["--resume"], "--resume needs the --checkpoint-dir"),
        (["--data-dir", "/nowhere"], "no MNIST data in /nowhere"),
        (["--devise", "cpu"], "unrecognized arguments: --devise cpu"),
    ],
)
def test_bad_arguments_get_one_sentence(arguments, sentence, tmp_path):
    bad = run(
        sys.executable, REPOSITORY / "distributed/train_preemptible.py", *arguments, cwd=tmp_path
    )
    assert bad.returncode in (1, 2)
    assert sentence in bad.stderr and len(bad.stderr.splitlines()) == 1, bad.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_does_not_divide(tiny):
    for launch in (["./torchrun.sh"], [sys.executable, "distributed/spawn_ranks.py"]):
        bad = run(
            *launch,
            "distributed/train_preemptible.py",
            "--data-dir",
            tiny,
            "--batch-size",
            7,
            env=environment(NPROC_PER_NODE=2),
        )
        assert bad.returncode != 0
        assert bad.stderr.count("--batch-size 7 does not divide by 2 ranks") == 1, bad.stderr


def test_a_line_is_one_write(tiny, tmp_path):
    """In a log that ranks share, another one's line would come in between: Python unbuffered
    makes several."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # it keeps writes apart
    command = [
        sys.executable,
        "distributed/train_preemptible.py",
        "--data-dir",
        tiny,
        "--max-steps",
        "3",
    ]
    variables = environment(PYTHONUNBUFFERED=1, OMP_NUM_THREADS=1)
    with subprocess.Popen(
        [*command, "--checkpoint-dir", tmp_path / "out"],
        cwd=REPOSITORY,
        env=variables,
        stdout=there,
        stderr=there,
    ) as process:
        there.close()
        here.settimeout(120)
        writes = [part.decode() for part in iter(lambda: here.recv(65536), b"")]
    assert process.returncode == 0 and len(writes) >= 6, writes
    assert [part for part in writes if part.find("\n") != len(part) - 1] == []


@pytest.mark.matrix
def test_ctrl_c_ends_all_ranks(tiny, tmp_path):
    options = [
        "--data-dir",
        tiny,
        "--epochs",
        "1000",
        "--log-every",
        "1",
        "--checkpoint-dir",
        tmp_path,
    ]
    for launch in (["./torchrun.sh"], [sys.executable, "distributed/spawn_ranks.py"]):
        command = [*launch, "distributed/train_preemptible.py", *map(str, options), "--resume"]
        pipes = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "text": True,
            "start_new_session": True,
        }
        with subprocess.Popen(
            command, cwd=REPOSITORY, env=environment(NPROC_PER_NODE=2), **pipes
        ) as process:
            for line in process.stdout:
                if "loss=" in line:
                    break
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=60)
        left = run("pgrep", "--full", str(tmp_path)).stdout
        assert left == "", left
