"""On a GPU: every script in every precision, NCCL with one rank, stop and resume, memory, and
the losses of the CPU.

`make test-gpu` runs it, and fails where no GPU is. With two GPUs or more there are cases of two
ranks besides. `pytest tests/test_gpu.py -m gpu --device cpu` is the dry run: the same with the
CPU and gloo, two ranks included. Cases may share a GPU: -n 8 --dist load.
"""

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from conftest import REPOSITORY, environment, free_port, once, run
from transformer import SIZES, count_weights, new_config

SINGLE, DDP, TASK = "local/train_single.py", "distributed/train_ddp.py", "distributed/train_task.py"
PREEMPTIBLE, FSDP, TP = (f"distributed/train_{name}.py" for name in ("preemptible", "fsdp", "tp"))
STEPS = 15
IMAGES = "--epochs 1 --batch-size 20 --log-every 1"  # 300 images
TEXT = f"--num-hidden-layers 2 --hidden-size 64 --context 32 --batch-size 8 --steps {STEPS}"
TEXT += " --learning-rate 0.01 --warmup-steps 5 --log-every 1 --eval-windows 20"
ARGUMENTS = {SINGLE: IMAGES, DDP: IMAGES, PREEMPTIBLE: IMAGES, FSDP: TEXT, TP: TEXT}
ARGUMENTS |= {TASK: IMAGES}
# Whose losses on the CPU are a script's own.
REFERENCE = {SINGLE: SINGLE, DDP: SINGLE, PREEMPTIBLE: SINGLE, TASK: TASK, FSDP: FSDP, TP: FSDP}
# How far a loss may be from the CPU's in float32, as a share of it. Float32 is meant:
# NVIDIA_TF32_OVERRIDE=0.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.03}
FORMS = {
    "none": [sys.executable],
    "torchrun": ["./torchrun.sh"],
    "spawn": [sys.executable, "distributed/spawn_ranks.py"],
    "environment": [sys.executable],  # and the five variables
}


def stem(value: str | None) -> str:
    return Path(value or "auto").stem


def pytest_generate_tests(metafunc):
    """Two ranks need two GPUs. Where there is one, their cases do not exist: none is skipped."""
    if "ranks" in metafunc.fixturenames:
        two = metafunc.config.getoption("--device") == "cpu" or torch.cuda.device_count() >= 2
        metafunc.parametrize("ranks", [1, 2] if two else [1])


@pytest.fixture(scope="session")
def device(request) -> str:
    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.exit("no GPU here (a dry run: --device cpu)", returncode=1)
    return name


