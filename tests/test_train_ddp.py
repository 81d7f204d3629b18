"""train_single.py and train_ddp.py: the same losses, whoever starts the ranks."""

import json
import re
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
import torch

import heartbeat
from copies import THREE_FILES, copy_file
from ddp_runs import (
    DDP,
    EVALUATED,
    PREEMPTIBLE,
    SINGLE,
    STEPS,
    assert_same_curve,
    evaluations,
    losses,
    small_project,
)
from heartbeat import read_beats
from slurm import LAUNCHERS, REPOSITORY, cells, free_port, mounted_in_memory, one_rank_a_node, ranks


def test_one_process_without_torch_distributed(one_process, mnist, tmp_path):
    options = ["--data-dir", mnist, *STEPS, "--checkpoint-dir", tmp_path / "out"]
    alone = ranks(0, SINGLE, *options)
    assert alone.returncode == 0, alone.stderr
    assert losses(alone.stdout) == pytest.approx(losses(one_process), rel=1e-5)
    assert evaluations(alone.stdout)[0] == pytest.approx(evaluations(one_process)[0], rel=1e-5)
    last = alone.stdout.splitlines()[-1]
    assert last == f"Finished: epoch=1, checkpoint in {tmp_path / 'out/checkpoint.pt'}"


def test_equal_losses_on_the_cluster(cluster, one_process, mnist, tmp_path):
    """By all launchers at once, on two nodes: by srun with two ranks each, and by the others, whose
    counts test_launchers.py has, with one."""
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        size = [] if way == "srun" else one_rank_a_node(way)
        command = [DDP, "--data-dir", mnist, *STEPS]
        command += ["--checkpoint-dir", tmp_path / way]
        submitted[way] = cluster.submit(f"--output={tmp_path}/{way}.log", *size, launcher, *command)
    for way, number in submitted.items():
        job, expected = cluster.wait(number), "0101" if way == "srun" else "00"
        assert job.state == "COMPLETED", job.log
        assert_same_curve(job.log, one_process)
        place = rf"^\[Rank: (\d) \| (\S+) \| world size: {len(expected)} "
        place += r"\| local rank: (\d) \| device: cpu\]$"
        numbers, hosts, local_ranks = zip(*sorted(re.findall(place, job.log, re.M)), strict=True)
        assert numbers == tuple("0123"[: len(expected)]), job.log
        assert local_ranks == tuple(expected) and len(set(hosts)) == 2, job.log
        beats = read_beats(REPOSITORY / f"log/{job.id}/ranks-0")
        assert [beat["rank"] for beat in beats] == list(range(len(expected)))


def reads(folder: Path) -> list[list[int]]:
    """The images that the ranks together have read in each step, in order."""
    files = [map(json.loads, file.read_text().splitlines()) for file in folder.iterdir()]
    return [sorted(chain(*step)) for step in zip(*files, strict=True)]


@pytest.mark.parametrize("script", cells([(DDP,), (PREEMPTIBLE,)], (DDP,)))
def test_an_epoch_reads_each_image_once(script, tiny, tmp_path):
    """280 of 300 in 7 steps, then the 100 test images. Four ranks read the batches of one."""
    found = []
    for count in (1, 4):
        folder = tmp_path / f"{count}"
        folder.mkdir()
        train = ["tests/scripts/slowly.py", 0, script, "--data-dir", tiny, "--batch-size", 40]
        train += ["--epochs", 2, "--checkpoint-dir", tmp_path / f"out-{count}"]
        done = ranks(count, *train, READS=folder)
        assert done.returncode == 0, done.stderr
        found.append(reads(folder))
    one, four = found
    assert one == four and len(four) == 16
    assert len(set(chain(*four[:7]))) == len(set(chain(*four[8:15]))) == 280
    assert four[:7] != four[8:15]
    assert four[7] == four[15] == list(range(100))


