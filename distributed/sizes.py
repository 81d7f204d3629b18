"""The sizes of language models, and what follows from a size: options, memory, FLOPs and speed.

    args = sizes.parse(parser)                    # the table, as options of the command line
    config = sizes.config_of(args, vocab_size)    # the model's config.json
    recompute, line = sizes.plan_memory(device, None, config, micro_batch_size, args.context)
    speed = sizes.Speed(config, args, device, step)
    ...
        log(speed.since_last(step))               # tokens per second, mfu, memory, time left

The fields of a model's shape are those of Hugging Face's config.json.
"""

import argparse
import contextlib
import math
import re
import shutil
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import hugging_face
from heartbeat import fail

# --- the table ---

# Models, and how to train them. From 0.6b on the shapes are those of Qwen3's config.json
# (arxiv.org/abs/2505.09388, tables 1 and 2), and 0.1b has as many weights as GPT-2. From there on
# the steps see 20 tokens for each weight (arxiv.org/abs/2203.15556), at the learning rates of
# GPT-3's models (arxiv.org/abs/2005.14165, table 2.1). 30b-a3b is a mixture of experts, of whose 30
# billion weights a token meets 3. EDIT: a column for a model of your own.
# fmt: off
NAMES = (                   "cpu", "gpu", "0.1b", "0.6b", "1.7b",   "4b",   "8b",  "32b", "30b-a3b")
SHAPE = {
    "num_hidden_layers":   (    4,     6,     12,     28,     28,     36,     36,     64,     48),
    "hidden_size":         (  128,   384,    768,   1024,   2048,   2560,   4096,   5120,   2048),
    "intermediate_size":   (  384,  1152,   2304,   3072,   6144,   9728, 12_288, 25_600,   6144),
    "num_attention_heads": (    4,     6,     12,     16,     16,     32,     32,     64,     32),
    "num_key_value_heads": (    2,     2,      6,      8,      8,      8,      8,      8,      4),
    "head_dim":            (   32,    64,     64,    128,    128,    128,    128,    128,    128),
    "tie_word_embeddings": ( True,  True,   True,   True,   True,   True,  False,  False,  False),
}
EXPERTS = {
    "num_experts":         (    0,     0,      0,      0,      0,      0,      0,      0,    128),
    "num_experts_per_tok": (    0,     0,      0,      0,      0,      0,      0,      0,      8),
    "moe_intermediate_size": (  0,     0,      0,      0,      0,      0,      0,      0,    768),
}
TRAINING = {
    "context":             (   64,   256,   1024,   4096,   4096,   4096,   4096,   4096,   4096),
    "batch_size":          (   12,    64,    480,    256,    512,   1024,   1024,   2048,   2048),
    "steps":               ( 2000,  5000,   5000, 11_400, 16_400, 19_200, 39_000, 78_100, 72_800),
    "learning_rate":       ( 2e-3,  1e-3,   6e-4, 2.5e-4,   2e-4, 1.6e-4, 1.2e-4,   1e-4,   1e-4),
    "warmup_steps":        (  100,   100,    500,   1000,   2000,   2000,   2000,   2000,   2000),
    "beta2":               ( 0.99,  0.99,   0.95,   0.95,   0.95,   0.95,   0.95,   0.95,   0.95),
    "weight_decay":        (  0.1,   0.1,    0.1,    0.1,    0.1,    0.1,    0.1,    0.1,    0.1),
}
# fmt: on
TABLE = SHAPE | EXPERTS | TRAINING
SIZES = {size: {name: row[i] for name, row in TABLE.items()} for i, size in enumerate(NAMES)}
# To continue from weights that others have trained
TUNING = {"context": 1024, "batch_size": 64, "steps": 1000, "learning_rate": 1e-5}
TUNING |= {"warmup_steps": 50, "beta2": 0.95, "weight_decay": 0.0}


# --- options ---


def positive(text: str) -> int:
    """A type for argparse."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of the command line. To the parser's own it adds --size, --init-from and the
    rows of the table, whose defaults follow from these two. `hf_config` is the config.json of
    --init-from, or None."""
    add = parser.add_argument
    add("--size", choices=NAMES, default="cpu", help="sets the defaults of these, in this order:")
    for name, row in TABLE.items():
        may_be_0 = name == "warmup_steps" or name in EXPERTS
        kind = positive if type(row[0]) is int and not may_be_0 else type(row[0])
        if kind is not bool:
            add(f"--{name.replace('_', '-')}", type=kind, help=", ".join(map(str, row)))
    help = "fine-tune a Qwen3 or Llama of Hugging Face"
    add("--init-from", type=Path, metavar="FOLDER", help=help)

    chosen = parser.parse_known_args()[0]
    parser.set_defaults(hf_config=None, **SIZES[chosen.size])
    if chosen.init_from:
        hf_config = hugging_face.read_config(chosen.init_from)
        # No other key sets an option, because the file may be a stranger's.
        shape = {name: hf_config.get(name, 0) for name in SHAPE | EXPERTS}
        parser.set_defaults(hf_config=hf_config, **TUNING | shape)
    args = parser.parse_args()
    if args.warmup_steps < 0:
        parser.error("--warmup-steps must be 0 or more")
    return args


