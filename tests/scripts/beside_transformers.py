"""Run by test_transformer.py: models of transformers, into a folder, into ours, and out again.
Norms of a fresh model are 1, which a mistake would survive, so all weights are drawn."""

import json
import sys
from pathlib import Path

sys.path.insert(0, "distributed")
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import hugging_face
from transformer import Transformer

sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=3)
sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
scaled = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0)
experts = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48, head_dim=16)
experts |= dict(output_router_logits=True, router_aux_loss_coef=0.1)
one = dict(num_experts_per_tok=1, num_experts=5)
scaled |= dict(high_freq_factor=4.0, original_max_position_embeddings=64)
families = {
    "qwen3 tied": Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=True)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, rope_theta=1e6)),
    "llama 3.1": LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=scaled)),
    "llama 2": LlamaForCausalLM(LlamaConfig(**sizes | {"num_key_value_heads": 4})),
    "qwen3 moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True)),
    "qwen3 moe, one": Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts | one)),
    "mistral": MistralForCausalLM(MistralConfig(**sizes, sliding_window=None)),
}
torch.manual_seed(0)
hugging_face.FILE_SIZE = 100_000


def far(a, b):
    return ((a - b).abs().max() / a.abs().max()).item()


def compare(theirs, folder):
    for weight in theirs.parameters():
        if weight.dim() == 1:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=0.2)
    theirs.save_pretrained(folder / "in", max_shard_size="200KB")
    ours = Transformer(hugging_face.read_config(folder / "in"))
    ours.load_weights(hugging_face.open_weights(folder / "in", ours).__getitem__)
    found = {"files": len(list((folder / "in").glob("*.safetensors")))}
    mine = dict(ours.named_parameters())
    hugging_face.write(folder / "out", ours, mine.__getitem__)
    again, said = AutoModelForCausalLM.from_pretrained(folder / "out", output_loading_info=True)
    found["said"] = [*said["missing_keys"], *said["unexpected_keys"]]
    tokens, wanted = torch.randint(300, (2, 2, 200))
    logits = [model(tokens).logits for model in (theirs, again)] + [ours(tokens)]
    found["again"], found["logits"] = torch.equal(*logits[:2]), far(logits[0], logits[2])
    pairs = [(weight, mine[name]) for name, weight in theirs.named_parameters()]
    balance = 0
    if "moe" in folder.name:
        balance = 0.1 * theirs(tokens, output_router_logits=True).aux_loss
    found["balance"] = abs(float(balance - ours.balance()))
    for its, more in ((logits[0], balance), (logits[2], ours.balance())):
        loss = torch.nn.functional.cross_entropy(its.flatten(0, 1), wanted.flatten())
        (loss + more).backward()
    found["gradients"] = max(far(a.grad, b.grad) for a, b in pairs)
    for model in (theirs, ours):
        # Without eps Adam would step as far for rounding noise as for a large gradient.
        torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3).step()
    found["step"] = max(far(a.detach(), b.detach()) for a, b in pairs)
    prompt = tokens[:1, :20]
    options = dict(do_sample=False, max_new_tokens=60, attention_mask=torch.ones_like(prompt))
    text = theirs.generate(prompt, **options, eos_token_id=999)
    found["text"] = torch.equal(text, ours.generate(prompt, 60, 300, temperature=0))
    return found


print(json.dumps({name: compare(x, Path(sys.argv[1], name)) for name, x in families.items()}))
