"""Token files, and the numbers of models and GPUs that no GPU is here to show."""

import json
import math
import os
import re
import shutil
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sizes
import token_files
import transformer
from memory import MODELS
from sizes import (
    SIZES,
    best_precision,
    count_weights,
    flops_per_token,
    memory,
    new_config,
    peak_flops,
    plan_memory,
)
from slurm import REPOSITORY
from transformer import Transformer


def test_damaged_data_are_refused(text, tmp_path):
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    assert token_files.missing_data(folder, 16) is None
    os.truncate(folder / "train.bin", 100)
    fault = token_files.missing_data(folder, 16)
    assert fault.startswith(f"{folder}/train.bin is not as long as vocabulary.json beside it says")
    shutil.copytree(text, folder, dirs_exist_ok=True)
    with (folder / "val.bin").open("r+b") as file:
        file.write(b"\xff")
    fault = token_files.missing_data(folder, 16)
    assert fault.startswith(f"{folder}/val.bin has token 255, and the vocabulary ends at ")


def of_bytes(**changed: object) -> dict:
    """The tokenizer's entry in vocabulary.json."""
    return {"tokenizer": {"name": "bytes", "size": 256} | changed}


VOCABULARIES = [
    ({"dtype": "int7"}, "its dtype is int7, not one of "),
    ({"dtype": "\x1b]52;c;AAAA\x07"}, "its dtype is ?]52;c;AAAA?, not one of "),
    ({"dtype": None}, "its dtype is None, not of type str"),
    ({"id": 5}, "its id is 5, not of type str"),
    ({"source": None}, "its source is None, not of type str"),
    ({"train_tokens": "900"}, "its train_tokens is '900', not of type int"),
    ({"packed": "16"}, "its packed is '16', not of type int"),
    ({"tokenizer": ["bytes", 256]}, "its tokenizer is ['bytes', 256], not of type dict"),
    (of_bytes(size="256"), "its size is '256', not of type int"),
    (of_bytes(size=65.5), "its size is 65.5, not of type int"),
    (of_bytes(size=True), "its size is True, not of type int"),
    (of_bytes(size=1 << 40), "its size is 1099511627776"),
    (of_bytes(name=None), "its name is None, not of type str"),
    (of_bytes(name="characters"), "its characters is None, not of type list"),
    (of_bytes(name="characters", size=2, characters=["a", 5]), "it has 1 characters, not 2"),
    ("5", "its JSON is no object"),
    ("[" * 100_000, "its JSON is too deep"),
]


@pytest.mark.parametrize(("changed", "sentence"), VOCABULARIES)
def test_a_vocabulary_from_anywhere_is_a_sentence(changed, sentence, text, tmp_path):
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    said = changed
    if isinstance(changed, dict):
        said = json.dumps(json.loads((folder / "vocabulary.json").read_text()) | changed)
    (folder / "vocabulary.json").write_text(said)
    fault = token_files.missing_data(folder, 16)
    what = f"{folder}: vocabulary.json is not one that aux/prepare_data.py wrote ({sentence}"
    assert fault.startswith(what) and fault.isprintable() and len(fault) < 600


NAMES = """312 NVIDIA A100-SXM4-80GB
312 NVIDIA A100 80GB PCIe; nan NVIDIA A100-SXM4-40GB MIG 3g.20gb
989 NVIDIA H100 80GB HBM3; 756 NVIDIA H100 PCIe; 835 NVIDIA H100 NVL; 756 NVIDIA H800 PCIe
989 NVIDIA H200; 835 NVIDIA H200 NVL; 989 NVIDIA GH200 480GB; 2250 NVIDIA B200; 2500 NVIDIA GB200
2250 NVIDIA B300 SXM6 AC; 362 NVIDIA L40S; nan NVIDIA L40; 125 NVIDIA A10; nan NVIDIA A10G
nan NVIDIA A10-4Q; nan NVIDIA GeForce RTX 4090; 1307 AMD Instinct MI300X OAM
191.5 AMD Instinct MI250X; nan AMD Instinct MI300A"""


