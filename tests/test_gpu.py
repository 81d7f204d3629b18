"""On a GPU: every script in every precision, NCCL with one rank, stop and resume, memory, and
the losses of the CPU.

`make test-gpu` runs it, and fails where no GPU is. With two GPUs or more there are cases of two
ranks besides. `pytest tests/test_gpu.py -m gpu --device cpu` is the dry run: the same with the
CPU and gloo, two ranks included. Cases may share a GPU: -n 8 --dist load.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from sizes import SIZES, count_weights, new_config
from slurm import environment, once, run

SINGLE, DDP, TASK = "local/train_single.py", "distributed/train_ddp.py", "local/laptop/train.py"
PREEMPTIBLE, FSDP = "distributed/train_preemptible.py", "distributed/train_fsdp.py"
TP = f"{FSDP} --tensor-parallel"  # over all ranks, also if there is one
STEPS = 15
IMAGES = "--epochs 1 --batch-size 20 --log-every 1"  # 300 images
TEXT = f"--num-hidden-layers 2 --hidden-size 64 --context 32 --batch-size 8 --steps {STEPS}"
TEXT += " --learning-rate 0.003 --warmup-steps 5 --log-every 1 --eval-windows 20"
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
    "spawn": [sys.executable, "aux/launch/spawn_ranks.py"],
}


def stem(value: str | None) -> str:
    return Path((value or "auto").replace(".py --", "-")).stem


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


@pytest.fixture(scope="session")
def train(request, tmp_path_factory):
    """A function that runs a script to its end and returns what it printed."""

    def train(
        script: str, device: str, *flags: object, form="none", ranks=1, folder=None, **variables
    ) -> str:
        folder = folder or tmp_path_factory.mktemp("out") / "checkpoints"
        data = request.getfixturevalue("text" if script in (FSDP, TP) else "tiny")
        command = [*FORMS[form], "tests/scripts/one_rank.py", *script.split()]
        command += [*([ranks] if script == TP else []), *ARGUMENTS[script].split()]
        command += ["--data-dir", data, *([] if script == TASK else ["--checkpoint-dir", folder])]
        # The plain scripts know only auto and cpu.
        command += ["--device", "auto" if device == "cuda" else device, *flags]
        variables |= {"NVIDIA_TF32_OVERRIDE": 0, "OMP_NUM_THREADS": 1, "NPROC_PER_NODE": ranks}
        variables["TORCHDYNAMO_DISABLE"] = int("--compile" not in flags)
        done = run(*command, env=environment(**variables), timeout=500)
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


# --- every script, in every precision, by every launcher ---

ALONE = [
    (SINGLE, "fp32", "none"),
    (SINGLE, "bf16", "none"),
    (DDP, "bf16", "none"),
    (PREEMPTIBLE, "bf16", "none"),
    (FSDP, "fp32", "none"),
    (FSDP, None, "none"),
    (FSDP, "bf16", "none --compile"),
    (TASK, None, "none"),
    (TASK, None, "torchrun"),
    (TASK, None, "spawn"),
]
GROUPS = [
    (DDP, "fp32", "torchrun"),
    (DDP, "fp32", "spawn"),
    (PREEMPTIBLE, "fp32", "torchrun"),
    (FSDP, "fp32", "torchrun --compile"),
    (FSDP, "fp32", "spawn"),
    (FSDP, "bf16", "torchrun"),
    (TP, "fp32", "torchrun"),
    (TP, "bf16", "torchrun --compile"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("script", "precision", "form"), ALONE, ids=stem)
def test_one_process(device, train, on_cpu, script, precision, form, ranks=1):
    form, *flags = form.split()
    flags += ["--precision", precision] if precision else []
    log = train(script, device, *flags, form=form, ranks=ranks)
    for said in devices(log, device, ranks):
        # All others have a process group, if only of one rank.
        expected = {"cuda": "nccl", "cpu": "gloo"}[device]
        assert said["backend"] is None if script == SINGLE else expected in said["backend"]
        if script in (FSDP, TP) and form != "none":
            assert said["kind"] == "DTensor"
    if script == FSDP and precision is None:
        [precision] = re.findall(r"^Precision: (\w+)\.", log, re.M)
        assert precision == ("bf16" if device == "cuda" else "fp32"), log
    assert "--compile" not in flags or "Compiled: True" in log, log
    assert ("peak_memory_gib=" in log) == (device == "cuda" and script in (FSDP, TP)), log
    assert_equal_losses(log, on_cpu(script), precision or "fp32")


@pytest.mark.gpu
@pytest.mark.parametrize(("script", "precision", "form"), GROUPS, ids=stem)
def test_process_group(device, train, on_cpu, script, precision, form, ranks):
    """NCCL with one rank, too; what several ranks do around a checkpoint is done for one."""
    test_one_process(device, train, on_cpu, script, precision, form, ranks)


@pytest.mark.gpu
def test_cluster_report(device, ranks):
    """All meet, the losses are a CPU's, and a run that is stopped resumes with the same ones."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    variables = environment(NPROC_PER_NODE=ranks, OMP_NUM_THREADS=1, **hidden)
    parts = ["dev/cluster_report.py", "checks", "losses", "stop"]
    done = run("./torchrun.sh", *parts, env=variables, timeout=900)
    assert done.returncode == 0 and ": All is well\n" in done.stdout, done.stdout + done.stderr
    assert (" cuda:0 " in done.stdout) == (device == "cuda"), done.stdout


