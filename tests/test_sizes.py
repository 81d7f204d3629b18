"""sizes.py and memory.py: the numbers of models and GPUs that no GPU is here to show."""

import argparse
import json
import math
import re
import sys
import textwrap

import pytest
import torch

import sizes
import slurm
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
PUBLISHED["30b-a3b"] = 30.5e9


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


EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96}


@pytest.mark.parametrize("experts", [{}, EXPERTS])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_memory_of_activations(recompute, experts):
    """Of a layer, as autograd keeps them. On a CPU RMSNorm also keeps what it has normed, and keys
    and values are not copied. What gates and sorting keep is little."""
    config = new_config(SIZES["cpu"] | experts, 64, 128)
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
    assert found[1] - found[0] == pytest.approx(expected, rel=0.03 if experts else 0.01)


def test_memory_of_experts_by_hand(monkeypatch):
    """FSDP gathers all experts of two layers in bfloat16, and sums a layer's gradients in float32.
    A token has 8 of 128, whose rows are kept before and after."""
    config, layer = new_config(SIZES["30b-a3b"], 4096, 151_936), 623_120_640
    everything, embeddings = 30_532_122_624, 2 * 151_936 * 2048 + 2048
    assert count_weights(config) == (layer, embeddings)
    assert 48 * count_weights(config, active=True)[0] + embeddings == 3_353_032_704
    need = memory(config, 1, 4096, ranks=8)
    assert need["weights"] == 4 * everything / 8 + 2 * (2 * layer + embeddings)
    assert need["gradients"] == 4 * everything / 8 + 6 * layer
    split = 3 * 4096 + 3 * 512 + 8 * (4 * 768 + 2 * 2048)
    assert need["activations"] == 2 * 4096 * 48 * (4 * 2048 + split)
    assert memory(config, 1, 4096)["gradients"] == 4 * everything
    active = 48 * 56_889_600 + 151_936 * 2048 + 2048
    assert flops_per_token(config, 4096) == 6 * active + 12 * 48 * 4096 * 4096
    monkeypatch.setattr(sizes, "total_memory", lambda device: 2.0**30)
    _, line = plan_memory(torch.device("cpu"), True, config, 1, 4096, 8)
    assert "take less. torchtitan also splits the experts of a layer, which FSDP gathers" in line
    _, line = plan_memory(torch.device("cpu"), True, new_config(SIZES["8b"], 4096, 99), 1, 4096, 8)
    assert "warning: this may not fit" in line and "torchtitan" not in line