@pytest.mark.parametrize("line", re.split("; |\n", NAMES))
def test_peak_flops_are_those_of_the_data_sheet_or_unknown(line, monkeypatch):
    """In TFLOP/s."""
    expected, _, name = line.partition(" ")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = peak_flops(torch.device("cuda"))
    assert found == pytest.approx(1e12 * float(expected), nan_ok=True)
    assert math.isnan(peak_flops(torch.device("cpu")))


# Of the weights that Hugging Face says its files have.
PUBLISHED = {"0.6b": 596e6, "1.7b": 1.72e9, "4b": 4.02e9, "8b": 8.19e9, "32b": 32.8e9}


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_are_those_of_qwen3(size):
    """With its vocabulary; trained on 20 tokens for each weight."""
    its = SIZES[size]
    config = new_config(its, its["context"], 151_936)
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in Transformer(config).parameters())
    layer, outside = count_weights(config)
    assert its["num_hidden_layers"] * layer + outside == weights
    assert weights == pytest.approx(PUBLISHED[size], rel=0.002)
    tokens = its["batch_size"] * its["context"] * its["steps"]
    assert tokens == pytest.approx(20 * weights, rel=0.01)


def kept_for_backward(config: dict, layers: int, recompute: bool) -> int:
    """The bytes that a model of so many layers keeps, of two sequences of 64."""
    model = Transformer(config | {"num_hidden_layers": layers}, recompute)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def pack(tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(torch.zeros(2, 64, dtype=torch.long))
    assert logits.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("recompute", [False, True])
def test_the_memory_of_activations(recompute):
    """Of a layer, as autograd keeps them. On a CPU RMSNorm also keeps what it has normed, and keys
    and values are not copied."""
    config = new_config(SIZES["cpu"], 64, 128)
    estimates, found = [], []
    for layers in (2, 3):
        its = config | {"num_hidden_layers": layers}
        need = memory(its, 2, 64, bf16=False, activation_checkpointing=recompute)
        estimates.append(need["activations"])
        found.append(kept_for_backward(config, layers, recompute))
    width, size, heads, groups = config["hidden_size"], config["head_dim"], 4, 2
    expected = estimates[1] - estimates[0]
    if not recompute:
        normed, copied = 2 * width + (heads + groups) * size, 2 * (heads - groups) * size
        expected += 4 * 2 * 64 * (normed - copied)
    assert found[1] - found[0] == pytest.approx(expected, rel=0.01)


def test_memory_by_hand(monkeypatch):
    """Of 8 billion weights on 16 GPUs, in groups of 2: gathered are two layers and the embeddings
    in bfloat16. Recomputed, a layer keeps its input."""
    config = new_config(SIZES["8b"], 4096, 151_936)
    need = memory(config, 1, 4096, ranks=16, tensor=2, activation_checkpointing=True)
    assert need["gradients"] == 4 * 8_190_735_360 / 16
    assert need["states"] == 8 * 8_190_735_360 / 16
    layer, embeddings = 192_946_432, 2 * 151_936 * 4096 + 4096
    assert need["weights"] == 4 * 8_190_735_360 / 16 + 2 * (2 * layer + embeddings) / 2
    split = 3 * 4096 + 3 * 1024 + 4 * 12_288
    assert need["activations"] == 2 * 4096 * (36 * 4096 + 4 * 4096 + split / 2)
    assert need["logits"] == 10 * 4096 * 151_936 / 2
    assert memory(config, 1, 4096, ranks=1)["weights"] == 6 * 8_190_735_360
    total = sum(need.values()) / 2**30
    step, device = (config, 1, 4096, 16, 2), torch.device("cpu")
    recompute, line = plan_memory(device, True, *step)
    assert recompute and line.startswith(f"Memory of a rank: about {total:.1f} GiB (weights ")
    more = sum(memory(*step).values())
    # 5 % more than the step needs is not enough.
    narrow = (1.05 * more / 2**30, None, True)
    for gib, asked, expected in ((80, None, False), narrow, (25, None, True), (25, False, False)):
        monkeypatch.setattr(sizes, "gpu_memory", lambda device, gib=gib: gib * 2**30)
        recompute, line = plan_memory(device, asked, *step)
        assert recompute == expected and f"of the GPU's {gib:.1f} (" in line
        assert ("\nwarning: this may not fit" in line) == (gib == 25 and not recompute)
    assert total < 25 < more / 2**30 < 80


PAGE = (REPOSITORY / "docs/memory.html").read_text()


def on_the_page(**given: float) -> dict[str, float]:
    """The numbers of its function `bytes`, whose lines are Python but for `const` and `;`."""
    pattern = r"^function bytes.*?^(  const attention.*?)^  return \{(.*?)\};$"
    lines, kinds = re.search(pattern, PAGE, re.M | re.S).groups()
    exec(textwrap.dedent(lines).replace("const ", "").replace(";", ""), given)
    return {kind: given[kind] for kind in kinds.split(", ")}


def test_the_page_computes_what_a_run_logs():
    """For the models of aux/memory.py, of which the page has a list."""
    names = re.search(r"^// (.*), as below$", PAGE, re.M)[1].split(", ")
    models = json.loads(re.search(r"^const MODELS = (\{.*?\});", PAGE, re.M | re.S)[1])
    assert list(models) == list(MODELS)
    layouts = [(1, 1, False, True), (8, 1, True, True), (64, 3, False, False), (1, 2, True, False)]
    for name, config in MODELS.items():
        layer, outside = count_weights(config)
        weights = config["num_hidden_layers"] * layer + outside
        assert weights == {"llama-3.1-70b": 70_553_706_496}.get(name, weights)
        for ranks, rows, recompute, bf16 in layouts:
            options = {"ranks": ranks, "recompute": recompute, "bf16": bf16}
            given = dict(zip(names, models[name], strict=True)) | options
            found = on_the_page(**given, sequence=4096, batch=rows)
            options["activation_checkpointing"] = options.pop("recompute")
            assert found == pytest.approx(memory(config, rows, 4096, **options), rel=1e-12), name


# --- windows ---


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000, 12345, 1 << 20])
def test_a_shuffled_order_has_each_place_once(count):
    places, orders = torch.arange(count), []
    for seed in (0, 1):
        orders.append(token_files.shuffled(places, count, seed))
        assert orders[-1].sort().values.equal(places)
    if count > 1000:
        pairs = [(orders[0], places), (orders[0], orders[1]), (orders[0][1:], orders[0][:-1])]
        for pair in pairs:
            assert torch.corrcoef(torch.stack(pair).double())[0, 1].abs() < 4 / math.sqrt(count)


