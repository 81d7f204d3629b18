"""Run under torchrun by tests/test_language_model.py: trains the same small model in every split its ranks allow.

    torchrun ... language_model.py DATA_DIR OUT_DIR

Rank 0 writes OUT_DIR/results.json: for each split its losses, gradient norms, largest difference between the final
weights and OUT_DIR/dense.pt, what each rank holds in bytes, and the collectives of a step.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import characters
import tensor_parallel_by_hand
import train_fsdp
import train_tp
from char_transformer import CharTransformer
from resilience.checkpoints import seed_from

CPU = torch.device("cpu")
SIZES = {"layers": 2, "heads": 4, "width": 32, "context": 16}
FLAGS = ["--batch-size", "8", "--steps", "20", "--warmup-steps", "5", "--precision", "fp32", "--dropout", "0"]
FLAGS += [part for name, value in SIZES.items() for part in (f"--{name}", str(value))]


class Collectives(TorchDispatchMode):
    """Counts what goes through torch.distributed inside the with block, whoever calls it."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its parts come through here again, as plain tensors
        namespace, name = function._schema.name.split("::")
        if "c10d" in namespace and not name.startswith(("wait", "_wrap")):
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def size(tensors) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def train(script, data_dir: str, dense: dict | None, *flags: str, steps: int = 20, dropout_place=None) -> dict:
    """Twenty steps as the script's main() does them. Returns what results.json has of a split, and the model."""
    sys.argv = ["script", *FLAGS, *flags, "--data-dir", data_dir]
    args = script.parse_arguments()
    mesh = script.make_mesh(args, CPU, dist.get_world_size())
    vocabulary = len(characters.read_vocabulary(data_dir)["characters"])
    torch.manual_seed(args.seed)
    model = CharTransformer(vocabulary, **SIZES, dropout=args.dropout)
    script.split(args, model, mesh)
    optimizer = script.make_optimizer(args, model)
    held = {}
    optimizer.register_step_pre_hook(lambda *_: held.update(gradients=size(x.grad for x in model.parameters())))
    windows = characters.windows(data_dir, "train", args.context)
    losses, norms = [], []
    for step in range(steps):
        if args.dropout:
            place = script.dropout_place(args, mesh) if dropout_place is None else dropout_place
            torch.manual_seed(seed_from(args.seed, step, place))
        batch = characters.random_batch(args, windows, step, *script.data_place(mesh), CPU)
        with Collectives() as collectives:
            loss, norm = script.train_step(args, step, model, optimizer, batch)
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    held |= {"parameters": size(model.parameters()), "optimizer": size(states)}
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, held)
    result = {"losses": losses, "norms": norms, "held": everywhere, "collectives": dict(collectives.counts)}
    whole = {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach() for name, x in model.named_parameters()}
    if dense:
        result["weights"] = max((whole[name] - dense[name]).abs().max().item() for name in dense)
    return result | {"drift": drift(model) if script is train_tp else 0.0}


def drift(model: torch.nn.Module) -> float:
    """The largest difference between the copies, within a tensor-parallel group, of a weight that it replicates."""
    largest = 0.0
    for weight in model.parameters():
        if weight.placements[-1].is_replicate():
            group = weight.device_mesh["tensor"].get_group() if weight.device_mesh.ndim > 1 else None
            copies = [torch.empty_like(weight.to_local()) for _ in range(dist.get_world_size(group))]
            dist.all_gather(copies, weight.to_local().detach().contiguous(), group=group)
            largest = max(largest, *((copy - copies[0]).abs().max().item() for copy in copies))
    return largest


