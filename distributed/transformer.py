"""A decoder-only transformer over tokens, in plain torch: nothing in here knows of ranks.

nanoGPT's architecture (github.com/karpathy/nanoGPT, model.py, there after GPT-2) without biases,
as its train.py has it by default, with one difference: the rows of the fused linear for q, k and
v are ordered (head, q k v, D), as in Megatron-LM, so that a part of them is whole heads. (The
bias of k would have no gradient but rounding noise, which Adam amplifies.) With `gpt2` it has the
biases and the GELU of OpenAI's weights, for training that goes on from them.

The letters in the shapes: B sequences, T tokens each, C channels (the width), H heads, D = C / H,
V tokens in the vocabulary. A rank may hold a part of H or of T, so sizes that are not in a linear's
or an embedding's own weight are read off the tensor at hand.
"""

import math
import re
import zlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# Models, and how to train them: nanoGPT's, but the small model learns more with a rate of
# 2e-3 instead of 1e-3. The vocabulary is rounded up to a multiple of pad_vocabulary.
CPU = {"layers": 4, "heads": 4, "width": 128, "context": 64, "dropout": 0.0, "batch_size": 12}
CPU |= {"steps": 2000, "learning_rate": 2e-3, "warmup_steps": 100, "beta2": 0.99}
CPU |= {"pad_vocabulary": 1}
GPU = {"layers": 6, "heads": 6, "width": 384, "context": 256, "dropout": 0.2, "batch_size": 64}
GPU |= {"steps": 5000, "learning_rate": 1e-3, "warmup_steps": 100, "beta2": 0.99}
GPU |= {"pad_vocabulary": 1}
GPT2 = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "dropout": 0.0, "batch_size": 480}
GPT2 |= {"steps": 600_000, "learning_rate": 6e-4, "warmup_steps": 2000, "beta2": 0.95}
GPT2 |= {"pad_vocabulary": 64}
# Learning rates and batch sizes of GPT-3's models (arxiv.org/abs/2005.14165, table 2.1)
MEDIUM = GPT2 | {"layers": 24, "heads": 16, "width": 1024, "learning_rate": 3e-4}
ONE_B = GPT2 | {"layers": 24, "heads": 16, "width": 2048, "context": 2048, "learning_rate": 2e-4}
ONE_B |= {"batch_size": 512, "steps": 286_000}
SIZES = {"cpu": CPU, "gpu": GPU, "gpt2": GPT2, "gpt2-medium": MEDIUM, "1b": ONE_B}

# FLOP/s in dense bfloat16 from the data sheets (half of their number with sparsity), by words in
# torch's name of the device: "NVIDIA H100 80GB HBM3" is SXM, "NVIDIA H100 PCIe" and "NVIDIA H100
# NVL" are slower. They are at www.nvidia.com/en-us/data-center/: a40, a100, l4, l40s, h100, h200,
# grace-hopper-superchip, hgx (B200 and B300), gb200-nvl72, gb300-nvl72, products/a10-gpu and
# products/a30-gpu; and at www.amd.com/en/products/accelerators/instinct/mi300/: mi300x.html and
# mi325x.html. MI250X is in AMD's white paper on CDNA 3. Half of it is here, because each half is a
# GPU for torch. H20 and H800 were made for China, and have none there.
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


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    """Causal attention, (B, H, T, D) each, softmax(q k' / sqrt(D)) v.

    On a CPU it computes in float32, because flash attention is slow in bfloat16 there, especially
    its backward pass.
    """
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        with torch.autocast("cpu", enabled=False):
            return attend(q.float(), k.float(), v.float(), dropout).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Attention(nn.Module):
    """Multi-head self-attention, (B, T, C) to (B, T, C)."""

    def __init__(self, width: int, heads: int, dropout: float, gpt2: bool):
        super().__init__()
        self.head_size, self.dropout, self.attend = width // heads, dropout, attend
        self.qkv = nn.Linear(width, 3 * width, bias=gpt2)
        self.out = nn.Linear(width, width, bias=gpt2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # (B, T, H 3 D) to (B, H, T, D) each
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_size)).transpose(1, 2).unbind(-2)
        y = self.attend(q, k, v, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linears with GELU between them, (B, T, C) to (B, T, C) by way of 4 C."""

    def __init__(self, width: int, gpt2: bool):
        super().__init__()
        self.approximate = "tanh" if gpt2 else "none"
        self.up = nn.Linear(width, 4 * width, bias=gpt2)
        self.down = nn.Linear(4 * width, width, bias=gpt2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    """A pre-norm transformer layer, (B, T, C) to (B, T, C).

    With `recompute` its inner activations are dropped and computed again in the backward pass: B
    T C numbers are kept for it instead of some 16 times as many, for a third more computing
    (Chen et al. 2016, arxiv.org/abs/1604.06174).
    """

    recompute = False

    def __init__(self, width: int, heads: int, dropout: float, gpt2: bool):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=gpt2)
        self.attention = Attention(width, heads, dropout, gpt2)
        self.mlp_norm = nn.LayerNorm(width, bias=gpt2)
        self.mlp = MLP(width, gpt2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute and self.training:
            return checkpoint(self.layer, x, use_reentrant=False)
        return self.layer(x)

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    """Tokens (B, T) int64 with T <= context to logits (B, T, V). The output head shares the
    embedding's weight.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float = 0.0,
        gpt2: bool = False,
    ):
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, gpt2) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=gpt2)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tie()

    def tie(self):
        """One weight (V, C) for token embedding and head. Call it again after anything that
        replaces parameters."""
        self.head.weight = self.token_embedding.weight

    def draw(self, name: str, seed: int) -> torch.Tensor:
        """A weight's first value, whole and on the CPU, as GPT-2 draws it: from the seed and its
        name, so it is the same on any number of ranks."""
        weight = torch.ones(self.get_parameter(name).shape)  # a norm's, unless it is a matrix
        if weight.dim() >= 2:
            std = 0.02
            # The more layers add to the residual stream, the less each is to add.
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                std /= math.sqrt(2 * len(self.blocks))
            generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, name)).encode()))
            weight.normal_(std=std, generator=generator)
        return weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        # The residual stream then has the dtype that the layers compute in.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def flops_per_token(self, context: int) -> int:
        """Of one training step, forward and backward: 6 N + 12 L C T (PaLM,
        arxiv.org/abs/2204.02311, appendix B).

        N is the number of weights that multiply, without the position embedding. Call it before the
        model is split.
        """
        weights = sum(weight.numel() for weight in self.parameters())
        weights -= self.position_embedding.weight.numel()
        return 6 * weights + 12 * len(self.blocks) * self.norm.weight.numel() * context

    @torch.no_grad()
    def generate(
        self, tokens: torch.Tensor, count: int, known: int, temperature: float = 0.8
    ) -> torch.Tensor:
        """`tokens` (B, T) int64 and `count` more, drawn one by one among the first `known` of V:
        (B, T + count).

        A lower temperature takes likely tokens more often, and 0 always takes the likeliest.
        """
        self.eval()
        for _ in range(count):
            logits = self(tokens[:, -self.position_embedding.num_embeddings :])[:, -1, :known]
            if temperature > 0:
                drawn = torch.multinomial((logits / temperature).softmax(-1), 1)
            else:
                drawn = logits.argmax(-1, keepdim=True)
            tokens = torch.cat((tokens, drawn), dim=1)
        return tokens
