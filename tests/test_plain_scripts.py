"""train_single.py and train_ddp.py: the same losses, whoever starts the ranks."""

import datetime
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import LAUNCHERS, REPOSITORY, cells, environment, first_images, run, wait_for

SINGLE, DDP = "local/train_single.py", "distributed/train_ddp.py"
STEPS = ["--epochs", "1", "--log-every", "1", "--dropout", "0", "--seed", "7"]
BY_HAND = {
    "torchrun": ["./torchrun.sh"],
    "spawn": [sys.executable, "distributed/spawn_ranks.py"],
}


def losses(log: str) -> dict[tuple[int, int], float]:
    """The losses of a log by epoch and step. A step that is logged twice is a failure."""
    line = r"^epoch=(\d+) step=(\d+)/\d+ loss=(\S+) images_per_second=\d+ time_left=\S+$"
    found = re.findall(line, log, re.M)
    assert len({row[:2] for row in found}) == len(found), log
    return {(int(epoch), int(step)): float(loss) for epoch, step, loss in found}


def evaluations(log: str) -> list[list[float]]:
    """Test loss and accuracy after every epoch of a log."""
    found = re.findall(r"^epoch=\d+ test_loss=(\S+) test_accuracy=(\S+)$", log, re.M)
    return [[float(value) for value in row] for row in found]


def local(way: str, ranks: int, script: str, *arguments: object, **variables: object):
    variables |= {"NPROC_PER_NODE": ranks, "OMP_NUM_THREADS": 1}
    return run(*BY_HAND[way], script, *arguments, env=environment(**variables))


def sizes(way: str, nodes: int, ranks: int, log: Path) -> list[str]:
    """The options of sbatch for so many ranks on each of so many nodes."""
    tasks = ranks if way == "srun" else 1
    size = [f"--nodes={nodes}", f"--gpus-per-node={ranks}", f"--ntasks-per-node={tasks}"]
    return [*size, f"--output={log}"]


@pytest.fixture(scope="session")
def one_process(mnist, tmp_path_factory) -> str:
    """The log of train_ddp.py as one process: the curve that all others must repeat."""
    folder = tmp_path_factory.mktemp("one-process")
    options = ["--data-dir", mnist, *STEPS, "--checkpoint-dir", folder / "out"]
    alone = run(sys.executable, DDP, *options)
    assert alone.returncode == 0, alone.stderr
    # 1,003 images in batches of 64.
    assert list(losses(alone.stdout)) == [(1, step) for step in range(1, 16)]
    assert [path.name for path in (folder / "out").iterdir()] == ["checkpoint_epoch_1.pt"]
    return alone.stdout


def assert_same_curve(log: str, expected: str):
    """Equal losses, and of 501 test images each is counted once."""
    assert losses(log) == pytest.approx(losses(expected), rel=2e-4), log
    (test_loss, accuracy), (loss, share) = evaluations(log)[0], evaluations(expected)[0]
    assert test_loss == pytest.approx(loss, rel=1e-3), log
    assert accuracy * 501 == pytest.approx(share * 501, abs=1.1), log


def test_one_process_without_torch_distributed(one_process, mnist, tmp_path):
    options = ["--data-dir", mnist, *STEPS, "--checkpoint-dir", tmp_path / "out"]
    alone = run(sys.executable, SINGLE, *options)
    assert alone.returncode == 0, alone.stderr
    assert losses(alone.stdout) == pytest.approx(losses(one_process), rel=1e-5)
    assert evaluations(alone.stdout)[0] == pytest.approx(evaluations(one_process)[0], rel=1e-5)
    last = alone.stdout.splitlines()[-1]
    assert last == f"Finished: epoch=1, checkpoints in {tmp_path / 'out'}"


HANDS = [(way, ranks) for way in BY_HAND for ranks in (2, 4)]


@pytest.mark.parametrize(("way", "ranks"), cells(HANDS, ("spawn", 2)))
def test_equal_losses_by_hand(way, ranks, one_process, mnist, tmp_path):
    options = ["--data-dir", mnist, *STEPS, "--checkpoint-dir", tmp_path / "out"]
    done = local(way, ranks, "tests/scripts/digest.py", DDP, *options)
    assert done.returncode == 0, done.stderr
    assert_same_curve(done.stdout, one_process)
    digests = re.findall(r"WEIGHTS (\w{64})", done.stdout)
    assert len(digests) == ranks and len(set(digests)) == 1, done.stdout


SHAPES = [("2x2",), ("1x2",), ("2x1",), ("4x1",)]


