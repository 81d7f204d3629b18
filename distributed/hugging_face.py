"""Hugging Face's folders of a model: config.json, *.safetensors, and the tokenizer's files.

transformer.py has the same names, so nothing is converted. A file is mapped, so a rank that keeps
some rows of a weight reads no others; and it is written weight by weight, so no rank ever holds a
whole model. It needs no other package.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from token_files import mapped, numbers

# What transformer.py computes: a field of config.json, and the values that it may have.
KNOWN = {
    "model_type": ("qwen3", "llama", "mistral"),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
    "rope_type": ("default", "llama3", None),
    "partial_rotary_factor": (1.0, None),
    "num_experts": (0, None),
    "attn_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "quantization_config": (None,),
    "dtype": ("float32", "bfloat16", "float16", None),
    "torch_dtype": ("float32", "bfloat16", "float16", None),
}
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps")
NEEDED += ("num_attention_heads", "max_position_embeddings")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INDEX = "model.safetensors.index.json"
TOKENIZER = ("tokenizer*", "*_tokens*.json", "vocab.json", "merges.txt", "chat_template*")
TOKENIZER += ("generation_config.json",)
FILE_SIZE = 4 << 30  # bytes of weights in a file that is written


def read_config(folder: Path) -> dict:
    """The content of config.json, with its defaults. Ends with a sentence if transformer.py is
    another model."""
    try:
        config = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        asked = config | {"rope_type": rope.get("rope_type", rope.get("type"))}
        # Qwen3's files have a window, and say beside it that it is not used.
        if config.get("use_sliding_window") is False:
            asked["sliding_window"] = None
        for name, known in KNOWN.items():
            if asked.get(name) not in known:
                theirs = asked.get(name)
                raise ValueError(f"transformer.py knows no {name} {theirs}, only {known[0]}")
        for name in NEEDED:
            if config.get(name) is None:
                raise ValueError(f"its config.json has no {name}")
    except (OSError, ValueError) as error:
        sys.exit(f"{folder} is no Qwen3 or Llama to start from: {error}")
    heads = config["num_attention_heads"]
    default = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads}
    default |= {"tie_word_embeddings": False, "rope_theta": 10_000.0}
    return default | {name: value for name, value in config.items() if value is not None}


def open_weights(folder: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The values of a model's weights by name, whole, as views of the files: nothing is read yet.
    Ends with a sentence if they are those of another model."""
    try:
        files = ["model.safetensors"]
        if (folder / INDEX).exists():
            files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        found = {}
        for file in files:
            found |= open_file(folder / file)
    except (OSError, ValueError, LookupError, TypeError) as error:
        sys.exit(f"{folder} cannot be read: {type(error).__name__}: {error}")

    weights = dict(model.named_parameters())
    for name in sorted(weights.keys() | found.keys()):
        # A weight that is shared has its first name. Old files have what follows from the config.
        implied = name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
        if implied and name not in weights:
            continue
        theirs = tuple(found[name].shape) if name in found else "none"
        ours = tuple(weights[name].shape) if name in weights else "none"
        if theirs != ours:
            sys.exit(f"{folder} is not what its config.json says: {name} is {theirs}, not {ours}")
    return found


def open_file(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name: a length (8 bytes), a header in JSON with each
    one's dtype, shape and place, and then the numbers."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path.name} is no safetensors file, but perhaps git-lfs's pointer")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    memory, found = mapped(path), {}
    for name, said in header.items():
        if said["dtype"] not in DTYPES:
            raise ValueError(f"{path.name} has {name} in {said['dtype']}, not in {[*DTYPES]}")
        first, count = 8 + length + said["data_offsets"][0], prod(said["shape"])
        value = numbers(memory, DTYPES[said["dtype"]], count, first)
        found[name] = value.view(said["shape"])
    return found


def write(
    folder: Path,
    model: torch.nn.Module,
    value_of: Callable[[str], torch.Tensor],
    like: Path | None = None,
):
    """Makes a folder for from_pretrained(), with the tokenizer of the folder `like`, in the dtype
    that the model's config names.

    If the weights are split, all ranks call it: they gather one after the other, and rank 0 writes
    it. An older folder is replaced when the new one is whole.
    """
    config, part = model.config, folder.with_name(f".{folder.name}.part")
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    files, room = [], 0
    for name, shape in shapes.items():
        size = prod(shape) * dtype.itemsize
        if size > room:
            files.append([])
            room = FILE_SIZE
        files[-1].append(name)
        room -= size

    writes = not dist.is_initialized() or dist.get_rank() == 0
    if writes:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    places = {}
    for number, names in enumerate(files, start=1):
        path = part / f"model-{number:05}-of-{len(files):05}.safetensors"
        path = path if len(files) > 1 else part / "model.safetensors"
        places |= dict.fromkeys(names, path.name)
        with path.open("wb") if writes else open(os.devnull, "wb") as file:
            file.write(header_of({name: shapes[name] for name in names}, dtype))
            for name in names:
                weight = value_of(name).detach().to(dtype)
                whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
                if writes:
                    file.write(whole.cpu().contiguous().view(torch.uint8).numpy())
    if not writes:
        return
    if len(files) > 1:
        total = sum(map(prod, shapes.values())) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (part / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for pattern in TOKENIZER if like else ():
        for path in filter(Path.is_file, like.glob(pattern)):
            shutil.copyfile(path, part / path.name)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def header_of(shapes: dict[str, list[int]], dtype: torch.dtype) -> bytes:
    """The beginning of a safetensors file with these tensors."""
    name_of = {known: name for name, known in DTYPES.items()}[dtype]
    header, place = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end = place + prod(shape) * dtype.itemsize
        header[name] = {"dtype": name_of, "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
