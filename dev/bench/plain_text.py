"""Train a language model in the style of nanoGPT, on the CPU: the other side of compare.py.

python dev/bench/plain_text.py --layers 4 --heads 4 --width 128 --context 64 --batch-size 12
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--data-dir", type=Path, default=Path("data/shakespeare"))
for name, default in [("layers", 4), ("heads", 4), ("width", 128), ("context", 64)]:
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()
if args.steps < 30 or args.width % args.heads:
    parser.error("--steps takes 30 or more, and --width a multiple of --heads")
if not (args.data_dir / "vocabulary.json").exists():
    parser.error(f"no text in {args.data_dir}: python aux/prepare_data.py shakespeare")
vocabulary = json.loads((args.data_dir / "vocabulary.json").read_text())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(args.width, bias=False) for _ in range(2))
        self.qkv = nn.Linear(args.width, 3 * args.width, bias=False)
        self.out = nn.Linear(args.width, args.width, bias=False)
        self.up = nn.Linear(args.width, 4 * args.width, bias=False)
        self.down = nn.Linear(4 * args.width, args.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, args.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, kinds: int):
        super().__init__()
        self.tokens = nn.Embedding(kinds, args.width)
        self.places = nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width, bias=False)
        self.head = nn.Linear(args.width, kinds, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                deep = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * args.layers) if deep else 0.02
                nn.init.normal_(weight, std=std)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    # Opened anew each time, as nanoGPT does.
    data = np.memmap(args.data_dir / "train.bin", dtype=vocabulary["dtype"], mode="r")
    starts = torch.randint(len(data) - args.context, (args.batch_size,)).tolist()
    parts = [data[i : i + args.context + 1].astype(np.int64) for i in starts]
    both = torch.stack([torch.from_numpy(part) for part in parts])
    return both[:, :-1], both[:, 1:]


torch.manual_seed(0)
model = Model(vocabulary["tokenizer"]["size"])
groups = [
    {"params": [w for w in model.parameters() if w.dim() >= 2], "weight_decay": 0.1},
    {"params": [w for w in model.parameters() if w.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))

start, every = time.perf_counter(), args.steps // 5
for step in range(1, args.steps + 1):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1, step / 100)
    loss = model(*batch())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % every == 0:
        rate = every * args.batch_size * args.context / (time.perf_counter() - start)
        print(f"step={step} loss={loss.item():.4f} tokens_per_second={rate:.0f}", flush=True)
        start = time.perf_counter()
