"""A language model in the style of nanoGPT, in one process: the other side of compare.py.

python dev/bench/plain_text.py --layers 4 --heads 4 --width 128 --context 64 --batch-size 12
python dev/bench/plain_text.py ... --device cuda --compile
"""

import argparse
import json
import math
import time
from contextlib import nullcontext
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
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--compile", action="store_true")
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
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, args.heads, -1)).permute(2, 0, 3, 1, 4)
        p = args.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(*heads, dropout_p=p, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self, kinds: int):
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(kinds, args.width),
            nn.Embedding(args.context, args.width),
        )
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
        x = self.tokens(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    # Opened anew each time, as nanoGPT does.
    data = np.memmap(args.data_dir / "train.bin", dtype=vocabulary["dtype"], mode="r")
    starts = torch.randint(len(data) - args.context, (args.batch_size,)).tolist()
    parts = [data[i : i + args.context + 1].astype(np.int64) for i in starts]
    both = torch.stack([torch.from_numpy(part) for part in parts])
    if args.device == "cuda":
        both = both.pin_memory().to("cuda", non_blocking=True)
    return both[:, :-1], both[:, 1:]


torch.manual_seed(0)
torch.set_float32_matmul_precision("high")
autocast = torch.autocast("cuda", torch.bfloat16) if args.device == "cuda" else nullcontext()
model = Model(vocabulary["tokenizer"]["size"]).to(args.device)
groups = [
    {"params": [w for w in model.parameters() if w.dim() >= 2], "weight_decay": 0.1},
    {"params": [w for w in model.parameters() if w.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=args.device == "cuda")
compiled = torch.compile(model) if args.compile else model

start, every = time.perf_counter(), args.steps // 5
for step in range(1, args.steps + 1):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * min(1, step / 100)
    tokens, targets = batch()
    with autocast:
        loss = compiled(tokens, targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if args.device == "cpu" or step % 10 == 0:
        loss.item()
    if step % every == 0:
        if args.device == "cuda":
            torch.cuda.synchronize()
        rate = every * args.batch_size * args.context / (time.perf_counter() - start)
        print(f"step={step} loss={loss.item():.4f} tokens_per_second={rate:.0f}", flush=True)
        start = time.perf_counter()
