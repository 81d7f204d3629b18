"""The transformer of Qwen3, its mixture of experts, and Llama 3, in plain torch.

Its modules, and the keys of its `config`, have the names of Hugging Face's transformers. So its
state dict and its config.json are theirs, and neither is ever converted.

The letters in the shapes: B sequences, T tokens each, C channels (hidden_size), H heads of D
channels (head_dim), G pairs of keys and values (num_key_value_heads), I inner channels
(intermediate_size, or moe_intermediate_size of an expert), V tokens in the vocabulary, E experts
(num_experts) of which a token has K (num_experts_per_tok). A rank may hold a part of H and G, so
sizes that are not in a weight are read off the tensor at hand.
"""

import math
import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint


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
        if config["model_type"].startswith("qwen3"):
            # So that no product of q and k grows too large
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
        if q.dtype == torch.float32 and q.device.type != "cpu":
            # No kernel of CUDA for float32 takes shared keys and values, and without a kernel
            # attention would keep T x T numbers for each head.
            shared = q.size(1) // k.size(1)
            k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
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


class Experts(nn.Module):
    """E SwiGLUs, whose weights are stacked. Of the rows (S, C) the first `counts[0]` are for the
    first expert, and so on. A count may be 0. To (S, C)."""

    def __init__(self, config: dict):
        super().__init__()
        count, width = config["num_experts"], config["hidden_size"]
        inner = config["moe_intermediate_size"]
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0)
        gate, up = grouped_linear(rows, self.gate_up_proj, ends).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, self.down_proj, ends)


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows (S, in) by groups, each of which ends before a row of `ends` (E), times each group's
    weight of (E, out, in): (S, out)."""
    weight = weight.to(rows.dtype).mT  # autocast does not know grouped_mm
    known = {"cpu": (torch.bfloat16, torch.float32), "cuda": (torch.bfloat16,)}
    whole = all(size % 8 == 0 for size in weight.shape[1:])  # it wants rows of 16 bytes
    # There its gradients are wrong for a group without rows (pytorch#172439, #193633).
    blackwell = rows.is_cuda and torch.cuda.get_device_capability(rows.device) >= (10, 0)
    if rows.dtype in known.get(rows.device.type, ()) and whole and not blackwell:
        return F.grouped_mm(rows, weight, offs=ends.int())
    groups = rows.tensor_split(ends[:-1].cpu())
    return torch.cat([group @ own for group, own in zip(groups, weight, strict=True)])


class SparseMLP(nn.Module):
    """A mixture of experts (Shazeer et al. 2017, arxiv.org/abs/1701.06538), (B, T, C) to (B, T, C).
    Each token has the K experts to which `gate` gives the highest probabilities, however many other
    tokens they have. None is dropped."""

    def __init__(self, config: dict):
        super().__init__()
        self.top, self.normed = config["num_experts_per_tok"], config["norm_topk_prob"]
        self.gate = nn.Linear(config["hidden_size"], config["num_experts"], bias=False)
        self.experts = Experts(config)
        self.load = None  # for Transformer.balance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        probabilities = logits.softmax(-1, dtype=torch.float32)
        weight, chosen = probabilities.topk(self.top)  # (B T, K)
        if self.normed:
            weight = weight / weight.sum(-1, keepdim=True)
        # A row for each choice, sorted by expert
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(logits.size(-1), device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        # If the backward pass computes this again, its graph would outlive it here.
        if self.load is None:
            self.load = counts, probabilities.sum(0)
        y = self.experts(tokens[order // self.top].to(logits.dtype), counts)
        y = y[order.argsort()] * weight.view(-1, 1).to(y.dtype)
        return y.unflatten(0, (-1, self.top)).sum(1).view_as(x)


class Block(nn.Module):
    """A pre-norm transformer layer, (B, T, C) to (B, T, C). Its other inputs are attention's.

    With `activation_checkpointing` its inner activations are dropped and computed again in the
    backward pass: B T C numbers are kept for it instead of some 20 times as many, for a third more
    computing (Chen et al. 2016, arxiv.org/abs/1604.06174).
    """

    def __init__(self, config: dict, activation_checkpointing: bool = False):
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        width, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(width, epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(width, epsilon)
        self.mlp = SparseMLP(config) if config["model_type"] == "qwen3_moe" else MLP(config)

    def forward(self, *inputs) -> torch.Tensor:
        if self.activation_checkpointing and self.training:
            return checkpoint(self.layer, *inputs, use_reentrant=False)
        return self.layer(*inputs)

    def layer(self, x: torch.Tensor, *others) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *others)
        return x + self.mlp(self.post_attention_layernorm(x))


class Transformer(nn.Module):
    """Tokens (B, T) int64 to logits (B, T, V). `config` is the content of a config.json."""

    def __init__(self, config: dict, activation_checkpointing: bool = False):
        super().__init__()
        self.config, width = config, config["hidden_size"]
        self.model = nn.Module()  # for the names, which begin with it
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], width)
        layers = range(config["num_hidden_layers"])
        self.model.layers = nn.ModuleList(Block(config, activation_checkpointing) for _ in layers)
        self.model.norm = nn.RMSNorm(width, config["rms_norm_eps"])
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)
        self.tie()

    def tie(self):
        """One weight (V, C) for embedding and head, if the config says so. Call it again after
        anything that replaces parameters."""
        if self.config["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def init_weights(self, device: torch.device, seed: int, pretrained: dict | None = None):
        """Memory on `device` for this rank's part of the weights, and their first values: those of
        `pretrained`, by name, or drawn from the seed."""
        self.to_empty(device=device)
        self.tie()
        if pretrained is None:
            self.load_weights(lambda name: self.first_value(name, seed))
        else:
            self.load_weights(pretrained.__getitem__)

    def first_value(self, name: str, seed: int) -> torch.Tensor:
        """A weight's first value, whole and on the CPU, as GPT-2 draws it: from the seed and its
        name, so it is the same on any number of ranks."""
        weight = torch.ones(self.get_parameter(name).shape)  # a norm's, unless it is a matrix
        if weight.dim() >= 2:
            std = 0.02
            # The more layers add to the residual stream, the less each is to add.
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                std /= math.sqrt(2 * len(self.model.layers))
            generator = torch.Generator().manual_seed(zlib.crc32(repr((seed, name)).encode()))
            weight.normal_(std=std, generator=generator)
        return weight

    @torch.no_grad()
    def load_weights(self, value_of: Callable[[str], torch.Tensor]):
        """Sets each weight to the value of its name, which is whole. A rank that holds a part of
        the weight reads no more than that part."""
        for name, weight in self.named_parameters():
            value, offsets, sizes = value_of(name), [0] * weight.dim(), weight.shape
            if isinstance(weight, DTensor):
                # How torch's own checkpoints find a rank's part in the whole.
                [part] = weight.__create_chunk_list__()
                weight, offsets, sizes = weight.to_local(), part.offsets, part.sizes
            for dim, (first, size) in enumerate(zip(offsets, sizes, strict=True)):
                value = value.narrow(dim, first, size)
            weight.copy_(value)

    def balance(self) -> torch.Tensor | float:
        """What the last forward pass adds to the loss so that all experts get tokens, if the config
        has `output_router_logits`: how many of a token's choices fall on an expert, times its mean
        probability (Switch Transformer, arxiv.org/abs/2101.03961, equation 4), over all layers at
        once, as transformers has it.

        Over several ranks, which have different tokens, the sum over the ranks is that loss. It is
        no mean over tokens, so the counts are those of all ranks, and each rank calls it.
        """
        sparse = self.config["model_type"] == "qwen3_moe"
        if not sparse or not self.config["output_router_logits"]:
            return 0.0
        loads = [layer.mlp.load for layer in self.model.layers]
        counts, probabilities = (sum(values) for values in zip(*loads, strict=True))
        if dist.is_initialized():
            dist.all_reduce(counts)
        rows = counts.sum() / self.config["num_experts_per_tok"]
        balance = len(counts) * (counts / rows * (probabilities / rows)).sum()
        return self.config["router_aux_loss_coef"] * balance

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
            if isinstance(block.mlp, SparseMLP):
                block.mlp.load = None
            x = block(x, cos, sin, cache)
        return self.lm_head(self.model.norm(x))

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        count: int,
        vocab_size: int,
        temperature: float = 0.8,
        ends: Sequence[int] = (),
    ) -> torch.Tensor:
        """`tokens` (B, T) int64 and `count` more, drawn one by one among the first `vocab_size`
        of V: (B, T + count). When the context is full, it continues from the later half.

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
            logits = self(new, cache)[:, -1, :vocab_size]
            if temperature > 0:
                new = torch.multinomial((logits / temperature).softmax(-1), 1)
            else:
                new = logits.argmax(-1, keepdim=True)
            new = torch.where(ended, tokens[:, -1:], new)
            tokens = torch.cat((tokens, new), dim=1)
            for end in ends:
                ended |= new == end
            # `ended.all` waits for the GPU.
            if ends and ended.all():
                break
        return tokens
