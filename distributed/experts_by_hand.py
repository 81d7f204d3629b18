"""Expert parallelism by hand: a mixture of experts, some of them on each rank, to be read.

    NPROC_PER_NODE=4 ./torchrun.sh distributed/experts_by_hand.py

Each rank has its own sequences. Two neighbours are a group, and hold all experts between them. The
ranks in the same place of each group hold copies. All other weights are on every rank:

    rank 0: experts 0 to 3    rank 1: experts 4 to 7    a group
    rank 2: experts 0 to 3    rank 3: experts 4 to 7    another

All-to-all brings a token to the ranks that have its experts, and the results back: two for a layer,
and two more in the backward pass, for the gradients. Three sums are easily wrong:

1. An expert's gradient has the tokens of its whole group already. So it is summed over its copies
   only, and all other gradients over all ranks. These are sums, and the loss is divided by the
   tokens of all ranks before: a mean over each one's own ranks would make experts' twice too large.
2. The norm for clipping has the squares of all experts of a group, and of other weights once.
3. The balance of the experts is no mean over tokens: its counts are summed over all ranks first.

The losses hardly show such a mistake. The norm of the gradients does, in the first step.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sizes import SIZES, new_config
from transformer import Experts, Transformer

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
BALANCE = 0.01


class SplitExperts(Experts):
    """This rank's experts, for all rows of its group."""

    def __init__(self, whole: Experts, group: dist.ProcessGroup):
        nn.Module.__init__(self)
        self.group = group
        for name, weight in whole.named_parameters():
            part = weight.detach().chunk(group.size())[group.rank()]
            self.register_parameter(name, nn.Parameter(part.clone()))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        # Row r: how many this rank has for each expert of rank r, and gets from it for its own.
        given = counts.view(self.group.size(), -1)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=self.group)
        splits = given.sum(1).tolist(), taken.sum(1).tolist()
        rows = Exchange.apply(rows, *splits, self.group)
        # They are sorted by the rank they come from, and only then by expert.
        expert = torch.arange(given.size(1)).repeat(len(given)).repeat_interleave(taken.flatten())
        order = expert.argsort(stable=True)
        y = super().forward(rows[order], taken.sum(0))
        return Exchange.apply(y[order.argsort()], *reversed(splits), self.group)


class Exchange(torch.autograd.Function):
    """Gives rows (S, C) away, the first `given[0]` to the first rank of the group and so on, and
    takes as many from each as `taken` says. Backward the gradients go the other way."""

    @staticmethod
    def forward(
        ctx, rows: torch.Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = taken, given, group
        return exchange(rows, given, taken, group)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return exchange(gradient, *ctx.back), None, None, None


def exchange(
    rows: torch.Tensor, given: list[int], taken: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    got = rows.new_empty(sum(taken), *rows.shape[1:])
    dist.all_to_all_single(got, rows.contiguous(), taken, given, group=group)
    return got


def split_by_hand(model: Transformer, group: dist.ProcessGroup) -> Transformer:
    """Leaves this rank its experts of an unsplit model."""
    for layer in model.model.layers:
        layer.mlp.experts = SplitExperts(layer.mlp.experts, group)
    return model


def balance(model: Transformer, ranks: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Each expert's part of all choices, times its mean probability, as Transformer.balance has it.
    Its sum over the ranks is the balance of all tokens."""
    loads = [layer.mlp.load for layer in model.model.layers]
    counts, probabilities = (sum(values) for values in zip(*loads, strict=True))
    if ranks is not None:
        dist.all_reduce(counts, group=ranks)
    rows = counts.sum() / EXPERTS["num_experts_per_tok"]
    return len(counts) * (counts / rows * (probabilities / rows)).sum()


def sum_gradients(model: nn.Module, mesh: DeviceMesh):
    """Over the copies of an expert, and over all ranks for other weights."""
    for name, weight in model.named_parameters():
        group = mesh.get_group("copies") if ".experts." in name else dist.group.WORLD
        dist.all_reduce(weight.grad, group=group)


def squares(model: nn.Module, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """The sums of squares of all gradients: of the experts', and of the others (2)."""
    sums = torch.zeros(2)
    for name, weight in model.named_parameters():
        sums[0 if ".experts." in name else 1] += weight.grad.square().sum()
    if mesh is not None:
        dist.all_reduce(sums[0], group=mesh.get_group("experts"))
    return sums


def clip(model: nn.Module, norm: torch.Tensor, limit: float):
    for weight in model.parameters():
        weight.grad *= (limit / norm).clamp(max=1)


def main(steps: int = 100):
    # A launcher sets RANK and WORLD_SIZE, a bare srun its own. Any other process is alone.
    env = os.environ
    rank = int(env.get("RANK", env.get("SLURM_PROCID", 0)))
    world_size = int(env.get("WORLD_SIZE", env.get("SLURM_STEP_NUM_TASKS", 1)))
    alone = {"store": dist.HashStore()} if world_size == 1 else {}
    dist.init_process_group("gloo", rank=rank, world_size=world_size, **alone)
    size = 1 if world_size % 2 else 2  # of a group
    mesh = init_device_mesh("cpu", (world_size // size, size), mesh_dim_names=("copies", "experts"))
    text = Path(__file__).read_text()
    numbers = torch.tensor([sorted(set(text)).index(character) for character in text])
    models = []
    for _ in range(2):
        shape = SIZES["cpu"] | EXPERTS | {"num_hidden_layers": 2}
        model = Transformer(new_config(shape, 32, 128))
        for name, weight in model.named_parameters():
            weight.data = model.first_value(name, seed=0)
        models.append(model)
    torch.manual_seed(0)
    whole, split = models[0], split_by_hand(models[1], mesh.get_group("experts"))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-4) for model in models]
    for step in range(1, steps + 1):
        batch = numbers.unfold(0, 33, 1)[torch.randint(len(numbers) - 32, (8,))]
        count, losses = batch[:, 1:].numel(), []
        parts = (whole, batch, None), (split, batch.chunk(world_size)[rank], dist.group.WORLD)
        for model, part, ranks in parts:
            logits, targets = model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()
            loss = F.cross_entropy(logits, targets, reduction="sum") / count
            (loss + BALANCE * balance(model, ranks)).backward()
            losses.append(loss.detach())
        dist.all_reduce(losses[1])
        sum_gradients(split, mesh)
        norms = [squares(whole).sum().sqrt(), squares(split, mesh).sum().sqrt()]
        for model, norm, optimizer in zip(models, norms, optimizers, strict=True):
            clip(model, norm, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if rank == 0 and (step % 20 == 0 or step == 1):
            line = f"step={step} loss_whole={losses[0]:.6f} loss_split_over_{world_size}="
            line += f"{losses[1]:.6f} norm_whole={norms[0]:.6f} norm_split={norms[1]:.6f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # The threads of gloo may outlive the group, and abort a Python that is shutting down.
    os._exit(0)
