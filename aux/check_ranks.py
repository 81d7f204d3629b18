"""Find the bad node: where every rank is, how fast it is, and a verdict.

    sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=64 \\
        launch_slurm_with_torchrun.sh aux/check_ranks.py
    srun --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 python check_ranks.py
    torchrun --standalone --nproc-per-node=8 check_ranks.py

The last line says that all is well (exit status 0, even with warnings), or which nodes to leave out
(exit status 1). All ranks compute at once, as in training. A rank with less than 0.8 of the median
speed is bad (on CPUs 0.5). So is a node whose all-reduce, inside it or with each of two neighbours,
has less than 0.8 of the median (on CPUs 0.1), unless both neighbours are slow alike, as the network
may be built so. This file needs only torch, so it can be copied by itself.

--also adds a test of your site's, which one rank of each node runs. It fails a node by its exit
status, and its last line says why:

    sbatch launch_slurm_with_torchrun.sh aux/check_ranks.py --also "dcgmi diag --run 2"

All nodes of a partition, each as soon as it is free:

    for node in $(sinfo --noheader --Node --partition=gpu --format=%N); do
        sbatch --partition=gpu --nodes=1 --nodelist=$node --output=%N.out \\
            launch_slurm_with_torchrun.sh aux/check_ranks.py
    done                                 # and when all have ended: grep VERDICT *.out
"""

import argparse
import contextlib
import itertools
import json
import os
import pwd
import re
import resource
import secrets
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from xml.etree import ElementTree

import torch
import torch.distributed as dist

env = os.environ
HOST = env.get("SLURMD_NODENAME") or socket.gethostname()
# The devices of two kinds of fast networks. CXI is HPE's Slingshot.
INFINIBAND, CXI = Path("/sys/class/infiniband"), Path("/sys/class/cxi")
# An NVIDIA GPU's file, which a process that uses the GPU has open
DEVICES = "/dev/nvidia"
# nvidia-smi's reasons that are faults. A power cap is none, because a GPU under constant load
# reaches it.
SLOWDOWNS = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
MIB = 2**20

# A launcher sets RANK, LOCAL_RANK (the number on this node) and WORLD_SIZE. A bare srun sets its
# own, and any other process is alone: srun sets SLURM_STEP_NUM_TASKS, and env.sh unsets an
# inherited one.
rank = int(env.get("RANK", env.get("SLURM_PROCID", 0)))
local_rank = int(env.get("LOCAL_RANK", env.get("SLURM_LOCALID", 0)))
world_size = int(env.get("WORLD_SIZE", env.get("SLURM_STEP_NUM_TASKS", 1)))
slurm = env if "SLURM_STEP_NUM_TASKS" in env else {}
nodes = int(slurm.get("SLURM_STEP_NUM_NODES", 1))
ranks_per_node = int(env.get("LOCAL_WORLD_SIZE", -(-world_size // nodes)))
# As slurm_rank.sh says: with some topology plugins task 0 is not on the first node, where the ranks
# meet.
if slurm and "RANK" not in env:
    rank = int(env["SLURM_NODEID"]) * ranks_per_node + local_rank
launcher = "srun" if slurm else "hand"
if "TORCHELASTIC_RUN_ID" in env:  # set by torchrun and by spawn_ranks.py
    launcher = "torchrun" if "TORCHELASTIC_USE_AGENT_STORE" in env else "spawn"


def parse_arguments() -> argparse.Namespace:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text, allow_abbrev=False)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "xpu"], default="auto")
    help = "check that all nodes see this folder (default: checkpoints)"
    parser.add_argument("--checkpoint-dir", type=Path, default="checkpoints", help=help)
    help = "how long to wait for a rank (default: 300, and one more for each node)"
    parser.add_argument("--timeout", type=float, default=300 + nodes, metavar="SECONDS", help=help)
    help = "test whether SIGTERM reaches the ranks; torchrun ends after it, and the job is FAILED"
    parser.add_argument("--sigterm", action="store_true", help=help)
    help = "a test of your site's, run once on each node; a status other than 0 makes the node bad"
    parser.add_argument("--also", type=shlex.split, metavar="COMMAND", help=help)
    args = parser.parse_args()
    if args.sigterm and not (slurm and shutil.which("scancel")):
        parser.error("--sigterm needs scancel, and a step of srun")
    if not 1 <= args.timeout <= 1e6:
        parser.error("--timeout takes a number from 1 to 1000000")
    return args


def stop(sentence: str):
    """Ends this rank, and so the job, at once: gloo's threads could keep it from a clean end."""
    sys.stderr.write(f"[Rank {rank} on {HOST}] {sentence}\n")
    sys.stderr.flush()
    os._exit(1)


# --- the ranks meet ---


