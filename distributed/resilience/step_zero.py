"""Step 0, before the process group exists: the ranks meet, say where they are, and stop together if anything is wrong.

They talk through the rendezvous store alone, so that a fault which would make NCCL hang (two ranks on one GPU, a rank
that trains alone) ends the job within seconds, as one sentence from one rank.
"""

import datetime
import io
import json
import os
import socket
import sys
import time
import traceback
from collections import defaultdict

import torch
import torch.distributed as dist

from . import stop_request
from .arguments import let_srun_read
from .stop_request import HOST


def stop(sentence: str, rank: int = 0, speak: bool = True):
    """Ends this rank with status 1. Where several ranks know the fault, one speaks and the others give it time to."""
    if speak:
        print(f"[Rank {rank} on {HOST}] {sentence}", file=sys.stderr, flush=True)
    else:
        time.sleep(5)  # a rank that ends ends the job
    end()


def end():
    """Ends this process with status 1, at once: a clean end may wait for ever for gloo's threads, a peer being gone."""
    let_srun_read()
    os._exit(1)


def leave():
    """Ends the process group, and with it this process, with status 0.

    At once, because gloo's threads can outlive the group: one that frees its last tensors while Python is taken down
    wants the interpreter's lock, and then the process hangs or aborts (seen in one of ten runs with torch 2.13).
    """
    if dist.is_initialized():
        dist.barrier()  # rank 0 may still be writing, and srun --wait ends the step some time after its first task
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def world_size_fault(launcher: str, world_size: int) -> str | None:
    """One sentence when this process knows of fewer ranks than the job has: several trainings instead of one."""
    env = os.environ
    if launcher not in ("srun", "torchrun", "mp") or "SLURM_STEP_ID" not in env:
        return None
    if launcher == "srun":
        asked = int(env["WORLD_SIZE"]) if "NNODES" in env else world_size
    else:  # these two have set WORLD_SIZE anew; what env.sh derived from the job is its two factors
        asked = int(env.get("NNODES", 0)) * int(env.get("NPROC_PER_NODE", 0)) or world_size
        parents, nodes = int(env["SLURM_NTASKS"]), int(env["GROUP_WORLD_SIZE"])
        if nodes != parents:
            return (
                f"{parents} independent trainings instead of one: srun started {parents} x {launcher}, and this one "
                f"knows of {nodes} node (world size {world_size}); torchrun needs --nnodes={parents} and the same "
                f"--rdzv-endpoint everywhere, never --standalone (torchrun.sh does that)"
            )
    if asked != world_size:
        return f"the job asked for {asked} ranks, but {launcher} started {world_size}"
    return None


def meet(launcher: str, rank: int, local_rank: int, world_size: int, timeout: datetime.timedelta) -> dist.Store:
    """The store all ranks share, at MASTER_ADDR:MASTER_PORT (with torchrun: its agent's). Stops with a sentence."""
    speak_as(rank)
    fault = world_size_fault(launcher, world_size)
    if fault:  # each of the separate worlds has a rank 0: the first one of the job speaks
        stop(fault, rank, speak=local_rank == 0 and os.environ.get("SLURM_PROCID", "0") == "0")
    if world_size == 1:
        return dist.HashStore()
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdigit() or not 0 < int(port) < 65536:
        stop(f"MASTER_PORT is {port!r}, which is no port number", rank, speak=rank == 0)
    try:
        found = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        if rank != 0:
            time.sleep(5)  # if no host knows the name, it is rank 0 that says so
        stop(f"the host name MASTER_ADDR={address} does not resolve here: {error.strerror}", rank, local_rank == 0)
    if rank == 0 and launcher != "torchrun" and not any(is_here(family, where) for family, _, _, _, where in found):
        stop(f"MASTER_ADDR is {address}, but rank 0 is on {HOST}, and opens the port there: leave it to env.sh", rank)
    try:
        store = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))[0]
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            stop(f"port {port} on {address} is taken by another program: submit with MASTER_PORT=ANOTHER", rank)
        time.sleep(5)  # if rank 0 failed to open the store, it says so and this rank is ended
        stop(f"no rendezvous at {address}:{port} within {timeout}: {str(error).splitlines()[0]}", rank)
    mine = f"job {os.environ.get('SLURM_JOB_ID', 'none')}, start {stop_request.ATTEMPT}"
    if rank == 0:
        store.set("job", mine)
    owner = store.get("job").decode()
    if owner != mine:  # else the ranks of two jobs would train together, as far as they fit
        taken = f"{address}:{port} is the rendezvous of {owner}, not of {mine}: submit with MASTER_PORT=ANOTHER"
        stop(taken, rank, speak=rank == 0)
    return store


