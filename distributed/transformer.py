"""The transformer of Qwen3 and Llama 3, in plain torch.

Its modules, and the keys of its `config`, have the names of Hugging Face's transformers. So its
state dict and its config.json are theirs, and neither is ever converted.

The letters in the shapes: B sequences, T tokens each, C channels (hidden_size), H heads of D
channels (head_dim), G pairs of keys and values (num_key_value_heads), I inner channels
(intermediate_size), V tokens in the vocabulary. A rank may hold a part of H and G, so sizes that
are not in a weight are read off the tensor at hand.
"""

import math
import re
import sys
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

# Models, and how to train them. From 0.6b on the shapes are those of Qwen3's config.json
# (arxiv.org/abs/2505.09388, table 1), and 0.1b has as many weights as GPT-2. From there on the
# steps see 20 tokens for each weight (arxiv.org/abs/2203.15556), at the learning rates of GPT-3's
# models (arxiv.org/abs/2005.14165, table 2.1).
SHAPE = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
SHAPE += ("num_key_value_heads", "head_dim", "tie_word_embeddings")
TRAINING = ("context", "batch_size", "steps", "learning_rate", "warmup_steps", "beta2")
TRAINING += ("weight_decay",)
ROWS = {
    "cpu": (4, 128, 384, 4, 2, 32, True, 64, 12, 2000, 2e-3, 100, 0.99, 0.1),
    "gpu": (6, 384, 1152, 6, 2, 64, True, 256, 64, 5000, 1e-3, 100, 0.99, 0.1),
    "0.1b": (12, 768, 2304, 12, 6, 64, True, 1024, 480, 5000, 6e-4, 500, 0.95, 0.1),
    "0.6b": (28, 1024, 3072, 16, 8, 128, True, 4096, 256, 11_400, 2.5e-4, 1000, 0.95, 0.1),
    "1.7b": (28, 2048, 6144, 16, 8, 128, True, 4096, 512, 16_400, 2e-4, 2000, 0.95, 0.1),
    "4b": (36, 2560, 9728, 32, 8, 128, True, 4096, 1024, 19_200, 1.6e-4, 2000, 0.95, 0.1),
    "8b": (36, 4096, 12_288, 32, 8, 128, False, 4096, 1024, 39_000, 1.2e-4, 2000, 0.95, 0.1),
    "32b": (64, 5120, 25_600, 64, 8, 128, False, 4096, 2048, 78_100, 1e-4, 2000, 0.95, 0.1),
}
SIZES = {size: dict(zip(SHAPE + TRAINING, row, strict=True)) for size, row in ROWS.items()}
# To continue from weights that others have trained
TUNING = dict(zip(TRAINING, (1024, 64, 1000, 1e-5, 50, 0.95, 0.0), strict=True))