@pytest.mark.matrix
def test_srun_typed_by_hand(cluster, one_process, mnist, tmp_path):
    """Without a launcher Slurm's own names are the ranks'. The rendezvous has to be given."""
    command = ["srun", "--nodes=2", "--nodelist=node-[1-2]", "--ntasks-per-node=2", "python", DDP]
    command += ["--data-dir", mnist, *STEPS, "--checkpoint-dir", tmp_path / "out"]
    bad = cluster.exec(*command)
    assert bad.returncode != 0, bad.stdout
    assert "MASTER_ADDR expected, but not set" in bad.stderr
    address = {"MASTER_ADDR": "node-1", "MASTER_PORT": "60123", "OMP_NUM_THREADS": "1"}
    hand = cluster.exec(*command, env=address)
    assert hand.returncode == 0, hand.stderr
    assert_same_curve(hand.stdout, one_process)


@pytest.mark.parametrize("script", [SINGLE, DDP])
def test_resume(script, tiny, tmp_path):
    """One epoch and then, by the name of its job's runs, another: the second is that of two epochs
    at once."""

    def train(epochs: int, run: str):
        options = ["--data-dir", tiny, "--batch-size", 60, "--log-every", 1]
        command = [REPOSITORY / script, *options, "--epochs", epochs]
        return ranks(0, *command, cwd=tmp_path, RUN=run)

    both, first = train(2, "a"), train(1, "b")
    # Of a start that was killed while it saved.
    (tmp_path / "checkpoints/b/checkpoint.pt.part").touch()
    second = train(2, "b")
    assert both.returncode == first.returncode == second.returncode == 0, second.stderr
    assert "Resumed after epoch 1\n" in second.stdout
    assert [path.name for path in (tmp_path / "checkpoints/b").iterdir()] == ["checkpoint.pt"]
    assert [key[0] for key in losses(second.stdout)] == [2] * 5
    parts = losses(first.stdout) | losses(second.stdout)
    assert parts == pytest.approx(losses(both.stdout), rel=1e-5)
    assert evaluations(second.stdout)[0] == pytest.approx(evaluations(both.stdout)[1], rel=1e-5)


@pytest.mark.parametrize("script", [SINGLE, DDP])
def test_a_checkpoint_that_cannot_be_read_is_not_replaced(script, tiny, tmp_path):
    """A link to a file system that is away. Of that, as of any error, Path.exists says False, from
    Python 3.14 on."""
    path = tmp_path / "checkpoint.pt"
    path.symlink_to("/away/checkpoint.pt")
    done = ranks(0, script, "--data-dir", tiny, "--epochs", 1, "--checkpoint-dir", tmp_path)
    assert done.returncode == 1 and "No such file" in done.stderr, done.stdout + done.stderr
    assert path.is_symlink() and [*tmp_path.iterdir()] == [path]


@pytest.mark.long
@pytest.mark.parametrize("script", [SINGLE, DDP, PREEMPTIBLE])
def test_what_a_resumed_run_is_told(script, tiny, tmp_path):
    """Its own learning rate holds, here one that changes nothing. One that ruins the weights in a
    step, whose loss was still finite, leaves the checkpoint as it was."""

    def train(epochs: int, *options: object):
        # An epoch is one step.
        given = ["--data-dir", tiny, "--batch-size", 300, "--checkpoint-dir", tmp_path]
        return ranks(0, script, *given, "--epochs", epochs, *options)

    more = ["--resume"] if script == PREEMPTIBLE else []
    first, again = train(1), train(2, *more, "--learning-rate", 0)
    assert again.returncode == 0 and re.search(r"^Finished: \w+=2,", again.stdout, re.M), again
    bad = train(3, *more, "--learning-rate", 1e39, "--log-every", 100)
    assert bad.returncode == 1 and "the weights are not finite after" in bad.stderr, bad
    last = train(3, *more, "--learning-rate", 0)
    assert evaluations(first.stdout)[0] == evaluations(again.stdout)[-1]
    assert evaluations(first.stdout)[0] == evaluations(last.stdout)[-1]


@pytest.mark.parametrize("script", [SINGLE, DDP, PREEMPTIBLE])
def test_a_loss_that_is_not_finite(script, tiny, tmp_path):
    """Ends the run at the next line of the log, before the epoch ends and before the next save."""
    given = ["--data-dir", tiny, "--batch-size", 10, "--log-every", 2, "--learning-rate", 1e8]
    bad = ranks(0, script, *given, "--checkpoint-dir", tmp_path)
    assert bad.returncode == 1, bad
    assert re.fullmatch(r"the loss is (nan|inf): try a lower --learning-rate\n", bad.stderr), bad
    assert len(losses(bad.stdout)) < 5 and not evaluations(bad.stdout), bad
    assert not [*tmp_path.glob("*.pt"), *tmp_path.glob("step_*")]


