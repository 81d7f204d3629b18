"""How train_fsdp.py splits a model and a batch over the ranks, and the plan of tensor parallelism.

    fsdp_mesh, tensor_mesh = parallel_plan.meshes(device, shard, tensor)
    parallel_plan.split_layers(model, tensor_mesh, sequence_parallel=False, compiled=False)
    ...
        with loss_parallel():                       # around the loss and the backward pass
            ...
    parallel_plan.sum_partial_gradients(model)      # before the optimizer's step

transformer.py knows nothing of the plan. For another model change the names in `plan`.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from heartbeat import fail


def check(args: argparse.Namespace, world_size: int):
    """Ends with a sentence if so many ranks cannot share out the model and the batch like that."""
    if args.num_experts and args.tensor_parallel > 1:
        fail("--tensor-parallel splits no experts: leave it out, and FSDP splits them")
    if args.num_experts and args.compile:
        why = "in float32 torch 2.13 fails, and in bfloat16 we have not seen it end"
        fail(f"--compile does not go with experts, because {why}")
    tensor, heads = args.tensor_parallel, args.num_key_value_heads
    if world_size % tensor != 0 or heads % tensor != 0:
        split = f"{world_size} (ranks) and {heads} (--num-key-value-heads)"
        fail(f"--tensor-parallel must divide {split}")
    if args.sequence_parallel and args.context % tensor != 0:
        fail(f"--context must be a multiple of {tensor} (--tensor-parallel)")
    groups = world_size // tensor
    what = "ranks" if tensor == 1 else "groups of --tensor-parallel"
    if groups % (args.shard or 1) != 0:
        fail(f"--shard must divide {groups} ({what})")
    if args.batch_size % (groups * args.accumulation) != 0:
        parts = f"{groups} ({what}) x {args.accumulation} (--accumulation)"
        fail(f"--batch-size must be a multiple of {parts}")


def meshes(
    device: torch.device, shard: int, tensor: int
) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The ranks as fully_shard takes them, and as parallelize_module does; None if it has nothing
    to do. `tensor` neighbours share each layer, `shard` such groups hold one copy of the model
    between them, and the others hold more copies.

    DDP sees to the copies of a model that is not split. But it takes no DTensors, so those of one
    whose layers are split are fully_shard's.
    """
    copies = dist.get_world_size() // shard // tensor
    if shard == 1 and tensor == 1:
        return None, None
    sizes = {"replicate": copies, "shard": shard, "tensor": tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if shard > 1 and tensor > 1:
        # So that DTensor sums the gradient's norm over both dimensions at once.
        mesh["shard", "tensor"]._flatten("model")
    fsdp = None
    if copies > 1:
        fsdp = mesh["replicate", "shard"]
    elif shard > 1:
        fsdp = mesh["shard"]
    return fsdp, mesh["tensor"] if tensor > 1 else None


class Replicated(ParallelStyle):
    """For a module whose weights are whole on every rank, but DTensors, because clipping and fused
    AdamW take tensors of one kind. Takes and returns a tensor that is the same on all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self.wrap, self.unwrap)

    def wrap(self, module, inputs, device_mesh):
        return tuple(
            DTensor.from_local(x, device_mesh, [Replicate()], run_check=False) for x in inputs
        )

    def unwrap(self, module, output, device_mesh):
        return output.to_local()


class Embedding(RowwiseParallel):
    """Waits for the other ranks' part of the vectors before it returns them: torch 2.13 cannot
    compile a layer whose input is still on its way."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda module, inputs, x: x.clone())
        return module


def plan(sequence_parallel: bool) -> dict[str, ParallelStyle]:
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
        "model.embed_tokens": Embedding(input_layouts=Replicate(), output_layouts=x),
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


def split_layers(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool, compiled: bool):
    """Leaves each rank its part of every layer, and compiles the layers if asked to."""
    parallelize_module(model, mesh, plan(sequence_parallel))
    model.tie()  # parallelize_module made two parameters out of one
    # What is recomputed is compiled, because torch 2.13 cannot compile a checkpoint of DTensors.
    # The loss is left out, because the compiler assumes that the ranks' parts are equally long.
    for layer in model.model.layers if compiled else ():
        layer.layer = torch.compile(layer.layer)


def full_tensor(x: torch.Tensor) -> torch.Tensor:
    """A DTensor as a plain tensor, summed over the ranks if that is due; any other as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def sum_over_copies(model: nn.Module, now: bool):
    """Whether the next backward pass sums the gradients over the copies of the model. If a step has
    several passes, only the last one need do so."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)
    elif isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = now


def sum_partial_gradients(model: nn.Module):
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
