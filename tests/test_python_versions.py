"""Jobs run on Python 3.10, as NVIDIA's images of 2024 and Ubuntu 22.04 have it, and on torch 2.4
or 2.6."""

import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import language_model
from conftest import REPOSITORY, environment, run
from resilience import place

TRACKED = subprocess.run(
    ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True
).stdout.split()
ON_TOP = ("check_ranks", "lint_sbatch", "plot_runs", "prepare_data", "slurm_task", "watch_job")
IN_JOBS = [path for path in TRACKED if path.startswith(("distributed/", "local/", "dev/"))]
IN_JOBS = [
    path for path in [*IN_JOBS, *(f"aux/{name}.py" for name in ON_TOP)] if path.endswith(".py")
]
ON_SUBMISSION = ["aux/submit.py", *(path for path in TRACKED if path.startswith("aux/submission/"))]
ON_SUBMISSION = [path for path in ON_SUBMISSION if path.endswith(".py")]


def violations(version: str, *paths: object) -> str:
    """What vermin finds that is newer than `version`; empty if nothing is."""
    options = ["--no-tips", "--eval-annotations", "--violations", f"--target={version}-"]
    done = run(Path(sys.executable).with_name("vermin"), *options, *paths)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_jobs_run_on_python_3_10():
    assert len(IN_JOBS) > 20 and violations("3.10", *IN_JOBS) == ""


def test_submission_runs_on_python_3_11():
    assert violations("3.11", *ON_SUBMISSION) == ""
    assert "tomllib" in violations("3.10", *ON_SUBMISSION), "the check can fail"


def test_a_task_in_a_job_imports_nothing_of_the_submission():
    script = "import sys, slurm_task; print({'tomllib', 'submit', 'submission'} & set(sys.modules))"
    done = run(sys.executable, "-c", script, cwd=REPOSITORY / "aux")
    assert done.stdout == "set()\n", done.stdout + done.stderr


OLDER, MATRIX = "tests/scripts/older_torch.py", pytest.mark.matrix


@pytest.mark.parametrize(
    "command",
    [
        ["./torchrun.sh", OLDER, "2.4", "distributed/train_preemptible.py", "--batch-size", "20"],
        ["./torchrun.sh", OLDER, "2.4", "distributed/train_ddp.py", "--batch-size", "20"],
        pytest.param([sys.executable, OLDER, "2.4", "local/train_single.py"], marks=MATRIX),
        pytest.param([sys.executable, OLDER, "2.4", "distributed/train_task.py"], marks=MATRIX),
    ],
    ids=lambda command: command[3],
)
def test_plain_and_hard_layers_run_on_torch_2_4(command, tiny, tmp_path):
    """With what torch has had since taken away."""
    where = [
        "--data-dir",
        tiny,
        *(["--checkpoint-dir", tmp_path / "c"] if "task" not in command[3] else []),
    ]
    env = environment(NPROC_PER_NODE=2, OMP_NUM_THREADS=1, TRAIN_DEVICE="cpu")
    done = run(*command, "--epochs", 1, *where, env=env)
    assert done.returncode == 0 and re.search("^Finished: ", done.stdout, re.M), (
        done.stdout + done.stderr
    )


@MATRIX
def test_check_ranks_runs_on_torch_2_4():
    env = environment(NPROC_PER_NODE=2, OMP_NUM_THREADS=1, TRAIN_DEVICE="cpu")
    done = run("./torchrun.sh", OLDER, "2.4", "aux/check_ranks.py", env=env)
    assert done.returncode == 0 and "VERDICT: 2 ranks" in done.stdout, done.stdout + done.stderr


