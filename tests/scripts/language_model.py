"""Run under torchrun by tests/test_train_fsdp.py: the train scripts themselves, in every split
that these ranks allow, or in a few that cover all, one after another in one process group.

    torchrun ... language_model.py DATA_DIR OUT_DIR few|all|experts FLAG ...

Rank 0 writes OUT_DIR/results_RANKS.json: for each split the losses and gradient norms, the largest
difference between the final weights and OUT_DIR/dense.pt, the bytes that each rank holds, the
collectives of a step, the types of what they reduce, the types between blocks, and torch's
precision of matmuls in float32.
"""

import contextlib
import io
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

import heartbeat
import preemption
import transformer

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
            # The script's own sums are of one number: the loss to log, and the looks at the flag.
            own = name == "allreduce_" and args[0][0].numel() == 1
            self.counts[name] += not own
            if "reduce_scatter" in name:
                self.reduced.add(str(args[0].dtype))
        return result


class Steps(type(heartbeat)):
    """Calls `after` with each step that `heartbeat.step` is set to."""

    after = staticmethod(lambda step: None)

    def __setattr__(self, name: str, value: object):
        super().__setattr__(name, value)
        if name == "step":
            Steps.after(value)


BUCKETS = Counter()


class CountedDDP(torch.nn.parallel.DistributedDataParallel):
    """Its reducer's collectives do not pass the dispatcher."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)

        def hook(state, bucket):
            BUCKETS["ddp"] += 1
            return allreduce_hook(state, bucket)

        self.register_comm_hook(None, hook)


def size(tensors) -> int:
    """Bytes of this rank's parts."""
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum(part.numel() * part.element_size() for part in parts)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def run_script(command: str, folder: Path, flags: list[str]) -> tuple[dict, str]:
    """A train script's variables after its last step, and what it has printed."""
    preemption.asked = lambda *_: False  # how often it looks depends on how long a step takes
    script, *more = command.split()
    path, variables = f"distributed/{script}", {"__name__": "__main__"}
    sys.argv = [script, *flags, *more, "--checkpoint-dir", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(Path(path).read_text(), path, "exec"), variables)
    return variables, printed.getvalue()


def train(command: str, folder: Path, flags: list[str], dense: dict) -> dict:
    """What results.json has of a split."""
    collectives, types = Collectives(), set()
    BUCKETS.clear()

    def after(step: int):
        if step == STEPS - 1:
            BUCKETS.clear()
            collectives.__enter__()
        elif step == STEPS:
            collectives.__exit__(None, None, None)

    def between_blocks(module, inputs, output):
        if isinstance(module, transformer.Block):
            types.update(str(x.dtype) for x in (inputs[0], output))

    hook = torch.nn.modules.module.register_module_forward_hook(between_blocks)
    Steps.after = staticmethod(after)
    its, printed = run_script(command, folder, flags)
    Steps.after = staticmethod(lambda step: None)
    hook.remove()

    model, states = its["model"], its["optimizer"].state.values()
    moments = [value for state in states for name, value in state.items() if name != "step"]
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # an evaluation leaves its last part whole
    weights = {name: whole(x) for name, x in model.named_parameters()}
    held = [None] * dist.get_world_size()
    mine = {"parameters": size(model.parameters()), "optimizer": size(moments)}
    dist.all_gather_object(held, mine)
    lines = re.findall(r"^step=\S+ loss=(\S+) grad_norm=(\S+) ", printed, re.M)
    return {
        "losses": [float(loss) for loss, _ in lines],
        "norms": [float(norm) for _, norm in lines],
        "weights": max((weights[name] - dense[name]).abs().max().item() for name in dense),
        "types": sorted(types),
        "held": held,
        "collectives": collectives.counts + BUCKETS,
        "reduced": sorted(collectives.reduced),
        "matmuls": torch.get_float32_matmul_precision(),
    }


TP = "train_fsdp.py --tensor-parallel 2"
SPLITS = {
    2: {
        "ddp 2": "train_fsdp.py --shard 1",
        "ddp 2, accumulation 2": "train_fsdp.py --shard 1 --accumulation 2",
        "ddp 2, bf16": "train_fsdp.py --shard 1 --precision bf16",
        "fsdp 2": "train_fsdp.py",
        "fsdp 2, accumulation 2": "train_fsdp.py --accumulation 2",
        "fsdp 2, recomputed": "train_fsdp.py --activation-checkpointing",
        "fsdp 2, bf16": "train_fsdp.py --precision bf16",
        "fsdp 2, tf32": "train_fsdp.py --precision tf32",
        "tp 2": TP,
        "tp 2, accumulation 2": f"{TP} --accumulation 2",
        "tp 2, recomputed": f"{TP} --activation-checkpointing",
        "tp 2, bf16": f"{TP} --precision bf16",
        "tp 2, sequence": f"{TP} --sequence-parallel",
        "tp 2, sequence, accumulation 2": f"{TP} --sequence-parallel --accumulation 2",
    },
    4: {
        "fsdp 4": "train_fsdp.py",
        "hybrid 2x2": "train_fsdp.py --shard 2",
        "hybrid 2x2, accumulation 2": "train_fsdp.py --shard 2 --accumulation 2",
        "tp 4": "train_fsdp.py --tensor-parallel 4",
        "tp 4, sequence": "train_fsdp.py --tensor-parallel 4 --sequence-parallel",
        "tp 2 x data 2": TP,
        "tp 2 x data 2, accumulation 2": f"{TP} --accumulation 2",
        "tp 2 x data 2, sequence": f"{TP} --sequence-parallel",
        "tp 2 x data 2, bf16": f"{TP} --precision bf16",
        "tp 2 x copies 2": f"{TP} --shard 1",
        "tp 2 x copies 2, accumulation 2": f"{TP} --shard 1 --accumulation 2",
    },
    8: {
        "tp 2 x hybrid 2x2": f"{TP} --shard 2 --accumulation 2",
    },
}
# Each kind of split, and each thing that may be done with one, once.
FEW = "ddp 2; ddp 2, accumulation 2; ddp 2, bf16; fsdp 2; fsdp 2, recomputed; fsdp 2, bf16; "
FEW += "tp 2; tp 2, recomputed; tp 2, sequence; tp 2, sequence, accumulation 2; tp 2, bf16; "
FEW += "hybrid 2x2; hybrid 2x2, accumulation 2; tp 2 x data 2"
# Of a mixture of experts. With accumulation each part of a step has a balance of its own.
EXPERTS = "ddp 2; ddp 2, bf16; fsdp 2; fsdp 2, recomputed; fsdp 4; hybrid 2x2"


def main(data_dir: str, out: str, which: str, *flags: str):
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    # The scripts run in this group, and leave it as it is.
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    os._exit, end = lambda status: None, os._exit
    heartbeat.start, heartbeat.__class__ = lambda: None, Steps
    torch.nn.parallel.DistributedDataParallel = CountedDDP

    dense = torch.load(Path(out, "dense.pt"), weights_only=True)
    results = {}
    for name, command in SPLITS[world_size].items():
        if which == "all" or name in (EXPERTS if which == "experts" else FEW).split("; "):
            its = [*flags, "--data-dir", data_dir]
            results[name] = train(command, Path(out, name), its, dense)
    if dist.get_rank() == 0:
        Path(out, f"results_{world_size}.json").write_text(json.dumps(results))
    dist.barrier()
    end(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
