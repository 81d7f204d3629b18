"""Print the memory that a model takes on each GPU, as sizes.py computes it, before the job.

    python aux/memory.py --model qwen3-8b --ranks 8
    python aux/memory.py --model llama-3.1-70b --ranks 64 --sequence 8192 --recompute
    python aux/memory.py --model qwen3-8b --num-hidden-layers 48    # or any size of a config.json

The line is the one that train_fsdp.py logs before its first step, with AdamW in float32.
docs/memory.html computes the same in a browser, without torch.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

try:
    import torch

    import sizes
except ImportError as error:
    sys.exit(f"{error}: activate the environment with torch, or open docs/memory.html in a browser")

KEYS = (*sizes.SHAPE, *sizes.EXPERTS, "vocab_size", "model_type")
ROWS = {}
for size in ("0.6b", "1.7b", "4b", "8b", "32b", "30b-a3b"):
    shape = [sizes.SIZES[size][name] for name in KEYS[:-2]]
    ROWS[f"qwen3-{size}"] = (*shape, 151_936, "qwen3_moe" if size == "30b-a3b" else "qwen3")
# As in their config.json on the hub
ROWS["llama-3.1-8b"] = (32, 4096, 14_336, 32, 8, 128, False, 0, 0, 0, 128_256, "llama")
ROWS["llama-3.1-70b"] = (80, 8192, 28_672, 64, 8, 128, False, 0, 0, 0, 128_256, "llama")
MODELS = {name: dict(zip(KEYS, row, strict=True)) for name, row in ROWS.items()}


def main():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    add, positive = parser.add_argument, sizes.positive
    add("--model", choices=MODELS, default="qwen3-8b", help="sets the sizes below")
    for name, value in MODELS["qwen3-8b"].items():
        if type(value) is int:
            add(f"--{name.replace('_', '-')}", type=positive, metavar="N")
    add("--ranks", type=positive, default=1, help="that hold a model between them; 1 is DDP")
    add("--sequence", type=positive, default=4096, help="tokens of a sequence")
    add("--batch", type=positive, default=1, help="sequences that a rank computes at once")
    add("--recompute", action="store_true", help="activation checkpointing")
    add("--precision", choices=["bf16", "fp32"], default="bf16", help="to compute in")
    args = parser.parse_args()

    config = dict(MODELS[args.model])
    config |= {name: vars(args)[name] for name in KEYS if vars(args).get(name)}
    if config["num_experts"]:
        config["model_type"] = "qwen3_moe"
        if not config["num_experts_per_tok"] or not config["moe_intermediate_size"]:
            parser.error("--num-experts needs --num-experts-per-tok and --moe-intermediate-size")
    layers, bf16 = config["num_hidden_layers"], args.precision == "bf16"
    layer, outside = sizes.count_weights(config)
    line = f"Weights: {layers * layer + outside:,}"
    if config["num_experts"]:
        active, _ = sizes.count_weights(config, active=True)
        line += f", of which a token meets {layers * active + outside:,}. FSDP gathers all of a"
        line += f" layer's, {(2 if bf16 else 4) * layer / 2**30:.1f} GiB"
    print(line)
    step = (config, args.batch, args.sequence, args.ranks)
    _, line = sizes.plan_memory(torch.device("cpu"), args.recompute, *step, bf16=bf16)
    print(line)


if __name__ == "__main__":
    main()
