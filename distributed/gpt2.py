"""Convert the weights of transformer.py from and to Hugging Face's layout of GPT-2.

A folder holds config.json and model.safetensors, as transformers' save_pretrained() writes them.
There a linear's weight is stored as (in, out), and the fused one for q, k and v has all heads' q
first; here it is (out, in), in the order (head, q k v, D).
"""

import json
import re
import sys
from pathlib import Path

import torch

from transformer import Transformer

NAMES = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "norm": "ln_f",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def their_name(name: str) -> str:
    """ "blocks.3.mlp.up.weight" is "h.3.mlp.c_fc.weight"."""
    block, module, kind = re.fullmatch(r"(blocks\.\d+\.)?(.+)\.(weight|bias)", name).groups()
    return f"{(block or '').replace('blocks', 'h')}{NAMES[module]}.{kind}"


def is_linear(name: str) -> bool:
    return name.endswith((".qkv.weight", ".out.weight", ".up.weight", ".down.weight"))


def sizes(folder: Path) -> dict[str, int]:
    """The sizes of the model in a folder. Ends with a sentence if it is no GPT-2."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if config["model_type"] != "gpt2" or config["activation_function"] != "gelu_new":
            raise ValueError("config.json describes a different model")
        if not (folder / "model.safetensors").exists():
            raise ValueError("it has no model.safetensors")
        names = {"layers": "n_layer", "heads": "n_head", "width": "n_embd"}
        names |= {"context": "n_positions", "vocabulary": "vocab_size"}
        return {ours: config[theirs] for ours, theirs in names.items()}
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"--init-from {folder} is not a GPT-2 to start from: {error}")


class Weights:
    """The weights in a folder, each read when it is asked for. Raises OSError or ImportError."""

    def __init__(self, folder: Path, model: Transformer):
        from safetensors import safe_open

        self.file = safe_open(Path(folder) / "model.safetensors", framework="pt")
        # save_pretrained() of the model with its head writes "transformer.wte.weight".
        headed = "transformer.wte.weight" in set(self.file.keys())
        self.prefix = "transformer." if headed else ""
        self.head_size = model.blocks[0].attention.head_size

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        """A weight by its name in transformer.py, in float32, of that shape (the first rows of a
        longer position embedding)."""
        weight = self.file.get_tensor(self.prefix + their_name(name)).float()
        if is_linear(name):
            weight = weight.t()
        if ".qkv." in name:
            # (q k v, head, D, ...) to (head, q k v, D, ...)
            weight = weight.unflatten(0, (3, -1, self.head_size)).transpose(0, 1).flatten(0, 2)
        return weight[: shape[0]]


def write(folder: Path, model: Transformer):
    """config.json and model.safetensors of a whole model. Raises OSError or ImportError."""
    from safetensors.torch import save_file

    attention = model.blocks[0].attention
    tensors = {}
    for name, weight in model.state_dict().items():
        if name.startswith("head."):  # the same weight as the token embedding's
            continue
        if ".qkv." in name:
            split = weight.unflatten(0, (-1, 3, attention.head_size))
            weight = split.transpose(0, 1).flatten(0, 2)
        if is_linear(name):
            weight = weight.t()
        # A copy, because safetensors refuses tensors that share memory.
        tensors["transformer." + their_name(name)] = weight.clone().contiguous().cpu()
        if name.endswith(".weight") and "embedding" not in name:
            # A model without biases gets biases of zero there.
            zeros = torch.zeros(weight.size(-1))
            tensors.setdefault("transformer." + their_name(name[:-6] + "bias"), zeros)

    positions, width = model.position_embedding.weight.shape
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new" if model.blocks[0].mlp.approximate == "tanh" else "gelu",
        "vocab_size": model.token_embedding.num_embeddings,
        "n_positions": positions,
        "n_embd": width,
        "n_layer": len(model.blocks),
        "n_head": width // attention.head_size,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