def is_here(family: int, address: tuple) -> bool:
    """Whether an address that a name resolves to is one of this host's own: only then can it be bound."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


def choose_device(name: str, local_rank: int, world_size: int) -> tuple[torch.device, str | None]:
    """This rank's device, and in one sentence what is wrong with it, or None. CUDA_VISIBLE_DEVICES is left to Slurm."""
    cpu = torch.device("cpu")
    if name == "auto":
        granted = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
        if granted and not torch.cuda.is_available():
            return cpu, (
                f"Slurm granted {granted} GPUs on this node, but torch {torch.__version__} sees none: look at "
                f"nvidia-smi and the build of torch here, or say --device cpu (or TRAIN_DEVICE=cpu) if that is meant"
            )
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        if name == "mps" and world_size > 1:
            name = "cpu"  # gloo does not know MPS
    if name == "mps" and (world_size > 1 or not torch.backends.mps.is_available()):
        return cpu, "--device mps needs an Apple GPU and one process alone"
    if name != "cuda":
        return torch.device(name), None
    count = torch.cuda.device_count()
    index = 0 if count == 1 else local_rank  # one device in sight: Slurm has bound it to this task
    if index >= count:
        return cpu, f"local rank {local_rank} has no GPU: torch sees {count}; ask for as many GPUs a node as ranks"
    torch.cuda.set_device(index)
    return torch.device("cuda", index), None


def gpu_uuid(device: torch.device) -> str | None:
    """What tells two GPUs of a node apart, whatever CUDA_VISIBLE_DEVICES has renumbered; None for another device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def check(store: dist.Store, rank: int, world_size: int, device: torch.device, facts: dict, fault: str | None = None):
    """Prints `facts`, one line per rank; any rank's fault, or one that only the comparison shows, stops every rank."""
    here = {"host": HOST, "fault": fault, "gpu": gpu_uuid(device), "facts": facts}
    here["torch"] = torch.__version__
    store.set(f"step 0/{rank}", json.dumps(here))
    if rank != 0:
        if store.get("step 0/verdict"):
            store.add("step 0/gone", 1)
            end()
        return
    try:
        ranks = [json.loads(store.get(f"step 0/{other}")) for other in range(world_size)]
        verdict = first_fault(ranks)
    except dist.DistError:
        missing = [str(other) for other in range(world_size) if not store.check([f"step 0/{other}"])]
        who = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
        told = f"{len(missing)} of {world_size} ranks have not come within {store.timeout}: {who}"
        ranks, verdict = [], f"[Rank 0 on {HOST}] {told}"
    name = "SLURMD_NODENAME" if "SLURMD_NODENAME" in os.environ else "host"
    print(f"Step 0: {world_size} rank{'s' if world_size > 1 else ''}", flush=True)
    for other, there in enumerate(ranks):
        shown = " | ".join(f"{fact}: {value}" for fact, value in there["facts"].items())
        print(f"[Rank: {other} | {name}: {there['host']} | {shown}]", flush=True)
    if verdict:
        print(verdict, file=sys.stderr, flush=True)
    store.set("step 0/verdict", verdict)
    if verdict:
        deadline = time.monotonic() + 5  # this process may be the store's host: it goes last
        while store.add("step 0/gone", 0) < world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        end()


def first_fault(ranks: list[dict]) -> str:
    """The one sentence that names the first fault, its rank and its host; empty when all is well."""
    said = [(rank, here) for rank, here in enumerate(ranks) if here["fault"]]
    if said:
        rank, here = said[0]
        more = f" (and {len(said) - 1} more ranks)" if len(said) > 1 else ""
        return f"[Rank {rank} on {here['host']}] {here['fault']}{more}"
    versions = defaultdict(list)
    for rank, here in enumerate(ranks):
        versions[here["torch"]].append(f"rank {rank} on {here['host']}")
    if len(versions) > 1:
        told = ", ".join(f"{version} ({who[0]})" for version, who in versions.items())
        return f"the ranks are of different versions of torch: {told}"
    gpus = {}
    for rank, here in enumerate(ranks):
        other = gpus.setdefault((here["host"], here["gpu"] or rank), rank)
        if other != rank:
            return (
                f"[Rank {rank} on {here['host']}] ranks {other} and {rank} are on one device, GPU {here['gpu']}: "
                f"ask for one GPU per rank (--gpus-per-node equal to the ranks of a node; without Slurm NPROC_PER_NODE)"
            )
    return ""


def speak_as(rank: int):
    """Keeps this rank's lines whole in a log that ranks share, and heads an uncaught exception with rank and host.

    An exception that only says that a peer is gone becomes one line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # in a notebook it is none
            # Python unbuffered writes a line and its end apart, and another rank's line may come in between.
            stream.reconfigure(line_buffering=True, write_through=False)

    def report(kind, error, trace):
        if kind is KeyboardInterrupt:
            os._exit(130)  # ctrl-C: no news to whoever typed it
        stderr = sys.__stderr__  # init_process_group wraps this hook, and keeps what it writes to sys.stderr for later
        if isinstance(error, (RuntimeError, dist.DistError)) and any(x in str(error) for x in PEER_IS_GONE):
            print(f"[Rank {rank} on {HOST}] lost a peer; the error that matters is another rank's", file=stderr)
            time.sleep(2)  # leave that rank the time to say it
        else:
            print(f"[Rank {rank} on {HOST}] failed:", file=stderr)
            traceback.print_exception(kind, error, trace, file=stderr)
        stderr.flush()
        end()

    sys.excepthook = report


PEER_IS_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