def test_a_gpu_without_a_uuid(monkeypatch):
    """NVIDIA's torch of 2024 shows none."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Namespace(name="a GPU"))
    assert place.gpu_uuid(torch.device("cuda", 0)) is None


NEWER = {
    "2.4": [
        "torch.accelerator",
        "torch.cpu.get_capabilities()",
        "from torch.distributed.fsdp import fully_shard",
    ],
    "2.6": [
        "torch.cpu.get_capabilities()",
        "from torch.distributed.checkpoint.staging import StagingOptions",
        "import torch.distributed.checkpoint as dcp; dcp.load({}, no_dist=True)",
    ],
}


@pytest.mark.parametrize("version", NEWER)
def test_the_older_torch_is_one(version, tmp_path):
    caught = "except (AttributeError, ImportError, TypeError): print('older')"
    tries = [f"try: {line}\n{caught}\n" for line in NEWER[version]]
    (tmp_path / "newer.py").write_text("import torch\n" + "".join(tries))
    done = run(sys.executable, OLDER, version, tmp_path / "newer.py")
    assert done.stdout == "older\n" * 3, done.stdout + done.stderr


LARGE = [
    "--layers",
    2,
    "--heads",
    4,
    "--width",
    32,
    "--context",
    32,
    "--batch-size",
    8,
    "--log-every",
    5,
]
LARGE += ["--steps", 10, "--warmup-steps", 2, "--eval-windows", 8, "--checkpoint-every", 5]


@pytest.mark.parametrize(
    ("start", "script"),
    [
        pytest.param(sys.executable, "train_fsdp.py", id="train_fsdp.py"),
        pytest.param("./torchrun.sh", "train_tp.py", id="train_tp.py", marks=MATRIX),
    ],
)
def test_large_layer_runs_on_torch_2_6(start, script, text, tmp_path):
    """Trains, and resumes from a sharded checkpoint, with what torch has had since taken away."""
    command = [
        start,
        OLDER,
        "2.6",
        f"distributed/{script}",
        *LARGE,
        "--data-dir",
        text,
        "--checkpoint-dir",
        tmp_path,
    ]
    env = environment(NPROC_PER_NODE=2, OMP_NUM_THREADS=1, TRAIN_DEVICE="cpu")
    for resumed in ([], ["--resume"]):
        done = run(*command, *resumed, env=env)
        assert done.returncode == 0 and "warning" not in done.stderr.lower(), done.stderr
        assert ("Resumed after step 5\n" in done.stdout) == bool(resumed), done.stdout
        assert "Finished: step=10 " in done.stdout, done.stdout
        shutil.rmtree(tmp_path / "checkpoint_step_10")


FSDP_ON_A_CPU = "FSDP on a CPU needs torch 2.9 or newer, whose gloo can average, and this is "


@MATRIX
def test_fsdp_on_a_cpu_says_which_torch_it_needs(text, tmp_path):
    """With torch 2.6.0 it fails. With 2.7.0 and 2.8.0 gloo adds the gradients up where FSDP2
    wants their average."""
    command = [
        "./torchrun.sh",
        OLDER,
        "2.6",
        "distributed/train_fsdp.py",
        *LARGE,
        "--data-dir",
        text,
    ]
    env = environment(NPROC_PER_NODE=2, OMP_NUM_THREADS=1, TRAIN_DEVICE="cpu")
    done = run(*command, "--checkpoint-dir", tmp_path, env=env)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.endswith(f"{FSDP_ON_A_CPU}2.6.0\n")


@pytest.mark.parametrize(
    ("version", "vocabulary", "device", "mesh", "fault"),
    [
        ("2.6.0+cu124", 65, "cuda", {"shard": 4}, None),
        ("2.6.0", 65, "cpu", {"replicate": 2, "shard": 1}, FSDP_ON_A_CPU),
        ("2.6.0", 65, "cpu", {"data": 2, "tensor": 2}, FSDP_ON_A_CPU),
        ("2.6.0", 65, "cpu", {"data": 1, "tensor": 4}, None),
        ("2.6.0", 65, "cpu", {}, None),
        ("2.8.0", 65, "cpu", {"shard": 4}, FSDP_ON_A_CPU),
        ("2.9.1", 65, "cpu", {"shard": 4}, None),
        ("2.8.0", 128, "cuda", {"data": 2, "tensor": 2}, None),
        (
            "2.8.0",
            65,
            "cuda",
            {"data": 2, "tensor": 2},
            "torch 2.8.0 cannot split 65 rows of a weight over 4 ranks: ",
        ),
        (
            "2.8.0",
            192,
            "cuda",
            {"data": 3, "tensor": 2},
            "torch 2.8.0 cannot split 512 rows of a weight over 6 ranks: ",
        ),
        ("2.9.1", 65, "cuda", {"data": 2, "tensor": 2}, None),
    ],
)
def test_what_torch_cannot_do_yet(version, vocabulary, device, mesh, fault, monkeypatch):
    monkeypatch.setattr(
        language_model,
        "metadata_of",
        lambda args: {"sizes": {"vocabulary": vocabulary, "width": 128}},
    )
    named = Namespace(mesh_dim_names=tuple(mesh), shape=tuple(mesh.values())) if mesh else None
    found = language_model.too_old(version, Namespace(), torch.device(device), named)
    assert found == fault or (fault and found.startswith(fault)), found


@pytest.mark.parametrize("script", ["train_fsdp.py", "train_tp.py"])
def test_large_layer_says_which_torch_it_needs(script, tmp_path):
    metadata = tmp_path / "torch-2.4.0a0+f70bd71a48.nv24.6.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.0a0+f70bd71a48.nv24.6\n")
    done = run(sys.executable, f"distributed/{script}", env=environment(PYTHONPATH=tmp_path))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(
        f"{script}: needs torch 2.6 or newer, and this is 2.4.0a0+f70bd71a48.nv24.6: "
    )
