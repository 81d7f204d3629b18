"""Hugging Face's folders of a model: config.json, *.safetensors, and the tokenizer's files.

transformer.py has the same names, so nothing is converted, except that it stacks the weights of
experts, which the files have one by one. A file is mapped, so a rank that keeps some rows of a
weight reads no others; and it is written weight by weight, so no rank ever holds a whole model. It
needs no other package.

A downloaded folder is a stranger's. None of it runs, what it says is compared with what is there,
and no link in it leads to a file of yours.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from heartbeat import fail
from token_files import LARGEST, json_object, mapped, numbers, printable, read_object

# What transformer.py computes: a field of config.json, and the values that it may have.
KNOWN = {
    "model_type": ("qwen3", "qwen3_moe", "llama", "mistral"),
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
    "rope_type": ("default", "llama3", None),
    "partial_rotary_factor": (1.0, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "attn_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "quantization_config": (None,),
    "dtype": ("float32", "bfloat16", "float16", None),
    "torch_dtype": ("float32", "bfloat16", "float16", None),
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads", "head_dim")
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
# A weight of all experts, and the names under which the files have what it consists of
STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INDEX = "model.safetensors.index.json"
# Without code that a model may bring
TOKENIZER = ("tokenizer*.json", "tokenizer.model*", "*_tokens*.json", "vocab.json", "merges.txt")
TOKENIZER += ("chat_template*.jinja", "chat_template*.json", "generation_config.json")
FILE_SIZE = 4 << 30  # bytes of weights in a file that is written


def read_config(folder: Path) -> dict:
    """The content of config.json, with its defaults. Ends with a sentence if transformer.py cannot
    compute this model, or if a link in the folder leads out of it."""
    try:
        found = read_object(folder / "config.json")
        config = {name: value for name, value in found.items() if value is not None}
        check_config(config)
        check_inside(folder, folder / "config.json")
        tokenizer_of(folder)
    except (OSError, ValueError) as error:
        fail(f"{folder} is no Qwen3 or Llama to start from: {printable(error)}")
    return config


def check_config(config: dict):
    """Adds the defaults to the content of a config.json. Raises ValueError if transformer.py cannot
    compute this model, or no model has such numbers."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"its rope_parameters are {rope}")
    inner = {name: value for name, value in rope.items() if value is not None}
    asked = config | {"rope_type": rope.get("rope_type", rope.get("type"))}
    if "partial_rotary_factor" in inner:
        asked["partial_rotary_factor"] = inner["partial_rotary_factor"]
    # Qwen3's files have a window, and say beside it that it is not used.
    if config.get("use_sliding_window") is False:
        asked["sliding_window"] = None
    for name, known in KNOWN.items():
        if asked.get(name) not in known:
            raise ValueError(f"transformer.py knows no {name} {asked.get(name)}, only {known[0]}")

    check_numbers(config, int, 1 << 20, "hidden_size", "num_attention_heads")
    heads = config["num_attention_heads"]
    default = {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // heads}
    default |= {"tie_word_embeddings": False, "rope_theta": 10_000.0}
    for name, value in default.items():
        config.setdefault(name, value)
    check_numbers(config, int, 1 << 20, *SIZES)
    check_experts(config)
    check_numbers(config, int, 1 << 31, "max_position_embeddings")
    check_numbers(config, int | float, 1 << 60, "rms_norm_eps", "rope_theta")
    if "rope_theta" in inner:
        check_numbers(inner, int | float, 1 << 60, "rope_theta")
    if asked["rope_type"] == "llama3":
        check_numbers(inner, int | float, 1 << 60, *LLAMA3)
        if inner["low_freq_factor"] >= inner["high_freq_factor"]:
            raise ValueError("its low_freq_factor is not below its high_freq_factor")
    if heads % config["num_key_value_heads"] or config["head_dim"] % 2:
        rule = "its num_attention_heads must be a multiple of num_key_value_heads"
        raise ValueError(f"{rule}, and its head_dim even")
    if type(config["tie_word_embeddings"]) is not bool:
        raise ValueError(f"its tie_word_embeddings is {config['tie_word_embeddings']}")


def check_experts(config: dict):
    """check_config for what a mixture of experts has besides, and no other model may have."""
    if config["model_type"] != "qwen3_moe":
        for name in ("num_experts", "num_local_experts"):
            if config.get(name, 0) != 0:
                raise ValueError(f"transformer.py knows no {name} {config[name]}, only 0")
        return
    default = {"norm_topk_prob": False, "output_router_logits": False}
    default["router_aux_loss_coef"] = 0.001
    if "num_local_experts" in config:  # the name since transformers 5
        default["num_experts"] = config["num_local_experts"]
    for name, value in default.items():
        config.setdefault(name, value)
    check_numbers(config, int, 1 << 16, *EXPERTS)
    if config["num_experts_per_tok"] > config["num_experts"]:
        raise ValueError("its num_experts_per_tok is more than its num_experts")
    for name in ("norm_topk_prob", "output_router_logits"):
        if type(config[name]) is not bool:
            raise ValueError(f"its {name} is {config[name]}")
    if config["output_router_logits"]:
        check_numbers(config, int | float, 1 << 20, "router_aux_loss_coef")


def check_numbers(values: dict, kind: type, limit: float, *names: str):
    """Raises ValueError if one of these is missing, or no number of this kind between 0 and the
    limit."""
    for name in names:
        value = values.get(name)
        if value is None:
            raise ValueError(f"its config.json has no {name}")
        if type(value) is bool or not isinstance(value, kind) or not 0 < value < limit:
            raise ValueError(f"its {name} is {value}, and no model has that")


def check_inside(folder: Path, path: Path):
    """Raises ValueError if a file of a folder is a link to one of yours, which a run would publish.
    In Hugging Face's cache a folder `snapshots/X` has links, but only into `blobs` beside it."""
    home, target = folder.resolve(), Path(os.path.realpath(path))
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
        raise ValueError(f"the link {path.name} leads out of it: put a copy in its place")


def tokenizer_of(folder: Path) -> list[Path]:
    """The files of a folder that belong to its tokenizer. Raises ValueError if one is a link."""
    found = [path for pattern in TOKENIZER for path in folder.glob(pattern) if path.is_file()]
    for path in found:
        check_inside(folder, path)
    return found


def open_weights(folder: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The values of a model's weights by name, whole, as views of the files: nothing is read yet.
    Ends with a sentence if they are those of another model."""
    try:
        files = ["model.safetensors"]
        if (folder / INDEX).exists():
            files = sorted(set(read_object(folder / INDEX)["weight_map"].values()))
        found = {}
        for file in files:
            check_inside(folder, folder / file)
            found |= open_file(folder / file)
    except Exception as error:  # a header may have anything in any place
        fail(f"{folder} cannot be read: {type(error).__name__}: {printable(error)}")

    weights = {name: in_files(name, weight) for name, weight in model.named_parameters()}
    shapes = {name: shape for parts in weights.values() for name, shape in parts.items()}
    for name in sorted(shapes.keys() | found.keys()):
        # A weight that is shared has its first name. Old files have what follows from the config.
        implied = name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
        if implied and name not in shapes:
            continue
        theirs = tuple(found[name].shape) if name in found else "none"
        ours = shapes.get(name, "none")
        if theirs != ours:
            said = f"{printable(name)} is {theirs}, not {ours}"
            fail(f"{folder} is not what its config.json says: {said}")
    return {
        name: found[name] if name in parts else Stack([found[part] for part in parts], len(weight))
        for (name, weight), parts in zip(model.named_parameters(), weights.values(), strict=True)
    }


def in_files(name: str, weight: torch.Tensor) -> dict[str, tuple[int, ...]]:
    """What the files have for a weight of the model: names, in the order of its numbers, and their
    shapes. If it is one of all experts, each has its own."""
    layer, _, kind = name.partition(".experts.")
    if not kind:
        return {name: tuple(weight.shape)}
    count, rows, columns = weight.shape
    parts = STACKED[kind]
    names = [f"{layer}.experts.{e}.{part}.weight" for e in range(count) for part in parts]
    return dict.fromkeys(names, (rows // len(parts), columns))


class Stack:
    """A weight of all experts, (E, ...). Only those for which `narrow` asks are read."""

    def __init__(self, parts: list[torch.Tensor], count: int):
        self.parts, self.each = parts, len(parts) // count

    def narrow(self, dim: int, first: int, size: int) -> torch.Tensor:
        """As of a tensor, along its first dimension."""
        asked = self.parts[first * self.each : (first + size) * self.each]
        # A rank may have none, but needs their shape.
        whole = torch.cat(asked or self.parts[: self.each])
        return whole.view(-1, self.each * len(self.parts[0]), *whole.shape[1:])[:size]


def open_file(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file by name: a length (8 bytes), a header in JSON with each
    one's dtype, shape and place, and then the numbers, without holes. Raises OSError, or one of
    several errors if the header is not that of the file."""
    size = path.stat().st_size
    if size < 8:
        raise ValueError(f"{path.name} is no safetensors file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, LARGEST):
            raise ValueError(f"{path.name} is no safetensors file, but perhaps git-lfs's pointer")
        header = json_object(file.read(length))
    header.pop("__metadata__", None)
    memory, found, begin = mapped(path), {}, 0
    for name, said in sorted(header.items(), key=lambda entry: entry[1]["data_offsets"]):
        what, shape = f"{path.name} has {name}", said["shape"]
        if said["dtype"] not in DTYPES:
            raise ValueError(f"{what} in {said['dtype']}, not in {[*DTYPES]}")
        if not all(type(count) is int and count >= 0 for count in shape):
            raise ValueError(f"{what} of shape {shape}")
        dtype, count, first = DTYPES[said["dtype"]], math.prod(shape), 8 + length + begin
        end = begin + count * dtype.itemsize
        if said["data_offsets"] != [begin, end]:
            place = f"at {said['data_offsets']}, and its shape and dtype need {[begin, end]}"
            raise ValueError(f"{what} {place}")
        if 8 + length + end > size:
            raise ValueError(f"{path.name} is cut short")
        found[name], begin = numbers(memory, dtype, count, first).view(shape), end
    if 8 + length + begin != size:
        raise ValueError(f"{path.name} is longer than its header says")
    return found


def write(
    folder: Path,
    model: torch.nn.Module,
    value_of: Callable[[str], torch.Tensor] | None = None,
    like: Path | None = None,
):
    """Makes a folder for from_pretrained(), with the tokenizer of the folder `like`, in the dtype
    that the model's config names. `value_of` returns a weight by its name; by default it is the
    model's own.

    If the weights are split, all ranks call it: they gather one after the other, and rank 0 writes
    it. An older folder is replaced when the new one is whole. Raises ValueError if a file of the
    tokenizer is a link out of its folder.
    """
    tokenizer = tokenizer_of(like) if like else []
    if value_of is None:
        # FSDP leaves some weights gathered and rounded. In the state_dict they are not.
        value_of = model.state_dict().__getitem__
    config, part = model.config, folder.with_name(f".{folder.name}.part")
    dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "float32")
    weights = dict(model.named_parameters())
    files, room = [], 0
    for name, weight in weights.items():
        size = weight.numel() * dtype.itemsize
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
        shapes = {}
        for name in names:
            shapes |= in_files(name, weights[name])
        places |= dict.fromkeys(shapes, path.name)
        with path.open("wb") if writes else open(os.devnull, "wb") as file:
            file.write(header_of(shapes, dtype))
            for name in names:
                weight = value_of(name).detach().to(dtype)
                whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
                if writes:
                    file.write(whole.cpu().contiguous().view(torch.uint8).numpy())
    if not writes:
        return
    if len(files) > 1:
        total = sum(weight.numel() for weight in weights.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (part / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in tokenizer:
        shutil.copyfile(path, part / path.name)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def header_of(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> bytes:
    """The beginning of a safetensors file with these tensors."""
    name_of = {known: name for name, known in DTYPES.items()}[dtype]
    header, place = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        end = place + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": name_of, "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
