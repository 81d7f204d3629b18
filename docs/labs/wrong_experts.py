"""experts_by_hand.py with one of four mistakes, of which no loss of the first step shows any.

    NPROC_PER_NODE=4 ./torchrun.sh docs/labs/wrong_experts.py a    # or b, c, d

Besides, it prints the norms of the first step for experts and for other weights.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import experts_by_hand as right

balance, squares, sum_gradients = right.balance, right.squares, right.sum_gradients


def norm_of_own_experts(model: nn.Module, mesh: DeviceMesh | None = None) -> torch.Tensor:
    return squares(model)


def experts_of_one_copy(model: nn.Module, mesh: DeviceMesh):
    for name, weight in model.named_parameters():
        if ".experts." not in name:
            dist.all_reduce(weight.grad)


def means_over_own_ranks(model: nn.Module, mesh: DeviceMesh):
    """Each rank's loss is the mean over its own tokens, and a gradient that over its copies."""
    for name, weight in model.named_parameters():
        group = mesh.get_group("copies") if ".experts." in name else dist.group.WORLD
        weight.grad *= dist.get_world_size()
        dist.all_reduce(weight.grad, group=group)
        weight.grad /= group.size()


def balance_of_own_counts(model: nn.Module, ranks: dist.ProcessGroup | None = None) -> torch.Tensor:
    return balance(model) / (1 if ranks is None else ranks.size())


MISTAKES = {
    "a": ("balance", balance_of_own_counts),
    "b": ("sum_gradients", experts_of_one_copy),
    "c": ("squares", norm_of_own_experts),
    "d": ("sum_gradients", means_over_own_ranks),
}


def shown(model: nn.Module, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """The script's `squares`. The norms of its first two calls, whole and split, are printed."""
    sums = counted(model, mesh)
    if models and dist.get_rank() == 0:
        experts, others = sums.sqrt().tolist()
        print(
            f"{models.pop(0)} model: norm {experts:.6f} of experts, {others:.6f} of other weights"
        )
    return sums


name, wrong = MISTAKES[sys.argv[1]]
setattr(right, name, wrong)
counted, models = right.squares, ["whole", "split"]
right.squares = shown
right.main(steps=20)
dist.barrier()
sys.stdout.flush()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
