"""tokens.py on many GPUs: chapter 2's lines, and its row on a loss over tokens."""

import argparse
import faulthandler
import os
import sys

import torch
import torch.distributed as dist
from exam_data import LONGEST, TOKENS, Sequences
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--checkpoint", default="tokens.pt", help="the trained weights")
parser.add_argument("--exact", action="store_true", help="float64")
options = parser.parse_args()

ACCUMULATED, PADDING = 2, 0
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
faulthandler.dump_traceback_later(300, exit=True)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
dist.barrier()
faulthandler.cancel_dump_traceback_later()
rank, world_size = dist.get_rank(), dist.get_world_size()
if options.batch_size % world_size != 0:
    sys.exit(f"{world_size} ranks cannot share a batch of {options.batch_size}")
per_rank = options.batch_size // world_size
torch.manual_seed(0)
torch.set_default_dtype(torch.float64 if options.exact else torch.float32)


class LanguageModel(nn.Module):
    """Tokens (batch, length) to logits (batch, length, TOKENS)."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.position = nn.Parameter(0.02 * torch.randn(LONGEST, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.embedding(tokens) + self.position[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        return self.head(self.blocks(hidden, mask, is_causal=True))


def padded(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, both (batch, length): a target is the token after its input."""
    rows = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=PADDING)
    return rows[:, :-1], rows[:, 1:]


train_set = Sequences()
sampler = DistributedSampler(train_set, shuffle=False, drop_last=True)
loader = DataLoader(train_set, per_rank, sampler=sampler, collate_fn=padded, drop_last=True)
model = LanguageModel().to(device)
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
updates = options.epochs * (len(loader) // ACCUMULATED)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

step = 0
for _ in range(options.epochs):
    batches = iter(loader)
    for batches_of_update in zip(*[batches] * ACCUMULATED, strict=False):
        count = sum((targets != PADDING).sum() for _, targets in batches_of_update).to(device)
        dist.all_reduce(count)
        summed = torch.zeros((), device=device)
        optimizer.zero_grad()
        for inputs, targets in batches_of_update:
            logits = ddp(inputs.to(device)).flatten(0, 1)
            targets = targets.to(device).flatten()
            loss = nn.functional.cross_entropy(
                logits, targets, ignore_index=PADDING, reduction="sum"
            )
            (loss * world_size / count).backward()
            summed += loss.detach()
        dist.all_reduce(summed)
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        step += 1
        if rank == 0:
            said = f"step={step} loss={(summed / count).item():.9f} learning_rate={rate:.9f}"
            print(said, flush=True)
if rank == 0:
    torch.save({"model": model.state_dict()}, options.checkpoint)
dist.barrier()
dist.destroy_process_group()
if device.type == "cpu":
    os._exit(0)  # gloo on a CPU may abort a Python that shuts down
