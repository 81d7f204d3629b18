"""On a GPU: every script in every precision, NCCL with one rank, stop and resume, memory, and
the losses of the CPU.

`make test-gpu` runs it, and fails where no GPU is. With two GPUs or more there are cases of two
ranks besides. `pytest tests/test_gpu.py -m gpu --device cpu` is the dry run: the same with the
CPU and gloo, two ranks included.
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

from conftest import REPOSITORY, environment, free_port, read_metrics, run

SINGLE, DDP, TASK = "local/train_single.py", "distributed/train_ddp.py", "distributed/train_task.py"
PREEMPTIBLE, FSDP, TP = (f"distributed/train_{name}.py" for name in ("preemptible", "fsdp", "tp"))
IMAGES = ["--epochs", 1, "--batch-size", 20, "--log-every", 1]  # 300 images: 15 steps
TEXT = [
    "--layers",
    2,
    "--heads",
    4,
    "--width",
    64,
    "--context",
    32,
    "--batch-size",
    8,
    "--dropout",
    0,
]
TEXT += [
    "--learning-rate",
    0.01,
    "--steps",
    15,
    "--warmup-steps",
    5,
    "--log-every",
    1,
    "--eval-windows",
    20,
]
ARGUMENTS = {SINGLE: [*IMAGES, "--dropout", 0], TASK: IMAGES, FSDP: TEXT}
ARGUMENTS |= {DDP: ARGUMENTS[SINGLE], PREEMPTIBLE: ARGUMENTS[SINGLE], TP: TEXT}
# Of equal losses.
REFERENCE = {
    SINGLE: SINGLE,
    DDP: SINGLE,
    PREEMPTIBLE: SINGLE,
    TASK: TASK,
    FSDP: FSDP,
    TP: FSDP,
}
STEPS = 15
# How far a loss may be from the CPU's in float32, as a share of it. Float32 is meant:
# NVIDIA_TF32_OVERRIDE=0.
TOLERANCE = {"fp32": 1e-3, "bf16": 0.03, "fp16": 0.03}
FORMS = {
    "none": [sys.executable],
    "torchrun": ["./torchrun.sh"],
    "spawn": [sys.executable, "distributed/spawn_ranks.py"],
    "environment": [sys.executable],  # and the five variables
}


def stem(value: str) -> str:
    return Path(value).stem


def pytest_generate_tests(metafunc):
    """Two ranks need two GPUs. Where there is one, their cases do not exist: none is skipped."""
    two = metafunc.config.getoption("--device") == "cpu" or torch.cuda.device_count() >= 2
    if {"form", "ranks"} <= set(metafunc.fixturenames):
        alone = [("torchrun", 1), ("spawn", 1), ("environment", 1)]
        metafunc.parametrize(
            ("form", "ranks"), [*alone, ("torchrun", 2), ("spawn", 2)] if two else alone
        )
    elif "ranks" in metafunc.fixturenames:
        metafunc.parametrize("ranks", [1, 2] if two else [1])


@pytest.fixture(scope="session")
def device(request) -> str:
    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.exit("no GPU here (a dry run: --device cpu)", returncode=1)
    return name


def command_of(script: str, data: Path, folder: Path, device: str, form: str, *flags: object):
    """The command line, and the variables that the form of its start needs for one rank."""
    command = [*FORMS[form], "tests/scripts/one_rank.py", script, *ARGUMENTS.get(script, [])]
    command += ["--data-dir", data, *([] if script == TASK else ["--checkpoint-dir", folder])]
    command += ["--device", device, *flags]
    variables = {
        "NVIDIA_TF32_OVERRIDE": 0,
        "OMP_NUM_THREADS": 1,
        "TORCHDYNAMO_DISABLE": int("--compile" not in flags),
    }
    if form in ("spawn", "environment"):
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    if form == "spawn":  # as in a job
        variables |= {"NNODES": 1, "SLURM_NODEID": 0}
    if form == "environment":
        variables |= {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
    return [str(part) for part in command], variables


@pytest.fixture(scope="session")
def train(request, tmp_path_factory):
    """A function that runs a script to its end and returns what it printed; made lazily is the
    data that it wants."""

    def train(
        script: str, device: str, *flags: object, form="none", ranks=1, folder=None, **variables
    ) -> str:
        data = request.getfixturevalue("text" if script in (FSDP, TP) else "tiny")
        folder = folder or tmp_path_factory.mktemp("out") / "checkpoints"
        command, needed = command_of(script, data, folder, device, form, *flags)
        done = run(
            *command, env=environment(NPROC_PER_NODE=ranks, **needed, **variables), timeout=500
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return train


@pytest.fixture(scope="session")
def on_cpu(train):
    """A function that gives the losses of a script in one process on the CPU, in float32, and
    its last test loss."""
    known = {}

    def on_cpu(script: str) -> tuple[list[float], float]:
        if (reference := REFERENCE[script]) not in known:
            log = train(reference, "cpu", "--precision", "fp32")
            known[reference] = losses(log), last_loss(log)
        return known[reference]

    return on_cpu


def losses(log: str) -> list[float]:
    return [
        float(loss)
        for loss in re.findall(r"^(?:epoch=\d+ )?step=\d+/\d+ .*?\bloss=(\S+)", log, re.M)
    ]


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

PRECISIONS = [(PREEMPTIBLE, "fp16")]
PRECISIONS += [
    (script, precision) for script in (SINGLE, DDP, PREEMPTIBLE) for precision in ("fp32", "bf16")
]
PRECISIONS += [(script, precision) for script in (FSDP, TP) for precision in ("fp32", "bf16")]


@pytest.mark.gpu
@pytest.mark.parametrize(("script", "precision"), [*PRECISIONS, (FSDP, "auto")], ids=stem)
def test_precision(device, train, on_cpu, script, precision):
    log = train(script, device, "--precision", precision)
    [said] = devices(log, device)
    assert said["backend"] is None
    if precision == "auto":
        [precision] = re.findall(r"^Precision: (\w+)\.", log, re.M)
        assert device == "cpu" or (precision == "bf16") == (
            torch.cuda.get_device_capability() >= (8, 0)
        ), log
    assert_equal_losses(log, on_cpu(script), precision)
    assert ("peak_memory_gib=" in log) == (device == "cuda" and script in (FSDP, TP)), log
    assert device == "cuda" or "Compiled: True" not in log, log


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["none", "torchrun", "spawn"], ids=["alone", "one-rank", "spawn"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_task(device, train, on_cpu, precision, form):
    """Its dropout is fixed, and a GPU draws another one than the CPU: near are only the first
    loss and the last."""
    log = train(TASK, device, "--precision", precision, form=form)
    [said] = devices(log, device)
    assert (said["backend"] is None) == (form == "none")
    expected, last = on_cpu(TASK)
    assert len(losses(log)) == STEPS
    assert losses(log)[0] == pytest.approx(expected[0], abs=0.1)
    assert last_loss(log) == pytest.approx(last, abs=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["none", "torchrun"], ids=["alone", "one-rank"])
@pytest.mark.parametrize(("script", "precision"), PRECISIONS[-4:], ids=stem)
def test_compile(device, train, on_cpu, script, precision, form):
    log = train(script, device, "--precision", precision, "--compile", form=form)
    assert "Compiled: True" in log, log
    assert_equal_losses(log, on_cpu(script), precision)


# --- a process group ---

WEIGHTS = {DDP: "Parameter", PREEMPTIBLE: "Parameter", FSDP: "DTensor", TP: "DTensor"}


@pytest.mark.gpu
@pytest.mark.parametrize("script", WEIGHTS, ids=stem)
def test_process_group(device, train, on_cpu, script, form, ranks):
    """NCCL with one rank, too; what several ranks do around a checkpoint is done for one. FSDP's
    are replicas once."""
    flags = ["--hybrid", 1] if (script, form) == (FSDP, "spawn") else []
    log = train(script, device, "--precision", "fp32", *flags, form=form, ranks=ranks)
    assert ("replicate" in log) == (flags != [] and ranks == 2), log
    for said in devices(log, device, ranks):
        assert said["backend"] == {"cuda": "nccl", "cpu": "gloo"}[device]
        assert said["kind"] == WEIGHTS[script]
    assert_equal_losses(log, on_cpu(script))


@pytest.mark.gpu
@pytest.mark.parametrize("script", [PREEMPTIBLE, FSDP, TP], ids=stem)
def test_deterministic(device, train, script):
    """Twice the same losses, to the last digit that is printed."""
    flags = ["--precision", "fp32", "--deterministic"]
    first, second = (losses(train(script, device, *flags, form="torchrun")) for _ in range(2))
    assert first == second and len(first) == STEPS


@pytest.mark.gpu
@pytest.mark.parametrize("script", [FSDP, TP], ids=stem)
def test_process_group_in_bfloat16(device, train, on_cpu, script, ranks):
    log = train(script, device, "--precision", "bf16", form="torchrun", ranks=ranks)
    assert_equal_losses(log, on_cpu(script), "bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("script", [FSDP, TP], ids=stem)
def test_asynchronous_checkpoints(device, train, on_cpu, tmp_path, script, ranks):
    """Copied from the device and written by a thread, which leaves other ranks' GPUs alone."""
    flags = ["--precision", "fp32", "--checkpoint-every", 5]
    log = train(
        script,
        device,
        *flags,
        form="torchrun",
        ranks=ranks,
        folder=tmp_path / "out",
        ASYNCHRONOUS=1,
    )
    assert_equal_losses(log, on_cpu(script))
    assert all(len(said.get("contexts", [0])) == 1 for said in devices(log, device, ranks)), log
    resumed = train(
        script, device, *flags, "--resume", form="torchrun", ranks=ranks, folder=tmp_path / "out"
    )
    assert f"Resumed after step {STEPS}" in resumed, resumed


