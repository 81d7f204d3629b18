"""Run under torchrun by tests/test_language_model.py: trains the same small model in every split
its ranks allow.

    torchrun ... language_model.py DATA_DIR OUT_DIR

Rank 0 writes OUT_DIR/results.json: for each split its losses, gradient norms, largest difference
between the final weights and OUT_DIR/dense.pt, what each rank holds in bytes, the types between
blocks and whether autocast is on there, the collectives of a step with their bytes, and the
kernels of its optimizer.
"""

import contextlib
import json
import os
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import char_transformer
import characters
import tensor_parallel_by_hand
import train_fsdp
import train_tp
from char_transformer import CharTransformer
from recipe import initialize, learning_rate, make_optimizer, metadata_of
from resilience import sharded_checkpoints
from resilience.samplers import seed_from

CPU = torch.device("cpu")
SIZES = {"layers": 2, "heads": 4, "width": 32, "context": 16}
FLAGS = [
    "--batch-size",
    "8",
    "--steps",
    "20",
    "--warmup-steps",
    "5",
    "--precision",
    "fp32",
    "--dropout",
    "0",
]
FLAGS += ["--learning-rate", "0.001"]
FLAGS += [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]


class Collectives(TorchDispatchMode):
    """Counts what goes through torch.distributed inside the with block, whoever calls it, and
    all kernels.

    The bytes are those of the larger side: of what an all-gather gives, of what an all-reduce or
    reduce-scatter takes.
    """

    def __init__(self):
        super().__init__()
        self.counts, self.bytes, self.kernels = Counter(), Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its parts come through here again, as plain tensors
        result = function(*args, **(kwargs or {}))
        namespace, name = function._schema.name.split("::")
        self.kernels[name] += 1
        if "c10d" in namespace and not name.startswith(("wait", "_wrap")):
            self.counts[name] += 1
            self.bytes[name] += max(size(tensors_in(part)) for part in (*args, result))
        return result


def tensors_in(part) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor)]


class Memory(TorchDispatchMode):
    """Counts the bytes of the floating-point tensors that are made inside the with block, as
    long as they live."""

    def __init__(self):
        super().__init__()
        self.made, self.peak = WeakIdKeyDictionary(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.device.type != "meta"
                and tensor.is_floating_point()
            ):
                self.made[tensor.untyped_storage()] = True
        self.peak = max(self.peak, self.held())
        return result

    def held(self) -> int:
        return sum(storage.nbytes() for storage in self.made)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size(tensors) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def build(script, data_dir: str, *flags: str, world_size: int | None = None) -> tuple:
    """Arguments, mesh and model as the script's main() has them."""
    sys.argv = ["script", *FLAGS, *flags, "--data-dir", data_dir]
    args = script.parse_arguments()
    mesh = script.make_mesh(args, CPU, world_size or dist.get_world_size())
    with torch.device("meta"):
        model = CharTransformer(**metadata_of(args)["sizes"], dropout=args.dropout)
    script.split(args, model, mesh)
    initialize(model, CPU, args.seed)
    return args, mesh, model


def train(
    script,
    data_dir: str,
    dense: dict | None,
    *flags: str,
    steps: int = 20,
    dropout_place=None,
    world_size=None,
) -> dict:
    """Twenty steps as the script's main() does them. Returns what results.json has of a split."""
    with Memory() as memory:
        args, mesh, model = build(script, data_dir, *flags, world_size=world_size)
    optimizer = make_optimizer(args, model)
    held, types, autocast = {"peak": memory.peak}, set(), set()
    optimizer.register_step_pre_hook(
        lambda *_: held.update(gradients=size(x.grad for x in model.parameters()))
    )
    optimizer.register_step_pre_hook(lambda *_: collectives.kernels.clear())
    for block in model.blocks:
        block.register_forward_hook(
            lambda _, inputs, output: types.update(str(x.dtype) for x in (*inputs, output))
        )
        block.register_forward_hook(lambda *_: autocast.add(torch.is_autocast_enabled("cpu")))
    windows = characters.windows(data_dir, "train", args.context)
    losses, norms, collectives = [], [], Collectives()
    for step in range(steps):
        if args.dropout:
            place = script.dropout_place(args, mesh) if dropout_place is None else dropout_place
            torch.manual_seed(seed_from(args.seed, step, place))
        batch = characters.random_batch(args, windows, step, *script.data_place(mesh), CPU)
        # The last step's: counting is slow.
        with collectives if step == steps - 1 else contextlib.nullcontext():
            loss, norm = script.train_step(args, step, model, optimizer, batch)
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
    states = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    held |= {"parameters": size(model.parameters()), "optimizer": size(states)}
    result = {"losses": losses, "norms": norms, "types": sorted(types), **counted(collectives)}
    result |= {"kernels": dict(collectives.kernels), "autocast": sorted(autocast)}
    whole = {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach()
        for name, x in model.named_parameters()
    }
    if dense:
        result["weights"] = max((whole[name] - dense[name]).abs().max().item() for name in dense)
    result["drift"] = drift(model) if script is train_tp else 0.0
    if args.accumulation > 1:
        held["accumulated"] = accumulated(
            args, model, lambda: script.train_step(args, 0, model, optimizer, batch)
        )
    return result | {"held": gathered(held)}