@pytest.mark.parametrize("option", ["--batch-size=60", "--seed=1", "--data-dir="])
def test_another_order_of_the_data_is_refused(option, tiny, mnist, tmp_path):
    """A step would be another place in an epoch, or an image would come twice."""
    train = [0, PREEMPTIBLE, "--checkpoint-dir", tmp_path, "--epochs", 1]
    assert ranks(*train, "--data-dir", tiny).returncode == 0
    other = f"--data-dir={mnist}" if option == "--data-dir=" else option
    bad = ranks(*train, "--data-dir", tiny, "--resume", other)
    assert bad.returncode == 1 and "Traceback" not in bad.stderr, bad.stderr
    said = rf"{tmp_path}/step_4 has (batch_size 64|seed 0|samples 300), not \d+: resume it with its"
    assert re.search(said, bad.stderr), bad.stderr
    new = ranks(*train, "--data-dir", tiny)
    assert new.returncode == 1 and f"{tmp_path} has checkpoints: pass --resume" in new.stderr


def test_twice_in_an_interactive_shell(tiny, tmp_path):
    """Slurm's job id is there, as in `srun --pty bash`, but no launcher's RUN: two runs."""
    command = [0, REPOSITORY / SINGLE, "--data-dir", tiny, "--epochs", 1]
    for _ in range(2):
        done = ranks(*command, cwd=tmp_path, SLURM_JOB_ID=7)
        assert done.returncode == 0, done.stderr
        time.sleep(1)  # the folder's name is the second of the start
    assert len(list(tmp_path.glob("checkpoints/*/checkpoint.pt"))) == 2
    named = ranks(*command, cwd=tmp_path, SLURM_JOB_ID=7, RUN="7_10-11-12")
    assert (tmp_path / "checkpoints/7_10-11-12/checkpoint.pt").exists(), named.stderr


def test_what_nobody_sees(tiny, tmp_path):
    """No rank leaves while rank 0 saves, what it saves is synced before it gets its name, and the
    timer of the start does not end the run five minutes later. Only rank 0 reads a checkpoint, to
    the CPU. The step of a heartbeat rises through all epochs."""
    train = ["tests/scripts/watched.py", DDP, "--data-dir", tiny, "--checkpoint-dir", tmp_path]
    for epochs in (1, 2):
        done = ranks(2, *train, "--epochs", epochs, SLOW_SAVE=1)
        assert done.returncode == 0, done.stderr
        found = [json.loads(x) for x in re.findall(r"^WATCHED (.*)$", done.stdout, re.M)]
        assert len(found) == 2, done.stdout
        for facts in found:
            assert facts["saved"] and not facts["timer"] and all(facts["synced"])
            # Four steps of 64 images an epoch
            assert facts["step"] == 4 * epochs
        assert [x for facts in found for x in facts["loaded_to"]] == ["cpu"] * (epochs - 1)
        assert sum(bool(facts["synced"]) for facts in found) == 1, "rank 0 alone"


@pytest.mark.parametrize(("script", "alive"), [(DDP, [0, 600]), (PREEMPTIBLE, [600, 0])])
def test_what_is_no_hang(script, alive, tiny, tmp_path):
    """A save may take ten minutes, and after each batch of an evaluation, here one, heartbeat.py
    begins to count anew."""
    train = ["--data-dir", tiny, "--checkpoint-dir", tmp_path, "--epochs", 1]
    done = ranks(0, "tests/scripts/watched.py", script, *train)
    facts = json.loads(re.search(r"^WATCHED (.*)$", done.stdout, re.M)[1])
    assert facts["alive"] == alive, done.stderr