@pytest.mark.gpu
def test_check_ranks(device, tmp_path, form, ranks):
    checked, variables = command_of("aux/check_ranks.py", tmp_path, tmp_path, device, form)
    del checked[checked.index("--data-dir") : checked.index("--checkpoint-dir")]
    done = run(*checked, env=environment(NPROC_PER_NODE=ranks, **variables))
    assert done.returncode == 0, done.stdout + done.stderr
    starter = "hand" if form == "environment" else form
    assert f"VERDICT: all well, {ranks} ranks started by {starter}" in done.stdout
    assert (" cuda:0 " in done.stdout) == (device == "cuda"), done.stdout


# --- stop, save and resume ---


@pytest.mark.gpu
@pytest.mark.parametrize("script", [PREEMPTIBLE, FSDP, TP], ids=stem)
def test_stop_save_and_resume(device, train, on_cpu, request, tmp_path, script):
    """Asked to stop in its midst, resumed under another launcher: the losses of a run that was
    not stopped."""
    data, folder = (
        request.getfixturevalue("text" if script in (FSDP, TP) else "tiny"),
        tmp_path / "checkpoints",
    )
    flags = ["--precision", "fp32", "--checkpoint-every", 1000]
    command, variables = command_of(script, data, folder, device, "environment", *flags)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment(SLOW=0.3, **variables), **pipes
    ) as process:
        overdue = threading.Timer(300, process.kill)
        overdue.start()
        printed = ""
        for line in process.stdout:
            printed += line
            if line.startswith("step=2/"):
                process.send_signal(signal.SIGTERM)
        overdue.cancel()
    assert process.returncode == 0, printed
    [stopped] = re.findall(r"^Stopped after step (\d+), saved$", printed, re.M)
    assert 2 <= int(stopped) < STEPS
    log = train(script, device, *flags, "--resume", form="torchrun", folder=folder)
    devices(log, device)
    assert f"Resumed after step {stopped}\n" in log
    events = [event for event in read_metrics(folder) if "loss" in event]
    assert [event["step"] for event in events] == list(range(1, STEPS + 1))
    assert [event["loss"] for event in events] == pytest.approx(
        on_cpu(script)[0], rel=TOLERANCE["fp32"]
    )
    if script != PREEMPTIBLE:
        written = train(script, device, "--sample", 40, "--prompt", "The ", folder=folder)
        assert re.search(rf"^Sample from .*_step_{STEPS}:\nThe ", written, re.M), written