def hosts_of_ranks() -> list[str]:
    """The node of each rank of this srun; none without scontrol."""
    if not slurm or not shutil.which("scontrol"):
        return []
    command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
    hosts = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return [host for host in hosts for _ in range(ranks_per_node)]


def check_world_size():
    """Stops if this is one of several training runs that do not know of each other."""
    started, groups = slurm.get("SLURM_STEP_NUM_TASKS"), env.get("GROUP_WORLD_SIZE")
    # 2(x2) are two tasks on each of two nodes, and 3,1 are not as many on each.
    if launcher == "srun" and "," in slurm.get("SLURM_STEP_TASKS_PER_NODE", ""):
        if int(slurm["SLURM_PROCID"]) > 0:
            # srun would end task 0, before it has said why.
            os._exit(0)
        stop(f"{world_size} tasks on {nodes} nodes: use --ntasks-per-node")
    if not slurm or launcher == "srun" or groups == started:
        return
    # Each of them has a rank 0, but the job has only one task 0.
    if int(slurm["SLURM_PROCID"]) > 0 or local_rank > 0:
        os._exit(0)
    stop(
        f"{started} independent training runs instead of one: srun started {started} x {launcher}, "
        f"and this one knows of {groups} node (world size {world_size}); torchrun needs "
        f"--nnodes={started} and the same --master-addr everywhere, never --standalone "
        "(torchrun.sh does that)"
    )


def open_store(timeout: float) -> dist.Store:
    """A dictionary that all ranks share, so that they can report even if no collective works."""
    if world_size == 1:
        return dist.HashStore()
    if "MASTER_ADDR" not in env:
        hosts = hosts_of_ranks()
        if not hosts:
            stop(f"this is one of {world_size} ranks, but MASTER_ADDR is not set: use a launcher")
        env["MASTER_ADDR"] = hosts[0]
        env["MASTER_PORT"] = str(61000 + int(env["SLURM_JOB_ID"]) % 4536)
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    # gloo listens on the address of the node's own name. No other node reaches one like 127.0.1.1.
    for name in (socket.gethostname(), address) if nodes > 1 and local_rank == 0 else ():
        with contextlib.suppress(OSError):
            if (found := socket.gethostbyname(name)).startswith("127."):
                stop(f"{name} is {found} here, where no other node reaches it: check /etc/hosts")
    # torchrun's agent has opened the store, or rank 0 opens it. Rank 0 waits for nobody, so that it
    # can name missing ranks. The others wait longer, so that rank 0 speaks first.
    opens = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(seconds=timeout if rank == 0 else timeout + 30)
    try:
        store = dist.TCPStore(address, port, world_size, opens, patience, False, multi_tenant=True)
    except dist.DistError as error:
        what = f"cannot reach rank 0 at {address}:{port}"
        stop(f"{what} ({str(error).splitlines()[0]}): look for its error, or for a firewall")
    return dist.PrefixStore("check_ranks", store)


def gather(store: dist.Store, step: str, mine: dict, timeout: float) -> list[dict]:
    """Waits for all ranks. Returns the findings of each on rank 0, and nothing on the others."""
    store.set(f"{step}/{rank}", json.dumps(mine))
    if rank != 0:
        try:
            store.wait([step])
        except dist.DistError:
            os._exit(1)  # rank 0 has ended, and has said why
        return []
    keys = [f"{step}/{other}" for other in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout))
    except dist.DistError:
        missing = [other for other, key in enumerate(keys) if not store.check([key])]
        # The ranks that have come may know why.
        for other in {*range(world_size)} - {*missing}:
            its = json.loads(store.get(keys[other]))
            for sentence in its["bad"]:
                sys.stderr.write(f"[Rank {other} on {its['host']}] {sentence}\n")
        # Too short if nodes have different numbers of ranks.
        hosts = hosts_of_ranks() + ["a node that Slurm does not name"] * world_size
        named = [f"rank {other} on {hosts[other]}" for other in missing]
        what = f"{len(missing)} of {world_size} ranks have not reached the {step} in {timeout:g} s"
        stop(f"{what}: {', '.join(named[:8])}{', ...' if len(named) > 8 else ''}")
    store.set(step, "")
    return [json.loads(store.get(key)) for key in keys]


# --- is the node fit? ---


