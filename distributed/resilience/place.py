"""What a rank does together with the others: connecting, timeouts, and the end."""

import contextlib
import datetime
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .heartbeat import Heartbeat
from .ranks import Ranks, end, say, stop

# Parts of gloo's and NCCL's errors when ranks cannot reach each other. Others are one rank's own.
CANNOT_CONNECT = ("connect", "Connection", "Broken pipe", "interface", "imed out", "timeout")
CANNOT_CONNECT += ("network error", "Unable to find", "Unable to bind")


class Place:
    """One rank among the others, on its device. `timeout` is in seconds: see set_timeout.

    `groups` are the process groups that are used in steps, besides the default one: those of a
    device mesh. `seconds_saving` is the time that saving has taken so far, which Progress leaves
    out of the throughput. `status` is the exit status with which shutdown() ends this process.
    """

    def __init__(self, ranks: Ranks, device: torch.device, timeout: float):
        self.ranks, self.device, self.timeout = ranks, device, timeout
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.groups: list[dist.ProcessGroup] = []
        self.seconds_saving, self.status = 0.0, 0
        self.beat = Heartbeat(ranks, timeout)

    @contextlib.contextmanager
    def connecting(self, backend: str, store: dist.Store) -> Iterator[None]:
        """Around the start of a process group and its first all-reduce, which makes connections.

        Ranks that cannot reach each other end with a sentence within the timeout. NCCL would hang
        for ever, because its watchdog does not see its first collective. If gloo refuses on one
        rank, the others would wait for it: the first such rank, by `store`, says so and ends them.
        """
        within = datetime.timedelta(seconds=self.timeout)
        lost = f"their first all-reduce did not finish within {within}"
        timer = threading.Timer(self.timeout, self.not_connected, (backend, lost, 0))
        timer.daemon = True
        timer.start()
        # There is nothing to save yet, and Python could not run a handler in the middle of this.
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            yield
        except RuntimeError as error:
            if not any(part in str(error) for part in CANNOT_CONNECT):
                raise
            if store.add("not connected", 1) > 1:
                os._exit(0)  # another rank says so
            what = f"they cannot connect: {' '.join(str(error).split())}"
            self.not_connected(backend, what, self.rank)
        signal.signal(signal.SIGTERM, before)
        timer.cancel()
        sys.excepthook = end_after(sys.excepthook)

    def connect(self, *meshes: DeviceMesh):
        """Takes the groups of device meshes, and has each connect, which NCCL does only in a
        group's first collective."""
        self.groups = [mesh.get_group(name) for mesh in meshes for name in mesh.mesh_dim_names]
        for group in (None, *self.groups):
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def not_connected(self, backend: str, what: str, speaker: int):
        name = f"{backend.upper()}_SOCKET_IFNAME"
        chosen = os.environ.get(name, f"{backend}'s own choice")
        hint = f"The interface is {chosen}: set {name} in env.sh to one over which all nodes reach"
        hint += " each other, or look for a firewall between them"
        stop(f"all ranks joined, but {what}. {hint}", self.rank, speaker)

    def set_timeout(self, seconds: float):
        """From now on a collective fails if a rank has not joined it within that time.

        It is long until the first step is done (compilation, connections), short in steps
        (Checkpoints.due), and long again in longer_timeout.
        """
        self.timeout = self.beat.timeout = seconds
        if dist.is_initialized():
            for group in (None, *self.groups):
                dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)

    @contextlib.contextmanager
    def longer_timeout(self, seconds: float) -> Iterator[None]:
        """Around what may take a rank longer than a step: a save, a load, an evaluation."""
        before = self.timeout
        self.set_timeout(max(seconds, before))
        yield
        # In their next step the others would not wait long enough for one that is still writing.
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
        """Waits for all ranks. NCCL's barrier is an all-reduce, on the device that it is told."""
        if dist.is_initialized():
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def stop(self, sentence: str):
        """Ends the run with status 1, on all ranks, which all call it. Rank 0 says why."""
        self.stop_if_any(sentence)

    def stop_if_any(self, fault: str | None):
        """Ends the run with status 1 if any rank has a fault. The first such rank says it."""
        faulty = [rank for rank, known in enumerate(self.gathered(fault)) if known]
        if not faulty:
            return
        if self.rank == faulty[0]:
            say(fault, self.rank)
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
        # Rank 0 may still be writing, and srun may end a step soon after its first task.
        self.barrier()
        self.beat.finished = True
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.status)


def end_after(hook):
    """An excepthook that ends the process after printing the error, because gloo could keep it."""

    def report(*error):
        hook(*error)
        end()

    return report
