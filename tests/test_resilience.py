"""The package resilience by itself, without a cluster: what it imports, the order of the data, and its sentences."""

import math
import re
import socket
import subprocess
import sys
import threading
import zlib

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from char_transformer import peak_flops
from conftest import REPOSITORY, cells, environment, read_metrics, run
from resilience import heartbeat
from resilience.samplers import RunSampler
from resilience.sharded_checkpoints import measure_files


@pytest.mark.parametrize("module", ["arguments", "stop_request", "heartbeat", "checksums", "job"])
def test_light_modules_import_no_torch(module):
    code = (
        f"import sys; sys.path.insert(0, 'distributed'); import resilience.{module}; sys.exit('torch' in sys.modules)"
    )
    assert run(sys.executable, "-c", code, cwd=REPOSITORY / "distributed").returncode == 0


@pytest.mark.parametrize(("size", "batch_size", "world_size"), [(1003, 64, 4), (300, 20, 2), (23, 6, 3), (64, 64, 1)])
def test_run_sampler_is_distributed_sampler_over_all_epochs(size, batch_size, world_size):
    per_epoch = size // batch_size
    for rank in range(world_size):
        expected = []
        for epoch in (1, 2, 3):
            whole = DistributedSampler(range(size), world_size, rank, seed=7, drop_last=True)
            whole.set_epoch(epoch)
            expected += list(BatchSampler(whole, batch_size // world_size, drop_last=True))
        assert len(expected) == 3 * per_epoch
        sampler = RunSampler(size, batch_size, range(len(expected)), 7, rank, world_size)
        assert [indices.tolist() for indices in sampler] == expected
        first = per_epoch + per_epoch // 2  # in the midst of an epoch
        sampler.steps = range(first, len(expected))
        assert [indices.tolist() for indices in sampler] == expected[first:] and len(sampler) == len(expected) - first


def test_run_sampler_refuses_a_batch_that_is_larger_than_the_data():
    with pytest.raises(ValueError, match="a batch of 64 is larger than the data set of 63"):
        RunSampler(63, 64, range(1), 0, 0, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_run(ranks, tiny, tmp_path):
    """With one sentence and status 1, and no checkpoint of weights that are not finite."""
    command = ["distributed/train_preemptible.py", "--data-dir", tiny, "--checkpoint-dir", tmp_path / "out"]
    command += ["--learning-rate", 1e8, "--batch-size", 20, "--log-every", 100, "--checkpoint-every", 3]
    launch = [sys.executable] if ranks == 1 else ["./torchrun.sh"]
    done = run(*launch, *command, env=environment(NPROC_PER_NODE=ranks, OMP_NUM_THREADS=1))
    assert done.returncode == 1 and "Finished" not in done.stdout, done.stderr
    said = re.findall(r"^\[Rank \d on .*the loss is (?:nan|inf) at step \d+: try a lower", done.stderr, re.M)
    assert len(said) == 1 and "Traceback" not in re.sub(r"(?s)^.*elastic.*", "", done.stderr), done.stderr
    assert not list((tmp_path / "out").glob("*.pt"))


@pytest.mark.parametrize("script", cells([("train_fsdp.py",), ("train_preemptible.py",)], ("train_fsdp.py",)))
def test_time_that_saving_and_evaluation_take_is_in_no_throughput(script, text, request, tmp_path):
    """Half a second for each save, one save after every step, and a second for each evaluation, one in two steps."""
    code = (
        "import runpy, sys, time; sys.path.insert(0, 'distributed')\n"
        "from resilience import progress, sharded_checkpoints\n"
        "def slower(method, seconds):\n"
        "    return lambda *args, **options: (time.sleep(seconds), method(*args, **options))[1]\n"
        "for kind in (sharded_checkpoints.Checkpoints, sharded_checkpoints.ShardedCheckpoints):\n"
        "    kind.write = slower(kind.write, 0.5)\n"
        "progress.Progress.log_evaluation = slower(progress.Progress.log_evaluation, 1)\n"
        "sys.argv[0] = 'distributed/' + sys.argv.pop(1)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [script, "--batch-size", 12, "--steps", 4, "--eval-every", 2, "--eval-windows", 8, "--data-dir", text]
    if script == "train_preemptible.py":  # 300 images: an epoch, with its evaluation, is two steps
        command = [script, "--batch-size", 150, "--epochs", 2, "--data-dir", request.getfixturevalue("tiny")]
    command += ["--checkpoint-dir", tmp_path, "--log-every", 2, "--checkpoint-every", 1]
    done = run(sys.executable, "-c", code, *command)
    assert done.returncode == 0, done.stderr
    rates = [event[name] for event in read_metrics(tmp_path) for name in event if name.endswith("_per_second")]
    per_step = 150 if script == "train_preemptible.py" else 12 * 64
    # Of the second line, two steps come with two saves and an evaluation: with one of these, two steps a second.
    assert len(rates) == 2 and rates[1] > 2.5 * per_step, rates


def test_ranks_that_never_come_are_named(tiny, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"LOCAL_RANK": 0, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    place["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as env.sh has it
    command = [sys.executable, "distributed/train_preemptible.py", "--data-dir", tiny, "--init-timeout", 10]
    command = [str(part) for part in (*command, "--checkpoint-dir", tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment(RANK=3, **place), stderr=subprocess.PIPE) as other:
        first = run(*command, env=environment(RANK=0, **place))
        said = other.communicate(timeout=60)[1].decode()
    assert re.fullmatch(r"\[Rank 0 on \S+\] 2 of 4 ranks have not come within 0:00:10: 1, 2\n", first.stderr)
    assert first.returncode == other.returncode == 1 and said == "", said


@pytest.mark.parametrize("variables", [{"SLURM_PROCID": 0, "SLURM_LOCALID": 0}, {}])
def test_several_tasks_without_a_rendezvous_are_no_world_of_one(variables, tiny, tmp_path):
    """As in a container without scontrol, or where only some of Slurm's variables have come in."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    inside = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0, "SLURM_NTASKS": 4, "SLURM_STEP_NODELIST": "n1", **variables}
    inside |= {"PATH": tmp_path / "bin"}
    command = [
        sys.executable,
        "distributed/train_preemptible.py",
        "--data-dir",
        tiny,
        "--checkpoint-dir",
        tmp_path / "out",
    ]
    if variables:
        inside |= {"SLURM_PROCID": 0, "SLURM_LOCALID": 0}
    done = run(*command, env=environment() | {name: str(value) for name, value in inside.items()})
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "use a launcher" in done.stderr, done.stderr
    assert "Step 0" not in done.stdout


def test_the_frame_of_a_heartbeat_is_never_a_library_s():
    seen = []
    thread = threading.Timer(0.2, lambda: seen.append(heartbeat.main_stack()))
    thread.start()
    thread.join()  # the main thread waits in threading.py
    [(stack, frame, waits)] = seen
    assert "threading.py" in stack[-1] and "test_resilience.py" in frame and not waits


NAMES = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L40S": 362e12,
    "AMD Instinct MI300X": 1307e12,
    "AMD Instinct MI300X OAM": 1307e12,
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": None,
    "NVIDIA A10": None,
    "NVIDIA L40": None,
    "NVIDIA GH200 480GB": None,
    "NVIDIA H800": None,
    "NVIDIA GB300": None,
    "Tesla V100-SXM2-32GB": None,
    "AMD Instinct MI300A": None,
    "NVIDIA GeForce RTX 4090": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_peak_flops_are_those_of_the_data_sheet_or_unknown(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = peak_flops(torch.device("cuda"))
    assert found == NAMES[name] if NAMES[name] else math.isnan(found)
    assert math.isnan(peak_flops(torch.device("cpu")))


def test_a_rank_reads_its_own_file_of_a_sharded_checkpoint(tmp_path):
    """Of a checkpoint of twelve ranks, on fewer, as many and more of them: every file once, whoever has written it."""
    for name in (".metadata", "whole.json", *(f"__{rank}_{part}.distcp" for rank in range(12) for part in range(2))):
        (tmp_path / name).write_text(name)
    for world_size in (1, 5, 12, 16):
        shares = [measure_files(tmp_path, rank, world_size) for rank in range(world_size)]
        assert sorted(name for share in shares for name in share) == sorted(
            path.name for path in tmp_path.iterdir() if path.name != "whole.json"
        )
        for rank, share in enumerate(shares):
            assert world_size < 12 or share.keys() - {".metadata"} == {
                f"__{rank}_{part}.distcp" for part in range(2) if rank < 12
            }
    assert shares[3]["__3_0.distcp"] == [12, zlib.crc32(b"__3_0.distcp")]