def write_numbers(folder: Path, count: int, **said: object) -> Path:
    """Token files of 0, 1, 2, ... in train and in val."""
    folder.mkdir()
    for split in ("train", "val"):
        np.arange(count, dtype=np.uint16).tofile(folder / f"{split}.bin")
    described = {"dtype": "uint16", "source": "", "id": "", "train_tokens": count}
    described |= {"tokenizer": {"name": "tokenizer.json", "size": count}, "val_tokens": count}
    (folder / "vocabulary.json").write_text(json.dumps(described | said))
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_window_once_an_epoch(ranks, tmp_path):
    """On any number of ranks; the next epoch has other windows, in another order."""
    text = token_files.TokenDataset(write_numbers(tmp_path / "text", 1000), 9, batch_size=8, seed=1)
    assert text.per_epoch == 110 and "; an epoch is 13.8 steps" in str(text)
    found = []
    for step in range(1, 29):
        parts = [text.batch(step, rank, ranks, torch.device("cpu")) for rank in range(ranks)]
        assert {part[2] for part in parts} == {8 * 9}
        for inputs, targets, _ in parts:
            assert inputs.shape == (8 // ranks, 9) and targets.equal(inputs + 1)
            found += inputs[:, 0].tolist()
    epochs = [found[:110], found[110:220]]
    for epoch in epochs:
        assert np.diff(sorted(epoch)).tolist() == [9] * 109 and epoch != sorted(epoch)
    assert set(epochs[0]).isdisjoint(epochs[1])
    assert found[:16] == [int(x) for x in text.starts(torch.arange(16))], "as on one rank"


def test_a_text_needs_one_token_more_than_the_context(tmp_path):
    """A window's last target."""
    folder = write_numbers(tmp_path / "text", 9)
    fault = token_files.missing_data(folder, 9)
    assert fault == f"--context 9 is too long for the 9 tokens in {folder}/train.bin: 8 would do"
    inputs, targets, _ = token_files.TokenDataset(folder, 8, 1).batch(1, 0, 1, torch.device("cpu"))
    assert inputs.tolist() == [[*range(8)]] and targets.tolist() == [[*range(1, 9)]]


def test_windows_of_conversations(tmp_path):
    """All begin where they were packed, and what is not the model's to write does not count."""
    folder = write_numbers(tmp_path / "text", 10 * 20 + 1, packed=10)
    for split in ("train", "val"):
        (np.arange(201) // 2 % 3 == 0).astype(np.uint8).tofile(folder / f"{split}.mask")
    (folder / "val.mask").rename(tmp_path / "val.mask")
    assert f"no prepared text at {folder}/val.mask (No" in token_files.missing_data(folder, 10)
    (tmp_path / "val.mask").rename(folder / "val.mask")
    assert "packed for --context 10, not 9" in token_files.missing_data(folder, 9)
    text = token_files.TokenDataset(folder, context=10, batch_size=4)
    starts = []
    for step in range(1, 11):
        inputs, targets, count = text.batch(step, 0, 1, torch.device("cpu"))
        starts += inputs[:, 0].tolist()
        counts = (inputs + 1) // 2 % 3 == 0
        assert targets.equal((inputs + 1).where(counts, token_files.IGNORED))
        halves = [text.batch(step, rank, 2, torch.device("cpu")) for rank in (0, 1)]
        assert {half[2] for half in halves} == {count} and count == counts.sum()
    assert sorted(starts) == sorted(2 * list(range(0, 200, 10)))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_evaluation_has_one_shape_on_all_ranks(text, ranks):
    rows, shapes, counted = 8 // ranks, [], 0
    its = token_files.TokenDataset(text, 16, 8)
    for rank in range(ranks):
        batches = list(its.eval_batches(50, rows, rank, ranks))
        shapes.append([(tokens.shape, targets.shape) for tokens, targets in batches])
        assert all(tokens.min() >= 0 for tokens, _ in batches)
        counted += sum((targets >= 0).sum().item() for _, targets in batches)
    assert shapes == [[((rows, 16),) * 2] * 7] * ranks
    assert counted == 50 * 16


def test_evaluation_reaches_the_end_of_a_long_text(tmp_path):
    """float32 knows no 33,554,435. Of the files all but the end is a hole."""
    folder, count = write_numbers(tmp_path / "text", 20), 33_554_437
    with (folder / "val.bin").open("r+b") as file:
        file.truncate(2 * count - 4)
        file.seek(0, os.SEEK_END)
        file.write(np.array([5, 7], np.uint16).tobytes())
    said = json.loads((folder / "vocabulary.json").read_text()) | {"val_tokens": count}
    (folder / "vocabulary.json").write_text(json.dumps(said))
    [(inputs, targets)] = token_files.TokenDataset(folder, 1, 3).eval_batches(3, 3, 0, 1)
    assert inputs.tolist() == [[0], [0], [5]] and targets.tolist()[2] == [7]


def test_a_text_that_is_larger_than_the_memory(text, tmp_path):
    """Ten times as large, nearly all of it a hole."""
    folder = Path(shutil.copytree(text, tmp_path / "text"))
    count = 10 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    os.truncate(folder / "train.bin", count)
    said = json.loads((folder / "vocabulary.json").read_text()) | {"train_tokens": count}
    (folder / "vocabulary.json").write_text(json.dumps(said))
    inputs, _, _ = token_files.TokenDataset(folder, 64, 8).batch(1, 0, 1, torch.device("cpu"))
    assert inputs.shape == (8, 64) and inputs.sum() == 0


def test_positions_turn_as_in_qwen_and_llama():
    """(x, y) becomes (x cos - y sin, y cos + x sin). Llama 3.1's files scale the slow turns, under
    the name rope_scaling. In newer ones it is rope_parameters, with theta inside."""
    shape = {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 8, "head_dim": 8}
    shape |= {"num_hidden_layers": 1, "intermediate_size": 8}
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = new_config(SIZES["cpu"] | shape, 64, 128)
    older = {"rope_theta": 500_000.0, "rope_scaling": scaling}
    newer = {"rope_parameters": scaling | {"rope_theta": 500_000.0}}
    for its in (older, newer):
        [angles] = Transformer(config | its).angles(1, 1, torch.device("cpu"))
        assert angles[:4].tolist() == pytest.approx([1, 0.0047007, 1.7678e-4, 6.648e-6], rel=1e-3)
    quarter = torch.zeros(1, 2), torch.ones(1, 2)
    assert transformer.rotate(torch.tensor([[[[1.0, 0.0]]]]), *quarter).flatten().tolist() == [0, 1]


SHARED = [("cpu", torch.float32, 2), ("meta", torch.bfloat16, 2), ("meta", torch.float32, 4)]


@pytest.mark.parametrize(("device", "dtype", "pairs"), SHARED)
def test_shared_keys_and_values(device, dtype, pairs, monkeypatch):
    """A GPU, here meta, has no kernel of float32 that takes them. A copy for each head is the
    same."""
    attend, seen = F.scaled_dot_product_attention, []

    def seen_attend(q, k, v, **options):
        seen.append((q.size(1), k.size(1), v.size(1)))
        return attend(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen_attend)
    attention = transformer.Attention(new_config(SIZES["cpu"], 64, 128)).to(device, dtype)
    x, angle = (torch.zeros(shape, device=device, dtype=dtype) for shape in ((1, 8, 128), (8, 32)))
    attention(x, angle, angle, None)
    assert seen == [(4, pairs, pairs)]
    q, k, v = torch.randn(1, 4, 8, 32), torch.randn(1, 2, 8, 32), torch.randn(1, 2, 8, 32)
    copies = (x.repeat_interleave(2, dim=1) for x in (k, v))
    shared = attend(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attend(q, *copies, is_causal=True), shared)


def test_gpus_without_bfloat16(monkeypatch):
    """A V100 emulates it."""
    assert best_precision(torch.device("cpu")) == "fp32"
    for has_it, precision in ((False, "fp32"), (True, "bf16")):

        def supported(including_emulation: bool = True, has_it: bool = has_it) -> bool:
            return including_emulation or has_it

        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
        assert best_precision(torch.device("cuda")) == precision
    assert best_precision(torch.device("xpu")) == "bf16"


@torch.no_grad()
def test_the_gate_is_that_of_qwen_and_llama():
    """silu is near 0 far below 0."""
    mlp = transformer.MLP({"hidden_size": 1, "intermediate_size": 1})
    for part, weight in ((mlp.gate_proj, -20.0), (mlp.up_proj, 1.0), (mlp.down_proj, 1.0)):
        part.weight.fill_(weight)
    assert abs(mlp(torch.ones(1, 1, 1)).item()) < 1e-6


def test_flops_of_a_known_model():
    """6 for each weight but the embedding's, and 12 x layers x heads x head_dim x context."""
    assert flops_per_token(new_config(SIZES["8b"], 4096, 151_936), 4096) == 52_658_190_336
