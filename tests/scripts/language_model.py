"""Run under torchrun by tests/test_language_model.py: the train scripts themselves, in every split
that these ranks allow, or in a few that cover all, one after another in one process group.

    torchrun ... language_model.py DATA_DIR OUT_DIR few|all

Rank 0 writes OUT_DIR/results_RANKS.json: for each split the losses and gradient norms, the largest
difference between the final weights and OUT_DIR/dense.pt, the bytes that each rank holds, the
collectives of a step, the types of what they reduce, and the types between blocks.
"""

import contextlib
import io
import json
import os
import re
import sys
import zlib
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import heartbeat
import transformer

FLAGS = "--layers 2 --heads 4 --width 32 --context 16 --batch-size 8 --steps 12 --warmup-steps 3 "
FLAGS += "--precision fp32 --learning-rate 0.001 --log-every 1 --eval-windows 8 --device cpu "
STEPS = 12


class Collectives(TorchDispatchMode):
    """Counts what goes through torch.distributed while it is entered, whoever calls it."""

    def __init__(self):
        super().__init__()
        self.counts, self.reduced = Counter(), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its parts come through here again, as plain tensors
        result = function(*args, **(kwargs or {}))
        namespace, name = function._schema.name.split("::")
        if "c10d" in namespace and not name.startswith(("wait", "_wrap")):
            self.counts[name] += 1
            if "reduce_scatter" in name:
                self.reduced.add(str(args[0].dtype))
        return result


def size(tensors) -> int:
    """Bytes of this rank's parts."""
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def gathered(mine) -> list:
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return everywhere


