"""Parts of the large models' recipe that no GPU is here to show."""

import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import characters
import mnist
import recipe
from char_transformer import peak_flops


def test_compiled_where_it_pays(monkeypatch):
    """On CUDA with what Triton needs, on the CPU not."""
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(recipe.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(recipe.Path, "exists", lambda path: True)
    assert recipe.can_compile(torch.device("cuda:0"))
    assert not recipe.can_compile(torch.device("cpu"))
    capability[0] = (6, 1)
    assert not recipe.can_compile(torch.device("cuda:0"))


def test_sizes_are_compared_where_checksums_are_not(text, tiny, tmp_path):
    """Local rank 0 of a node reads every file whole; the others look at the lengths."""
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    assert characters.missing_data(folder, 16, local_rank=1) is None
    os.truncate(folder / "train.bin", 100)
    fault = characters.missing_data(folder, 16, local_rank=1)
    assert fault.startswith(
        f"{folder}/train.bin is not as long as in vocabulary.json beside it; "
    ), fault

    images = Path(shutil.copytree(tiny, tmp_path / "images"))
    mnist.load(images)
    os.truncate(images / "MNIST/raw/train-labels-idx1-ubyte", 100)
    with pytest.raises(ValueError, match="is incomplete or damaged"):
        mnist.load(images)


def test_memory_is_in_the_log_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.25}])
    norm = SimpleNamespace(device=torch.device("cuda", 1), item=lambda: 2.0)
    logged = {"learning_rate": 0.25, "grad_norm": 2.0}
    assert recipe.log_values(optimizer, norm) == logged | {"peak_memory_gib": 3.0}
    assert recipe.log_values(optimizer, torch.tensor(2.0)) == logged


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