TASK = {"SLURM_PROCID": 9, "SLURM_LOCALID": 1, "SLURM_STEP_NUM_TASKS": 16}
BATCH = {"SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_NTASKS": 4, "SLURM_STEP_ID": -5}
RANK = {"RANK": 9, "LOCAL_RANK": 1, "WORLD_SIZE": 16}
PLACES = [
    (RANK, "cuda:8", 9, 16, "cuda:1", "nccl"),
    # gloo's groups, beside it, know no bound XPU.
    (RANK | BATCH, "xpu:8", 9, 16, "None", "xccl"),
    (TASK, "cuda:8", 9, 16, "cuda:1", "nccl"),
    # Slurm shows each rank only its own.
    (TASK, "cuda:1", 9, 16, "cuda:0", "nccl"),
    # The shell of a job, by Slurm 26.05, and that of salloc.
    (BATCH, "cuda:8", 0, 1, "cuda:0", "nccl"),
    ({"SLURM_JOB_ID": 7, "SLURM_NTASKS": 4}, "cuda:8", 0, 1, "cuda:0", "nccl"),
]


@pytest.mark.parametrize(("given", "sees", "rank", "world_size", "device", "backend"), PLACES)
def test_rank_and_device(given, sees, rank, world_size, device, backend):
    """Before a rank meets the others, on a machine that seems to have GPUs. The other scripts have
    the same block (test_style.py)."""
    done = ranks(0, "tests/scripts/watched.py", DDP, **given, ACCELERATOR=sees)
    facts = json.loads(done.stdout.removeprefix("WATCHED "))
    assert (facts["rank"], facts["world_size"]) == (rank, world_size)
    assert (facts["device"], facts["backend"]) == (device, backend)
    assert facts["set"] == (0 if device == "cuda:0" else 1)
    assert facts["timer"]
    # Several ranks that nobody has told where to meet do not meet here.
    assert facts["variables"]["MASTER_ADDR"] == ("localhost" if world_size == 1 else None)


def test_bf16(tiny, tmp_path):
    """It rounds in another way than float32."""
    found = []
    for precision in ("fp32", "bf16"):
        train = [0, DDP, "--data-dir", tiny, "--log-every", 1, "--epochs", 1]
        done = ranks(*train, "--precision", precision, "--checkpoint-dir", tmp_path / precision)
        assert done.returncode == 0, done.stderr
        found.append(losses(done.stdout))
    assert found[0] != found[1] and found[0] == pytest.approx(found[1], rel=0.05)


@pytest.mark.parametrize("script", [DDP, PREEMPTIBLE])
def test_images_per_second(script, tiny, tmp_path):
    """Two ranks that take half a second for a step, of 64 images, train at most 128."""
    train = ["tests/scripts/slowly.py", 0.5, script, "--data-dir", tiny, "--epochs", 1]
    done = ranks(2, *train, "--checkpoint-dir", tmp_path)
    [rate] = re.findall(r" images_per_second=(\d+) ", done.stdout)
    assert 30 < int(rate) <= 128, done.stdout + done.stderr


@pytest.mark.slurm
@pytest.mark.parametrize("script", [SINGLE, DDP])
def test_full_disk(script, tiny, tmp_path):
    """The second checkpoint has no room: the first stays whole."""
    with mounted_in_memory(tmp_path, "15m"):
        train = [script, "--data-dir", tiny, "--epochs", 3, "--checkpoint-dir", tmp_path]
        done = ranks(0, *train)
        assert done.returncode == 1 and "Finished" not in done.stdout, done.stdout + done.stderr
        saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["epochs_done"] == 1, done.stderr


def test_only_rank_0_has_the_checkpoint(tiny, tmp_path):
    """As on nodes that do not share the folder: all ranks resume from what rank 0 has read, with
    the losses of one rank."""
    options = ["--data-dir", tiny, "--epochs", 2, "--log-every", 1]
    train = [0, DDP, *options, "--batch-size", 60]
    whole = ranks(*train, "--checkpoint-dir", tmp_path / "whole")
    alone = ranks(*train, "--epochs", 1, "--checkpoint-dir", tmp_path / "0")
    assert whole.returncode == alone.returncode == 0, alone.stderr
    world = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}

    def rank(number: int):
        place = {"RANK": number, "LOCAL_RANK": number}
        return ranks(*train, "--checkpoint-dir", tmp_path / str(number), **world, **place)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "Resumed after epoch 1\n" in first.stdout
    rest = {key: loss for key, loss in losses(whole.stdout).items() if key[0] == 2}
    assert losses(first.stdout) == pytest.approx(rest, rel=2e-4)