def command_of(script: str, data: Path, folder: Path, device: str, form: str, *flags: object):
    """The command line, and the variables that the form of its start needs for one rank."""
    command = [*FORMS[form], "tests/scripts/one_rank.py", script, *ARGUMENTS[script].split()]
    command += ["--data-dir", data, *([] if script == TASK else ["--checkpoint-dir", folder])]
    # The plain scripts know only auto and cpu.
    command += ["--device", "auto" if device == "cuda" else device, *flags]
    variables = {
        "NVIDIA_TF32_OVERRIDE": 0,
        "OMP_NUM_THREADS": 1,
        "TORCHDYNAMO_DISABLE": int("--compile" not in flags),
    }
    if form == "environment":
        variables |= {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [str(part) for part in command], variables


@pytest.fixture(scope="session")
def data_of(request):
    """The folder of a script's data; only those are made that are asked for."""
    return lambda script: request.getfixturevalue("text" if script in (FSDP, TP) else "tiny")


@pytest.fixture(scope="session")
def train(data_of, tmp_path_factory):
    """A function that runs a script to its end and returns what it printed."""

    def train(
        script: str, device: str, *flags: object, form="none", ranks=1, folder=None, **variables
    ) -> str:
        folder = folder or tmp_path_factory.mktemp("out") / "checkpoints"
        command, needed = command_of(script, data_of(script), folder, device, form, *flags)
        variables = environment(NPROC_PER_NODE=ranks, **needed, **variables)
        done = run(*command, env=variables, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return train


@pytest.fixture(scope="session")
def on_cpu(train, tmp_path_factory):
    """A function that gives the losses of a script in one process on the CPU, in float32, and
    its last test loss. Each reference is trained once for all processes of pytest-xdist."""

    def on_cpu(script: str) -> tuple[list[float], float]:
        reference = REFERENCE[script]

        def make(folder: Path):
            folder.mkdir()
            precision = [] if reference == TASK else ["--precision", "fp32"]
            (folder / "log").write_text(train(reference, "cpu", *precision))

        log = (once(tmp_path_factory, f"{stem(reference)}-on-cpu", make) / "log").read_text()
        return losses(log), last_loss(log)

    return on_cpu


def losses(log: str) -> list[float]:
    found = re.findall(r"^(?:epoch=\d+ )?step=\d+/\d+ .*?\bloss=(\S+)", log, re.M)
    return [float(loss) for loss in found]


def last_loss(log: str) -> float:
    """On the test images or the validation text."""
    return float(re.findall(r"\b(?:test|val)_loss=(\S+)", log)[-1])


def devices(log: str, device: str, ranks: int = 1) -> list[dict]:
    """What tests/scripts/one_rank.py has said after the last step, rank by rank: all is on the
    device."""
    said = [json.loads(line) for line in re.findall(r"^DEVICE (.*)$", log, re.M)]
    assert len(said) >= ranks and {line["device"] for line in said} == {device}, log
    return said[-ranks:]


def assert_equal_losses(log: str, expected: tuple[list[float], float], precision: str = "fp32"):
    assert len(losses(log)) == STEPS, log
    assert losses(log) == pytest.approx(expected[0], rel=TOLERANCE[precision]), log
    assert last_loss(log) == pytest.approx(expected[1], rel=TOLERANCE[precision]), log
    if precision != "fp32":
        assert losses(log) != pytest.approx(expected[0], rel=1e-5), f"this was not {precision}"


# --- one process ---

PRECISIONS = [(SINGLE, "fp32"), (SINGLE, "bf16"), (DDP, "bf16"), (FSDP, "fp32"), (TP, "bf16")]
PRECISIONS += [(PREEMPTIBLE, "bf16"), (FSDP, None)]


@pytest.mark.gpu
@pytest.mark.parametrize(("script", "precision"), PRECISIONS, ids=stem)
def test_precision(device, train, on_cpu, script, precision):
    log = train(script, device, *(["--precision", precision] if precision else []))
    [said] = devices(log, device)
    # All others have a process group of one rank.
    assert (said["backend"] is None) == (script == SINGLE)
    if precision is None:
        [precision] = re.findall(r"^Precision: (\w+)\.", log, re.M)
        assert precision == ("bf16" if device == "cuda" else "fp32"), log
    assert_equal_losses(log, on_cpu(script), precision)
    assert ("peak_memory_gib=" in log) == (device == "cuda" and script in (FSDP, TP)), log


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["none", "torchrun", "spawn"])
def test_task(device, train, on_cpu, form):
    log = train(TASK, device, form=form)
    [said] = devices(log, device)
    assert said["backend"]
    assert_equal_losses(log, on_cpu(TASK))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("script", "precision", "form"),
    [(FSDP, "bf16", "none"), (FSDP, "fp32", "torchrun"), (TP, "bf16", "torchrun")],
    ids=stem,
)
def test_compile(device, train, on_cpu, script, precision, form):
    log = train(script, device, "--precision", precision, "--compile", form=form)
    assert "Compiled: True" in log, log
    assert_equal_losses(log, on_cpu(script), precision)


# --- a process group ---

GROUPS = [(DDP, "torchrun"), (DDP, "spawn"), (PREEMPTIBLE, "torchrun"), (FSDP, "torchrun")]
GROUPS += [(FSDP, "spawn"), (TP, "torchrun")]


