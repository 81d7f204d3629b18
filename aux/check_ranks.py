"""Step 0 alone, to run before a long job: where every rank is, what its node is fit for, one
all-reduce, and a verdict.

    sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=96 \\
        launch_slurm_with_torchrun.sh aux/check_ranks.py
    ./torchrun.sh aux/check_ranks.py

Exit code 0 and a line that begins with VERDICT when every rank is where it should be; otherwise
one sentence that names the rank, the node and the fault, and another exit code. Looked at: CPUs,
names that resolve to loopback, open files, /dev/shm, the folder for checkpoints (space, inodes,
the same on all nodes; a quota does not show) and the clocks.
"""

import argparse
import os
import resource
import secrets
import shutil
import socket
import sys
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

import torch
import torch.distributed as dist

from resilience.arguments import ArgumentParser, device_name
from resilience.place import Place
from resilience.ranks import Ranks, find_ranks, stop
from resilience.step_zero import device_fault, gpu_uuid, step_zero

# --- arguments ---


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    device = os.environ.get("TRAIN_DEVICE", "auto")
    parser.add_argument(
        "--device", type=device_name, default=device, help="auto, cpu or cuda; or TRAIN_DEVICE"
    )
    parser.add_argument(
        "--checkpoint-dir",
        type=Path,
        default="checkpoints",
        help="the folder that all nodes must see",
    )
    parser.add_timeout_arguments()
    help = (
        "the script and arguments of the job to come: those of the above among them count here, too"
    )
    parser.add_argument("--before", nargs=argparse.REMAINDER, help=help)
    args = parser.parse_args()
    return parser.parse_known_args(args.before, namespace=args)[0] if args.before else args


MB = 2**20

# --- checks ---