def choose_device(asked: str) -> tuple[torch.device, list[str]]:
    """This rank's device, and its faults."""
    # CUDA, ROCm or XPU. Apple's MPS has no collectives.
    count = 0 if sys.platform == "darwin" else torch.accelerator.device_count()
    cpu = torch.device("cpu")
    granted = int(env.get("SLURM_GPUS_ON_NODE") or 0)
    if asked == "cpu" or (asked == "auto" and count == granted == 0):
        return cpu, []
    if count == 0:
        who = f"Slurm granted {granted} GPUs on this node"
        if not granted:
            who = f"--device {asked} was given"
        what = f"{who}, but torch {torch.__version__} sees none"
        how = "look at nvidia-smi or amd-smi, and the build of torch, or pass --device cpu"
        return cpu, [f"{what}: {how}"]
    # If Slurm hides the other ranks' GPUs, this rank's is number 0.
    number = local_rank if count > 1 else 0
    if number >= count:
        what = f"local rank {local_rank} has no GPU: torch sees {count}"
        return cpu, [f"{what}; ask for as many GPUs per node as ranks"]
    torch.accelerator.set_device_index(number)
    return torch.device(torch.accelerator.current_accelerator().type, number), []


def name_of(device: torch.device) -> str:
    """Tells the GPUs of a node apart, even if a variable such as CUDA_VISIBLE_DEVICES renumbers
    them. Parts of a GPU can share either the UUID or the address."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return f"{getattr(properties, 'uuid', '')} {getattr(properties, 'pci_bus_id', '')}".strip()


def limits() -> Iterator[str]:
    """The limits that are too low on this node."""
    cpus = len(os.sched_getaffinity(0))
    asked = int(env.get("SLURM_CPUS_PER_TASK" if launcher == "srun" else "CPUS_PER_NODE") or 1)
    # The local cluster's nodes claim more CPUs than there are.
    if cpus < min(asked, os.cpu_count()):
        yield f"may use {cpus} CPUs, but the job asked for {asked}: look at srun's --cpus-per-task"
    # A socket for each peer, two on rank 0, besides some hundred files of Python's and torch's.
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 512 + 2 * world_size
    if files != resource.RLIM_INFINITY and files < needed:
        how = f"ulimit -n {needed} before srun, as env.sh does"
        if most != resource.RLIM_INFINITY and most < needed:
            how = f"the hard limit is {most}, which only root can raise (LimitNOFILE of slurmd)"
        yield f"may have {files} files open, {needed} are needed: {how}"
    # Loader workers and NCCL exchange data there. A container has 64 MiB by default.
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free // MIB
        if free < 256:
            yield f"/dev/shm has {free} MiB free, 256 MiB are needed: clear it, or --shm-size=1g"


def folder_faults(folder: Path, store: dist.Store) -> list[str]:
    """Rank 0 leaves a file where checkpoints will be, and every rank looks for it there."""
    if rank == 0:
        while not folder.is_dir():
            folder = folder.parent
        mark = folder / f".check_ranks_{secrets.token_hex(8)}"
    else:
        mark = Path(store.get("mark").decode())
    fault = None
    if mark.parent.is_dir():
        space = os.statvfs(mark.parent)
        free = space.f_bavail * space.f_frsize // MIB
        if free < 1024:
            what = f"{mark.parent} has {free} MiB free, and 1024 MiB are needed"
            fault = f"{what}: delete old checkpoints"
    if rank == 0:
        try:
            mark.touch()
        except OSError as error:
            fault = fault or f"cannot write in {folder}: {error.strerror}"
        # With a fault of its own, rank 0 names a file that exists on all ranks.
        store.set("mark", "." if fault else str(mark))
    elif not mark.exists():
        what = f"does not see what rank 0 writes in {mark.parent}"
        fault = fault or f"{what}: use a folder that all nodes share"
    return [fault] if fault else []


def warnings(device: torch.device) -> Iterator[str]:
    """Possible reasons for a slow training run."""
    there, count = int(env.get("SLURM_GPUS_ON_NODE") or 0), torch.accelerator.device_count()
    # For AMD's GPUs, Frontier's user guide advises --gpu-bind=closest.
    hides = device.type != "cpu" and not torch.version.hip
    if hides and count < min(there, ranks_per_node):
        what = f"sees {count} of this node's {there} GPUs"
        why = "--gpus-per-task or --gpu-bind hides its peers' from NCCL"
        yield f"{what}: {why}; ask with --gpus-per-node instead"
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()) and locked != resource.RLIM_INFINITY:
        what = f"may lock {locked // 1024} KiB of memory, and InfiniBand needs more"
        yield f"{what}: ulimit -l unlimited in site.sh, or LimitMEMLOCK=infinity for slurmd"


def read_nvidia_smi(text: str) -> tuple[list[str], list[str]]:
    bad, notes = [], []
    gpus = list(enumerate(ElementTree.fromstring(text).iter("gpu")))
    module, seen = torch.get_device_module(), range(torch.accelerator.device_count())
    uuids = [f"GPU-{module.get_device_properties(index).uuid}" for index in seen]
    ours = [(number, gpu) for number, gpu in gpus if gpu.findtext("uuid") in uuids]
    # If this rank sees fewer GPUs than the node has ranks, Slurm hides its peers' GPUs from it.
    for number, gpu in ours if len(ours) >= ranks_per_node else gpus:
        counts = gpu.iterfind("ecc_errors/volatile/*")
        texts = [each.text for each in counts if "uncorrectable" in each.tag]
        errors = sum(int(text) for text in texts if text.isdigit())  # not N/A
        if errors:
            bad.append(f"GPU {number} has {errors} uncorrected ECC errors")
        # A row of memory that has failed is replaced by a spare one when the GPU is next reset.
        if gpu.findtext("remapped_rows/remapped_row_failure") == "Yes":
            bad.append(f"GPU {number} has no spare row left for one that failed: replace the GPU")
        elif gpu.findtext("remapped_rows/remapped_row_pending") == "Yes":
            bad.append(f"GPU {number} has a failed row of memory: it needs a reset")
        for each in gpu.iter():
            # clocks_event_reason_hw_slowdown, or clocks_throttle_reason_hw_slowdown
            reason = each.tag.partition("_reason_")[2]
            if reason in SLOWDOWNS and each.text.strip() == "Active":
                bad.append(f"GPU {number} is throttled: {reason}")
        if gpu.findtext("mig_mode/current_mig") == "Enabled":
            notes.append(f"GPU {number} is in MIG mode: a rank gets a part of it")
    return bad, notes


def read_amd_smi(text: str) -> tuple[list[str], list[str]]:
    found, bad = json.loads(text), []
    gpus = found["gpu_data"] if isinstance(found, dict) else found  # from ROCm 7 on, and before
    for gpu in gpus:
        errors = gpu["ecc"]["total_uncorrectable_count"]
        if isinstance(errors, int) and errors:  # not N/A
            bad.append(f"GPU {gpu['gpu']} has {errors} uncorrected ECC errors")
    # Only warnings if the node has GPUs that may be another job's
    ours = int(env.get("SLURM_GPUS_ON_NODE") or torch.accelerator.device_count())
    return (bad, []) if len(gpus) == ours else ([], bad)


HEALTH = {
    "nvidia-smi --query --xml-format": read_nvidia_smi,
    "amd-smi metric --ecc --json": read_amd_smi,
}


def ask_about_gpus() -> tuple[list[str], list[str]]:
    """The faults of this node's GPUs, and the warnings, by the command of their vendor."""
    for command, read in HEALTH.items():
        name, *options = command.split()
        if not shutil.which(name):
            continue
        try:
            done = subprocess.run(
                [name, *options], capture_output=True, text=True, timeout=60, check=True
            )
            return read(done.stdout)
        except Exception as error:  # also of output in another form than these functions know
            sentence = f"{name} fails here: {error}"
            # Everybody may run nvidia-smi. The other can need rights that a job has not.
            return ([sentence], []) if name == "nvidia-smi" else ([], [sentence])
    return [], []


