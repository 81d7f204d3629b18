"""Step 0: before there is a process group, the ranks compare what they know through a store.

A fault that would make NCCL hang (two ranks on one GPU, a rank that trains by itself) ends the job
within seconds, with one sentence from one rank.
"""

import datetime
import json
import os
import socket
import sys
from argparse import Namespace

import torch
import torch.distributed as dist

from .job import HOST, JOB, RESTART_COUNT
from .ranks import Ranks, end, hosts_of_step, stop


def device_fault(name: str, ranks: Ranks) -> str | None:
    """One sentence if this rank has no device of this name (auto, cpu or cuda), or None."""
    granted = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    count = torch.cuda.device_count() if name != "cpu" else 1
    if count == 0 and (granted or name == "cuda"):
        who = f"Slurm granted {granted} GPUs on this node" if granted else "--device cuda was given"
        return (
            f"{who}, but torch {torch.__version__} sees none: look at nvidia-smi and the build of "
            f"torch here, or pass --device cpu (or set TRAIN_DEVICE=cpu) to train on the CPU"
        )
    if count > 1 and ranks.local_rank >= count:
        ask = "ask for as many GPUs per node as ranks"
        return f"local rank {ranks.local_rank} has no GPU: torch sees {count}; {ask}"
    return None


def step_zero(
    args: Namespace, ranks: Ranks, device: torch.device, fault: str | None, **columns: object
) -> dist.Store:
    """Compares all ranks, and prints a line for each. Returns the store that they share.

    `fault` is what is wrong on this rank, in one sentence: any rank's fault stops all of them.
    `columns` are also shown. Ranks that have not come within args.init_timeout are named.
    """
    for stream in (sys.stdout, sys.stderr):
        # Unbuffered, Python writes a line and its line break separately, and ranks share the log.
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
    if ranks.rank == 0:
        verdict = compare_ranks(ranks, store, timeout)
        store.set("step 0/verdict", verdict)
    else:
        verdict = wait_for_verdict(ranks, store, timeout)
    if verdict:
        end()
    return store


def wait_for_verdict(ranks: Ranks, store: dist.Store, timeout: datetime.timedelta) -> str:
    """The verdict of rank 0, which prints it itself; empty when all is well."""
    # Rank 0, which names the ranks that are missing, must be the first to give up.
    store.set_timeout(timeout + datetime.timedelta(seconds=10))
    try:
        return store.get("step 0/verdict")
    except dist.DistStoreError:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        stop(f"rank 0 has not come to {where} within {timeout}", ranks.rank, ranks.world_size - 1)
    except dist.DistNetworkError:
        return "rank 0 has ended, and has said why"


def compare_ranks(ranks: Ranks, store: dist.Store, timeout: datetime.timedelta) -> str:
    """Prints a line for each rank, and one sentence if something is wrong. Only on rank 0."""
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
    return verdict


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

    on_gpu = {}
    for rank, its in known.items():
        if its["torch"] != known[0]["torch"]:
            there = f"rank {rank} on {its['host']} has {its['torch']}"
            zero = known[0]["torch"]
            return f"the ranks have different versions of torch: {there}, rank 0 {zero}"
        other = on_gpu.setdefault((its["host"], its["gpu"] or rank), rank)
        if other != rank:
            return (
                f"[Rank {rank} on {its['host']}] ranks {other} and {rank} are on one device, GPU "
                f"{its['gpu']}: ask for one GPU per rank (--gpus-per-node equal to the ranks of a "
                f"node; without Slurm NPROC_PER_NODE)"
            )
    return ""


def gpu_uuid(device: torch.device) -> str | None:
    """It tells two GPUs of a node apart, even if CUDA_VISIBLE_DEVICES renumbers them."""
    if device.type != "cuda":
        return None
    # Not in every build of torch
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else str(uuid)


# --- rendezvous ---


def rendezvous(ranks: Ranks, timeout: datetime.timedelta) -> dist.Store:
    """The store of all ranks at MASTER_ADDR:MASTER_PORT, which is torchrun's agent's if there is
    one."""
    rank, world_size = ranks.rank, ranks.world_size
    if fault := world_size_fault(ranks):
        # Each of the separate training runs has a rank 0, but a job has only one task 0.
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
            remedy = "choose another MASTER_PORT in env.sh"
            stop(f"port {port} on {address} is taken by another program: {remedy}", rank)
        cause = str(error).splitlines()[0]
        sentence = f"no rendezvous at {address}:{port} within {timeout}: {cause}"
        # Rank 0 speaks for itself. If the others wait for it, the last of them says so.
        stop(sentence, rank, speaker=0 if rank == 0 else world_size - 1)
    if agent:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        store = dist.PrefixStore(f"/worker/{restarts}", store)

    # Without this, the ranks of two jobs that meet here would train together.
    return dist.PrefixStore(f"job {JOB}, start {RESTART_COUNT}", store)


def world_size_fault(ranks: Ranks) -> str | None:
    """One sentence if this process knows of fewer ranks than the job has, or None."""
    env, launcher = os.environ, ranks.launcher
    if launcher in ("none", "environment") or "SLURM_STEP_ID" not in env:
        return None
    tasks, started = int(env["SLURM_NTASKS"]), ranks.world_size
    if launcher == "srun":
        started = tasks
    elif int(env["GROUP_WORLD_SIZE"]) != tasks:
        return (
            f"{tasks} independent training runs instead of one: srun started {tasks} x {launcher}, "
            f"and this one knows of {env['GROUP_WORLD_SIZE']} node (world size "
            f"{ranks.world_size}); torchrun needs --nnodes={tasks} and the same --master-addr "
            f"everywhere, never --standalone (torchrun.sh does that)"
        )
    # torchrun and the spawner set WORLD_SIZE anew, but these two are still env.sh's.
    asked = int(env.get("NNODES", 0)) * int(env.get("NPROC_PER_NODE", 0)) or started
    if asked != started:
        return f"the job asked for {asked} ranks, but {launcher} started {started}"
    return None


def find_address(ranks: Ranks) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT, from Slurm in a bare srun. Stops with a sentence on a fault."""
    env, rank = os.environ, ranks.rank
    hosts = hosts_of_step() if ranks.launcher == "srun" and "MASTER_ADDR" not in env else []
    if hosts:
        env["MASTER_ADDR"] = hosts[0]
        job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
        env.setdefault("MASTER_PORT", str(61000 + (job + 1009 * step) % 4536))
    if missing := {"MASTER_ADDR", "MASTER_PORT"} - env.keys():
        what = f"one of {ranks.world_size} ranks, but {missing.pop()} is not set"
        stop(f"this is {what}: use a launcher", rank, speaker=0)
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    if rank == 0 and ranks.launcher != "torchrun":
        try:
            family, _, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            socket.create_server(where, family=family).close()
        except OSError as error:
            what = f"MASTER_ADDR is {address}, but rank 0 is on {HOST}, and opens the port there"
            stop(f"{what} ({error.strerror}): leave it to env.sh", rank)
    return address, port