def count_cpus(ranks: Ranks) -> tuple[int, str | None]:
    """The CPUs this rank may use, some of them perhaps shared with others, and a sentence if
    they are too few."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return os.cpu_count() or 1, None
    asked = int(
        os.environ.get("SLURM_CPUS_PER_TASK" if ranks.launcher == "srun" else "CPUS_PER_NODE") or 1
    )
    cpus = len(os.sched_getaffinity(0))
    fault = (
        f"may use {cpus} CPUs, but the job asked for {asked}: look at --cpus-per-task on the srun "
        "line"
    )
    return cpus, fault if cpus < asked else None


def check_names() -> str | None:
    """Gloo listens at the address of the node's own name, and at 127.0.1.1 (Debian's habit)
    nobody else reaches it."""
    nodes = os.environ.get("SLURM_STEP_NUM_NODES") or os.environ.get("GROUP_WORLD_SIZE") or "1"
    for name in (
        {socket.gethostname(), os.environ.get("MASTER_ADDR", "localhost")} if nodes != "1" else ()
    ):
        try:
            address = socket.gethostbyname(name)
        except OSError:
            continue  # Step 0 has its own sentence for this
        if address.startswith("127."):
            return (
                f"the name {name} resolves to {address}, where no other node is: look at "
                "/etc/hosts here"
            )
    return None


def check_open_files(world_size: int) -> str | None:
    """A rank has a socket for each of its peers, rank 0 two, besides some hundred files of
    Python's and torch's."""
    limit, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 512 + 2 * world_size
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return None
    return f"may have {limit} files open, {needed} are needed: say ulimit -n {needed} in env.sh"


def check_shared_memory() -> str | None:
    """Loader workers and NCCL hand data over in /dev/shm, of which a container has 64 MB by
    default."""
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else sys.maxsize
    if free >= 256 * MB:
        return None
    return (
        f"/dev/shm has {free // MB} MB free, 256 MB are needed: clear it, or start the container "
        "with --shm-size=1g"
    )


def check_space(folder: Path) -> str | None:
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free < 1024 * MB:
        return (
            f"{folder} has {free // MB} MB free, and 1024 MB are needed: delete old checkpoints, "
            "or take another disk"
        )
    # Some file systems do not count them, and both are 0.
    if found.f_files and found.f_favail < 1000:
        return (
            f"{folder} has inodes for {found.f_favail} files left, and 1000 are needed: delete "
            "files there"
        )
    return None


def check_folder(folder: Path, place: Place) -> str | None:
    """Rank 0 makes a file with a random name where checkpoints will be, and every rank looks for
    it."""
    rank, token, fault = place.rank, [None], None
    if rank == 0:
        folder = next(
            path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir()
        )
        fault = check_space(folder)
        path = folder / f".check_ranks_{secrets.token_hex(8)}"
        try:
            path.touch()
            token = [str(path)]
        except OSError as error:
            fault = fault or f"cannot write in {folder}: {error.strerror}"
    if place.world_size > 1:
        dist.broadcast_object_list(token)
        if rank != 0 and token[0]:
            folder = Path(token[0]).parent
            fault = check_space(folder) if folder.is_dir() else None
            if not fault and not os.path.exists(token[0]):
                fault = (
                    f"does not see what rank 0 writes in {folder}: it must be on a file system "
                    "that all nodes share"
                )
        place.barrier()
    if rank == 0 and token[0]:
        path.unlink()
    return fault


def clock_difference(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> float:
    """Seconds by which our clock is ahead of theirs, at least (negative: behind); 0 where they
    may be equal.

    Each pair is the time before and after an all-reduce. All ranks are in it at some one moment,
    so that two clocks which agree cannot show spans that do not overlap, however long the
    network takes.
    """
    ahead = max(ours[0] - theirs[1] for ours, theirs in zip(ours, theirs, strict=True))
    behind = max(theirs[0] - ours[1] for ours, theirs in zip(ours, theirs, strict=True))
    return max(ahead, 0.0) - max(behind, 0.0)


def check_clocks(place: Place) -> str | None:
    spans = []
    for _ in range(5):
        before = time.time()
        place.all_reduced([1])
        spans.append((before, time.time()))
    everywhere = [spans] * place.world_size
    if place.world_size > 1:
        dist.all_gather_object(everywhere, spans)
    seconds = clock_difference(spans, everywhere[0])
    if abs(seconds) < 1:
        return None
    how = "ahead of" if seconds > 0 else "behind"
    return (
        f"its clock is {abs(seconds):.1f} s {how} rank 0's: have chronyd or ntpd run on this node"
    )


def check_all_reduce(place: Place) -> tuple[float, str | None]:
    """Milliseconds of one all-reduce of four bytes, and a sentence if its result is not right."""
    for _ in range(2):  # the first one warms up
        start = time.perf_counter()
        [found] = place.all_reduced([place.rank])
    right = place.world_size * (place.world_size - 1) // 2
    fault = (
        None
        if found == right
        else f"the all-reduce of all ranks gave {int(found)} instead of {right}"
    )
    return (time.perf_counter() - start) * 1000, fault


# --- main ---


def main(args: Namespace):
    ranks = find_ranks()
    rank, world_size = ranks.rank, ranks.world_size
    fault = device_fault(args.device, ranks)
    use_cuda = args.device != "cpu" and torch.cuda.is_available() and not fault
    device = torch.device("cpu")
    if use_cuda:
        # GPU number local_rank, but number 0 if Slurm shows this rank a single GPU.
        device = torch.device("cuda", ranks.local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)

    # A rank that seeks rank 0 at a loopback address would never find it.
    if names_fault := check_names():
        stop(names_fault, rank, speaker=rank - ranks.local_rank)
    cpus, cpu_fault = count_cpus(ranks)
    fault = fault or cpu_fault or check_open_files(world_size) or check_shared_memory()
    columns = {"GPU": gpu_uuid(device) or "none", "CPUs": cpus, "threads": torch.get_num_threads()}
    store = step_zero(args, ranks, device, fault, **columns)
    place = Place(ranks, device, args.init_timeout)
    if world_size > 1:
        backend, wait = "nccl" if use_cuda else "gloo", timedelta(seconds=args.init_timeout)
        with place.connecting(backend):
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=wait
            )
            place.all_reduced([1])

    milliseconds, fault = check_all_reduce(place)
    folder_fault = check_folder(args.checkpoint_dir, place)
    clock_fault = check_clocks(place)
    place.stop_if_any(fault or folder_fault or clock_fault)
    if rank == 0:
        fine = f"{world_size} ranks started by {ranks.launcher} are fine"
        print(f"VERDICT: {fine}, all-reduce in {milliseconds:.2f} ms")
    place.shutdown()


if __name__ == "__main__":
    main(parse_arguments())