@pytest.mark.gpu
def test_tf32(device):
    """Defaults, as chapter 4 has them, and chapter 3's variable, which overrides a switch."""
    code = f"""
import torch
torch.manual_seed(0)
print(torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
torch.set_float32_matmul_precision("high")
print(torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
x = torch.randn(256, 256, dtype=torch.float64)
y = x.to("{device}", torch.float32)
print(((y @ y).double().cpu() / (x @ x) - 1).abs().median().item())
"""
    errors = []
    for override in ({}, {"NVIDIA_TF32_OVERRIDE": 0}):
        done = run(sys.executable, "-c", code, env=environment(**override))
        first, second, error = done.stdout.splitlines()
        assert (first, second) == ("tf32 none", "tf32 tf32"), done.stdout
        errors.append(float(error))
    # TF32 has ten bits behind the binary point, float32 23.
    assert errors[1] < 1e-5 and (device == "cpu" or errors[0] > 1e-4), errors


# --- save and resume ---


@pytest.mark.gpu
def test_asynchronous_checkpoints(device, train, on_cpu, tmp_path, ranks):
    """Copied from the device and written by a thread, which leaves other ranks' GPUs alone. Another
    launcher resumes them, and they write text."""
    flags, folder = ["--precision", "fp32", "--save-every", 5], tmp_path / "out"
    log = train(FSDP, device, *flags, form="torchrun", ranks=ranks, folder=folder)
    assert_equal_losses(log, on_cpu(FSDP))
    assert all(len(said.get("contexts", [0])) == 1 for said in devices(log, device, ranks)), log
    shutil.rmtree(folder / f"step_{STEPS}")
    log = train(FSDP, device, *flags, "--resume", form="spawn", ranks=ranks, folder=folder)
    assert "Resumed after step 10\n" in log
    assert losses(log) == pytest.approx(on_cpu(FSDP)[0][10:], rel=TOLERANCE["fp32"])
    command = ["aux/sample.py", folder, "--length", 40, "--prompt", "The "]
    written = run(sys.executable, *command, "--device", device).stdout
    assert re.search(rf"^Sample from .*/step_{STEPS}:\nThe ", written, re.M), written


@pytest.mark.gpu
def test_resume_after_an_epoch(device, train, tmp_path):
    both = train(DDP, device, "--epochs", 2, form="torchrun")
    train(DDP, device, form="torchrun", folder=tmp_path)
    log = train(DDP, device, "--epochs", 2, form="torchrun", folder=tmp_path)
    devices(log, device)
    assert "Resumed after epoch 1\n" in log
    assert losses(log) == pytest.approx(losses(both)[STEPS:], rel=TOLERANCE["fp32"])


# --- memory ---


@pytest.mark.gpu
def test_memory(device, train, ranks):
    """A rank holds its part of weights, gradients and two moments, in float32; recomputing
    spares activations."""
    if device == "cpu":
        pytest.skip("a CPU has no counter of the memory for tensors")
    layers, width, context, batch = 8, 1024, 256, 16
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 3 * width}
    flags = [x for name, size in sizes.items() for x in (f"--{name.replace('_', '-')}", size)]
    flags += ["--context", context, "--batch-size", batch]
    flags += ["--precision", "fp32", "--steps", 3, "--accumulation", 1]
    layer, outside = count_weights(new_config(SIZES["cpu"] | sizes, context, 128))
    weights = 4 * (layers * layer + outside) / ranks
    peaks = []
    for more in ([], ["--activation-checkpointing"]):
        log = train(FSDP, device, *flags, *more, form="torchrun", ranks=ranks)
        for said in devices(log, device, ranks):
            assert said["weights"] == pytest.approx(weights, rel=0.01)
            # Besides there are the logits and the workspace of cuBLAS.
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
