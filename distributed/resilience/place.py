"""The place of this process in a run: its rank, its device, and the store that it shares with the other ranks.

Step 0 comes before the process group. The ranks compare what they know through the rendezvous store alone, so that a
fault which would make NCCL hang (two ranks on one GPU, a rank that trains alone) ends the job within seconds, with one
sentence from one rank.
"""

import contextlib
import datetime
import fcntl
import io
import itertools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from . import heartbeat
from .job import HOST, JOB, RESTART_COUNT

# Parts of gloo's and NCCL's errors on the ranks whose peer has ended, or has not come to a collective in time
PEER_FAILED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
PEER_FAILED += ("Timed out waiting", "remote process exited or there was a network error")
CANNOT_CONNECT = (*PEER_FAILED, "connectFullMesh", "interface", "timeout", "Unable to find", "Unable to bind")
AGENT_PREFIX = f"/worker/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"  # in the store of torchrun's agent


@dataclass
class Place:
    """One rank of a run. `launcher` is srun, torchrun, spawn, environment or none (one process).

    `groups` are the process groups that are used in steps, besides the default one: those of a device mesh.
    `seconds_saving` is the time that saving has taken so far: Progress leaves it out of the throughput.
    `status` is the exit status with which shutdown() ends this process.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    store: dist.Store
    launcher: str
    timeout: float = 0.0  # see set_timeout
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    seconds_saving: float = 0.0
    status: int = 0

    def all_reduced(self, values: torch.Tensor | Sequence[float], operation=dist.ReduceOp.SUM) -> list[float]:
        """The sum of each value over all ranks (or what `operation` says). A collective: every rank must call it."""
        if not isinstance(values, torch.Tensor):
            values = torch.tensor(values, dtype=torch.float32, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(values, operation)
        return values.tolist()

    def barrier(self):
        """Waits for all ranks. NCCL's barrier is an all-reduce, on the device that it is told."""
        if dist.is_initialized():
            dist.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def set_timeout(self, seconds: float):
        """From now on a collective fails when a rank has not come to it within so long.

        It is long until the first step is done (compilation, connections), short in steps (Checkpoints.due), and long
        again in longer_timeout.
        """
        self.timeout = heartbeat.timeout = seconds
        for group in (None, *self.groups) if dist.is_initialized() else ():
            dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)

    @contextlib.contextmanager
    def longer_timeout(self, seconds: float) -> Iterator[None]:
        """Around what may take a rank longer than a step: a save, a load, an evaluation. By all ranks."""
        before = self.timeout
        self.set_timeout(max(seconds, before))
        yield
        self.barrier()  # in their next step the others would not wait long enough for one that is still writing
        self.set_timeout(before)

    def stop(self, sentence: str):
        """Ends the run with status 1, on all ranks, which all call it. Rank 0 prints the sentence."""
        self.stop_if_any(sentence)

    def stop_if_any(self, fault: str | None):
        """Ends the run with status 1 if any rank has a fault, one sentence. The first that has one prints it."""
        faults = [fault] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(faults, fault)
        if not any(faults):
            return
        if self.rank == next(rank for rank, fault in enumerate(faults) if fault):
            say(fault, self.rank)
        self.barrier()  # the first rank that ends has the others ended: only when it has been said
        end()

    def shutdown(self):
        """Ends the process group and this process. Without a process group, a status of 0 ends nothing.

        At once, because gloo's threads can outlive the group. One that frees its last tensors while Python is shutting
        down wants the interpreter's lock, and the process hangs or aborts (seen in one of ten runs with torch 2.13).
        """
        if dist.is_initialized():
            self.barrier()  # rank 0 may still be writing, and srun --wait ends the step some time after its first task
            heartbeat.finished = True
            dist.destroy_process_group()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.status)
        elif self.status:
            sys.exit(self.status)