def test_the_table_of_fine_tuning():
    """64 sequences of 1,024 tokens over the GPUs, which recompute; on one GPU in eight parts."""
    page = (REPOSITORY / "docs/fine_tuning.md").read_text()
    names = [f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "30b-a3b", "32b")]
    rows = re.findall(r"^\| [\d.]+ billion.*? \| (\d.*) \|$", page, re.M)
    for name, row in zip([*names, "llama-3.1-70b"], rows, strict=True):
        found = []
        for ranks in (1, 8, 16, 32):
            step = (MODELS[name], 8 if ranks == 1 else 64 // ranks, 1024, ranks)
            found.append(sum(memory(*step, activation_checkpointing=True).values()) / 2**30)
        assert row == " | ".join(f"{gib:,.0f}" for gib in found), name


def first_that_fits(config: dict, gpus: int, room: float) -> str:
    """Chapter 10's choice for nodes of eight GPUs, with the GiB that it takes."""
    data = [("`--shard 8`", 8, 1), ("FSDP", gpus, 1)]
    tensor = [(f"`--tensor-parallel {n}`", gpus, n) for n in (2, 4) if not config["num_experts"]]
    tries = [(*split, False) for split in data] + [(*split, True) for split in data + tensor]
    for name, ranks, tensor, recomputed in tries:
        need = memory(config, 1, 4096, ranks, tensor, activation_checkpointing=recomputed)
        gib = sum(need.values()) / 2**30
        if gib < 0.9 * room:
            return f"{name}{', recomputed' if recomputed else ''} {gib:.0f}"
    return "none"


def test_the_choice_of_chapter_10():
    """An H100 has 79.6 GiB, and an H200 139.8."""
    page = (REPOSITORY / "docs/is_my_split_right.md").read_text()
    rows = re.findall(r"^\| (Qwen3-\S+), (\d+) GB \| (.*) \| (.*) \| (.*) \|$", page, re.M)
    assert len(rows) == 6
    for model, size, *cells in rows:
        room = {"80": 79.6, "141": 139.8}[size]
        config = MODELS[model.lower()]
        assert cells == [first_that_fits(config, gpus, room) for gpus in (8, 16, 64)], model


@pytest.mark.parametrize(
    "name, value",
    [("num_experts", 0), ("num_experts_per_tok", 1), ("head_dim", 8), ("num_hidden_layers", 1)],
)
def test_a_folder_s_own_shape(name, value):
    """Heads of another size, and fewer experts for a token, have weights of the same shapes."""
    folder = new_config(SIZES["cpu"] | EXPERTS, 64, 64)
    options = SIZES["cpu"] | EXPERTS | {name: value, "hf_config": folder, "context": 64}
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(
        SystemExit, match=f"has {name} {folder[name]}, so {option} must be the same"
    ):
        sizes.config_of(argparse.Namespace(init_from="qwen", **options), 64)


MAY_BE_0 = {"warmup_steps", "learning_rate", "beta2", "weight_decay", *sizes.EXPERTS}


@pytest.mark.parametrize("name", [name for name in sizes.TABLE if name != "tie_word_embeddings"])
def test_which_options_may_be_0(name, monkeypatch, capsys):
    option = f"--{name.replace('_', '-')}"
    monkeypatch.setattr(sys, "argv", ["train.py", option, "0"])
    if name in MAY_BE_0:
        args = sizes.parse(argparse.ArgumentParser())
        others = {"size": "cpu", "init_from": None, "hf_config": None}
        assert vars(args) == others | SIZES["cpu"] | {name: 0}
        return
    with pytest.raises(SystemExit):
        sizes.parse(argparse.ArgumentParser())
    assert f"argument {option}: invalid positive value: '0'" in capsys.readouterr().err


def test_a_negative_warmup_is_a_sentence(monkeypatch, capsys):
    """-1 would divide by 0, and -5 train at a negative rate."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--warmup-steps", "-1"])
    with pytest.raises(SystemExit):
        sizes.parse(argparse.ArgumentParser())
    assert "error: --warmup-steps must be 0 or more\n" in capsys.readouterr().err


HEADS = "--num-attention-heads must be a multiple of --num-key-value-heads, and --head-dim even"
PER_TOKEN = "--num-experts-per-tok must be between 1 and --num-experts"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"num_attention_heads": 3}, HEADS),
        ({"head_dim": 7}, HEADS),
        ({"num_attention_heads": 2, "head_dim": 2}, None),
        ({"num_experts_per_tok": 0}, PER_TOKEN),
        ({"num_experts_per_tok": 17}, PER_TOKEN),
        ({"num_experts_per_tok": 16}, None),
        ({"num_experts_per_tok": 1, "num_experts": 1}, None),
        ({"moe_intermediate_size": 0}, "--moe-intermediate-size must be at least 1"),
        ({"moe_intermediate_size": 1}, None),
        ({"moe_intermediate_size": 0, "num_experts": 0}, None),
    ],
)
def test_a_shape_that_is_impossible_is_a_sentence(changed, sentence):
    shape = SIZES["cpu"] | EXPERTS | changed
    if sentence is None:
        assert new_config(shape, 64, 64)["head_dim"] == shape["head_dim"]
        return
    with pytest.raises(SystemExit) as ended:
        new_config(shape, 64, 64)
    assert ended.value.code == sentence


@pytest.mark.parametrize(("context", "vocabulary"), [(64, 128), (65, 128), (64, 129)])
def test_what_a_folder_s_model_knows(context, vocabulary):
    """A run needs no longer context and no more tokens than that."""
    folder = new_config(SIZES["cpu"], 64, 128)
    options = SIZES["cpu"] | {"hf_config": folder, "context": context, "init_from": "qwen"}
    if (context, vocabulary) == (64, 128):
        assert sizes.config_of(argparse.Namespace(**options), vocabulary) is folder
        return
    with pytest.raises(SystemExit) as ended:
        sizes.config_of(argparse.Namespace(**options), vocabulary)
    assert ended.value.code == "qwen knows 128 tokens, and --context 64 at most"


def test_a_new_model_knows_the_context_of_its_run():
    """Beyond it, it has not been trained."""
    options = SIZES["cpu"] | {"hf_config": None, "context": 48}
    config = sizes.config_of(argparse.Namespace(**options), 64)
    assert (config["max_position_embeddings"], config["vocab_size"]) == (48, 64)


def test_what_memory_py_says_of_experts():
    done = slurm.ranks(0, "aux/memory.py", "--model", "qwen3-30b-a3b", "--ranks", 8)
    line = "Weights: 30,532,122,624, of which a token meets 3,353,032,704. FSDP gathers all of a"
    assert done.stdout.startswith(f"{line} layer's, 1.2 GiB\nMemory of a rank: about ")
    done = slurm.ranks(0, "aux/memory.py", "--num-experts", 8)
    assert "--num-experts needs --num-experts-per-tok and --moe-inter" in done.stderr
    assert done.returncode == 2


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
        monkeypatch.setattr(sizes, "total_memory", lambda device, gib=gib: gib * 2**30)
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


def test_gpus_without_bfloat16(monkeypatch):
    """A V100 emulates it."""
    assert best_precision(torch.device("cpu")) == "fp32"
    for has_it, precision in ((False, "fp32"), (True, "bf16")):

        def supported(including_emulation: bool = True, has_it: bool = has_it) -> bool:
            return including_emulation or has_it

        monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
        assert best_precision(torch.device("cuda")) == precision
    assert best_precision(torch.device("xpu")) == "bf16"


def test_flops_of_a_known_model():
    """6 for each weight but the embedding's, and 12 x layers x heads x head_dim x context."""
    assert flops_per_token(new_config(SIZES["8b"], 4096, 151_936), 4096) == 52_658_190_336