def best_precision(device: torch.device) -> str:
    """bf16 on a GPU that computes in it. A V100 or T4 would only emulate it, slowly."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "fp32"
    return "fp32" if device.type == "cpu" else "bf16"


def can_compile(device: torch.device, config: dict) -> bool:
    """Only on GPUs is it worth its time. Triton needs a C compiler on the node. Experts are not
    compiled, for the reason in parallel_plan.check."""
    if device.type == "cpu" or config["model_type"] == "qwen3_moe":
        return False
    return any(map(shutil.which, ("gcc", "clang")))


# --- config.json ---


def config_of(args: argparse.Namespace, vocab_size: int) -> dict:
    """The config.json of the model: that of --init-from, or of a new Qwen3. Ends with a sentence if
    it has fewer tokens, or a shorter context, than the run needs."""
    if args.hf_config is None:
        return new_config(vars(args), args.context, vocab_size)
    config = args.hf_config
    for name in SHAPE | EXPERTS:
        if getattr(args, name) != config.get(name, 0):
            option = f"--{name.replace('_', '-')}"
            fail(f"{args.init_from} has {name} {config.get(name, 0)}, so {option} must be the same")
    if vocab_size > config["vocab_size"] or args.context > config["max_position_embeddings"]:
        limits = f"{config['vocab_size']} tokens, and --context {config['max_position_embeddings']}"
        fail(f"{args.init_from} knows {limits} at most")
    return config


def new_config(sizes: dict, context: int, vocab_size: int) -> dict:
    """The config.json of a Qwen3 whose SHAPE and EXPERTS are in `sizes`, for at least so many
    tokens. Ends with a sentence if the shape is impossible."""
    names = SHAPE | EXPERTS if sizes.get("num_experts") else SHAPE
    shape = {name: sizes[name] for name in names}
    if shape["num_attention_heads"] % shape["num_key_value_heads"] or shape["head_dim"] % 2:
        rule = "--num-attention-heads must be a multiple of --num-key-value-heads"
        fail(f"{rule}, and --head-dim even")
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu"}
    # Qwen3 was trained with this theta, and with 1,000,000 from 32,768 tokens on.
    config |= {"attention_bias": False, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
    if "num_experts" in shape:
        if not 1 <= shape["num_experts_per_tok"] <= shape["num_experts"]:
            fail("--num-experts-per-tok must be between 1 and --num-experts")
        if shape["moe_intermediate_size"] < 1:
            fail("--moe-intermediate-size must be at least 1")
        config |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
        # Without their balance in the loss, some experts get no tokens, and learn nothing.
        config |= {"output_router_logits": True, "router_aux_loss_coef": 0.001}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    # A vocabulary of whole blocks is faster on GPUs, and can be split.
    config |= {"max_position_embeddings": context, "vocab_size": math.ceil(vocab_size / 64) * 64}
    return config | shape | {"torch_dtype": "float32"}


def count_weights(config: dict, active: bool = False) -> tuple[int, int]:
    """How many weights a layer has, or a token meets there, and how many are outside the layers."""
    width, size = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    attention = width * size * (2 * heads + 2 * groups)
    norms = 2 * width + (2 * size if config["model_type"].startswith("qwen3") else 0)
    mlp = 3 * width * config["intermediate_size"]
    if config["model_type"] == "qwen3_moe":
        experts = config["num_experts_per_tok" if active else "num_experts"]
        mlp = width * (config["num_experts"] + 3 * experts * config["moe_intermediate_size"])
    embeddings = config["vocab_size"] * width * (1 if config["tie_word_embeddings"] else 2)
    return attention + mlp + norms, embeddings + width


# --- memory ---


def memory(
    config: dict,
    micro_batch_size: int,
    context: int,
    ranks: int = 1,
    tensor: int = 1,
    bf16: bool = True,
    activation_checkpointing: bool = False,
) -> dict[str, float]:
    """The bytes that a rank takes in a training step with AdamW, estimated from above, because
    compiled layers keep less.

    Of a mixture, FSDP gathers layers with all their experts, not with those that tokens have.
    `micro_batch_size` sequences at once; `ranks` hold a model between them, and each layer is
    computed by `tensor` of them.
    """
    number = 2 if bf16 else 4  # bytes of what it computes with
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"] * config["head_dim"]
    groups = config["num_key_value_heads"] * config["head_dim"]
    layer, outside = count_weights(config)
    # In float32, on a GPU, each head has a copy of the keys and values that it shares.
    copied = 2 * groups if bf16 else 2 * heads
    inner = 4 * config["intermediate_size"]
    if config["model_type"] == "qwen3_moe":  # each expert's input and output as well
        inner = config["num_experts_per_tok"] * (4 * config["moe_intermediate_size"] + 2 * width)
    # Of a layer's input, its two norms and its sum; of queries, keys and values; of SwiGLU
    kept = 4 * width + (3 * heads + groups + copied + inner) / tensor
    activations = layers * width + kept if activation_checkpointing else layers * kept
    # In float32, besides what it computes with. A model that is split gathers the embedding and
    # two layers at a time. One that is not split is cast whole.
    held = 4 * (layers * layer + outside) / ranks
    if ranks > tensor:
        held += number * (2 * layer + outside) / tensor
    elif bf16:
        held += 2 * (layers * layer + outside) / tensor
    gradients = 4 * (layers * layer + outside) / ranks
    if config["model_type"] == "qwen3_moe" and ranks > tensor:
        # Those of a whole layer, as they are and in float32 while they are summed
        gradients += (number + 4) * layer
    return {
        "weights": held,
        "gradients": gradients,
        "states": 8 * (layers * layer + outside) / ranks,  # AdamW's two moments
        "activations": number * micro_batch_size * context * activations,
        # As they are, and twice in float32 while the loss is computed
        "logits": (number + 8) * micro_batch_size * context * config["vocab_size"] / tensor,
    }


def total_memory(device: torch.device) -> float:
    """A GPU's bytes. A CPU's count as enough."""
    if device.type == "cpu":
        return math.inf
    return torch.get_device_module(device).get_device_properties(device).total_memory


def plan_memory(
    device: torch.device, activation_checkpointing: bool | None, *sizes, **options
) -> tuple[bool, str]:
    """Whether to recompute activations: as it is said, or because `memory` of the other arguments
    is more than the device's. And a line for the log on what they take."""
    room = total_memory(device)
    # NCCL takes some of it, and some is lost between tensors.
    usable = 0.9 * room
    if activation_checkpointing is None:
        activation_checkpointing = sum(memory(*sizes, **options).values()) > usable
    need = memory(*sizes, **options, activation_checkpointing=activation_checkpointing)
    total = sum(need.values())
    unit, scale = ("GiB", 2**30) if total >= 2**30 else ("MiB", 2**20)
    of = "" if room == math.inf else f" of the GPU's {room / scale:.1f}"
    parts = ", ".join(f"{name} {size / scale:.1f}" for name, size in need.items())
    line = f"Memory of a rank: about {total / scale:.1f} {unit}{of} ({parts})"
    if total > usable:
        less = "more ranks, --accumulation and --activation-checkpointing take less"
        line += f"\nwarning: this may not fit into the GPU: {less}"
        if sizes[0]["model_type"] == "qwen3_moe":
            line += ". torchtitan also splits the experts of a layer, which FSDP gathers"
    return activation_checkpointing, line


