"""Token files, and the numbers of models and GPUs that no GPU is here to show."""

import math
import os
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import mnist
import token_files
from conftest import REPOSITORY
from transformer import SIZES, Transformer, peak_flops


def test_damaged_data_are_refused(text, tiny, tmp_path):
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    assert token_files.missing_data(folder, 16) is None
    os.truncate(folder / "train.bin", 100)
    fault = token_files.missing_data(folder, 16)
    assert fault.startswith(
        f"{folder}/train.bin is not as long as vocabulary.json beside it says; "
    ), fault

    images = Path(shutil.copytree(tiny, tmp_path / "images"))
    mnist.load(images)
    os.truncate(images / "MNIST/raw/train-labels-idx1-ubyte", 100)
    with pytest.raises(SystemExit, match="is incomplete or damaged"):
        mnist.load(images)


def write_as_nanogpt(folder: Path, numbers: list[int], letters: str = ""):
    """As its data/shakespeare_char/prepare.py and data/openwebtext/prepare.py do."""
    folder.mkdir()
    cut = len(numbers) * 9 // 10
    for name, part in (("train", numbers[:cut]), ("val", numbers[cut:])):
        np.array(part, dtype=np.uint16).tofile(folder / f"{name}.bin")
    if letters:
        itos = dict(enumerate(letters))
        stoi = {letter: number for number, letter in itos.items()}
        meta = {"vocab_size": len(letters), "itos": itos, "stoi": stoi}
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


def test_folders_of_nanogpt(tmp_path):
    """With meta.pkl they are characters, and without it GPT-2's tokens."""
    write_as_nanogpt(tmp_path / "characters", [0, 1, 2, 3] * 100, "abc\n")
    write_as_nanogpt(tmp_path / "tokens", list(range(49_000, 49_400)))
    for name, size, first in (("characters", 4, 0), ("tokens", 50_257, 49_000)):
        folder = tmp_path / name
        assert token_files.missing_data(folder, context=16) is None
        assert token_files.read_vocabulary(folder)["tokenizer"]["size"] == size
        windows = token_files.windows(folder, "train", 16)
        assert windows.shape == (360 - 16, 17) and windows[0, 0].item() == first
    tokenizer = token_files.read_vocabulary(tmp_path / "characters")["tokenizer"]
    encode, decode = token_files.text_functions(tokenizer, None)
    assert decode(encode("cab\n")) == "cab\n"

    write_as_nanogpt(tmp_path / "beyond", [3, 4] * 100, "abc\n")
    fault = token_files.missing_data(tmp_path / "beyond", context=16)
    assert fault.endswith("val.bin has token 4, and the vocabulary ends at 3")


def test_a_strangers_meta_pkl_runs_no_code(tmp_path):
    class Stranger:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    write_as_nanogpt(tmp_path / "data", [0, 1] * 100, "ab")
    (tmp_path / "data/meta.pkl").write_bytes(pickle.dumps(Stranger()))
    fault = token_files.missing_data(tmp_path / "data", context=16)
    assert "posix.mkdir, and is not read" in fault
    assert not (tmp_path / "made").exists()


NAMES = {
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    "NVIDIA L40S": 362e12,
    "AMD Instinct MI300X OAM": 1307e12,
    "AMD Instinct MI250X": 191.5e12,
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": None,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": None,
    "NVIDIA A10-4Q": None,
    "NVIDIA H800 PCIe": 756e12,
    "NVIDIA L40": None,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA B300 SXM6 AC": 2250e12,
    "AMD Instinct MI300A": None,
    "NVIDIA GeForce RTX 4090": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_peak_flops_are_those_of_the_data_sheet_or_unknown(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = peak_flops(torch.device("cuda"))
    assert found == NAMES[name] if NAMES[name] else math.isnan(found)
    assert math.isnan(peak_flops(torch.device("cpu")))


@pytest.mark.parametrize("size", ["gpt2", "gpt2-medium", "1b"])
def test_the_table_of_sizes(size):
    """That of the recipe, by its formulas."""
    page = (REPOSITORY / "docs/recipes.md").read_text()
    [row] = re.findall(rf"^\| `{size}` \|(.*)\|$", page, re.M)
    weights, state, sequence, accumulation, hours = (
        float(re.search(r"[\d.]+", cell)[0]) for cell in row.split("|")
    )
    sizes = SIZES[size]
    layers, width, context = sizes["layers"], sizes["width"], sizes["context"]
    with torch.device("meta"):
        model = Transformer(50_257, context, layers, sizes["heads"], width)
    count = sum(weight.numel() for weight in model.parameters())
    unit = 1e9 if "billion" in row else 1e6
    assert weights == pytest.approx(count / unit, rel=0.02)
    assert state == pytest.approx(16 * count / 1e9, rel=0.1)
    needed = (34 * layers * width + 10 * 50_257) * context
    assert sequence == pytest.approx(needed / 1e9, rel=0.1)
    # Of 80 GB, with what a rank of 8 has at once and its share of the state
    assert sizes["batch_size"] % (8 * accumulation) == 0
    assert sizes["batch_size"] / 8 / accumulation * needed / 1e9 + state / 8 < 60
    tokens = sizes["batch_size"] * context * sizes["steps"]
    seconds = model.flops_per_token(context) * tokens / (8 * 0.4 * 989e12)
    assert hours == pytest.approx(seconds / 3600, rel=0.02)
