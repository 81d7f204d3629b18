"""Step 0: before there is a process group, the ranks compare what they know through a store.

A fault that would make NCCL hang (two ranks on one GPU, a rank that trains by itself) ends the job
within seconds, with one sentence from one rank.
"""

import datetime
import json
import os
import re
import socket
import sys
from argparse import Namespace

import torch
import torch.distributed as dist

from .job import HOST, JOB, RESTART_COUNT
from .ranks import Ranks, end, hosts_of_step, stop


def device_fault(name: str, ranks: Ranks) -> str | None:
    """One sentence if this rank has no device of this name (auto, cpu or cuda), or None."""
    if name == "cpu":
        return None
    granted = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    count = torch.cuda.device_count()
    if count == 0 and (granted or name == "cuda"):
        who = f"Slurm granted {granted} GPUs on this node" if granted else "--device cuda was given"
        return (
            f"{who}, but torch {torch.__version__} sees none: look at nvidia-smi and the build of "
            f"torch here, or say --device cpu (or TRAIN_DEVICE=cpu) if that is meant"
        )
    if count > 1 and ranks.local_rank >= count:
        return (
            f"local rank {ranks.local_rank} has no GPU: torch sees {count}; ask for as many GPUs "
            f"a node as ranks"
        )
    return None


def step_zero(
    args: Namespace, ranks: Ranks, device: torch.device, fault: str | None, **columns: object
) -> dist.Store:
    """Compares all ranks, and prints a line for each. Returns the store that they share.

    `fault` is what is wrong on this rank, in one sentence: any rank's fault stops all of them.
    `columns` are shown besides. Ranks that have not come within args.init_timeout are named.
    """
    for stream in (sys.stdout, sys.stderr):
        # Python unbuffered writes a line and its end apart, and ranks share the log.
        stream.reconfigure(line_buffering=True, write_through=False)
    if ranks.launcher == "srun" and "OMP_NUM_THREADS" not in os.environ:
        # A bare srun: every rank would use all CPUs.
        torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", 1)))

    timeout = datetime.timedelta(seconds=args.init_timeout)
    store = rendezvous(ranks, timeout)
    shown = {"world size": ranks.world_size, "local rank": ranks.local_rank, "device": device}
    shown |= {"launcher": ranks.launcher, **columns}
    mine = {"host": HOST, "fault": fault, "gpu": gpu_uuid(device), "torch": torch.__version__}
    mine["columns"] = " | ".join(f"{name}: {value}" for name, value in shown.items())
    store.set(f"step 0/{ranks.rank}", json.dumps(mine))

    if ranks.rank != 0:
        try:
            verdict = store.get("step 0/verdict")
        except dist.DistError:
            end()  # rank 0 has ended, and has said why
        if verdict:
            end()
        return store

    keys = [f"step 0/{rank}" for rank in range(ranks.world_size)]
    try:
        store.wait(keys, timeout)
        there = keys
    except dist.DistError:
        there = [key for key in keys if store.check([key])]
    known = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if key in there}
    print(f"Step 0: {ranks.world_size} rank{'s' if ranks.world_size > 1 else ''}", flush=True)
    if len(known) < ranks.world_size:
        verdict = name_missing(ranks, known, timeout)
    else:
        name = "SLURMD_NODENAME" if "SLURMD_NODENAME" in os.environ else "host"
        for rank, its in known.items():
            print(f"[Rank: {rank} | {name}: {its['host']} | {its['columns']}]", flush=True)
        verdict = first_fault(known)
    if verdict:
        print(verdict, file=sys.stderr, flush=True)
    store.set("step 0/verdict", verdict)
    if verdict:
        end()
    return store


