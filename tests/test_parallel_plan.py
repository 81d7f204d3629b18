"""parallel_plan.py: what is refused, and which ranks share what. test_train_fsdp.py trains so."""

import argparse

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import parallel_plan

# --num-experts 0 and --context 16 for two ranks, and what is given besides
BAD = [
    ({"batch_size": 7}, "--batch-size must be a multiple of 2 (ranks) x 1 (--accumulation)"),
    ({"shard": 3}, "--shard must divide 2 (ranks)"),
    ({"tensor_parallel": 3}, "must divide 2 (ranks) and 6 (--num-key-value-heads)"),
    ({"tensor_parallel": 2, "num_key_value_heads": 1}, "and 1 (--num-key-value-heads)"),
    (
        {"tensor_parallel": 2, "sequence_parallel": True, "context": 15},
        "--context must be a multiple of 2 (--tensor-parallel)",
    ),
    ({"tensor_parallel": 2, "shard": 2}, "--shard must divide 1 (groups of --tensor-parallel)"),
    (
        {"tensor_parallel": 2, "accumulation": 3},
        "multiple of 1 (groups of --tensor-parallel) x 3 (--accumulation)",
    ),
    ({"num_experts": 4, "tensor_parallel": 2}, "--tensor-parallel splits no experts: leave it"),
    ({"num_experts": 4, "compile": True}, "--compile does not go with experts, because"),
]
GOOD = [
    {"batch_size": 2, "shard": 2},
    {"shard": 1, "accumulation": 4},
    {"tensor_parallel": 2, "num_key_value_heads": 2, "sequence_parallel": True},
    {"tensor_parallel": 2, "context": 15, "compile": True, "shard": 1, "batch_size": 7},
    {"num_experts": 4, "compile": False},
]


@pytest.mark.parametrize(("given", "sentence"), [*BAD, *((its, None) for its in GOOD)])
def test_a_layout_that_is_impossible_is_a_sentence(given, sentence):
    args = {"num_experts": 0, "num_key_value_heads": 6, "context": 16, "batch_size": 8}
    args |= {"accumulation": 1, "compile": None, "shard": None}
    args |= {"tensor_parallel": 1, "sequence_parallel": False} | given
    if sentence is None:
        parallel_plan.check(argparse.Namespace(**args), 2)
        return
    with pytest.raises(SystemExit) as ended:
        parallel_plan.check(argparse.Namespace(**args), 2)
    assert sentence in ended.value.code


# How many ranks, --shard and --tensor-parallel; the ranks with which rank 5 has copies, and those
# with which it holds a model, by fully_shard; and those with which it computes a layer.
LAYOUTS = [
    ((8, 1, 1), None, None),
    ((8, 8, 1), [[*range(8)]], None),
    ((8, 2, 1), [[1, 3, 5, 7], [4, 5]], None),
    ((8, 1, 2), [[1, 3, 5, 7], [5]], [4, 5]),
    ((8, 4, 2), [[1, 3, 5, 7]], [4, 5]),
    ((8, 2, 2), [[1, 5], [5, 7]], [4, 5]),
    ((8, 1, 8), None, [*range(8)]),
]


@pytest.mark.parametrize(("layout", "copies_and_shards", "tensor"), LAYOUTS)
def test_which_ranks_share_what(layout, copies_and_shards, tensor):
    """What is neither split nor shared out is DistributedDataParallel's, not fully_shard's."""
    world_size, *sizes = layout
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=world_size)
    try:
        fsdp, split = parallel_plan.meshes(torch.device("cpu"), *sizes)
        groups = fsdp and [dist.get_process_group_ranks(each) for each in fsdp.get_all_groups()]
        assert groups == copies_and_shards
        assert (split and dist.get_process_group_ranks(split.get_group())) == tensor
    finally:
        dist.destroy_process_group()


def test_gradients_are_summed_once_a_step(monkeypatch):
    """Over DDP's copies, and FSDP's. A model without copies has nothing to say."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = torch.nn.Linear(2, 2)
        ddp, asked = torch.nn.parallel.DistributedDataParallel(model), []
        for now in (False, True):
            parallel_plan.sum_over_copies(ddp, now)
            assert ddp.require_backward_grad_sync == now
        parallel_plan.sum_over_copies(model, False)
        fsdp = fully_shard(model)
        monkeypatch.setattr(fsdp, "set_requires_all_reduce", asked.append)
        parallel_plan.sum_over_copies(fsdp, False)
        assert asked == [False]
    finally:
        dist.destroy_process_group()