def load(script, data_dir: str, folder: Path, *flags: str) -> dict:
    """What each rank holds in bytes at most while it loads a checkpoint."""
    args, _, model = build(script, data_dir, *flags)
    dcp.save(sharded_checkpoints.state_of(model, make_optimizer(args, model)), checkpoint_id=folder)
    with Memory() as memory:
        sharded_checkpoints.load_folder(folder, model, make_optimizer(args, model))
    return {"held": gathered({"parameters": size(model.parameters()), "peak": memory.peak})}


def counted(collectives: Collectives) -> dict:
    return {"collectives": dict(collectives.counts), "bytes": dict(collectives.bytes)}


def accumulated(args, model: torch.nn.Module, step) -> int:
    """The bytes that the first part of a step leaves behind until the next part begins."""
    held = []
    with Memory() as memory:
        handle = model.register_forward_pre_hook(lambda *_: held.append(settled(memory)))
        step()  # its gradients are seen when they are made; the weights of FSDP when they are used
        step()
    handle.remove()
    assert len(held) == 2 * args.accumulation
    return held[-args.accumulation + 1] - held[-args.accumulation]


def settled(memory: Memory) -> int:
    """What is held once gloo's threads have let go of what they had summed: the least within 0.2
    seconds."""
    looks = []
    for _ in range(20):
        time.sleep(0.01)
        looks.append(memory.held())
    return min(looks)


def gathered(mine) -> list:
    """What each rank has, by rank."""
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return everywhere


def dropped(data_dir: str, *flags: str) -> dict[str, list[list[int]]]:
    """Checksums of what each rank drops in a step of train_tp.py: of each head's, and of each
    module's mask."""
    attend, heads, modules = char_transformer.attend, [], []

    def seen(q, k, v, dropout: float):
        """Without scores, attention over the unit matrix is its mask, over the number of tokens."""
        state, count = torch.get_rng_state(), q.size(-2)
        nothing = q.new_zeros(*q.shape[:-1], count)
        mask = attend(nothing, nothing, torch.eye(count).expand_as(nothing), dropout) != 0
        heads.extend(zlib.crc32(head.numpy().tobytes()) for head in mask.transpose(0, 1))
        torch.set_rng_state(state)
        return attend(q, k, v, dropout)

    char_transformer.attend = seen
    args, mesh, model = build(train_tp, data_dir, *flags)
    char_transformer.attend = attend
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(
                lambda _, inputs, x: modules.append(zlib.crc32((x != 0).numpy().tobytes()))
            )
    torch.manual_seed(seed_from(args.seed, 0, train_tp.dropout_place(args, mesh)))
    windows = characters.windows(data_dir, "train", args.context)
    batch = characters.random_batch(args, windows, 0, *train_tp.data_place(mesh), CPU)
    train_tp.train_step(args, 0, model, make_optimizer(args, model), batch)
    return {"heads": gathered(heads), "modules": gathered(modules)}


def drift(model: torch.nn.Module) -> float:
    """The largest difference between the copies, within a tensor-parallel group, of a weight
    that it replicates."""
    largest = 0.0
    for weight in model.parameters():
        if weight.placements[-1].is_replicate():
            group = (
                weight.device_mesh["tensor"].get_group() if weight.device_mesh.ndim > 1 else None
            )
            copies = [
                torch.empty_like(weight.to_local()) for _ in range(dist.get_world_size(group))
            ]
            dist.all_gather(copies, weight.to_local().detach().contiguous(), group=group)
            largest = max(largest, *((copy - copies[0]).abs().max().item() for copy in copies))
    return largest


def train_by_hand(data_dir: str, dense: dict) -> dict:
    """The same twenty steps with the column and row linears of tensor_parallel_by_hand.py, all
    ranks one group."""
    sys.argv = ["script", *FLAGS, "--data-dir", data_dir]
    args, rank, world_size = train_tp.parse_arguments(), dist.get_rank(), dist.get_world_size()
    model = CharTransformer(len(characters.read_vocabulary(data_dir)["characters"]), **SIZES)
    model = tensor_parallel_by_hand.split_by_hand(
        initialize(model, CPU, args.seed), rank, world_size
    )
    optimizer = make_optimizer(args, model)
    windows, losses, norms = characters.windows(data_dir, "train", args.context), [], []
    collectives = Collectives()
    split_weights = {
        name: x for name, x in model.named_parameters() if x.shape != dense[name].shape
    }
    for step in range(args.steps):
        batch = characters.random_batch(args, windows, step, 0, 1, CPU)
        with collectives if step == args.steps - 1 else contextlib.nullcontext():
            loss = tensor_parallel_by_hand.split_loss(model, model(batch[:, :-1]), batch[:, 1:])
            loss.backward()
        squares = [sum(x.grad.square().sum() for x in split_weights.values())]
        dist.all_reduce(squares[0])
        squares += [
            x.grad.square().sum()
            for name, x in model.named_parameters()
            if name not in split_weights
        ]
        norms.append(sum(squares).sqrt().item())
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.clip, sum(squares).sqrt())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    difference = 0.0
    for name, x in model.named_parameters():
        dim = next((i for i in range(x.dim()) if x.size(i) != dense[name].size(i)), None)
        part = dense[name] if dim is None else dense[name].chunk(world_size, dim)[rank]
        difference = max(difference, (x.detach() - part).abs().max().item())
    differences = torch.tensor([difference])
    dist.all_reduce(differences, dist.ReduceOp.MAX)
    return {"losses": losses, "norms": norms, "weights": differences.item(), **counted(collectives)}