CANNOT_TRAIN = [
    (DDP, ["--data-dir", "/nowhere"], "no MNIST data in /nowhere"),
    (SINGLE, ["--batch-size", "1000"], "--batch-size 1000 is more than the 300 images"),
    (DDP, ["--batch-size", "1000"], "--batch-size must be a multiple of 1 (ranks), up to 300"),
    (DDP, ["--log-every", "0"], "error: --epochs, --batch-size and --log-every must be 1 or more"),
    (PREEMPTIBLE, ["--save-every", "0"], "-size, --log-every and --save-every must be 1 or more"),
    (PREEMPTIBLE, ["--resume"], "--resume needs --checkpoint-dir"),
    (PREEMPTIBLE, ["--keep", "0"], "--keep must be 1 or more"),
]


# Numbers are looked at before torch is imported.
QUICK = [CANNOT_TRAIN[0], *CANNOT_TRAIN[3:5]]


@pytest.mark.parametrize(("script", "arguments", "sentence"), cells(CANNOT_TRAIN, *QUICK))
def test_one_sentence(script, arguments, sentence, tiny, tmp_path):
    options = ["--data-dir", tiny, *arguments]
    if "--resume" not in arguments:
        options += ["--checkpoint-dir", tmp_path / "out"]
    bad = ranks(0, script, *options)
    assert bad.returncode in (1, 2) and sentence in bad.stderr, bad.stderr
    assert "Traceback" not in bad.stderr and not list((tmp_path / "out").glob("*"))


SAID_ONCE = [
    (["--no-such-option"], "train_ddp.py: error: unrecognized arguments: --no-such-option"),
    (["--epochs", 0], "train_ddp.py: error: --epochs, --batch-size and --log-every must be 1 or"),
    (["--batch-size", 299], "--batch-size must be a multiple of 2 (ranks), up to 300"),
    (["--data-dir", "/nowhere"], "no MNIST data in /nowhere"),
]


@pytest.mark.parametrize(("arguments", "sentence"), SAID_ONCE)
def test_all_ranks_say_one_sentence(arguments, sentence, tiny, tmp_path):
    """Before they meet, and afterwards."""
    bad = ranks(2, DDP, "--data-dir", tiny, "--checkpoint-dir", tmp_path, *arguments)
    assert bad.returncode == 1 and bad.stderr.count(sentence) == 1, bad.stderr


def test_one_sentence_of_a_job(cluster, tmp_path):
    """On two nodes, where srun ends all ranks as soon as one has left. Rank 0 is the last to find
    the mistake, and the other waits for it. That it had listened for SIGTERM does not keep it
    alive."""
    command = [LAUNCHERS["srun"], "tests/scripts/late_rank_0.py", tmp_path, PREEMPTIBLE]
    options = [*one_rank_a_node("srun"), f"--output={tmp_path}/log"]
    job = cluster.sbatch(*options, *command, "--epochs", "many")
    assert job.state == "FAILED", job.log
    assert job.log.count("argument --epochs: invalid int value: 'many'") == 1, job.log


def test_a_fault_of_one_rank(monkeypatch):
    """It is said, even though nothing ends that rank."""
    waited = []
    monkeypatch.setattr(heartbeat.time, "sleep", waited.append)
    monkeypatch.setattr(heartbeat.signal, "signal", lambda *_: None)
    for rank, seconds in ((0, []), (1, [10])):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit, match=r"^no such file$"):
            heartbeat.fail("no such file")
        assert waited == seconds


AS_GRANTED = [DDP, PREEMPTIBLE, "distributed/train_fsdp.py", "aux/check_ranks.py"]


