"""What a rank does together with the others: comparing, timeouts, and the end."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import torch_private
from .ranks import HOST, Ranks, end, say, stop_if_independent


def device_fault(name: str, ranks: Ranks) -> str | None:
    """One sentence if this rank has no device of this name (auto, cpu or cuda), or None."""
    count = torch.cuda.device_count() if name != "cpu" else 1
    granted = os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0"
    if count == 0 and (granted or name == "cuda"):
        who = "Slurm granted GPUs" if granted else "--device cuda was given"
        return f"{who}, but torch sees none: check nvidia-smi, or pass --device cpu"
    if count > 1 and ranks.local_rank >= count:
        ask = "ask for as many GPUs per node as ranks"
        return f"local rank {ranks.local_rank} has no GPU: torch sees {count}; {ask}"
    return None


class Group:
    """All ranks, seen from one of them. `timeout` is in seconds: see set_timeout.

    `groups` are the process groups that are used in steps, besides the default one: those of a
    device mesh. `seconds_saving` is the time that saving has taken so far, which Progress leaves
    out of the throughput. `status` is the exit status with which shutdown() ends this process.
    """

    def __init__(self, ranks: Ranks, device: torch.device, timeout: float):
        self.ranks, self.device, self.timeout = ranks, device, timeout
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.groups: list[dist.ProcessGroup] = []
        self.seconds_saving, self.status = 0.0, 0

    def compare(self, fault: str | None, **columns: object):
        """The ranks compare what they know, and rank 0 prints a line for each, with `columns`.

        `fault` is what is wrong on this rank, in one sentence: any rank's fault ends all of them.
        """
        stop_if_independent(self.ranks)
        shown = {"world size": self.world_size, "local rank": self.ranks.local_rank}
        shown |= {"device": self.device, "launcher": self.ranks.launcher, **columns}
        mine = {"host": HOST, "fault": fault, "torch": torch.__version__, "gpu": None}
        mine["columns"] = " | ".join(f"{name}: {value}" for name, value in shown.items())
        if self.device.type == "cuda":
            # The UUID tells a node's GPUs apart, even if CUDA_VISIBLE_DEVICES renumbers them.
            properties = torch.cuda.get_device_properties(self.device)
            mine["gpu"] = str(getattr(properties, "uuid", self.rank))  # not in every build of torch

        known = self.gathered(mine)
        if self.rank == 0:
            name = "SLURMD_NODENAME" if "SLURMD_NODENAME" in os.environ else "host"
            for rank, its in enumerate(known):
                line = f"[Rank: {rank} | {name}: {its['host']} | {its['columns']}]\n"
                print(line, end="", flush=True)
        self.stop_at_first(faults_of(known))

    def connect(self, *meshes: DeviceMesh):
        """Has all groups connect, the default one and those of the meshes, because NCCL does so
        only in a group's first collective. The CPU waits for each."""
        self.groups = [mesh.get_group(name) for mesh in meshes for name in mesh.mesh_dim_names]
        for group in (None, *self.groups):
            total = torch.ones(1, device=self.device)
            dist.all_reduce(total, group=group)
            total.item()
        # Without this the meshes' collectives would keep a timeout of their own.
        self.set_timeout(self.timeout)
        sys.excepthook = end_after(sys.excepthook)

    def set_timeout(self, seconds: float):
        """From now on a collective fails if a rank has not joined it within that time.

        It is long until the first step is done (compilation, connections), short in steps
        (Checkpoints.due), and long again in longer_timeout.
        """
        self.timeout = seconds
        if dist.is_initialized():
            for group in (None, *self.groups):
                torch_private.set_timeout(seconds, group)

    @contextlib.contextmanager
    def longer_timeout(self, seconds: float) -> Iterator[None]:
        """Around what may take a rank longer than a step: a save, a load, an evaluation."""
        before = self.timeout
        self.set_timeout(max(seconds, before))
        yield
        # Without a barrier the others' next step would not wait long enough for a rank that writes.
        self.barrier()
        self.set_timeout(before)

    def all_reduced(
        self, values: torch.Tensor | Sequence[float], operation=dist.ReduceOp.SUM
    ) -> list[float]:
        """The sum of each value over all ranks, or another `operation`. All ranks call it."""
        if not isinstance(values, torch.Tensor):
            values = torch.tensor(values, dtype=torch.float32, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(values, operation)
        return values.tolist()

    def gathered(self, value: Any, group: dist.ProcessGroup | None = None) -> list:
        """Each rank's value, by rank. All ranks call it, with the default group or another."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group)
        return values

    def barrier(self):
        """Waits for all ranks. Over gloo, because a rank with a fault may have no GPU."""
        if dist.is_initialized():
            dist.all_reduce(torch.zeros(1))

    def stop_if_any(self, fault: str | None):
        """Ends the run with status 1 if any rank has a fault. The first such rank says it."""
        self.stop_at_first(self.gathered(fault))

    def stop_at_first(self, faults: list[str | None]):
        """The same for the faults of all ranks, which each rank knows already."""
        faulty = [rank for rank, fault in enumerate(faults) if fault]
        if not faulty:
            return
        if self.rank == faulty[0]:
            say(faults[self.rank], self.rank)
        # When a rank ends, the others are ended, so the sentence must be out first.
        self.barrier()
        end()

    def shutdown(self):
        """Ends the process group and this process, if there is a group or a status to report.

        At once, because gloo's threads can outlive the group. One that frees its last tensors while
        Python is shutting down wants the interpreter's lock, and the process hangs or aborts.
        """
        if not dist.is_initialized():
            return sys.exit(self.status) if self.status else None
        # Rank 0 may still be writing, and srun may end a step soon after its first task has ended.
        self.barrier()
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.status)


def faults_of(known: list[dict]) -> list[str | None]:
    """Each rank's fault: one that it has found itself; a version of torch that differs from rank
    0's; or a GPU that another rank has, too."""
    faults, first_on = [its["fault"] for its in known], {}
    if any(faults):
        return faults
    for rank, its in enumerate(known):
        other = first_on.setdefault((its["host"], its["gpu"] or rank), rank)
        if its["torch"] != known[0]["torch"]:
            zero = f"rank 0 on {known[0]['host']} has {known[0]['torch']}"
            faults[rank] = f"this rank has torch {its['torch']}, but {zero}"
        elif other != rank:
            faults[rank] = f"ranks {other} and {rank} are on one device, GPU {its['gpu']}: ask for "
            faults[rank] += "one GPU per rank (--gpus-per-node, or NPROC_PER_NODE by hand)"
    return faults


def end_after(hook):
    """An excepthook that ends the process after printing the error, because gloo could keep it."""

    def report(*error):
        hook(*error)
        end()

    return report