def train_by_hand(data_dir: str, dense: dict) -> dict:
    """The same twenty steps with the column and row linears of tensor_parallel_by_hand.py, all ranks one group."""
    sys.argv = ["script", *FLAGS, "--data-dir", data_dir]
    args, rank, world_size = train_tp.parse_arguments(), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = CharTransformer(len(characters.read_vocabulary(data_dir)["characters"]), **SIZES)
    model = tensor_parallel_by_hand.split_by_hand(model, rank, world_size)
    optimizer = train_fsdp.make_optimizer(args, model)
    windows, losses, norms = characters.windows(data_dir, "train", args.context), [], []
    split_weights = {name: x for name, x in model.named_parameters() if x.shape != dense[name].shape}
    for step in range(args.steps):
        batch = characters.random_batch(args, windows, step, 0, 1, CPU)
        with Collectives() as collectives:
            loss = tensor_parallel_by_hand.split_loss(model, model(batch[:, :-1]), batch[:, 1:])
            loss.backward()
        squares = [sum(x.grad.square().sum() for x in split_weights.values())]
        dist.all_reduce(squares[0])
        squares += [x.grad.square().sum() for name, x in model.named_parameters() if name not in split_weights]
        norms.append(sum(squares).sqrt().item())
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.clip, sum(squares).sqrt())
        for group in optimizer.param_groups:
            group["lr"] = train_fsdp.learning_rate(args, step)
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
    return {"losses": losses, "norms": norms, "weights": differences.item(), "collectives": dict(collectives.counts)}


def count_ddp() -> dict:
    """The collectives of DistributedDataParallel's forward and backward pass, of a network as train_ddp.py's."""
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 32, 3), torch.nn.Conv2d(32, 64, 3), torch.nn.Flatten())
    network.append(torch.nn.Linear(64 * 24 * 24, 128)).append(torch.nn.Linear(128, 10))
    model = torch.nn.parallel.DistributedDataParallel(network)
    for _ in range(3):  # the buckets are made anew after the first, and broadcast
        with Collectives() as collectives:
            model(torch.zeros(2, 1, 28, 28)).sum().backward()
    return {"collectives": dict(collectives.counts)}


def main(data_dir: str, out: str):
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    dense = torch.load(Path(out, "dense.pt"), weights_only=True)
    dropout = ("--dropout", "0.2")
    results = {
        f"fsdp {world_size}": train(train_fsdp, data_dir, dense),
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
            "tp 2, accumulation 2": train(train_tp, data_dir, dense, "--accumulation", "2"),
            "tp 2, recomputed": train(train_tp, data_dir, dense, "--activation-checkpointing"),
            "tp 2, bf16": train(train_tp, data_dir, dense, "--precision", "bf16"),
            "tp 2, sequence": train(train_tp, data_dir, dense, *sequence),
            "tp 2, sequence, accumulation 2": train(train_tp, data_dir, dense, *sequence, "--accumulation", "2"),
            "tp 2, sequence, dropout": train(train_tp, data_dir, None, *sequence, *dropout, steps=5),
            "tp 2, dropout seeded by rank": train(
                train_tp, data_dir, None, *dropout, steps=5, dropout_place=dist.get_rank()
            ),
        }
    if world_size == 4:
        sequence = ("--tensor-parallel", "2", "--sequence-parallel")
        results |= {
            "hybrid 2x2": train(train_fsdp, data_dir, dense, "--hybrid", "2"),
            "hybrid 2x2, accumulation 2": train(train_fsdp, data_dir, dense, "--hybrid", "2", "--accumulation", "2"),
            "tp 2 x data 2": train(train_tp, data_dir, dense, "--tensor-parallel", "2"),
            "tp 2 x data 2, accumulation 2": train(train_tp, data_dir, dense, "--accumulation", "2"),
            "tp 2 x data 2, dropout": train(train_tp, data_dir, None, *dropout, steps=5),
            "tp 2 x data 2, sequence": train(train_tp, data_dir, dense, *sequence),
            "tp 4, sequence": train(train_tp, data_dir, dense, "--tensor-parallel", "4", "--sequence-parallel"),
        }
    if dist.get_rank() == 0:
        Path(out, f"results_{world_size}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # see Place.shutdown
