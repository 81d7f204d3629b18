"""How train_tp.py splits transformer.py, by a plan that the model knows nothing of."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


class Replicated(ParallelStyle):
    """For a module whose weights are whole on every rank, but DTensors, because clipping and fused
    AdamW take tensors of one kind.

    Takes a tensor that is the same on all ranks and returns it whole, or with
    output_layouts=Shard(0) a slice of it.
    """

    def __init__(self, output_layouts: Placement | None = None):
        self.output_layouts = output_layouts or Replicate()

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(module, device_mesh, None, self.wrap, self.unwrap)

    def wrap(self, module, inputs, device_mesh):
        return tuple(
            DTensor.from_local(x, device_mesh, [Replicate()], run_check=False) for x in inputs
        )

    def unwrap(self, module, output, device_mesh):
        return output.redistribute(placements=[self.output_layouts]).to_local()


def parallel_plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """How each part of the model is split. Between the layers x (B, T, C) is whole on all ranks,
    or split over T.

    A column-wise linear holds rows of its weight and makes a part of the channels, so no rank
    needs another's; the row-wise linear after it sums over all ranks, with one all-reduce forward,
    and one backward where x enters. The vocabulary is split too, and with it the logits (B, T, V),
    which loss_parallel takes as they are. 65 characters split unevenly.
    """
    x = Shard(1) if sequence_parallel else Replicate()
    enter = PrepareModuleInput(input_layouts=x, desired_input_layouts=Replicate())
    norm = SequenceParallel() if sequence_parallel else Replicated()
    return {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=x),
        "position_embedding": Replicated(
            output_layouts=Shard(0) if sequence_parallel else Replicate()
        ),
        "blocks.*.attention_norm": norm,
        "blocks.*.attention": enter,
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=x),
        "blocks.*.mlp_norm": norm,
        "blocks.*.mlp": enter,
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=x),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=x, output_layouts=Shard(-1), use_local_output=False),
    }


def with_own_dropout(attend: Callable, rank: int) -> Callable:
    """Attention that drops different weights on every rank of a group, because each has different
    heads.

    All other dropout is equal on these ranks, as is their random state. The state for attention is
    forked from it, as Megatron-LM's is for the tensor-parallel regions.
    """

    @torch.compiler.disable
    def attend_alone(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        seed = int(torch.randint(2**31, ())) + rank
        gpu = q.device if q.device.type != "cpu" else None
        kind = gpu.type if gpu else "cuda"
        with torch.random.fork_rng([gpu] if gpu else [], device_type=kind):
            torch.manual_seed(seed)
            return attend(q, k, v, dropout)

    return attend_alone


def whole_loss(loss: torch.Tensor) -> torch.Tensor:
    """A loss that loss_parallel has summed over the ranks already, as a plain tensor."""
    return loss.to_local() if isinstance(loss, DTensor) else loss


def sum_partial_gradients(model: torch.nn.Module):
    """Sums the norms' gradients in one all-reduce, because with sequence parallelism a rank has
    only those of its own tokens."""
    split = [weight for weight in model.parameters() if isinstance(weight.grad, DTensor)]
    partial = [weight for weight in split if weight.grad.placements[-1].is_partial()]
    if partial:
        flat = torch.cat([weight.grad.to_local() for weight in partial])
        dist.all_reduce(flat, group=partial[0].device_mesh.get_group("tensor"))
        for weight, grad in zip(partial, flat.chunk(len(partial)), strict=True):  # all of them (C,)
            weight.grad = DTensor.from_local(
                grad, weight.device_mesh, weight.placements, run_check=False
            )