@pytest.mark.parametrize(("shape",), cells(SHAPES, ("2x2",)))
def test_equal_losses_on_the_cluster(shape, cluster, one_process, mnist, tmp_path):
    """By all launchers at once."""
    nodes, ranks = map(int, shape.split("x"))
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        script = ["tests/scripts/digest.py", DDP, "--data-dir", mnist, *STEPS]
        script += ["--checkpoint-dir", tmp_path / way]
        size = sizes(way, nodes, ranks, tmp_path / f"{way}.log")
        submitted[way] = cluster.submit(*size, launcher, *script)
    for way, number in submitted.items():
        job = cluster.wait(number)
        assert job.state == "COMPLETED", job.log
        assert_same_curve(job.log, one_process)
        digests = re.findall(r"WEIGHTS (\w{64})", job.log)
        assert len(digests) == nodes * ranks and len(set(digests)) == 1, job.log
        place = (
            r"^\[Rank: (\d+) \| (\S+) \| world size: (\d+) \| local rank: (\d+) \| device: cpu\]$"
        )
        rows = sorted(re.findall(place, job.log, re.M))
        expected = [(i, i % ranks) for i in range(nodes * ranks)]
        assert [(int(row[0]), int(row[3])) for row in rows] == expected, way
        assert len({row[1] for row in rows}) == nodes
        assert {int(row[2]) for row in rows} == {nodes * ranks}


def test_srun_typed_by_hand(cluster, one_process, mnist, tmp_path):
    """Without a launcher Slurm's own names are the ranks'. The rendezvous has to be said."""
    command = ["srun", "--nodes=2", "--nodelist=node-[1-2]", "--ntasks-per-node=2", "python", DDP]
    command += ["--data-dir", mnist, *STEPS, "--checkpoint-dir", tmp_path / "out"]
    bad = cluster.exec(*command)
    assert bad.returncode != 0, bad.stdout
    assert "this is one of 4 ranks, but MASTER_ADDR is not set: use a launcher" in bad.stderr
    assert "Traceback" not in bad.stderr
    address = {"MASTER_ADDR": "node-1", "MASTER_PORT": "60123", "OMP_NUM_THREADS": "1"}
    hand = cluster.exec(*command, env=address)
    assert hand.returncode == 0, hand.stderr
    assert_same_curve(hand.stdout, one_process)


@pytest.mark.matrix
def test_precision(mnist_full, tmp_path):
    """The same curve, a little coarser."""
    data, curves = first_images(mnist_full, tmp_path / "data", 64, 20), {}
    for precision in ("fp32", "bf16"):
        options = ["--batch-size", 16, "--precision", precision]
        options += ["--checkpoint-dir", tmp_path / precision]
        done = run(sys.executable, DDP, "--data-dir", data, *STEPS, *options)
        assert done.returncode == 0, done.stderr
        curves[precision] = list(losses(done.stdout).values())
    assert curves["bf16"] == pytest.approx(curves["fp32"], rel=0.02)
    assert curves["bf16"] != pytest.approx(curves["fp32"], rel=1e-6)


@pytest.mark.parametrize(("script",), cells([(SINGLE,), (DDP,)], (DDP,)))
def test_resume(script, mnist, tmp_path):
    """One epoch and then another, with dropout: the second is that of two epochs at once."""

    def train(*arguments: object):
        options = ["--data-dir", mnist, "--log-every", 5, *arguments]
        if script == DDP:
            return local("torchrun", 2, script, *options)
        return run(sys.executable, script, *options)

    both = train("--epochs", 2, "--checkpoint-dir", tmp_path / "a")
    first = train("--epochs", 1, "--checkpoint-dir", tmp_path / "b")
    again = run(sys.executable, script, "--data-dir", mnist, "--checkpoint-dir", tmp_path / "b")
    assert again.returncode != 0
    assert again.stderr.count("has checkpoints: pass --resume") == 1, again.stderr
    second = train("--epochs", 2, "--checkpoint-dir", tmp_path / "b", "--resume")
    assert both.returncode == first.returncode == second.returncode == 0, second.stderr
    assert "Resumed after epoch 1\n" in second.stdout
    assert [key[0] for key in losses(second.stdout)] == [2, 2, 2]
    parts = losses(first.stdout) | losses(second.stdout)
    assert parts == pytest.approx(losses(both.stdout), rel=1e-5)
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
        script = ["tests/scripts/batches.py", *train, tmp_path / way]
        size = sizes(way, 2, 1, tmp_path / f"{way}.log")
        submitted[way] = cluster.submit(*size, launcher, *script, env={"SLOW": "1.5"})
    for way, number in submitted.items():
        wait_for(lambda folder=tmp_path / way: (folder / "checkpoint_epoch_1.pt").exists())
        assert cluster.exec("scontrol", "requeue", number).returncode == 0
    for way, number in submitted.items():
        job = cluster.wait(number)
        assert job.state == "COMPLETED" and cluster.show(number)["Restarts"] == "1", job.log
        log = re.split(r"^Resumed after epoch (\d)\n", job.log, flags=re.M)
        assert len(log) == 3 and log[1] in "12", job.log
        curve = losses(reference.stdout)
        expected = {key: loss for key, loss in curve.items() if key[0] > int(log[1])}
        assert losses(log[2]) == pytest.approx(expected, rel=1e-5), job.log
        kept = [f"checkpoint_epoch_{epoch}.pt" for epoch in (1, 2, 3)]
        assert sorted(path.name for path in (tmp_path / way).iterdir()) == kept


