"""Tensor parallelism by hand: what train_tp.py leaves to DTensor, in plain torch, to be read.

    NPROC_PER_NODE=2 ./torchrun.sh distributed/tensor_parallel_by_hand.py

Two autograd functions are all of it, Megatron-LM's f and g (Shoeybi et al. 2019,
arxiv.org/abs/1909.08053, figure 3). Between them every rank computes a part of the channels, the
heads or the vocabulary; outside them all ranks have the same values. Collectives per step: 4 for a
layer (f and g in attention and in MLP), and 4 more: g behind the embedding, f before the head,
and the largest logit and g in the loss.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from sizes import SIZES, new_config
from transformer import Transformer


class EnterSplit(torch.autograd.Function):
    """Megatron-LM's f: x as it is forward; backward the sum of the ranks' gradients of x."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return all_reduce(gradient)


class ReduceSplit(torch.autograd.Function):
    """Megatron-LM's g: the sum of the ranks' parts forward; backward the gradient as it is, the
    same for each part."""

    @staticmethod
    def forward(ctx, part: torch.Tensor) -> torch.Tensor:
        return all_reduce(part)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def all_reduce(x: torch.Tensor, operation=dist.ReduceOp.SUM) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    if dist.is_initialized():
        dist.all_reduce(x, operation)
    return x


class ColumnLinear(nn.Linear):
    """Rank r has rows r of weight (out, in): (..., in) to its part of (..., out). Its input has
    come through EnterSplit."""

    def __init__(self, whole: nn.Linear, rank: int, world_size: int):
        nn.Module.__init__(self)
        part = whole.weight.detach().chunk(world_size)[rank]
        self.weight, self.bias = nn.Parameter(part.clone()), None


class RowLinear(nn.Linear):
    """Rank r has columns r of weight (out, in). From its part of (..., in) it computes a term of
    (..., out), and ReduceSplit adds up the terms of all ranks."""

    def __init__(self, whole: nn.Linear, rank: int, world_size: int):
        nn.Module.__init__(self)
        part = whole.weight.detach().chunk(world_size, dim=1)[rank]
        self.weight, self.bias = nn.Parameter(part.clone()), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ReduceSplit.apply(super().forward(x))


class HeadNorm(nn.RMSNorm):
    """RMSNorm of this rank's heads. All ranks have the whole weight (D), and each the gradient of
    its own heads only, so the weight comes through EnterSplit."""

    def __init__(self, whole: nn.RMSNorm):
        super().__init__(whole.normalized_shape, whole.eps)
        self.weight = nn.Parameter(whole.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, EnterSplit.apply(self.weight), self.eps)


class SplitEmbedding(nn.Module):
    """Rank r has rows r of weight (V, C). For a token of another rank's it has 0, so the sum over
    all ranks is what the token's owner has."""

    def __init__(self, whole: nn.Embedding, rank: int, world_size: int):
        super().__init__()
        parts = whole.weight.detach().chunk(world_size)
        self.first, self.weight = rank * len(parts[0]), nn.Parameter(parts[rank].clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        row, held = find_rows(tokens, self.first, len(self.weight))
        return ReduceSplit.apply(F.embedding(row, self.weight) * held.unsqueeze(-1))


def find_rows(tokens: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of each token among this rank's `count` from `first` on, and whether it is one
    of them."""
    return (tokens - first).clamp(0, count - 1), (tokens >= first) & (tokens < first + count)


def split_by_hand(model: Transformer, rank: int, world_size: int) -> Transformer:
    """Leaves this rank its part of an unsplit model. The weights of norms stay whole on all
    ranks."""

    def enter(module: nn.Module, inputs: tuple) -> tuple:
        return EnterSplit.apply(inputs[0]), *inputs[1:]

    def columns(whole: nn.Linear) -> ColumnLinear:
        return ColumnLinear(whole, rank, world_size)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        attention.register_forward_pre_hook(enter)
        attention.q_proj = columns(attention.q_proj)
        attention.k_proj = columns(attention.k_proj)
        attention.v_proj = columns(attention.v_proj)
        attention.q_norm = HeadNorm(attention.q_norm)
        attention.k_norm = HeadNorm(attention.k_norm)
        attention.o_proj = RowLinear(attention.o_proj, rank, world_size)
        mlp.register_forward_pre_hook(enter)
        mlp.gate_proj, mlp.up_proj = columns(mlp.gate_proj), columns(mlp.up_proj)
        mlp.down_proj = RowLinear(mlp.down_proj, rank, world_size)
    model.model.embed_tokens = SplitEmbedding(model.model.embed_tokens, rank, world_size)
    model.lm_head = columns(model.lm_head)
    model.lm_head.register_forward_pre_hook(enter)
    model.tie()
    return model


def split_loss(model: Transformer, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of this rank's part of the logits (B, T, V / n): log of the sum of exp,
    less the target's."""
    largest = all_reduce(logits.detach().amax(-1), dist.ReduceOp.MAX)
    row, held = find_rows(targets, model.model.embed_tokens.first, logits.size(-1))
    target = logits.gather(-1, row.unsqueeze(-1)).squeeze(-1) * held
    total = (logits - largest.unsqueeze(-1)).exp().sum(-1)
    # One collective for both sums.
    total, target = ReduceSplit.apply(torch.stack((total, target)))
    return (total.log() + largest - target).mean()


def main():
    # A launcher sets RANK and WORLD_SIZE, a bare srun its own. Any other process is alone.
    env = os.environ
    rank = int(env.get("RANK", env.get("SLURM_PROCID", 0)))
    world_size = int(env.get("WORLD_SIZE", env.get("SLURM_STEP_NUM_TASKS", 1)))
    if world_size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    text = Path(__file__).read_text()
    numbers = torch.tensor([sorted(set(text)).index(character) for character in text])
    models = []
    for _ in range(2):
        model = Transformer(new_config(SIZES["cpu"] | {"num_hidden_layers": 2}, 32, 128))
        for name, weight in model.named_parameters():
            weight.data = model.first_value(name, seed=0)
        models.append(model)
    torch.manual_seed(0)
    whole, split = models[0], split_by_hand(models[1], rank, world_size)
    # At ten times this rate the losses part: Adam steps as far for a gradient of rounding noise as
    # for a large one.
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4) for model in models]
    for step in range(1, 101):
        batch = numbers.unfold(0, 33, 1)[torch.randint(len(numbers) - 32, (8,))]
        tokens, targets = batch[:, :-1], batch[:, 1:]
        loss_whole = F.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
        loss_split = split_loss(split, split(tokens), targets)
        for loss, optimizer in zip((loss_whole, loss_split), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0 and (step % 20 == 0 or step == 1):
            line = f"step={step} loss_whole={loss_whole:.6f}"
            print(f"{line} loss_split_over_{world_size}={loss_split:.6f}", flush=True)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        # The threads of gloo may outlive the group, and abort a Python that is shutting down.
        os._exit(0)