@pytest.mark.gpu
@pytest.mark.parametrize(("script", "form"), GROUPS, ids=stem)
def test_process_group(device, train, on_cpu, script, form, ranks):
    """NCCL with one rank, too; what several ranks do around a checkpoint is done for one."""
    log = train(script, device, "--precision", "fp32", form=form, ranks=ranks)
    for said in devices(log, device, ranks):
        assert {"cuda": "nccl", "cpu": "gloo"}[device] in said["backend"]
        assert said["kind"] == ("DTensor" if script in (FSDP, TP) else "Parameter")
    assert_equal_losses(log, on_cpu(script))


@pytest.mark.gpu
@pytest.mark.parametrize("script", [FSDP, TP], ids=stem)
def test_process_group_in_bfloat16(device, train, on_cpu, script, ranks):
    log = train(script, device, "--precision", "bf16", form="torchrun", ranks=ranks)
    assert_equal_losses(log, on_cpu(script), "bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("script", [FSDP, TP], ids=stem)
def test_deterministic(device, train, script):
    """Twice the same losses, to the last digit that is printed."""
    flags = ["--precision", "fp32", "--deterministic"]
    first, second = (losses(train(script, device, *flags, form="torchrun")) for _ in range(2))
    assert first == second and len(first) == STEPS


@pytest.mark.gpu
def test_check_ranks(device, tmp_path, ranks):
    command = ["./torchrun.sh", "tests/scripts/one_rank.py", "aux/check_ranks.py"]
    command += ["--checkpoint-dir", tmp_path, "--device", device]
    done = run(*command, env=environment(NPROC_PER_NODE=ranks, OMP_NUM_THREADS=1))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"VERDICT: all well, {ranks} ranks started by torchrun" in done.stdout
    assert (" cuda:0 " in done.stdout) == (device == "cuda"), done.stdout


# --- stop, save and resume ---


@pytest.mark.gpu
def test_asynchronous_checkpoints(device, train, on_cpu, tmp_path, ranks):
    """Copied from the device and written by a thread, which leaves other ranks' GPUs alone."""
    flags = ["--precision", "fp32", "--save-every", 5]
    where = {"form": "torchrun", "ranks": ranks, "folder": tmp_path / "out"}
    log = train(FSDP, device, *flags, ASYNCHRONOUS=1, **where)
    assert_equal_losses(log, on_cpu(FSDP))
    assert all(len(said.get("contexts", [0])) == 1 for said in devices(log, device, ranks)), log
    resumed = train(FSDP, device, *flags, "--resume", **where)
    assert f"Resumed after step {STEPS}" in resumed, resumed


def start(script: str, data: Path, folder: Path, device: str, *flags: object, **variables: object):
    """A rank whose steps take long, and which is killed when it has not ended after a while."""
    command, needed = command_of(script, data, folder, device, "environment", *flags)
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment(SLOW=0.3, **needed | variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    overdue = threading.Timer(300, process.kill)
    overdue.daemon = True
    overdue.start()
    return process


@pytest.mark.gpu
@pytest.mark.parametrize("script", [PREEMPTIBLE, FSDP, TP], ids=stem)
def test_stop_save_and_resume(device, train, on_cpu, data_of, tmp_path, script):
    """Asked to stop in its midst, resumed under another launcher: the losses of a run that was
    not stopped."""
    folder = tmp_path / "checkpoints"
    flags = ["--precision", "fp32"]
    printed = ""
    with start(script, data_of(script), folder, device, *flags) as process:
        for line in process.stdout:
            printed += line
            if re.match(r"(epoch=1 )?step=2/", line):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 0, printed
    [stopped] = re.findall(r"^Stopped after step (\d+), saved$", printed, re.M)
    assert 2 <= int(stopped) < STEPS
    log = train(script, device, *flags, "--resume", form="torchrun", folder=folder)
    assert f"Resumed after step {stopped}\n" in log
    expected = pytest.approx(on_cpu(script)[0], rel=TOLERANCE["fp32"])
    assert losses(printed) + losses(log) == expected
    if script == FSDP:
        command = ["distributed/sample.py", folder, "--length", 40, "--prompt", "The "]
        written = run(sys.executable, *command, "--device", device).stdout
        assert re.search(rf"^Sample from .*_step_{STEPS}:\nThe ", written, re.M), written


@pytest.mark.gpu
def test_killed_rank(device, train, on_cpu, data_of, tmp_path, ranks):
    """The others end by themselves; resumed, the losses are those of a run that was not killed."""
    folder, port = tmp_path / "checkpoints", free_port()
    # Where nobody ends them, they wait for each other's timeout.
    patient = (REPOSITORY / FSDP).read_text()
    assert patient.count("minutes=30") == 1
    script = tmp_path / "train_fsdp.py"
    script.write_text(patient.replace("minutes=30", "seconds=20"))
    ARGUMENTS[script] = ARGUMENTS[FSDP]
    flags = ["--precision", "fp32", "--save-every", 2]
    place = {
        "PYTHONPATH": "distributed",
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    *others, killed = [
        start(script, data_of(FSDP), folder, device, *flags, RANK=i, LOCAL_RANK=i, **place)
        for i in range(ranks)
    ]
    printed = ""
    try:
        for line in killed.stdout:
            printed += line
            if printed.count("DEVICE {") == 4:
                killed.kill()
        for other in others:
            said, _ = other.communicate(timeout=120)
            assert other.returncode not in (0, -signal.SIGKILL), said
    finally:
        for process in (*others, killed):
            process.kill()
            process.wait()
    assert killed.returncode == -signal.SIGKILL, printed
    log = train(FSDP, device, *flags, "--resume", form="torchrun", ranks=ranks, folder=folder)
    [done] = re.findall(r"^Resumed after step ([24])$", log, re.M)
    expected = on_cpu(FSDP)[0][int(done) :]
    assert losses(log) == pytest.approx(expected, rel=TOLERANCE["fp32"])


@pytest.mark.gpu
def test_resume_after_an_epoch(device, train, tmp_path):
    both = train(DDP, device, "--epochs", 2, form="environment")
    train(DDP, device, form="environment", folder=tmp_path)
    log = train(DDP, device, "--epochs", 2, "--resume", form="environment", folder=tmp_path)
    devices(log, device)
    assert "Resumed after epoch 1\n" in log
    assert losses(log) == pytest.approx(losses(both)[STEPS:], rel=TOLERANCE["fp32"])


# --- memory ---


@pytest.mark.gpu
def test_memory(device, train, ranks):
    """A rank holds its part of weights, gradients and two moments, in float32; recomputing
    spares activations."""
    layers, width, context, batch = (8, 1024, 256, 16) if device == "cuda" else (4, 128, 64, 8)
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 3 * width}
    flags = [x for name, size in sizes.items() for x in (f"--{name.replace('_', '-')}", size)]
    flags += ["--context", context, "--batch-size", batch]
    flags += ["--precision", "fp32", "--steps", 3, "--accumulation", 1]
    layer, outside = count_weights(new_config(SIZES["cpu"] | sizes, context, 128))
    weights = 4 * (layers * layer + outside) / ranks
    peaks = []
    for more in ([], ["--activation-checkpointing"]):
        log = train(FSDP, device, *flags, *more, form="torchrun", ranks=ranks, COUNT=1)
        for said in devices(log, device, ranks):
            assert said["weights"] == pytest.approx(weights, rel=0.01)
            # Besides there are the logits, on the CPU the text, and on a GPU the workspace of
            # cuBLAS.
            held = said["now"] / said["weights"]
            assert 4 <= held < 4.5, f"{held:.2f} times the weights"
        peaks.append(said["peak"] - said["now"])
    assert peaks[1] < 0.6 * peaks[0], peaks


# --- without a GPU ---


@pytest.mark.matrix
def test_no_gpu_is_a_failure():
    """Where torch sees none, and no GPU is hidden by mistake."""
    command = [sys.executable, "-m", "pytest", "tests/test_gpu.py", "-m", "gpu"]
    done = run(*command, "-p", "no:cacheprovider", env=environment(CUDA_VISIBLE_DEVICES=""))
    assert done.returncode == 1 and "no GPU here" in done.stdout, done.stdout
    assert not re.search(r"\d (passed|skipped)", done.stdout), done.stdout