@pytest.mark.parametrize(("script",), cells([(SINGLE,), (DDP,)], (DDP,)))
def test_full_disk(script, tiny, tmp_path):
    """The second checkpoint has no room: the first stays whole, and no other has a name."""
    folder, out = tmp_path / "full", tmp_path / "out"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=15m full {folder}"
    train = f"{sys.executable} {script} --data-dir {tiny} --epochs 3 --checkpoint-dir {folder}"
    program = f"{mount} && {train}; status=$?; cp --recursive {folder} {out}; exit $status"
    done = run("unshare", "--mount", "sh", "-c", program)
    assert done.returncode == 1 and "Finished" not in done.stdout, done.stdout + done.stderr
    assert [path.name for path in out.glob("*.pt")] == ["checkpoint_epoch_1.pt"], done.stderr
    assert zipfile.ZipFile(out / "checkpoint_epoch_1.pt").testzip() is None


SENTENCES = {
    "no data": (["--data-dir", "/nowhere"], "no MNIST data in /nowhere"),
    "too large": (["--batch-size", "1000"], "--batch-size 1000 is more than all 300 images"),
    "not finite": (["--learning-rate", "1e8"], "the loss is "),
    "unknown": (["--devise", "cpu"], "unrecognized arguments: --devise cpu"),
    "no number": (["--epochs", "many"], "--epochs: invalid int value: 'many'"),
    "zero": (["--log-every", "0"], "--log-every are 1 or more"),
    "dropout": (["--dropout", "1"], "--dropout is below 1"),
    "device": (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
    "precision": (["--precision", "fp8"], "--precision: invalid choice: 'fp8'"),
}
CASES = [(script, case) for script in (SINGLE, DDP) for case in SENTENCES]


@pytest.mark.parametrize(("script", "case"), cells(CASES, (SINGLE, "no data"), (DDP, "unknown")))
def test_one_sentence(script, case, tiny, tmp_path):
    arguments, sentence = SENTENCES[case]
    arguments = ["--data-dir", tiny, *arguments, "--checkpoint-dir", tmp_path / "out"]
    bad = run(sys.executable, script, *arguments)
    assert bad.returncode in (1, 2) and sentence in bad.stderr, bad.stderr
    assert "Traceback" not in bad.stderr and not list((tmp_path / "out").glob("*"))


WAYS = [(way, case) for way in BY_HAND for case in ("not finite", "no data")]


@pytest.mark.parametrize(("way", "case"), cells(WAYS, ("torchrun", "not finite")))
def test_one_sentence_of_two_ranks(way, case, tiny, tmp_path):
    """From each of them at most, because both have the same fault."""
    arguments, sentence = SENTENCES[case]
    arguments = ["--data-dir", tiny, *arguments, "--checkpoint-dir", tmp_path / "out"]
    bad = local(way, 2, DDP, *arguments)
    assert bad.returncode == 1 and 1 <= bad.stderr.count(sentence) <= 2, bad.stderr


def test_batch_that_the_ranks_cannot_share(tiny):
    bad = local("torchrun", 2, DDP, "--data-dir", tiny, "--batch-size", 7)
    assert bad.returncode == 1 and "must be divisible by 2 (ranks)" in bad.stderr, bad.stderr


def test_granted_gpus_that_torch_does_not_see(tiny, tmp_path):
    options = ["--data-dir", tiny, "--epochs", 1, "--checkpoint-dir", tmp_path / "out"]
    granted = environment(SLURM_GPUS_ON_NODE=2)
    bad = run(sys.executable, DDP, *options, env=granted)
    assert bad.returncode == 1 and len(bad.stderr.splitlines()) == 1, bad.stderr
    assert "Slurm granted GPUs, but torch sees none" in bad.stderr
    # Jobs of the local cluster have TRAIN_DEVICE=cpu.
    done = run(sys.executable, DDP, *options, "--device", "cpu", env=granted)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_all_ranks(tiny, tmp_path):
    options = ["--data-dir", tiny, "--epochs", "1000", "--log-every", "1"]
    options += ["--checkpoint-dir", tmp_path / "out", "--resume"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    for launch in BY_HAND.values():
        command = [*launch, DDP, *map(str, options)]
        place = {"cwd": REPOSITORY, "env": environment(NPROC_PER_NODE=2), "start_new_session": True}
        with subprocess.Popen(command, **place, **pipes) as process:
            for line in process.stdout:
                if "loss=" in line:
                    break
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=60)
        assert run("pgrep", "--full", str(tmp_path)).stdout == ""


# --- the end of a run ---


@pytest.mark.parametrize("times", [4, pytest.param(100, marks=pytest.mark.matrix)])
def test_the_end_of_two_local_ranks(times, tiny, tmp_path):
    """On gloo: all runs end with status 0."""
    port = 20000 + os.getpid() % 10000
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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


RAISED = {
    "srun": r"^srun: error: node-\d+: task 1: Exited with exit code 1$",
    "torchrun": r"^  host      : node-\d+\n  rank      : 1 \(local_rank: 0\)\n  exitcode  : 1 ",
    "spawn": r"^spawn_ranks.py: rank 1 on node-\d+: process 0 terminated with exit code 1$",
}


@pytest.mark.matrix
@pytest.mark.parametrize("i", range(10))
def test_an_exception_on_one_rank_ends_the_job(i, cluster, tiny, tmp_path):
    """In step 5, by all launchers at once: FAILED within seconds, and the rank is named."""
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        train = [DDP, "--data-dir", tiny, "--batch-size", 16, "--checkpoint-dir", tmp_path / way]
        command = [*sizes(way, 2, 1, tmp_path / f"{way}.log"), launcher]
        command += ["tests/scripts/batches.py", *train]
        submitted[way] = cluster.submit(*command, env={"RAISE": "5"})
    for way, number in submitted.items():
        job = cluster.wait(number)
        assert job.state == "FAILED" and job.exit_code != 0, job.log
        ended = datetime.datetime.fromisoformat(cluster.show(number)["EndTime"]).timestamp()
        assert ended - int(re.search(r"^raised at (\d+)$", job.log, re.M)[1]) < 15, job.log
        assert job.log.count("ValueError: boom on purpose") >= 1, job.log
        assert re.search(RAISED[way], job.log, re.M), job.log
        assert cluster.left_over(number) == []


# --- copies ---

TAKEN = [DDP, "distributed/mnist.py", "distributed/spawn_ranks.py", "env.sh", "torchrun.sh"]
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
        command = [f"--output={tmp_path}/{way}.log", launcher]
        command += [DDP, "--data-dir", tiny, "--epochs", 1]
        submitted[way] = cluster.submit(*command, cwd=elsewhere)
    for number in submitted.values():
        job = cluster.wait(number)
        assert job.state == "COMPLETED", job.log
        assert (elsewhere / f"checkpoints/{number}/checkpoint_epoch_1.pt").exists()
    for way, launch in BY_HAND.items():
        options = [
            "--data-dir",
            tiny,
            "--epochs",
            1,
            "--checkpoint-dir",
            tmp_path / f"by-hand-{way}",
        ]
        env = environment(NPROC_PER_NODE=2, OMP_NUM_THREADS=1)
        done = run(*launch, DDP, *options, cwd=elsewhere, env=env)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def images(tmp_path) -> Path:
    """Small PNG files in five classes, each of a colour: train/CLASS/*.png and test/CLASS/*.png."""
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


def test_the_chapter_s_changed_copy(cluster, images, tmp_path):
    """Other data and another model, by chapter 16's diff: by all launchers, the same losses."""
    chapter = (REPOSITORY / "docs/16_your_own_model_and_data.md").read_text()
    [diff] = re.findall(r"^```diff\n(--- .*?)^```$", chapter, re.M | re.S)
    elsewhere = take([*TAKEN, "tests/scripts/batches.py"], tmp_path / "elsewhere")
    (elsewhere / "distributed/mnist.py").unlink()
    (tmp_path / "diff").write_text(diff)
    patched = run("patch", "--strip=0", f"--input={tmp_path}/diff", cwd=elsewhere)
    assert patched.returncode == 0, patched.stdout + patched.stderr

    train = [DDP, "--data-dir", images, "--epochs", 3, "--batch-size", 20, "--log-every", 5]
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        # One thread in every rank, so that sums are rounded alike.
        size = [*sizes(way, 2, 1, tmp_path / f"{way}.log"), "--cpus-per-task=1"]
        submitted[way] = cluster.submit(*size, launcher, *train, cwd=elsewhere)
    curves = {}
    for way, number in submitted.items():
        job = cluster.wait(number)
        assert job.state == "COMPLETED", job.log
        curves[way] = losses(job.log)
        assert evaluations(job.log)[-1][1] > 0.9, job.log
    assert curves["spawn"] == curves["srun"] == curves["torchrun"]
    assert len(curves["srun"]) == 6
