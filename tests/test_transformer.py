"""transformer.py: its parts, the texts that it writes, and all of it beside Hugging Face's."""

import json
import shutil
import weakref

import pytest
import torch
import torch.nn.functional as F

import hugging_face
import transformer
from models import CONTEXT, EXPERTS, SHAPE, python, values
from sizes import SIZES, new_config
from transformer import Transformer


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


@torch.no_grad()
def test_the_gate_is_that_of_qwen_and_llama():
    """silu is near 0 far below 0."""
    mlp = transformer.MLP({"hidden_size": 1, "intermediate_size": 1})
    for part, weight in ((mlp.gate_proj, -20.0), (mlp.up_proj, 1.0), (mlp.down_proj, 1.0)):
        part.weight.fill_(weight)
    assert abs(mlp(torch.ones(1, 1, 1)).item()) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [16, 10])
def test_each_expert_has_its_rows(width, dtype):
    """By grouped_mm, or by a loop where torch has none for the dtype or the width. The second
    expert has no rows. The result is what each expert's SwiGLU makes of its rows."""
    config = {"hidden_size": width, "num_experts": 3, "moe_intermediate_size": width // 2}
    experts = transformer.Experts(config).to(dtype)
    for weight in experts.parameters():
        weight.normal_()
    rows, found = torch.randn(7, width, dtype=dtype), []
    for number, group in enumerate(rows.split([3, 0, 4])):
        gate, up = (group @ experts.gate_up_proj[number].T).chunk(2, dim=-1)
        found.append((F.silu(gate) * up) @ experts.down_proj[number].T)
    torch.testing.assert_close(experts(rows, torch.tensor([3, 0, 4])), torch.cat(found))


def test_no_activations_outlive_the_backward_pass():
    """With activation checkpointing, which computes each layer again, and its balance with it."""
    sizes = SIZES["cpu"] | {"hidden_size": 32, "num_hidden_layers": 2} | EXPERTS
    model = Transformer(new_config(sizes, 64, 64), activation_checkpointing=True)
    model.init_weights(torch.device("cpu"), seed=0)
    kept = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *call: kept.append(weakref.ref(call[-1])))
    logits = model(torch.zeros(1, 8, dtype=torch.int64))
    (logits.sum() + model.balance()).backward()
    assert len(kept) == 4 and not any(output() is not None for output in kept)


def test_a_dense_model_has_no_balance():
    config = new_config(SIZES["cpu"], 64, 64) | {"output_router_logits": True}
    assert Transformer(config).balance() == 0.0


# Another value of each key of a config.json that train_fsdp.py writes
OTHER = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 4}
OTHER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
OTHER |= {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
OTHER |= {"norm_topk_prob": False, "output_router_logits": False, "router_aux_loss_coef": 0.5}
OTHER |= {"vocab_size": 128, "rms_norm_eps": 0.1, "rope_theta": 100.0, "attention_bias": True}
OTHER |= {"hidden_act": "gelu", "decoder_sparse_step": 2, "mlp_only_layers": [0]}
OTHER |= {"model_type": "llama"}


@torch.no_grad()
@pytest.mark.parametrize(("experts", "idle"), [({}, set()), (EXPERTS, {"intermediate_size"})])
def test_each_key_of_a_config_changes_the_model_or_is_refused(experts, idle):
    """Except those that are for others to read. A mixture has no MLP but its experts."""

    def computed(config: dict) -> list[float]:
        hugging_face.check_config(config)
        model = Transformer(config)
        model.init_weights(torch.device("cpu"), seed=0)
        logits = model(torch.tensor([[3, 1, 4, 1, 5]]))
        return [*logits.flatten().tolist(), float(model.balance()), len(model.state_dict())]

    config = new_config(SHAPE | {"tie_word_embeddings": False} | experts, CONTEXT, 50)
    before = computed(config)
    idle = idle | {"architectures", "torch_dtype", "max_position_embeddings"}
    for key in config.keys() - idle:
        try:
            assert computed(config | {key: OTHER[key]}) != before, key
        except ValueError as refused:
            assert key in str(refused) or key == "model_type"


@torch.no_grad()
def test_a_token_has_its_likeliest_experts():
    """Weighted by their probabilities, which are normed or not."""
    x = torch.randn(2, 5, 16)
    for normed in (True, False):
        config = EXPERTS | {"hidden_size": 16, "norm_topk_prob": normed}
        layer = transformer.SparseMLP(config)
        for weight in layer.parameters():
            weight.normal_()
        found = torch.zeros(2, 5, 16)
        for place in ((b, t) for b in range(2) for t in range(5)):
            probabilities = layer.gate(x[place]).softmax(-1)
            chosen = probabilities.argsort(descending=True)[:2].tolist()
            scale = probabilities[chosen].sum() if normed else 1
            for number in chosen:
                counts = torch.zeros(6, dtype=torch.long)
                counts[number] = 1
                y = layer.experts(x[place].unsqueeze(0), counts)[0]
                found[place] += y * probabilities[number] / scale
        torch.testing.assert_close(layer(x), found, rtol=1e-4, atol=1e-4)


def new_model() -> Transformer:
    model = Transformer(new_config(SHAPE | {"tie_word_embeddings": True}, CONTEXT, 50))
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def test_the_likeliest_with_and_without_a_cache():
    """Beyond the context it continues from the later half."""
    model = new_model()
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    found = model.generate(tokens, 2 * CONTEXT, 50, temperature=0)
    first = 0
    for place in range(3, tokens.size(1) + 2 * CONTEXT):
        if place - first > CONTEXT:
            first = place - CONTEXT // 2
        likeliest = model(found[:, first:place])[:, -1, :50].argmax(-1)
        assert found[:, place].tolist() == likeliest.tolist(), place
    warm = model.generate(tokens, 40, 20, temperature=9)[:, 3:]
    assert warm.max() < 20 and len(warm.unique()) > 10


def test_texts_that_end():
    """Each with its own token; when all have ended, no more is computed."""
    model = new_model()
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]])
    endless = model.generate(tokens, 30, 50, temperature=0).tolist()
    ends = [endless[0][8], endless[1][12]]
    found = model.generate(tokens, 30, 50, temperature=0, ends=ends).tolist()
    expected = []
    for row in endless:
        last = next(place for place in range(3, 33) if row[place] in ends)
        expected.append(row[: last + 1])
    longest = max(map(len, expected))
    assert min(map(len, expected)) < longest < 33
    assert found == [row + row[-1:] * (longest - len(row)) for row in expected]