@pytest.mark.gpu
@pytest.mark.parametrize("script", [PREEMPTIBLE, FSDP], ids=stem)
def test_killed_rank(device, train, on_cpu, request, tmp_path, script, ranks):
    """The others end by themselves, with one line each; resumed, the losses are those of a run
    that was not killed."""
    data, folder = (
        request.getfixturevalue("text" if script == FSDP else "tiny"),
        tmp_path / "checkpoints",
    )
    flags = ["--precision", "fp32", "--checkpoint-every", 2]
    command, variables = command_of(
        script, data, folder, device, "environment", *flags, "--timeout", 20
    )
    variables |= {
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "SLOW": 0.3,
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = []
    for rank in range(ranks):
        place = environment(**variables | {"RANK": rank, "LOCAL_RANK": rank})
        started.append(subprocess.Popen(command, cwd=REPOSITORY, env=place, **pipes))
    *others, killed = started
    overdue = threading.Timer(300, killed.kill)
    overdue.start()
    try:
        printed = ""
        for line in killed.stdout:
            printed += line
            if printed.count("DEVICE {") == 4:
                killed.kill()
        said = [other.communicate(timeout=120)[0] for other in others]
    finally:
        overdue.cancel()
        for process in started:
            process.kill()
            process.wait()
    assert killed.returncode == -signal.SIGKILL, printed
    for other, text in zip(others, said, strict=True):
        assert (
            other.returncode != 0 and text.count("lost a peer") == 1 and "Traceback" not in text
        ), text
    log = train(script, device, *flags, "--resume", form="torchrun", ranks=ranks, folder=folder)
    assert re.search(r"^Resumed after step [2468]$", log, re.M), log
    events = [event for event in read_metrics(folder) if "loss" in event]
    assert [event["loss"] for event in events] == pytest.approx(
        on_cpu(script)[0], rel=TOLERANCE["fp32"]
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("script", "form"), [(SINGLE, "none"), (DDP, "environment")], ids=["single", "ddp"]
)
def test_resume_after_an_epoch(device, train, tmp_path, script, form):
    both = train(script, device, "--epochs", 2, form=form)
    train(script, device, form=form, folder=tmp_path)
    log = train(script, device, "--epochs", 2, "--resume", form=form, folder=tmp_path)
    devices(log, device)
    assert "Resumed after epoch 1\n" in log
    assert losses(log) == pytest.approx(losses(both)[STEPS:], rel=TOLERANCE["fp32"])


# --- memory ---


@pytest.mark.gpu
def test_memory(device, train, ranks):
    """A rank holds its part of weights, gradients and two moments, in float32; recomputing
    spares activations."""
    layers, width, context, batch = (8, 1024, 256, 16) if device == "cuda" else (4, 128, 64, 8)
    flags = [
        "--layers",
        layers,
        "--width",
        width,
        "--context",
        context,
        "--batch-size",
        batch,
        "--precision",
        "fp32",
    ]
    flags += ["--steps", 3, "--accumulation", 1]
    peaks = []
    for more in ([], ["--activation-checkpointing"]):
        for said in devices(
            train(FSDP, device, *flags, *more, form="torchrun", ranks=ranks, COUNT=1), device, ranks
        ):
            # Bytes, without the embedding of the characters.
            weights = 4 * (12 * layers * width**2 + context * width)
            assert weights / ranks < said["weights"] < 1.2 * weights / ranks
            # Besides there are the logits, on the CPU the text, and on a GPU the workspace of
            # cuBLAS
            held = said["now"] / said["weights"]
            assert 4 <= held < 4.5, f"{held:.2f} times the weights"
        peaks.append(said["peak"] - said["now"])
    assert peaks[1] < 0.6 * peaks[0], peaks


# --- without a GPU ---


@pytest.mark.matrix
def test_dry_run():
    """A part of it, on the CPU."""
    selected = "test_process_group and ((train_tp and torchrun-1) or (train_ddp and environment-1))"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/test_gpu.py",
        "-m",
        "gpu",
        "--device",
        "cpu",
        "-k",
        selected,
    ]
    done = run(*command, "-p", "no:cacheprovider")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout


def test_no_gpu_is_a_failure():
    """The command of `make test-gpu` where torch sees none, and no GPU is hidden by mistake."""
    [command] = re.findall(
        r"^test-gpu:.*\n\t(.+) \$\(ARGS\)$", (REPOSITORY / "Makefile").read_text(), re.M
    )
    done = run(
        "bash", "-c", f"{command} -p no:cacheprovider", env=environment(CUDA_VISIBLE_DEVICES="")
    )
    assert done.returncode == 1 and "no GPU here" in done.stdout, done.stdout
    assert not re.search(r"\d (passed|skipped)", done.stdout), done.stdout