def name_missing(ranks: Ranks, known: dict[int, dict], timeout: datetime.timedelta) -> str:
    """One sentence with the ranks that did not join, and their hosts if these are known."""
    hosts = dict(enumerate(hosts_of_step()))
    hosts |= {rank // ranks.local_world_size: its["host"] for rank, its in known.items()}
    missing = []
    for rank in range(ranks.world_size):
        if rank not in known:
            host = hosts.get(rank // ranks.local_world_size)
            missing.append(f"rank {rank} on {host}" if host else f"rank {rank}")
    named = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
    what = f"{len(missing)} of {ranks.world_size} ranks did not join within {timeout}"
    return f"[Rank 0 on {HOST}] {what}: {named}"


def first_fault(known: dict[int, dict]) -> str:
    """The sentence on the first fault, its rank and its host; empty when all is well."""
    faulty = [rank for rank, its in known.items() if its["fault"]]
    if faulty:
        its = known[faulty[0]]
        more = f" (and {len(faulty) - 1} more)" if len(faulty) > 1 else ""
        return f"[Rank {faulty[0]} on {its['host']}] {its['fault']}{more}"

    gpus = {}
    for rank, its in known.items():
        if its["torch"] != known[0]["torch"]:
            there = f"rank {rank} on {its['host']} has {its['torch']}"
            return (
                f"the ranks have different versions of torch: {there}, rank 0 {known[0]['torch']}"
            )
        other = gpus.setdefault((its["host"], its["gpu"] or rank), rank)
        if other != rank:
            return (
                f"[Rank {rank} on {its['host']}] ranks {other} and {rank} are on one device, GPU "
                f"{its['gpu']}: ask for one GPU per rank (--gpus-per-node equal to the ranks of a "
                f"node; without Slurm NPROC_PER_NODE)"
            )
    return ""


def gpu_uuid(device: torch.device) -> str | None:
    """It tells two GPUs of a node apart, whatever CUDA_VISIBLE_DEVICES has renumbered."""
    if device.type != "cuda":
        return None
    # Not in every build of torch
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


# --- rendezvous ---


def rendezvous(ranks: Ranks, timeout: datetime.timedelta) -> dist.Store:
    """The store of all ranks at MASTER_ADDR:MASTER_PORT, with torchrun its agent's."""
    rank, world_size = ranks.rank, ranks.world_size
    if fault := world_size_fault(ranks):
        # Each of the separate trainings has a rank 0, but a job has one task 0.
        stop(fault, int(os.environ["SLURM_PROCID"]) + ranks.local_rank, speaker=0)
    if world_size == 1:
        return dist.HashStore()

    address, port = find_address(ranks)
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        # It does not wait for workers, because rank 0 names those that are missing.
        hosts_it = rank == 0 and not agent
        store = dist.TCPStore(
            address, port, world_size, hosts_it, timeout, False, multi_tenant=True
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            remedy = "submit with MASTER_PORT=ANOTHER"
            stop(f"port {port} on {address} is taken by another program: {remedy}", rank)
        cause = str(error).splitlines()[0]
        sentence = f"no rendezvous at {address}:{port} within {timeout}: {cause}"
        # Rank 0 has come, or it is what the others wait for: then the last one says so.
        stop(sentence, rank, speaker=0 if rank == 0 else world_size - 1)
    if agent:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"/worker/{restarts}", store)

    # Without this the ranks of two jobs would train together, as far as they fit.
    mine = f"job {JOB}, start {RESTART_COUNT}"
    if rank == 0:
        store.set("job", mine)
    try:
        owner = store.get("job").decode()
    except dist.DistError:
        stop(f"rank 0 has not come to {address}:{port} within {timeout}", rank, world_size - 1)
    if owner != mine:
        where = f"{address}:{port} is the rendezvous of {owner}, not of {mine}"
        stop(f"{where}: submit with MASTER_PORT=ANOTHER", rank)
    if rank != 0:  # rank 0 is there, and shall be the first whose patience ends
        store.set_timeout(timeout + datetime.timedelta(seconds=30))
    return store


def world_size_fault(ranks: Ranks) -> str | None:
    """One sentence if this process knows of fewer ranks than the job has: several trainings."""
    env, launcher = os.environ, ranks.launcher
    if launcher in ("none", "environment") or "SLURM_STEP_ID" not in env:
        return None
    tasks, started = int(env["SLURM_NTASKS"]), ranks.world_size
    if launcher == "srun":
        started = tasks
    elif int(env["GROUP_WORLD_SIZE"]) != tasks:
        return (
            f"{tasks} independent trainings instead of one: srun started {tasks} x {launcher}, and "
            f"this one knows of {env['GROUP_WORLD_SIZE']} node (world size {ranks.world_size}); "
            f"torchrun needs --nnodes={tasks} and the same --master-addr everywhere, never "
            f"--standalone (torchrun.sh does that)"
        )
    # torchrun and the spawner set WORLD_SIZE anew: these two are what env.sh has found in the job.
    asked = int(env.get("NNODES", 0)) * int(env.get("NPROC_PER_NODE", 0)) or started
    if asked != started:
        return f"the job asked for {asked} ranks, but {launcher} started {started}"
    return None


def find_address(ranks: Ranks) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT, in a bare srun from Slurm. Stops with a sentence."""
    env, rank = os.environ, ranks.rank
    if ranks.launcher == "srun" and "MASTER_ADDR" not in env:
        hosts = hosts_of_step()
        if not hosts:
            tasks = f"{ranks.world_size} tasks without MASTER_ADDR"
            stop(f"{tasks}, and no scontrol here: use a launcher", rank, speaker=0)
        job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
        env["MASTER_ADDR"] = hosts[0]
        env.setdefault("MASTER_PORT", str(61000 + (job + 1009 * step) % 4536))
    address, port = env["MASTER_ADDR"], env.get("MASTER_PORT", "")
    if not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        stop(f"MASTER_PORT is {port!r}, which is no port number", rank, speaker=0)
    try:
        found = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        sentence = f"the host name MASTER_ADDR={address} does not resolve here: {error.strerror}"
        stop(sentence, rank, speaker=rank - ranks.local_rank)
    if rank == 0 and ranks.launcher != "torchrun" and not any(is_here(*each) for each in found):
        where = f"MASTER_ADDR is {address}, but rank 0 is on {HOST}, and opens the port there"
        stop(f"{where}: leave it to env.sh", rank)
    return address, int(port)


def is_here(family: int, kind: int, protocol: int, name: str, address: tuple) -> bool:
    """Whether an address is one of this host's own: only then can it be bound."""
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True