@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_how_weights_are_drawn(experts):
    """Those that add to the residual stream are smaller, the deeper the model."""
    sizes = SHAPE | {"num_hidden_layers": 8, "hidden_size": 128, "tie_word_embeddings": False}
    model = Transformer(new_config(sizes | experts, 64, 1024))
    for name, weight in model.named_parameters():
        added = ("o_proj.weight", "down_proj.weight", "experts.down_proj")
        std = 0.02 / 4 if name.endswith(added) else 0.02
        drawn = model.first_value(name, seed=0)
        assert drawn.shape == weight.shape
        if drawn.dim() >= 2:
            assert drawn.std().item() == pytest.approx(std, rel=0.05), name
        else:
            assert drawn.eq(1).all(), name


@pytest.mark.matrix
def test_equal_to_transformers(packages, tmp_path):
    """The logits of a folder that was in and out again bit for bit, all else nearly."""
    families = json.loads(
        python(packages, "tests/scripts/beside_transformers.py", tmp_path).splitlines()[-1]
    )
    assert len(families) == 7
    for name, found in families.items():
        assert found["files"] > 3 and found["said"] == [], name
        assert found["logits"] < 1e-5 and found["gradients"] < 3e-5 and found["step"] < 1e-5, found
        assert found["again"] and found["text"] and found["balance"] < 1e-7, name


# Twelve steps of transformers' own module in a plain loop, from a folder that it makes
TWELVE = """
import json, math, sys
from pathlib import Path
sys.path.insert(0, "distributed")
import torch, token_files
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
torch.manual_seed(0)
config = Qwen3MoeConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16,
    num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=64,
    initializer_range=0.2, output_router_logits=True, router_aux_loss_coef=0.05)
model = Qwen3MoeForCausalLM(config)
model.save_pretrained(sys.argv[1])
data = token_files.TokenDataset(sys.argv[2], 16, 8, 0)
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
for step in range(1, 13):
    inputs, targets, count = data.batch(step, 0, 1, torch.device("cpu"))
    found = model(inputs, output_router_logits=True)
    logits = found.logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, targets.flatten())
    (loss + 0.05 * found.aux_loss).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    done = max(0, step - 4) / 9
    rate = 0.001 * min(1, step / 4) * (0.55 + 0.45 * math.cos(math.pi * done))
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    print(f"step={step}/12 loss={loss.item():.6f} grad_norm={norm.item():.6f}")
model.save_pretrained(sys.argv[1] + ".trained")
"""
FAR = """
import sys, torch
from transformers import AutoModelForCausalLM
theirs, ours = (AutoModelForCausalLM.from_pretrained(x).state_dict() for x in sys.argv[1:])
assert theirs.keys() == ours.keys()
print(max((theirs[name] - ours[name]).abs().max().item() for name in theirs))
"""


@pytest.mark.matrix
def test_experts_trained_as_transformers_trains_them(packages, text, tmp_path):
    """From a folder of the hub's kind to another, which from_pretrained reads: in one process, on
    two ranks, and on four that resume what the two have saved."""
    model = tmp_path / "model"
    theirs = python(packages, "-c", TWELVE, model, text)
    flags = "--context 16 --batch-size 8 --steps 12 --warmup-steps 3 --learning-rate 0.001 "
    flags += "--log-every 1 --eval-every 12 --eval-windows 8 --save-every 6 --device cpu"
    flags = [*flags.split(), "--data-dir", text, "--init-from", model, "--checkpoint-dir"]
    (tmp_path / "4").mkdir()
    for count, first in ((0, 1), (2, 1), (4, 7)):
        folder = tmp_path / str(count)
        command = ["distributed/train_fsdp.py", *flags, folder, *["--resume"] * (count == 4)]
        log = python(packages, *command, ranks=count)
        assert ("Resumed after step 6" in log) == (count == 4)
        for name, error in (("loss", {"abs": 2e-6}), ("grad_norm", {"rel": 2e-5})):
            expected = {x: y for x, y in values(theirs, name).items() if x >= first}
            assert values(log, name) == pytest.approx(expected, **error), (count, name)
        far = python(packages, "-c", FAR, f"{model}.trained", folder / "model").splitlines()[-1]
        assert float(far) < 2e-5
        if count == 2:
            shutil.copytree(folder / "step_6", tmp_path / "4/step_6")