def new_config(sizes: dict, context: int, vocabulary: int) -> dict:
    """The config.json of a Qwen3 whose SHAPE is in `sizes`, for at least so many tokens. Ends with
    a sentence if the shape is impossible."""
    shape = {name: sizes[name] for name in SHAPE}
    if shape["num_attention_heads"] % shape["num_key_value_heads"] or shape["head_dim"] % 2:
        rule = "--num-attention-heads must be a multiple of --num-key-value-heads"
        sys.exit(f"{rule}, and --head-dim even")
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu"}
    # Qwen3 was trained with this theta, and with 1,000,000 from 32,768 tokens on.
    config |= {"attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
    # A vocabulary of whole blocks is faster on GPUs, and can be split.
    config |= {"max_position_embeddings": context, "vocab_size": math.ceil(vocabulary / 64) * 64}
    return config | shape | {"torch_dtype": "float32"}


def count_weights(config: dict) -> tuple[int, int]:
    """How many weights a layer has, and how many are outside the layers."""
    width, size = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    attention = width * size * (2 * heads + 2 * groups)
    norms = 2 * width + (2 * size if config["model_type"] == "qwen3" else 0)
    embeddings = config["vocab_size"] * width * (1 if config["tie_word_embeddings"] else 2)
    return attention + 3 * width * config["intermediate_size"] + norms, embeddings + width


def flops_per_token(config: dict, context: int) -> int:
    """Of one training step, forward and backward: 6 N + 12 L H D T (PaLM,
    arxiv.org/abs/2204.02311, appendix B). N is the number of weights that multiply, so an embedding
    counts only if it is the head."""
    layers = config["num_hidden_layers"]
    channels = config["num_attention_heads"] * config["head_dim"]
    layer, outside = count_weights(config)
    if not config["tie_word_embeddings"]:
        outside -= config["vocab_size"] * config["hidden_size"]
    return 6 * (layers * layer + outside) + 12 * layers * channels * context


def memory(
    config: dict,
    rows: int,
    context: int,
    ranks: int = 1,
    tensor: int = 1,
    bf16: bool = True,
    recompute: bool = False,
) -> dict[str, float]:
    """The bytes that a rank takes in a training step with AdamW, estimated from above, because
    compiled layers keep less.

    `rows` sequences at once; `ranks` hold a model between them, and each layer is computed by
    `tensor` of them.
    """
    number = 2 if bf16 else 4  # bytes of what it computes with
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"] * config["head_dim"]
    groups = config["num_key_value_heads"] * config["head_dim"]
    layer, outside = count_weights(config)
    # Of a layer's input, its two norms and its sum; of queries, keys and values; of SwiGLU
    kept = 4 * width + (3 * heads + 3 * groups + 4 * config["intermediate_size"]) / tensor
    activations = layers * width + kept if recompute else layers * kept
    # In float32, and besides what is computed with: the embedding and two layers are gathered at a
    # time if the model is split, and all are cast if it is not.
    held = 4 * (layers * layer + outside) / ranks
    if ranks > tensor:
        held += number * (2 * layer + outside) / tensor
    elif bf16:
        held += 2 * (layers * layer + outside) / tensor
    return {
        "weights": held,
        "gradients": 4 * (layers * layer + outside) / ranks,
        "states": 8 * (layers * layer + outside) / ranks,  # AdamW's two moments
        "activations": number * rows * context * activations,
        # As they are, and twice in float32 while the loss is computed
        "logits": (number + 8) * rows * context * config["vocab_size"] / tensor,
    }


# FLOP/s in dense bfloat16, by words in torch's name of the device: "NVIDIA H100 80GB HBM3" is SXM,
# "NVIDIA H100 PCIe" and "NVIDIA H100 NVL" are slower. From the data sheets (half of their numbers
# with sparsity) at www.nvidia.com/en-us/data-center/ and www.amd.com/en/products/accelerators/, but
# H20 and H800, made for China, have none there. Of MI250X each half is a GPU for torch.
PEAK_FLOPS = {
    "A10": 125e12,
    "A30": 165e12,
    "A40": 150e12,
    "A100": 312e12,
    "L4": 121e12,
    "L40S": 362e12,
    "H20": 148e12,
    "H100 HBM3": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "GB300": 2500e12,
    "MI250X": 191.5e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
}


def peak_flops(device: torch.device) -> float:
    """The FLOP/s that a device's data sheet promises; nan if it is not in the table, or is only a
    part of a GPU."""
    name = ""
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_name(device)
    words = set(re.split("[ -]", name))
    # "NVIDIA A10-4Q" is a virtual GPU.
    if any(word == "MIG" or re.fullmatch(r"\d+[QCAB]", word) for word in words):
        return math.nan
    found = (peak for known, peak in PEAK_FLOPS.items() if words.issuperset(known.split()))
    return next(found, math.nan)


def gpu_memory(device: torch.device) -> float:
    """A GPU's bytes. A CPU's count as enough."""
    if device.type == "cpu":
        return math.inf
    return torch.get_device_module(device).get_device_properties(device).total_memory


def plan_memory(
    device: torch.device, recompute: bool | None, *sizes, **options
) -> tuple[bool, str]:
    """Whether to recompute activations: as it is said, or because `memory` of the other arguments
    is more than the device's. And a line for the log on what they take."""
    room = gpu_memory(device)
    # NCCL takes some of it, and some is lost between tensors.
    usable = 0.9 * room
    if recompute is None:
        recompute = sum(memory(*sizes, **options).values()) > usable
    need = memory(*sizes, **options, recompute=recompute)
    total = sum(need.values())
    unit, scale = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
    of = "" if room == math.inf else f" of the GPU's {room / scale:.1f}"
    parts = ", ".join(f"{name} {size / scale:.1f}" for name, size in need.items())
    line = f"Memory of a rank: about {total / scale:.1f} {unit}{of} ({parts})"
    if total > usable:
        less = "more ranks, --accumulation and --activation-checkpointing take less"
        line += f"\nwarning: this may not fit into the GPU: {less}"
    return recompute, line


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021, arxiv.org/abs/2104.09864): in x (B, T, H, D) the channels
    i and i + D/2 are a point in a plane, which is turned by the angle of cos and sin (T, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class Attention(nn.Module):
    """Causal self-attention, softmax(q k' / sqrt(D)) v, (B, T, C) to (B, T, C). H / G neighbouring
    heads share a key and a value (Ainslie et al. 2023, arxiv.org/abs/2305.13245).

    A cache has those of earlier tokens, (B, G, T, D) each, under this module. With one, only the
    first call may have several tokens.
    """

    def __init__(self, config: dict):
        super().__init__()
        width, self.size = config["hidden_size"], config["head_dim"]
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, width, bias=False)
        self.q_norm = self.k_norm = nn.Identity()
        if config["model_type"] == "qwen3":  # so that no product of q and k grows too large
            self.q_norm = nn.RMSNorm(self.size, config["rms_norm_eps"])
            self.k_norm = nn.RMSNorm(self.size, config["rms_norm_eps"])

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: dict | None
    ) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.size))  # (B, T, H or G, D)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotate(self.q_norm(q), cos, sin).transpose(1, 2)
        k = rotate(self.k_norm(k), cos, sin).transpose(1, 2)
        v = v.transpose(1, 2)
        if cache is not None:
            if self in cache:
                k, v = torch.cat((cache[self][0], k), dim=2), torch.cat((cache[self][1], v), dim=2)
            cache[self] = k, v
        causal = q.size(2) > 1  # a single token sees all before it
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arxiv.org/abs/2002.05202), (B, T, C) to (B, T, C) by way of I."""

    def __init__(self, config: dict):
        super().__init__()
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm transformer layer, (B, T, C) to (B, T, C). Its other inputs are attention's.

    With `recompute` its inner activations are dropped and computed again in the backward pass: B
    T C numbers are kept for it instead of some 20 times as many, for a third more computing
    (Chen et al. 2016, arxiv.org/abs/1604.06174).
    """

    recompute = False

    def __init__(self, config: dict):
        super().__init__()
        width, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(width, epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(width, epsilon)
        self.mlp = MLP(config)

    def forward(self, *inputs) -> torch.Tensor:
        if self.recompute and self.training:
            return checkpoint(self.layer, *inputs, use_reentrant=False)
        return self.layer(*inputs)

    def layer(self, x: torch.Tensor, *others) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *others)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Tokens (B, T) int64 to logits (B, T, V). `config` is the content of a config.json."""

    def __init__(self, config: dict):
        super().__init__()
        self.config, width = config, config["hidden_size"]
        self.model = nn.Module()  # for the names, which begin with it
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.model.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(width, config["rms_norm_eps"])
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)
        self.tie()

    def tie(self):
        """One weight (V, C) for embedding and head, if the config says so. Call it again after
        anything that replaces parameters."""
        if self.config["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def draw(self, name: str, seed: int) -> torch.Tensor:
        """A weight's first value, whole and on the CPU, as GPT-2 draws it: from the seed and its
        name, so it is the same on any number of ranks."""
        weight = torch.ones(self.get_parameter(name).shape)  # a norm's, unless it is a matrix
        if weight.dim() >= 2:
            std = 0.02
            # The more layers add to the residual stream, the less each is to add.
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= math.sqrt(2 * len(self.model.layers))
            generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, name)).encode()))
            weight.normal_(std=std, generator=generator)
        return weight

    @torch.no_grad()
    def fill(self, value_of: Callable[[str], torch.Tensor]):
        """Sets each weight to the value of its name, which is whole. A rank that holds a part of
        the weight reads no more than that part."""
        for name, weight in self.named_parameters():
            if isinstance(weight, DTensor):
                # How torch's own checkpoints find a rank's part in the whole.
                [part] = weight.__create_chunk_list__()
                whole = value_of(name)
                for dim, (first, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
                    whole = whole.narrow(dim, first, size)
                weight.to_local().copy_(whole)
            else:
                weight.copy_(value_of(name))

    def angles(self, first: int, count: int, device: torch.device) -> torch.Tensor:
        """By how much channels are turned at `count` positions from `first` on, (T, D) float32."""
        size, config = self.config["head_dim"], self.config
        # Newer files have theta inside.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = rope.get("rope_theta") or config["rope_theta"]
        frequencies = theta ** -(torch.arange(0, size, 2, device=device) / size)
        if rope.get("rope_type", rope.get("type")) == "llama3":
            # Llama 3.1: slow channels turn `factor` times slower, for longer texts.
            turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            frequencies = frequencies * (kept + (1 - kept) / rope["factor"])
        positions = torch.arange(first, first + count, device=device)
        return torch.outer(positions, frequencies).repeat(1, 2)

    def forward(self, tokens: torch.Tensor, cache: dict | None = None) -> torch.Tensor:
        x = self.model.embed_tokens(tokens)
        # The residual stream then has the dtype that the layers compute in.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        first = next(iter(cache.values()))[0].size(2) if cache else 0
        angles = self.angles(first, tokens.size(1), x.device)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.model.layers:
            x = block(x, cos, sin, cache)
        return self.lm_head(self.model.norm(x))

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        count: int,
        known: int,
        temperature: float = 0.8,
        ends: Sequence[int] = (),
    ) -> torch.Tensor:
        """`tokens` (B, T) int64 and `count` more, drawn one by one among the first `known` of V:
        (B, T + count). When the context is full, it continues from the later half.

        A lower temperature takes likely tokens more often, and 0 always takes the likeliest. A
        sequence that has drawn one of `ends` only repeats it, and when all have, nothing follows.
        """
        self.eval()
        limit = self.config["max_position_embeddings"]
        ended = torch.zeros(len(tokens), 1, dtype=torch.bool, device=tokens.device)
        cache, seen, new = {}, 0, tokens[:, -limit:]
        for _ in range(count):
            if seen == limit:
                cache, seen, new = {}, 0, tokens[:, -(limit // 2) :]
            seen += new.size(1)
            logits = self(new, cache)[:, -1, :known]
            if temperature > 0:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            else:
                new = logits.argmax(-1, keepdim=True)
            new = torch.where(ended, tokens[:, -1:], new)
            tokens = torch.cat((tokens, new), dim=1)
            for end in ends:
                ended |= new == end
            # It waits for the GPU.
            if ends and ended.all():
                break
        return tokens