def init_process_group(args: Namespace, fault: str | None = None, **columns: object) -> Place:
    """Does the rendezvous, prints Step 0, and starts the heartbeat and NCCL or gloo.

    `fault` is what is wrong on this rank, in one sentence: any rank's fault stops all of them. `columns` are shown in
    Step 0 besides. `args` has device, and init_timeout in seconds.
    """
    launcher, rank, local_rank, world_size = find_ranks()
    set_up_output(rank)
    if vars(args).get("deterministic"):
        torch.use_deterministic_algorithms(True)
    if launcher == "srun" and "OMP_NUM_THREADS" not in os.environ:  # typed by hand: every rank would use all CPUs
        torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", 1)))
    timeout = datetime.timedelta(seconds=args.init_timeout)
    heartbeat.timeout = args.init_timeout
    store = rendezvous(launcher, rank, local_rank, world_size, timeout)
    device, device_fault = choose_device(args.device, local_rank, world_size)
    columns = {"world size": world_size, "local rank": local_rank, "device": device, "launcher": launcher, **columns}
    place = Place(rank, local_rank, world_size, device, store, launcher, args.init_timeout)
    step_zero(place, timeout, columns, device_fault or fault)
    if world_size > 1:
        nodes = ranks_of_nodes(launcher, world_size)
        heartbeat.start(rank, world_size, next(ranks for ranks in nodes if rank in ranks))
        connect(place, timeout)
    return place


