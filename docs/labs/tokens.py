"""A language model on one GPU, whose loss is the mean over tokens, to be ported: see grade_port.py.

python docs/labs/tokens.py --exact     # float64, for comparisons

The sequences have different lengths. An update takes two batches of them, in the order of the data,
and its loss is the mean over the tokens of both. Padding does not count.
"""

import argparse

import torch
from exam_data import LONGEST, TOKENS, Sequences
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--checkpoint", default="tokens.pt", help="the trained weights")
parser.add_argument("--exact", action="store_true", help="float64")
options = parser.parse_args()

ACCUMULATED, PADDING = 2, 0
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
loader = DataLoader(train_set, options.batch_size, collate_fn=padded, drop_last=True)
model = LanguageModel().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
updates = options.epochs * (len(loader) // ACCUMULATED)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)

step = 0
for _ in range(options.epochs):
    batches = iter(loader)
    for batches_of_update in zip(*[batches] * ACCUMULATED, strict=False):
        count = sum((targets != PADDING).sum() for _, targets in batches_of_update).to(device)
        summed = torch.zeros((), device=device)
        optimizer.zero_grad()
        for inputs, targets in batches_of_update:
            logits = model(inputs.to(device)).flatten(0, 1)
            targets = targets.to(device).flatten()
            loss = nn.functional.cross_entropy(
                logits, targets, ignore_index=PADDING, reduction="sum"
            )
            (loss / count).backward()
            summed += loss.detach()
        rate = schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
        step += 1
        print(f"step={step} loss={(summed / count).item():.9f} learning_rate={rate:.9f}")
torch.save({"model": model.state_dict()}, options.checkpoint)