def run_script(command: str, data_dir: str, folder: Path) -> tuple[dict, str]:
    """A train script's variables after its last step, and what it has printed."""
    script, *flags = command.split()
    path, variables = f"distributed/{script}", {"__name__": "__main__"}
    sys.argv = [script, *FLAGS.split(), *flags, "--data-dir", data_dir]
    sys.argv += ["--checkpoint-dir", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            exec(compile(Path(path).read_text(), path, "exec"), variables)
        except SystemExit as end:
            assert not end.code, end.code
    return variables, printed.getvalue()


class Steps(type(heartbeat)):
    """Calls `ends` when `heartbeat.step` says that the last step is done."""

    ends = staticmethod(lambda: None)

    def __setattr__(self, name: str, value: object):
        super().__setattr__(name, value)
        if (name, value) == ("step", STEPS):
            self.ends()


def train(command: str, data_dir: str, folder: Path, dense: dict) -> dict:
    """What results.json has of a split."""
    collectives, types, manual_seed = Collectives(), set(), torch.manual_seed

    def seed(number: int):
        if heartbeat.step == STEPS - 1 and not collectives.counts:
            collectives.__enter__()
        return manual_seed(number)

    def between_blocks(module, inputs, output):
        if isinstance(module, transformer.Block):
            types.update(str(x.dtype) for x in (*inputs, output))

    hook = torch.nn.modules.module.register_module_forward_hook(between_blocks)
    Steps.ends = staticmethod(lambda: collectives.__exit__(None, None, None))
    if "--dropout" not in command:  # with it attention's seeds would count, too
        torch.manual_seed = seed
    else:
        Steps.ends = staticmethod(lambda: None)
    its, printed = run_script(command, data_dir, folder)
    torch.manual_seed, Steps.ends = manual_seed, staticmethod(lambda: None)
    hook.remove()

    model, states = its["model"], its["optimizer"].state.values()
    moments = [value for state in states for name, value in state.items() if name != "step"]
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # an evaluation leaves its last part whole
    weights = {name: whole(x) for name, x in model.named_parameters()}
    held = {"parameters": size(model.parameters()), "optimizer": size(moments)}
    lines = re.findall(r"^step=\S+ loss=(\S+) grad_norm=(\S+) ", printed, re.M)
    return {
        "losses": [float(loss) for loss, _ in lines],
        "norms": [float(norm) for _, norm in lines],
        "weights": max((weights[name] - dense[name]).abs().max().item() for name in dense),
        "drift": drift(model) if command.startswith("train_tp.py") else 0.0,
        "types": sorted(types),
        "held": gathered(held),
        "collectives": collectives.counts,
        "reduced": sorted(collectives.reduced),
    }


def dropped(command: str, data_dir: str, folder: Path) -> dict[str, list[list[int]]]:
    """Checksums of what each rank drops in a step: of each head's mask, and of each module's."""
    attend, forward, heads, modules = transformer.attend, torch.nn.Dropout.forward, [], []

    def seen(q, k, v, dropout: float):
        """Without scores, attention over the unit matrix is its mask, over the number of tokens."""
        if dropout:
            state, count = torch.get_rng_state(), q.size(-2)
            nothing = q.new_zeros(*q.shape[:-1], count)
            mask = attend(nothing, nothing, torch.eye(count).expand_as(nothing), dropout) != 0
            heads.extend(zlib.crc32(head.numpy().tobytes()) for head in mask.transpose(0, 1))
            torch.set_rng_state(state)
        return attend(q, k, v, dropout)

    def seen_in_module(self, x):
        output = forward(self, x)
        if self.training:
            modules.append(zlib.crc32((output != 0).numpy().tobytes()))
        return output

    transformer.attend, torch.nn.Dropout.forward = seen, seen_in_module
    run_script(f"{command} --dropout 0.2 --steps 1", data_dir, folder)
    transformer.attend, torch.nn.Dropout.forward = attend, forward
    return {"heads": gathered(heads), "modules": gathered(modules)}


def drift(model: torch.nn.Module) -> float:
    """The largest difference between the copies of a weight that a tensor-parallel group has
    whole."""
    largest = 0.0
    for weight in model.parameters():
        if not weight.placements[-1].is_replicate():
            continue
        mesh = weight.device_mesh
        group = mesh["tensor"].get_group() if mesh.ndim > 1 else None
        mine = weight.to_local().detach().contiguous()
        copies = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(copies, mine, group=group)
        largest = max(largest, *((copy - copies[0]).abs().max().item() for copy in copies))
    return largest


SPLITS = {
    2: {
        "ddp 2": "train_fsdp.py --shard 1",
        "ddp 2, accumulation 2": "train_fsdp.py --shard 1 --accumulation 2",
        "fsdp 2": "train_fsdp.py",
        "fsdp 2, accumulation 2": "train_fsdp.py --accumulation 2",
        "fsdp 2, recomputed": "train_fsdp.py --activation-checkpointing",
        "fsdp 2, bf16": "train_fsdp.py --precision bf16",
        "tp 2": "train_tp.py",
        "tp 2, accumulation 2": "train_tp.py --accumulation 2",
        "tp 2, recomputed": "train_tp.py --activation-checkpointing",
        "tp 2, bf16": "train_tp.py --precision bf16",
        "tp 2, sequence": "train_tp.py --sequence-parallel",
        "tp 2, sequence, accumulation 2": "train_tp.py --sequence-parallel --accumulation 2",
        "tp 2, dropout": "train_tp.py --dropout 0.2",
        "tp 2, sequence, dropout": "train_tp.py --sequence-parallel --dropout 0.2",
    },
    4: {
        "fsdp 4": "train_fsdp.py",
        "hybrid 2x2": "train_fsdp.py --shard 2",
        "hybrid 2x2, accumulation 2": "train_fsdp.py --shard 2 --accumulation 2",
        "tp 4": "train_tp.py --tensor-parallel 4",
        "tp 4, sequence": "train_tp.py --tensor-parallel 4 --sequence-parallel",
        "tp 2 x data 2": "train_tp.py --tensor-parallel 2",
        "tp 2 x data 2, accumulation 2": "train_tp.py --tensor-parallel 2 --accumulation 2",
        "tp 2 x data 2, sequence": "train_tp.py --tensor-parallel 2 --sequence-parallel",
        "tp 2 x data 2, bf16": "train_tp.py --tensor-parallel 2 --precision bf16",
        "tp 2 x data 2, dropout": "train_tp.py --tensor-parallel 2 --dropout 0.2",
    },
}
DROPPED = {
    2: {
        "fsdp 2, dropped": "train_fsdp.py",
        "tp 2, dropped": "train_tp.py",
        "tp 2, recomputed, dropped": "train_tp.py --activation-checkpointing",
        "tp 2, sequence, dropped": "train_tp.py --sequence-parallel",
    },
    4: {"tp 2 x data 2, dropped": "train_tp.py --tensor-parallel 2"},
}


# Each kind of split, and each thing that may be done with one, once.
FEW = "ddp 2, accumulation 2; fsdp 2; fsdp 2, recomputed; fsdp 2, bf16; tp 2; tp 2, recomputed; "
FEW += "tp 2, sequence; tp 2, sequence, accumulation 2; tp 2, sequence, dropout; tp 2, bf16; "
FEW += "hybrid 2x2; hybrid 2x2, accumulation 2; tp 2 x data 2; tp 2 x data 2, dropout"


def main(data_dir: str, out: str, which: str):
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    # The scripts run in this group, and leave it as it is.
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    os._exit, end = lambda status: None, os._exit
    heartbeat.start, heartbeat.__class__ = lambda: None, Steps

    dense = torch.load(Path(out, "dense.pt"), weights_only=True)
    results = {}
    for name, command in SPLITS[world_size].items():
        if which == "few" and name not in FEW.split("; "):
            continue
        results[name] = train(command, data_dir, Path(out, name), dense)
    for name, command in DROPPED[world_size].items():
        results[name] = dropped(command, data_dir, Path(out, name))
    if dist.get_rank() == 0:
        Path(out, f"results_{world_size}.json").write_text(json.dumps(results))
    dist.barrier()
    end(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