def find_ranks() -> tuple[str, int, int, int]:
    """Who started this process, and which rank it is: (launcher, rank, local_rank, world_size).

    RANK, LOCAL_RANK and WORLD_SIZE if RANK is set, else Slurm's own numbers in a task of srun, else one process.
    """
    env = os.environ
    # The batch shell, too, has SLURM_PROCID, always 0. Ranks exist only in a step of srun's, which has a small number.
    in_step = int(env.get("SLURM_STEP_ID", 2**32)) < 2**31
    if "RANK" not in env:
        if not in_step:
            return "none", 0, 0, 1
        if "SLURM_PROCID" not in env:  # as in a container that was given only some of Slurm's variables
            stop("this is a task of srun, but neither RANK nor SLURM_PROCID is set: use a launcher")
        return "srun", int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), int(env["SLURM_NTASKS"])
    if missing := {"LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - env.keys():
        stop(f"RANK is set, but {' and '.join(sorted(missing))} not: start this with a launcher, or unset RANK")
    launcher = "srun" if in_step else "environment"
    if "TORCHELASTIC_RUN_ID" in env:  # set by torchrun and by spawn_ranks.py
        launcher = "torchrun" if "TORCHELASTIC_USE_AGENT_STORE" in env else "spawn"
    return launcher, int(env["RANK"]), int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"])


def set_up_output(rank: int):
    """Makes each line of this rank one write, and heads an uncaught exception with rank and host.

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
        if isinstance(error, RuntimeError | dist.DistError) and any(part in str(error) for part in PEER_FAILED):
            lost = f"[Rank {rank} on {HOST}] lost a peer; the error that matters is another rank's"
            print(lost, file=stderr)
        else:
            print(f"[Rank {rank} on {HOST}] failed:", file=stderr)
            traceback.print_exception(kind, error, trace, file=stderr)
        end()

    sys.excepthook = report


def say(sentence: str, rank: int):
    print(f"[Rank {rank} on {HOST}] {sentence}", file=sys.stderr, flush=True)


def stop(sentence: str, rank: int = 0, prints: bool = True):
    """Ends this rank with status 1. If several ranks know the fault, one prints it, and fails the job.

    The others end with status 0: a rank that fails has the others ended, perhaps before the sentence is out.
    """
    if not prints:
        os._exit(0)
    say(sentence, rank)
    end()


def end():
    """Ends this process with status 1, at once: a clean end may wait for ever for gloo's threads, a peer being gone."""
    sys.stdout.flush()
    sys.__stderr__.flush()
    os._exit(1)


# --- rendezvous -------------------------------------------------------------------------------------------------------


def rendezvous(launcher: str, rank: int, local_rank: int, world_size: int, timeout: datetime.timedelta) -> dist.Store:
    """The store all ranks share, at MASTER_ADDR:MASTER_PORT (with torchrun: its agent's). Stops with a sentence."""
    fault = world_size_fault(launcher, world_size)
    if fault:  # each of the separate worlds has a rank 0: the first one of the job prints it
        stop(fault, rank, prints=local_rank == 0 and os.environ.get("SLURM_PROCID", "0") == "0")
    if world_size == 1:
        return dist.HashStore()
    address, port = find_address(launcher, rank, local_rank)
    without_rank_0 = ranks_of_nodes(launcher, world_size)[-1][0] or 1  # the rank that says so
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent has opened the port
    try:  # not wait_for_workers: rank 0 names the missing ranks
        store = dist.TCPStore(address, port, world_size, rank == 0 and not agent, timeout, False, multi_tenant=True)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            stop(f"port {port} on {address} is taken by another program: submit with MASTER_PORT=ANOTHER", rank)
        sentence = f"no rendezvous at {address}:{port} within {timeout}: {str(error).splitlines()[0]}"
        stop(sentence, rank, prints=rank in (0, without_rank_0))
    if agent:
        store = dist.PrefixStore(AGENT_PREFIX, store)
    mine = f"job {JOB}, start {RESTART_COUNT}"
    if rank == 0:
        store.set("job", mine)
    try:
        owner = store.get("job").decode()
    except dist.DistError:
        stop(f"rank 0 has not come to {address}:{port} within {timeout}", rank, prints=rank == without_rank_0)
    if owner != mine:  # else the ranks of two jobs would train together, as far as they fit
        taken = f"{address}:{port} is the rendezvous of {owner}, not of {mine}: submit with MASTER_PORT=ANOTHER"
        stop(taken, rank, prints=rank == 0)
    if rank != 0:  # rank 0 is there, and the first whose patience with others ends
        store.set_timeout(timeout + datetime.timedelta(seconds=30))
    return store


def world_size_fault(launcher: str, world_size: int) -> str | None:
    """One sentence when this process knows of fewer ranks than the job has: several trainings instead of one."""
    env = os.environ
    if launcher not in ("srun", "torchrun", "spawn") or "SLURM_STEP_ID" not in env:
        return None
    tasks = int(env["SLURM_NTASKS"])
    if launcher == "srun":
        asked, started = int(env["WORLD_SIZE"]) if "NNODES" in env else world_size, tasks
    else:  # these two have set WORLD_SIZE anew; what env.sh derived from the job is its two factors
        asked, started = int(env.get("NNODES", 0)) * int(env.get("NPROC_PER_NODE", 0)) or world_size, world_size
        nodes = int(env["GROUP_WORLD_SIZE"])
        if nodes != tasks:
            return (
                f"{tasks} independent trainings instead of one: srun started {tasks} x {launcher}, and this one "
                f"knows of {nodes} node (world size {world_size}); torchrun needs --nnodes={tasks} and the same "
                f"--master-addr everywhere, never --standalone (torchrun.sh does that)"
            )
    if asked != started:
        return f"the job asked for {asked} ranks, but {launcher} started {started}"
    return None


def ranks_of_nodes(launcher: str, world_size: int) -> list[range]:
    """The ranks of each node, in the nodes' order. What is not known is taken for nodes with one rank each."""
    if launcher == "srun":  # 4(x2),3: two nodes with 4 tasks and one with 3
        found = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        counts = [int(tasks) for tasks, times in found for _ in range(int(times or 1))]
    else:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun and spawn_ranks.py set it
        counts = [local] * (world_size // local)
    if sum(counts) != world_size:
        counts = [1] * world_size
    return [range(end - count, end) for count, end in zip(counts, itertools.accumulate(counts), strict=True)]


def hosts_of_step() -> list[str]:
    """The nodes of this srun, as scontrol knows them; none where there is no scontrol, as in a container."""
    try:
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
        return subprocess.run(command, capture_output=True, text=True).stdout.split()
    except (OSError, KeyError):
        return []


def find_address(launcher: str, rank: int, local_rank: int) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT, for `srun python SCRIPT` typed by hand from Slurm. Stops with a sentence."""
    env = os.environ
    if launcher == "srun" and "MASTER_ADDR" not in env:
        if not (hosts := hosts_of_step()):
            tasks = env["SLURM_NTASKS"]
            stop(f"{tasks} tasks without MASTER_ADDR, and no scontrol here: use a launcher", rank, prints=rank == 0)
        env["MASTER_ADDR"] = hosts[0]
    if launcher == "srun":
        job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
        env.setdefault("MASTER_PORT", str(61000 + (job + 1009 * step) % 4536))
    address, port = env["MASTER_ADDR"], env["MASTER_PORT"]
    if not port.isdigit() or not 0 < int(port) < 65536:
        stop(f"MASTER_PORT is {port!r}, which is no port number", rank, prints=rank == 0)
    try:
        found = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        sentence = f"the host name MASTER_ADDR={address} does not resolve here: {error.strerror}"
        stop(sentence, rank, prints=local_rank == 0)
    if rank == 0 and launcher != "torchrun" and not any(is_local(family, where) for family, _, _, _, where in found):
        stop(f"MASTER_ADDR is {address}, but rank 0 is on {HOST}, and opens the port there: leave it to env.sh", rank)
    return address, int(port)


def is_local(family: int, address: tuple) -> bool:
    """Whether an address that a name resolves to is one of this host's own: only then can it be bound."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address[0], 0, *address[2:]))
        except OSError:
            return False
    return True


# --- device -----------------------------------------------------------------------------------------------------------


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
    hidden = 0 < count < max(2, int(os.environ.get("SLURM_GPUS_ON_NODE") or 0))  # Slurm shows only some of the node's
    index = local_rank % count if hidden else local_rank
    if index >= count:
        return cpu, f"local rank {local_rank} has no GPU: torch sees {count}; ask for as many GPUs a node as ranks"
    torch.cuda.set_device(index)
    return torch.device("cuda", index), None


def gpu_uuid(device: torch.device) -> str | None:
    """What tells two GPUs of a node apart, whatever CUDA_VISIBLE_DEVICES has renumbered; None where it is not known."""
    if device.type != "cuda":
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)  # not in every build of torch
    return None if uuid is None else str(uuid)


# --- Step 0 -----------------------------------------------------------------------------------------------------------


def step_zero(place: Place, timeout: datetime.timedelta, columns: dict, fault: str | None):
    """Rank 0 prints `columns`, a line per rank. Any rank's fault, or one that only a comparison shows, stops all."""
    store, rank, world_size = place.store, place.rank, place.world_size
    mine = {"host": HOST, "fault": fault, "gpu": gpu_uuid(place.device), "torch": torch.__version__}
    mine["interface"] = {name: interface(name) for name in {"gloo", backend_of(place.device)} if world_size > 1}
    mine["columns"] = {name: str(value) for name, value in columns.items()}
    store.set(f"step 0/{rank}", json.dumps(mine))
    if rank != 0:
        if store.get("step 0/verdict"):  # printed by rank 0 before it stood here
            store.add("step 0/ended", 1)
            end()
        return
    keys = [f"step 0/{other}" for other in range(world_size)]
    there = set(keys)
    try:
        store.wait(keys, timeout)
    except dist.DistError:
        there = {key for key in keys if store.check([key])}
    ranks = [json.loads(store.get(key)) if key in there else None for key in keys]
    come = [known for known in ranks if known]
    verdict = first_fault(come) if len(come) == world_size else name_missing(place, ranks, timeout)
    name = "SLURMD_NODENAME" if "SLURMD_NODENAME" in os.environ else "host"
    print(f"Step 0: {world_size} rank{'s' if world_size > 1 else ''}", flush=True)
    for other, known in enumerate(ranks if len(come) == world_size else []):
        shown = " | ".join(f"{column}: {value}" for column, value in known["columns"].items())
        print(f"[Rank: {other} | {name}: {known['host']} | {shown}]", flush=True)
    if verdict:
        print(verdict, file=sys.stderr, flush=True)
    store.set("step 0/verdict", verdict)
    if verdict:
        deadline = time.monotonic() + 5  # this process may be the store's host: it goes last
        while store.add("step 0/ended", 0) < len(come) - 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        end()


def name_missing(place: Place, ranks: list[dict | None], timeout: datetime.timedelta) -> str:
    """One sentence with the ranks that did not join; their hosts from Slurm, or from others of the same node."""
    nodes, hosts = ranks_of_nodes(place.launcher, place.world_size), hosts_of_step()
    hosts = hosts if len(hosts) == len(nodes) else [""] * len(nodes)
    missing = []
    for node, host in zip(nodes, hosts, strict=True):
        host = next((known["host"] for rank in node if (known := ranks[rank])), host)
        missing += [f"rank {rank}" + f" on {host}" * bool(host) for rank in node if not ranks[rank]]
    named = ", ".join(missing[:8]) + ", ..." * (len(missing) > 8)
    return f"[Rank 0 on {HOST}] {len(missing)} of {place.world_size} ranks did not join within {timeout}: {named}"


def first_fault(ranks: list[dict]) -> str:
    """The one sentence that names the first fault, its rank and its host; empty when all is well."""
    faulty = [(rank, known) for rank, known in enumerate(ranks) if known["fault"]]
    if faulty:
        rank, known = faulty[0]
        more = f" (and {len(faulty) - 1} more)" if len(faulty) > 1 else ""
        return f"[Rank {rank} on {known['host']}] {known['fault']}{more}"
    versions = defaultdict(list)
    for rank, known in enumerate(ranks):
        versions[known["torch"]].append(f"rank {rank} on {known['host']}")
    if len(versions) > 1:
        listed = ", ".join(f"{version} ({names[0]})" for version, names in versions.items())
        return f"the ranks are of different versions of torch: {listed}"
    gpus = {}
    for rank, known in enumerate(ranks):
        other = gpus.setdefault((known["host"], known["gpu"] or rank), rank)
        if other != rank:
            return (
                f"[Rank {rank} on {known['host']}] ranks {other} and {rank} are on one device, GPU {known['gpu']}: "
                f"ask for one GPU per rank (--gpus-per-node equal to the ranks of a node; without Slurm NPROC_PER_NODE)"
            )
    return ""


# --- connections ------------------------------------------------------------------------------------------------------


def connect(place: Place, timeout: datetime.timedelta):
    """Starts NCCL or gloo, and makes the connections in one all-reduce, within `timeout`.

    NCCL connects in its first collective, where its watchdog does not see it: with a wrong interface or a firewall that
    would hang for ever. The sentence comes from the first rank that has waited long enough.
    """
    backend, lost = backend_of(place.device), f"their first all-reduce did not finish within {timeout}"
    timer = threading.Timer(timeout.total_seconds(), report_not_connected, (place, lost, backend))
    timer.daemon = True
    timer.start()
    with connecting(place, backend):
        dist.init_process_group(
            backend, store=place.store, rank=place.rank, world_size=place.world_size, timeout=timeout
        )
        place.all_reduced([1])  # reads the result: on a GPU it is there only then
    timer.cancel()


@contextlib.contextmanager
def connecting(place: Place, backend: str) -> Iterator[None]:
    """Around the start of a process group: ends the run with a sentence when the ranks cannot connect."""
    listens = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # when another rank has printed it: nothing is to save yet
    try:
        yield
    except RuntimeError as error:
        if any(part in str(error) for part in CANNOT_CONNECT):
            cause = re.sub(r"\[/.*?] ", "", "; ".join(str(error).splitlines()))  # without gloo's source file
            report_not_connected(place, f"they cannot connect: {cause[:300]}", backend)
        raise
    signal.signal(signal.SIGTERM, listens)


def report_not_connected(place: Place, lost: str, backend: str):
    """Ends the run. The first rank that comes here names the interfaces, as every rank has written them in Step 0."""
    hosts, first = defaultdict(list), False
    with contextlib.suppress(dist.DistError, OSError):  # rank 0, the store's host, has ended
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        socket.create_connection((address, port), timeout=10).close()
        # A connection of its own: the main thread may be using the other one.
        store = dist.TCPStore(address, port, None, False, datetime.timedelta(seconds=10), False)
        store = dist.PrefixStore(AGENT_PREFIX, store) if isinstance(place.store, dist.PrefixStore) else store
        first = store.add("not connected", 1) == 1
        for rank in range(place.world_size) if first else ():
            known = json.loads(store.get(f"step 0/{rank}"))
            these = hosts[known["interface"].get(backend, "")]  # one rank alone has looked up none
            if known["host"] not in these:
                these.append(known["host"])
        if first:
            more = {name: f" and {len(some) - 3} more" * (len(some) > 3) for name, some in hosts.items()}
            used = ", ".join(f"{name} on {', '.join(some[:3])}{more[name]}" for name, some in hosts.items())
            variable = f"{backend.upper()}_SOCKET_IFNAME"
            hint = f"{variable} in env.sh chooses one by which all nodes reach each other; or a firewall is in between"
            sentence = f"all ranks joined, but {lost}. The interface is {used}: {hint}"
            print(f"[Rank {place.rank} on {HOST}] {sentence}", file=sys.stderr, flush=True)
            store.set("printed", "")
        else:
            store.wait(["printed"])  # the first rank that ends has the others ended
        deadline = time.monotonic() + 5  # rank 0, the store's host, goes last: when all have come, and one has printed
        while place.rank == 0 and time.monotonic() < deadline:
            if store.add("not connected", 0) >= place.world_size and store.check(["printed"]):
                break
            time.sleep(0.01)
    end()


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def interface(backend: str) -> str:
    """The network interface that NCCL or gloo takes here, by the rules in their manuals."""
    if chosen := os.environ.get(f"{backend.upper()}_SOCKET_IFNAME"):
        return chosen
    names = [name for _, name in socket.if_nameindex()]
    if backend == "nccl":  # the first that begins with ib, else one that is neither loopback nor Docker's
        return min(
            names, key=lambda name: (not name.startswith("ib"), name.startswith("lo"), name.startswith("docker"))
        )
    try:  # gloo: that of the address to which the host's own name resolves
        own = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "that of a host name which does not resolve"
    return next((name for name in names if address_of(name) == own), own)


def address_of(name: str) -> str | None:
    """The IPv4 address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # Linux' SIOCGIFADDR
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
