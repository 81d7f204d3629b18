"""How train_tp.py splits transformer.py, by a plan that the model knows nothing of."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


class Replicated(ParallelStyle):
    """For a module whose weights are whole on every rank, but DTensors, because clipping and fused
    AdamW take tensors of one kind. Takes and returns a tensor that is the same on all ranks."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(module, device_mesh, None, self.wrap, self.unwrap)

    def wrap(self, module, inputs, device_mesh):
        return tuple(
            DTensor.from_local(x, device_mesh, [Replicate()], run_check=False) for x in inputs
        )

    def unwrap(self, module, output, device_mesh):
        return output.to_local()


def parallel_plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """How each part of the model is split. Between the layers x (B, T, C) is whole on all ranks,
    or split over T.

    A column-wise linear holds rows of its weight and makes a part of the channels, so no rank
    needs another's; the row-wise linear after it sums over all ranks, with one all-reduce forward,
    and one backward where x enters. The vocabulary is split too, and with it the logits (B, T, V),
    which loss_parallel takes as they are.
    """
    x = Shard(1) if sequence_parallel else Replicate()
    # Attention's inputs are x, cos, sin and the cache, of which only x may be split.
    attention = PrepareModuleInput(
        input_layouts=(x, None, None, None),
        desired_input_layouts=(Replicate(), None, None, None),
    )
    enter = PrepareModuleInput(input_layouts=x, desired_input_layouts=Replicate())
    norm = SequenceParallel() if sequence_parallel else Replicated()
    # Of queries and keys (B, T, H, D) a rank has some heads.
    head_norm = SequenceParallel(sequence_dim=2, use_local_output=True)
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=x),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.self_attn": attention,
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.[qk]_norm": head_norm,
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=x),
        "model.layers.*.post_attention_layernorm": norm,
        "model.layers.*.mlp": enter,
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=x),
        "model.norm": norm,
        "lm_head": ColwiseParallel(
            input_layouts=x, output_layouts=Shard(-1), use_local_output=False
        ),
    }


def whole_loss(loss: torch.Tensor) -> torch.Tensor:
    """A loss that loss_parallel has summed over the ranks already, as a plain tensor."""
    return loss.to_local() if isinstance(loss, DTensor) else loss


def sum_partial_gradients(model: torch.nn.Module):
    """Sums the gradients of norms in one all-reduce, because a rank has only those of its own heads
    (inside of attention) and of its own tokens (elsewhere, with sequence parallelism)."""
    split = [weight for weight in model.parameters() if isinstance(weight.grad, DTensor)]
    partial = [weight for weight in split if weight.grad.placements[-1].is_partial()]
    if partial:
        grads = [weight.grad.to_local() for weight in partial]
        flat = torch.cat(grads)
        dist.all_reduce(flat, group=partial[0].device_mesh.get_group("tensor"))
        sums = flat.split([len(grad) for grad in grads])
        for weight, grad in zip(partial, sums, strict=True):
            weight.grad = DTensor.from_local(
                grad, weight.device_mesh, weight.placements, run_check=False
            )