def count_ddp() -> dict:
    """The collectives of DistributedDataParallel's forward and backward pass, of a network as
    train_ddp.py's."""
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3), torch.nn.Conv2d(32, 64, 3), torch.nn.Flatten()
    )
    network.append(torch.nn.Linear(64 * 24 * 24, 128)).append(torch.nn.Linear(128, 10))
    model = torch.nn.parallel.DistributedDataParallel(network)
    for _ in range(3):  # the buckets are made anew after the first, and broadcast
        with Collectives() as collectives:
            model(torch.zeros(2, 1, 28, 28)).sum().backward()
    return counted(collectives) | {"parameters": size(model.parameters())}


def main(data_dir: str, out: str):
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    dense = torch.load(Path(out, "dense.pt"), weights_only=True)
    dropout = ("--dropout", "0.2")
    results = {
        f"fsdp {world_size}": train(train_fsdp, data_dir, dense),
        f"fsdp {world_size}, loaded": load(train_fsdp, data_dir, Path(out, f"fsdp {world_size}")),
        f"tp {world_size}": train(train_tp, data_dir, dense, "--tensor-parallel", str(world_size)),
        f"tp {world_size}, dropout": train(
            train_tp, data_dir, None, "--tensor-parallel", str(world_size), *dropout, steps=5
        ),
        f"by hand {world_size}": train_by_hand(data_dir, dense),
        f"ddp {world_size}": count_ddp(),
    }
    if world_size == 2:
        sequence = ("--tensor-parallel", "2", "--sequence-parallel")
        results |= {
            "fsdp 2, accumulation 2": train(train_fsdp, data_dir, dense, "--accumulation", "2"),
            "fsdp 2, recomputed": train(train_fsdp, data_dir, dense, "--activation-checkpointing"),
            "fsdp 2, bf16": train(train_fsdp, data_dir, dense, "--precision", "bf16"),
            "tp 2, loaded": load(train_tp, data_dir, Path(out, "tp 2")),
            "tp 2, accumulation 2": train(train_tp, data_dir, dense, "--accumulation", "2"),
            "tp 2, recomputed": train(train_tp, data_dir, dense, "--activation-checkpointing"),
            "tp 2, bf16": train(train_tp, data_dir, dense, "--precision", "bf16"),
            "tp 2, sequence": train(train_tp, data_dir, dense, *sequence),
            "tp 2, sequence, accumulation 2": train(
                train_tp, data_dir, dense, *sequence, "--accumulation", "2"
            ),
            "tp 2, sequence, dropout": train(
                train_tp, data_dir, None, *sequence, *dropout, steps=5
            ),
            "alone": train(train_fsdp, data_dir, dense, world_size=1),
            "alone, bf16": train(train_fsdp, data_dir, dense, "--precision", "bf16", world_size=1),
            "tp 2, dropped": dropped(data_dir, *dropout),
            "tp 2, recomputed, dropped": dropped(data_dir, *dropout, "--activation-checkpointing"),
            "tp 2, sequence, dropped": dropped(data_dir, *dropout, *sequence),
            "tp 2, dropout seeded by rank": train(
                train_tp, data_dir, None, *dropout, steps=5, dropout_place=dist.get_rank()
            ),
        }
    if world_size == 4:
        sequence = ("--tensor-parallel", "2", "--sequence-parallel")
        results |= {
            "hybrid 2x2": train(train_fsdp, data_dir, dense, "--hybrid", "2"),
            "hybrid 2x2, accumulation 2": train(
                train_fsdp, data_dir, dense, "--hybrid", "2", "--accumulation", "2"
            ),
            "tp 2 x data 2": train(train_tp, data_dir, dense, "--tensor-parallel", "2"),
            "tp 2 x data 2, loaded": load(train_tp, data_dir, Path(out, "tp 2 x data 2")),
            "tp 2 x data 2, bf16": train(train_tp, data_dir, dense, "--precision", "bf16"),
            "tp 2 x data 2, dropped": dropped(data_dir, *dropout),
            "tp 2 x data 2, accumulation 2": train(
                train_tp, data_dir, dense, "--accumulation", "2"
            ),
            "tp 2 x data 2, dropout": train(train_tp, data_dir, None, *dropout, steps=5),
            "tp 2 x data 2, sequence": train(train_tp, data_dir, dense, *sequence),
            "tp 4, sequence": train(
                train_tp, data_dir, dense, "--tensor-parallel", "4", "--sequence-parallel"
            ),
        }
    if dist.get_rank() == 0:
        Path(out, f"results_{world_size}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # see Place.shutdown