# --- speed ---


class Speed:
    """Tokens per second of all ranks, and what share of their GPUs' peak that is: mfu, the model
    FLOPs utilization. It begins at `step`."""

    def __init__(self, config: dict, args: argparse.Namespace, device: torch.device, step: int):
        self.tokens, self.steps = args.batch_size * args.context, args.steps  # of a step; of a run
        self.flops = flops_per_token(config, args.context)
        self.peak = peak_flops(device) * dist.get_world_size()
        self.device, self.step, self.start = device, step, time.perf_counter()

    @contextlib.contextmanager
    def pause(self):
        """What happens inside does not count as training."""
        began = time.perf_counter()
        yield
        self.start += time.perf_counter() - began

    def since_last(self, step: int) -> str:
        """Of the steps since the last call, for the log."""
        now = time.perf_counter()
        seconds = (now - self.start) / (step - self.step)
        self.step, self.start, rate = step, now, self.tokens / seconds
        line = f"tokens_per_second={rate:.0f}"
        if not math.isnan(self.peak):
            line += f" mfu={self.flops * rate / self.peak:.3f}"
        if self.device.type != "cpu":
            line += f" peak_memory_gib={torch.accelerator.max_memory_allocated() / 2**30:.1f}"
        return f"{line} time_left={timedelta(seconds=round(seconds * (self.steps - step)))}"


def flops_per_token(config: dict, context: int) -> int:
    """Of one training step, forward and backward: 6 N + 12 L H D T (PaLM,
    arxiv.org/abs/2204.02311, appendix B). N is the number of weights that multiply a token, so an
    embedding counts only if it is the head, and of all experts those that the token has."""
    layers = config["num_hidden_layers"]
    channels = config["num_attention_heads"] * config["head_dim"]
    layer, outside = count_weights(config, active=True)
    if not config["tie_word_embeddings"]:
        outside -= config["vocab_size"] * config["hidden_size"]
    return 6 * (layers * layer + outside) + 12 * layers * channels * context


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