@pytest.mark.parametrize("script", AS_GRANTED)
def test_granted_gpus_that_torch_does_not_see(script):
    """In jobs of the local cluster, whose GPUs are pretended, the tasks hear of none. Who asks for
    the CPU gets it."""
    bad = ranks(0, script, SLURM_GPUS_ON_NODE=2)
    assert bad.returncode == 1 and "Traceback" not in bad.stderr, bad.stderr
    assert (bad.stdout + bad.stderr).count("Slurm granted ") == 1, bad.stdout + bad.stderr
    if "aux" not in script:
        on_cpu = ranks(0, script, "--device=cpu", "--data-dir=/nowhere", SLURM_GPUS_ON_NODE=2)
        said = "^no (MNIST data in|prepared text at) /nowhere"
        assert re.search(said, on_cpu.stderr, re.M), on_cpu.stderr


# --- copies ---


def test_from_one_gpu_to_many(cluster, tmp_path):
    """Chapter 2's ordinary script, and the same on two nodes with a rank each: one of them prints
    and saves, all have the same loss, and the accuracy is that of the saved weights on all test
    images."""
    for name in THREE_FILES["srun"]:
        copy_file(name, tmp_path)
    script = small_project("many_gpus.py", tmp_path)
    command = [*one_rank_a_node("srun"), "--output=log", LAUNCHERS["srun"], script.name]
    number = cluster.submit(*command, cwd=tmp_path)
    alone = ranks(0, small_project("one_gpu.py", tmp_path), cwd=tmp_path)
    assert len(re.findall(EVALUATED, alone.stdout)) == 2, alone
    job = cluster.wait(number, 240)
    evaluated = re.findall(EVALUATED, job.log)
    assert job.state == "COMPLETED" and [line[:7] for line in evaluated] == ["epoch=0", "epoch=1"]

    # The script's lines up to the loaders, in one process.
    lines = script.read_text()
    data = lines[lines.index("NETWORK, SIZE") : lines.index("EPOCHS, BATCH")]
    data += lines[lines.index("to_tensor =") : lines.index("workers =")]
    data = data.replace('"data/', f'"{tmp_path}/data/')
    imports = "\n".join(re.findall(r"^(?:import|from) .*$", lines, re.M))
    names: dict = {}
    exec(imports + "\n" + data, names)
    model = names["get_model"](names["NETWORK"], num_classes=10).eval()
    model.load_state_dict(torch.load(tmp_path / f"best_{number}.pt", weights_only=True))
    pairs = ((image, torch.tensor(label)) for image, label in names["test_set"])
    images, labels = map(torch.stack, zip(*pairs, strict=True))
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    assert f"{accuracy:.4f}" == max(line.split("accuracy=")[1] for line in evaluated), job.log

    # If both ranks print, each text is there twice. Their line breaks may come after both.
    (tmp_path / "all.py").write_text(lines.replace("if rank == 0:", "if True:", 1))
    both = ranks(2, tmp_path / "all.py", cwd=tmp_path)
    printed = re.findall(EVALUATED, both.stdout)
    assert len(printed) == 4 and len(set(printed)) == 2, both


# Convolutions and matmuls add up as on a CPU of 2008, whatever this one is.
OTHER_KERNELS = {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}


@pytest.mark.long
def test_chapter_2_s_script_is_right(tmp_path):
    """With the lines of chapter 3, two ranks print the losses of one in each step, even on a CPU
    whose kernels round in another way. In float32 they are 0.002 apart with AVX-512."""
    page = (REPOSITORY / "docs/03_is_it_right.md").read_text()
    [lines] = re.findall(r"^```python\n(torch\.set_.*?)^```$", page, re.M | re.S)
    network, loss = lines.split("\n\n")
    script = small_project("many_gpus.py", tmp_path)
    text = re.sub("^model = .*$", network, script.read_text(), flags=re.M)
    assert text.count("torch.float32") == 1
    step = "        loss.backward()\n"
    text = text.replace("torch.float32", "torch.float64")
    script.write_text(text.replace(step, step + textwrap.indent(loss, "        ")))
    found = []
    for count, kernels in ((1, {}), (2, OTHER_KERNELS)):
        done = ranks(count, script, cwd=tmp_path, **kernels)
        found.append([float(x) for x in re.findall(r"^loss (\S+)$", done.stdout, re.M)])
        assert len(found[-1]) == 12, done
    # The last of six digits may round the other way.
    assert found[1] == pytest.approx(found[0], abs=1.1e-6)