def own_test(command: list[str], timeout: float) -> list[str]:
    """The fault that a site's own test finds on this node."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=0.8 * timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command[0]}: {error}"]
    said = f"{done.stdout}{done.stderr}".strip().splitlines() or [f"status {done.returncode}"]
    return [f"{command[0]}: {said[-1]}"] if done.returncode else []


# --- how fast is it? ---


def finish(device: torch.device):
    torch.get_device_module(device).synchronize()


def rate(device: torch.device, amount: float, work: Callable) -> float:
    """The amount per second, if one call of `work` does `amount`."""
    rates, end = [], time.perf_counter() + (1.5 if device.type == "cpu" else 3)
    while len(rates) < 20 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        finish(device)
        rates.append(amount / (time.perf_counter() - start))
    # A GPU slows down as it gets warm. A CPU also runs other programs, so its best rate counts.
    return max(rates) if device.type == "cpu" else statistics.median(rates)


def variables_of(process: int) -> dict[str, str]:
    """Those with which it was started; none of another user's process."""
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{process}/environ").read_text(errors="replace").split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {}


def about(process: int) -> str:
    """A process in words, as far as it is visible here."""
    folder, said = Path(f"/proc/{process}"), f"process {process}"
    with contextlib.suppress(OSError):
        command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").strip()[:60]
        said += f" ({''.join(c if c.isprintable() else '?' for c in command)})"
        owner = folder.stat().st_uid
        with contextlib.suppress(KeyError):
            owner = pwd.getpwuid(owner).pw_name
        # After the name in parentheses the 20th is its start, in ticks after the machine's.
        start = int((folder / "stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        hours = (uptime - start / os.sysconf("SC_CLK_TCK")) / 3600
        # Everybody may read its control group, in which Slurm 26.05 no longer has the job's number.
        group = (folder / "cgroup").read_text()
        [job, *_] = re.findall(r"/job_(\d+)", group) or ["none"]
        job = variables_of(process).get("SLURM_JOB_ID", job)
        said += f" of {owner}, job {job}, {hours:.1f} hours old"
        for container in re.findall(r"docker[-/]([0-9a-f]{12})", group)[:1]:
            said += f", in a container (docker kill {container})"
    return said


def who_uses(module, device: torch.device) -> str:
    """The other processes that use this rank's GPU, and how to end those of this user."""
    found, file = set(), ""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ElementTree.ParseError):
        command = ["nvidia-smi", "--query", "--xml-format"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        for gpu in ElementTree.fromstring(text).iter("gpu"):
            if gpu.findtext("uuid") == f"GPU-{module.get_device_properties(device).uuid}":
                found |= {int(each.text) for each in gpu.iterfind("processes/process_info/pid")}
                file = f"{DEVICES}{gpu.findtext('minor_number')}"
    # nvidia-smi does not name what a process has forked, such as a loader worker that has outlived
    # its rank. But while that has the file open, the memory is not given back.
    step = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.readlink(link) == file:
                process = int(link.parts[2])
                its = variables_of(process)
                if any(its.get(name) != env.get(name) for name in step):
                    found.add(process)
    found -= {os.getpid()}
    if not found:
        return "nvidia-smi or amd-smi names them"
    said = "; ".join(map(about, sorted(found)[:4])) + ("; and more" if len(found) > 4 else "")
    mine = []
    for process in sorted(found):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{process}").st_uid == os.getuid():
                mine.append(str(process))
    if mine:
        where = f"srun --nodes=1 --nodelist={HOST} " if slurm else ""
        said += f". If no job of yours needs them: {where}kill -9 {' '.join(mine)}"
    return said


def memory_in_use(device: torch.device, mine: dict):
    """Finds other programs on this rank's GPU."""
    module = torch.get_device_module(device)
    free, total = module.mem_get_info()
    mine["GPU memory in use"] = f"{(total - free) / 2**30:.1f} GiB"
    # Some 512 MiB are the driver's own. Ranks with an NCCL_HOSTID may share a GPU on purpose.
    if total - free > 2048 * MIB and "NCCL_HOSTID" not in env:
        sentence = f"other programs use its GPU's memory: {who_uses(module, device)}"
        # On GH200, GB200 and MI300A Linux may keep files in the GPU's memory.
        shared = re.search(r"\bG[HB]\d|MI300A", module.get_device_name(device))
        mine["warnings" if shared else "bad"].append(sentence)


def measure(device: torch.device, mine: dict):
    """The speeds of a matmul and of a copy. On a CPU one call takes less than a millisecond, so
    that some are not interrupted."""
    on_gpu = device.type != "cpu"
    if on_gpu:
        memory_in_use(device, mine)

    size, dtype = (8192, torch.bfloat16) if on_gpu else (256, torch.float32)
    a, b, c = torch.rand(3, size, size, device=device, dtype=dtype)
    mine["TFLOP/s"] = rate(device, 2 * size**3 / 1e12, lambda: torch.mm(a, b, out=c))

    # It copies from piece to piece, so that no piece is in a cache.
    total, piece = (2048 * MIB, 1024 * MIB) if on_gpu else (128 * MIB, 4 * MIB)
    pieces = itertools.cycle(torch.ones(total, device=device, dtype=torch.uint8).split(piece))
    with ThreadPoolExecutor(1) as pool:
        # One rank of a node asks, while all its GPUs are at work.
        asks = local_rank == 0 and (on_gpu or "SLURM_GPUS_ON_NODE" in env)
        asked = pool.submit(ask_about_gpus) if asks else None
        amount = 2 * piece / 1e9  # read and written
        mine["GB/s"] = rate(device, amount, lambda: next(pieces).copy_(next(pieces)))
    if asked:
        bad, notes = asked.result()
        mine["bad"] += bad
        mine["warnings"] += notes


def log_of_nccl() -> Path | None:
    """The file in which NCCL says how it connects the ranks, of one rank on each node."""
    # env.sh asks for WARN. With any other setting the log is the user's.
    if local_rank > 0 or env.get("NCCL_DEBUG", "WARN").upper() not in ("WARN", "VERSION"):
        return None
    try:
        path = Path(tempfile.mkdtemp(prefix="check_ranks_"), "nccl.log")
    except OSError:
        return None
    env.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(path))
    return path


def read_log_of_nccl(log: str, mine: dict):
    """The network that NCCL has chosen, and a warning if a faster one is there."""
    for line in re.findall(r".*NCCL WARN.*", log):
        sys.stderr.write(f"{line}\n")
    [*_, network] = re.findall(r"Using network (.+)", log) or ["unknown"]
    used, direct = "via NET/" in log, "/GDRDMA" in log
    mine["network"] = network
    if used:
        mine["network"] += f", GPUDirect RDMA: {'yes' if direct else 'no'}"
    infiniband, cxi = (sorted(each.name for each in kind.glob("*")) for kind in (INFINIBAND, CXI))
    what = f"NCCL uses TCP, although this node has {', '.join([*cxi, *infiniband])}"
    if network == "Socket" and cxi:
        plugin = "aws-ofi-rccl" if torch.version.hip else "aws-ofi-nccl"
        how = f"load the site's module for Slingshot, which has the plugin {plugin}"
        safe = 'NCCL_NET="AWS Libfabric" makes NCCL fail without it'
        mine["warnings"].append(f"{what}: {how}; {safe}")
    elif network == "Socket" and infiniband:
        how = "without NCCL_NET, NCCL_IB_DISABLE and NCCL_IB_HCA it chooses by itself"
        mine["warnings"].append(f"{what}: {how}; a container needs /dev/infiniband")
    elif infiniband and not cxi and used and not direct:
        what = "NCCL copies its data to the CPU's memory first (no GPUDirect RDMA)"
        mine["warnings"].append(f"{what}: is nvidia_peermem loaded?")


def bus_speed(
    device: torch.device, ranks: list[int], size: int, mine: dict, timeout: float
) -> float:
    """GB/s on the bus, as nccl-tests define it, of an all-reduce of `size` bytes over these ranks,
    which all call it. The others must call it with ranks of their own, because torch names a group
    by how many there are already."""
    group = dist.group.WORLD
    if len(ranks) < world_size:
        limit = timedelta(seconds=timeout)
        group = dist.new_group(ranks, timeout=limit, use_local_synchronization=True)
    total, times = sum(ranks) + len(ranks), []
    for _ in range(3 if size == 64 * MIB else 6):
        numbers = torch.full([size // 8], rank + 1, dtype=torch.float64, device=device)
        finish(device)
        start = time.perf_counter()
        dist.all_reduce(numbers, group=group)
        finish(device)
        times.append(time.perf_counter() - start)
        mine["right"] &= bool((numbers == total).all())
    # The first call connects. CPUs have other work as well, so their best call counts.
    seconds = min(times[1:]) if device.type == "cpu" else statistics.median(times[1:])
    return 2 * (len(ranks) - 1) / len(ranks) * size / seconds / 1e9


def neighbours(node: int, count: int) -> list[int]:
    """A node's partner in each round, or itself if it has none.

    The nodes form a ring, in which each has two neighbours. In a round every node is in at most one
    pair, so with an odd number of nodes the ring's last pair needs a third round.
    """
    pairs = [(i, (i + 1) % count) for i in range(count)]
    even = count - count % 2
    partners = []
    for disjoint in filter(None, (pairs[0:even:2], pairs[1:even:2], pairs[even:])):
        mine = [pair for pair in disjoint if node in pair]
        partners.append(sum(mine[0]) - node if mine else node)
    return partners


@contextlib.contextmanager
def watched(what: str, hint: str, timeout: float) -> Iterator[None]:
    """Rank 0 stops with a sentence if it has not ended."""
    # NCCL can wait for ever in its first collective. gloo gives up by itself before that.
    late = f"{what} has not ended within {timeout:g} s: look for a firewall, or {hint}"
    timer = threading.Timer(timeout + 5, stop, [late])
    timer.daemon = True
    if rank == 0:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def try_gloo(mine: dict, timeout: float):
    """Between GPUs gloo may take a different network than NCCL, and checkpoint.py uses it."""
    what = "gloo's all-reduce, which checkpoints need,"
    hint = "set GLOO_SOCKET_IFNAME in site.sh to a network that all nodes share"
    ones = torch.ones(8)
    try:
        with watched(what, hint, timeout):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
            dist.all_reduce(ones, group=group)
    except RuntimeError as error:
        mine["bad"].append(f"{what} fails ({str(error).splitlines()[0]}): {hint}")
        return
    mine["right"] &= bool((ones == world_size).all())


def all_reduce(device: torch.device, store: dist.Store, mine: dict, timeout: float):
    """The speed over all ranks, inside this node, and between it and its neighbours, so that one
    bad link is found."""
    on_gpu, limit = device.type != "cpu", timedelta(seconds=timeout)
    backend = dist.get_default_backend_for_device(device)
    size, part = (1024 * MIB, 1024 * MIB) if on_gpu else (64 * MIB, 16 * MIB)
    variable = f"{backend.upper()}_SOCKET_IFNAME" if backend in ("nccl", "gloo") else "a variable"
    hint = f"set {variable} in site.sh to the right network"
    path = log_of_nccl() if backend == "nccl" else None
    hosts = json.loads(store.get("hosts"))
    members = {host: [r for r, its in enumerate(hosts) if its == host] for host in hosts}
    names, count = list(members), len(members)
    mine["right"], where = True, "over all ranks"

    def speed_of(ranks: list[int], size: int) -> float:
        with watched(f"the all-reduce {where}", hint, timeout):
            return bus_speed(device, ranks, size, mine, timeout)

    try:
        dist.init_process_group(backend, None, limit, world_size, rank, store)
        mine["bus"] = speed_of(list(range(world_size)), size)
        where = "inside this node"
        if count > 1 and (speed := speed_of(members[HOST], part)):
            mine["inside"] = speed
        for other in neighbours(names.index(HOST), count) if count > 2 else ():
            where = f"with {names[other]}"
            speed = speed_of(sorted({*members[HOST], *members[names[other]]}), part)
            if names[other] != HOST:
                mine.setdefault("pairs", []).append(speed)
        if "pairs" in mine:
            # A neighbour's bad link is not this node's.
            mine["between"] = max(mine["pairs"])
        if backend != "gloo":
            try_gloo(mine, timeout)
    except RuntimeError as error:
        mine["bad"].append(f"the all-reduce {where} fails ({str(error).splitlines()[0]}): {hint}")
        return
    finally:
        if path:
            read_log_of_nccl(path.read_text() if path.exists() else "", mine)
            shutil.rmtree(path.parent, ignore_errors=True)
    if not mine["right"]:
        mine["bad"].append("gets a wrong sum in the all-reduce")
    mine["all-reduce"] = f"all-reduce of {size // MIB} MiB: {mine['bus']:.2f} GB/s on the bus"
    if on_gpu and count > 2:
        # In a ring as many bytes leave a node as pass through each rank, and its ranks share them.
        share = mine["bus"] * 8 / len(members[HOST])
        mine["all-reduce"] += f", about {share:.0f} Gbit/s of the network for each GPU"


def try_signal(store: dist.Store, mine: dict, timeout: float):
    """Whether SIGTERM, which Slurm sends at the time limit and at preemption, reaches this rank."""
    came = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: came.set())
    gather(store, "signal", mine, timeout)
    if rank == 0:
        step = f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
        print(f"scancel --signal=TERM {step}", flush=True)
        subprocess.run(["scancel", "--signal=TERM", step])
    mine["signal"] = came.wait(10)


# --- the verdict, on rank 0 ---


def compare(found: list[dict]):
    """Adds the faults that show only in comparison with other ranks."""
    gpus, first = {}, found[0]
    for number, its in enumerate(found):
        if its["torch"] != first["torch"]:
            versions = f"{its['torch']}, rank 0 {first['torch']}"
            its["bad"].append(f"different versions of torch: {versions}")
        other = gpus.setdefault((its["host"], its["gpu"] or number), number)
        if other != number:
            its["bad"].append(f"shares a GPU with rank {other}: ask for one GPU for each rank")
        # All have read their clocks within a second or so of each other.
        ahead = its.get("clock", 0) - first.get("clock", 0)
        if abs(ahead) > 5:
            how = "ahead of" if ahead > 0 else "behind"
            its["bad"].append(f"its clock is {abs(ahead):.0f} s {how} rank 0's: chronyd or ntpd")
    for name in ("TFLOP/s", "GB/s"):
        median = statistics.median(its.get(name, 0) for its in found)
        for its in found:
            # GPUs of one model differ by some 8 %, and bad ones have two thirds of the median's
            # speed (Sinha et al. 2022, arxiv.org/abs/2208.11035), so 0.8 tells them apart. The
            # speed of CPUs varies more by itself, because all programs of a node share them. A
            # healthy one had 0.79 of the median's. So does that of a GPU that ranks share.
            share = 0.5 if its["device"] == "cpu" or "NCCL_HOSTID" in env else 0.8
            if its.get(name, 0) < share * median:
                its["bad"].append(f"{its[name]:.3f} {name}, and the median is {median:.3f}")
    for name, where in (("inside", "inside this node"), ("between", "with each neighbouring node")):
        # The ranks of a node measure the same.
        by_node = {its["host"]: its for its in reversed(found) if name in its}
        median = statistics.median_high([its[name] for its in by_node.values()] or [0])
        for its in by_node.values():
            # Between healthy CPUs the speeds were up to five times apart.
            share = 0.1 if its["device"] == "cpu" else 0.8
            if its[name] >= share * median:
                continue
            said = f"{its[name]:.3f} GB/s in the all-reduce {where}, and the median is {median:.3f}"
            # A node without a neighbour on its own switch has a half or a third of the others'
            # speed, with both of them, if the links between the switches are that much fewer. Less
            # than a quarter is a fault.
            pairs = its.get("pairs", [])
            alike = len(pairs) == 2 and min(pairs) > 0.8 * max(pairs) > 0.2 * median
            if name == "between" and alike:
                its["warnings"].append(f"{said}: a bad link, or it is alone on its switch")
            else:
                its["bad"].append(said)


def report(found: list[dict], asked_for_signal: bool) -> int:
    """Prints a table, what is wrong, and the verdict. Returns the exit status."""
    print(f"world size {len(found)}, torch {torch.__version__}")
    heads = ("local rank", "host", "device", "CPUs", "TFLOP/s", "GB/s", "GPU memory in use")
    rows = [("rank", *heads, "")]
    for number, its in enumerate(found):
        cells = [its.get(head, "-") for head in heads]
        cells = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells]
        rows.append((str(number), *cells, "<- bad" if its["bad"] else ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    if "all-reduce" in found[0]:
        right = "right" if all(its.get("right") for its in found) else "wrong"
        print(f"{found[0]['all-reduce']}, the sum is {right}")
    for name, where in (("inside", "inside a node"), ("between", "between two nodes")):
        if speeds := [its[name] for its in found if name in its]:
            print(f"{where}: {min(speeds):.2f} to {max(speeds):.2f} GB/s on the bus")
    for network in sorted({its["network"] for its in found if "network" in its}):
        print(f"NCCL's network: {network}")
    if asked_for_signal:
        deaf = [f"rank {n} on {its['host']}" for n, its in enumerate(found) if not its["signal"]]
        print("signals reach the ranks:", f"not {', '.join(deaf)}" if deaf else "yes")

    for kind, label in (("warnings", "warning: "), ("bad", "")):
        sentences = {}
        for number, its in enumerate(found):
            for sentence in its[kind]:
                sentences.setdefault(sentence, []).append(number)
        for sentence, (first, *others) in sentences.items():
            more = f" (and {len(others)} more)" if others else ""
            print(f"[Rank {first} on {found[first]['host']}] {label}{sentence}{more}")
    hosts = dict.fromkeys(its["host"] for its in found)
    bad = dict.fromkeys(its["host"] for its in found if its["bad"])
    if not bad:
        print(f"VERDICT: all well, {len(found)} ranks started by {launcher}")
    elif len(bad) < len(hosts):
        which = f"{', '.join(bad)} {'is' if len(bad) == 1 else 'are'} bad"
        print(f"VERDICT: {which}, submit again with --exclude={','.join(bad)}")
    else:
        print("VERDICT: bad on every node, so the cause may be the job: see above")
    sys.stdout.flush()
    return 1 if bad else 0


def main():
    args = parse_arguments()
    # If there are more threads than free CPUs, they wait for each other, and the node seems slow.
    torch.set_num_threads(1)
    check_world_size()
    store = open_store(args.timeout)
    device, bad = choose_device(args.device)
    bad += [*limits(), *folder_faults(args.checkpoint_dir.absolute(), store)]
    gpu = "" if device.type == "cpu" else name_of(device)
    mine = {"host": HOST, "local rank": local_rank, "device": str(device), "gpu": gpu}
    mine |= {"CPUs": len(os.sched_getaffinity(0)), "torch": torch.__version__, "bad": bad}
    mine["warnings"] = list(warnings(device))

    found = gather(store, "start", mine, args.timeout)
    mine["clock"] = time.time()
    if rank == 0:
        with contextlib.suppress(OSError):
            os.unlink(store.get("mark").decode())
        store.set("hosts", json.dumps([its["host"] for its in found]))
        compare(found)
        # A rank with a fault may be unable to go on.
        if any(its["bad"] for its in found):
            os._exit(report(found, False))
    if args.also and local_rank == 0:
        mine["bad"] += own_test(args.also, args.timeout)
    # Such a test may use the GPUs of all ranks.
    gather(store, "measurement", mine, args.timeout)
    measure(device, mine)
    gather(store, "all-reduce", mine, args.timeout)
    if world_size > 1:
        all_reduce(device, store, mine, args.timeout)
    if args.sigterm:
        try_signal(store, mine, args.timeout)
    if rank == 0:
        found = gather(store, "end", mine, args.timeout)
        compare(found)
        os._exit(report(found, args.sigterm))
    # If this rank failed, the others would be ended before rank 0 has said why, so only rank 0
    # fails the job.
    store.set(f"end/{rank}", json.dumps(mine))
    os._exit(0)


if __name__ == "__main__":
    main()
