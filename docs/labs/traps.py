"""Mistakes of split models that no loss shows, each in some ten lines, with its cure.

    NPROC_PER_NODE=4 ./torchrun.sh docs/labs/traps.py [mixed|norm|experts|means|saved]

docs/is_my_split_right.md says which they are.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))


def show(what: str, call):
    """Rank 0 prints what the call returns, or how it fails."""
    try:
        found = call()
    except Exception as error:
        found = f"{type(error).__name__}: {str(error).splitlines()[0][:72]}"
    if rank == 0:
        print(f"{what}: {found}", flush=True)


def gradients_of_ones(model: nn.Module):
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)


def mixed():
    """FSDP gathers weights when `forward` of what was sharded is called, and then only."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(1, 4)
    net.embed = lambda x: net[0](x).shape
    fully_shard(net)
    show("another method than forward", lambda: net.embed(x))
    register_fsdp_forward_method(net, "embed")
    show("the method is registered", lambda: net.embed(x))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net[0])
    gradients_of_ones(net)
    show("a part is not sharded", lambda: clip_grad_norm_(net.parameters(), 1.0, foreach=True))
    fully_shard(net)
    gradients_of_ones(net)
    norm = clip_grad_norm_(net.parameters(), 1.0, foreach=True)
    show("the root is sharded as well", norm.full_tensor)


def norm():
    """Of 24 gradients of 1 the norm is 4.8990, if they are on one mesh or on two."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    fully_shard(net[0], mesh=mesh["copies"])
    fully_shard(net, mesh=mesh._flatten("all"))
    gradients_of_ones(net)
    show("clip_grad_norm_", lambda: clip_grad_norm_(net.parameters(), 1.0))
    parts = [list(part.parameters()) for part in net]
    norms = [get_total_norm([x.grad for x in part]).full_tensor() for part in parts]
    total = torch.stack(norms).norm()  # the root of the sum of their squares
    for part in parts:
        clip_grads_with_norm_(part, 1.0, total)
    show("a norm for each mesh", lambda: f"{total:.4f}")


def experts():
    """An expert has the tokens of both ranks of a group, and FSDP divides by its two copies."""
    torch.manual_seed(0)
    tokens = torch.randn(4, 3, 8)  # of four ranks
    expert = nn.Linear(8, 1, bias=False)
    whole = torch.autograd.grad(expert(tokens).mean(), expert.weight)[0]
    for what in ("as FSDP has it", "divided by all ranks"):
        expert = nn.Linear(8, 1, bias=False)
        fully_shard(expert, mesh=mesh["copies"])
        if what == "divided by all ranks":
            expert.set_gradient_divide_factor(4.0)
            expert.set_force_sum_reduction_for_comms(True)  # gloo has no other
        # Each rank's loss is the mean over its own tokens.
        sum(expert(own).mean() for own in tokens.chunk(2)[rank // 2]).backward()
        ratio = expert.weight.grad.full_tensor().norm() / whole.norm()
        show(f"{what}, of the right gradient", lambda ratio=ratio: f"{ratio:.4f}")


def means():
    """Context parallelism: of a sequence each rank has a part, and an answer is in some only."""
    torch.manual_seed(0)
    x, targets = torch.randn(2, 16, 4), torch.randint(5, (2, 16))
    targets[0, :3] = targets[1, :14] = -100  # questions, which count in no loss
    for what in ("unsplit", "mean of the ranks' means", "sums, over the count of all ranks"):
        weight, own = torch.ones(5, 4, requires_grad=True), targets
        if what != "unsplit":
            own = targets.chunk(size, dim=1)[rank]
        part = x if what == "unsplit" else x.chunk(size, dim=1)[rank]
        count = (own >= 0).sum()
        if what.startswith("sums"):
            dist.all_reduce(count)
        loss = F.cross_entropy((part @ weight.T).flatten(0, 1), own.flatten(), reduction="sum")
        (loss / count).backward()
        if what != "unsplit":
            dist.all_reduce(weight.grad)
        if what.startswith("mean"):
            weight.grad /= size
        show(what, lambda grad=weight.grad: f"norm {grad.norm():.4f}")


def saved():
    """Each rank has experts of its own under one name: 1 on rank 0, 2 on rank 1, and so on."""
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    for what in ("plain tensors", "DTensors"):
        own = torch.full((2, 3), rank + 1.0)
        if what == "DTensors":
            own = DTensor.from_local(own, init_device_mesh("cpu", (size,)), [Shard(0)])
        path = f"{folders[0]}/{what[0]}"
        dcp.save({"experts": own}, checkpoint_id=path)
        again = {"experts": torch.zeros_like(own)}
        dcp.load(again, checkpoint_id=path)
        value = again["experts"].to_local() if what == "DTensors" else again["experts"]
        found = [None] * size
        dist.all_gather_object(found, value[0, 0].item())
        show(f"{what}, after a resume", lambda found=found: found)


for trap in (mixed, norm, experts, means, saved):
    if trap.__name__ in sys.argv[1:] or not sys.argv[1:]:
        if rank == 0:
            print(f"{trap.__name__}:", flush=True)
        trap()
dist.barrier()
os._exit(0)  # threads of gloo's can abort Python while it shuts down
