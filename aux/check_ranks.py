"""Step 0 alone, to run before a long job: where every rank is, one all-reduce, and a verdict.

    sbatch --nodes=4 --gpus-per-node=8 launch_slurm_with_torchrun.sh aux/check_ranks.py
    ./torchrun.sh aux/check_ranks.py

Exit code 0 and a line that begins with VERDICT when every rank is where it should be; otherwise one sentence that names
the rank, the node and the fault, and another exit code.
"""

import datetime
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from arguments import ArgumentParser, device_name

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    device = os.environ.get("TRAIN_DEVICE", "auto")
    parser.add_argument("--device", type=device_name, default=device, help="auto, cpu, cuda or mps (or TRAIN_DEVICE)")
    parser.add_timeout_arguments()
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_arguments()  # before torch: a typing mistake costs no second

import torch
import torch.distributed as dist

import heartbeat
import step_zero

# --- process group ----------------------------------------------------------------------------------------------------


def find_ranks() -> tuple[str, int, int, int]:
    """Who started this process, and its place: (launcher, rank, local_rank, world_size)."""
    env = os.environ
    # Children of torchrun and spawn_ranks.py inherit Slurm's variables, so their own marks are looked at first. The
    # batch shell has SLURM_PROCID, too, always 0: ranks exist only in a step that srun numbers, not in one near 2**32.
    if "TORCHELASTIC_RUN_ID" in env or "SPAWN_RANKS" in env:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "mp"
    elif "SLURM_PROCID" in env and int(env.get("SLURM_STEP_ID", 2**32)) < 2**31:
        if "MASTER_ADDR" not in env:  # `srun python train_ddp.py`, typed by hand
            hosts = subprocess.run(["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]], capture_output=True)
            env["MASTER_ADDR"] = hosts.stdout.decode().split("\n")[0]
        job, step = int(env["SLURM_JOB_ID"]), int(env["SLURM_STEP_ID"])
        env.setdefault("MASTER_PORT", str(61000 + (job + 1009 * step) % 4536))
        if "OMP_NUM_THREADS" not in env:
            torch.set_num_threads(int(env.get("SLURM_CPUS_PER_TASK", 1)))  # else every rank would use the whole node
        return "srun", int(env["SLURM_PROCID"]), int(env["SLURM_LOCALID"]), int(env["SLURM_NTASKS"])
    elif all(name in env for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        launcher = "environment"
    else:
        return "none", 0, 0, 1
    return launcher, int(env["RANK"]), int(env["LOCAL_RANK"]), int(env["WORLD_SIZE"])


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


def init_process_group(args: Namespace, fault: str | None = None, **facts) -> tuple[int, int, torch.device]:
    """Finds this rank's place, meets the others, prints Step 0 (with `facts`) and starts NCCL or gloo.

    Returns (rank, world_size, device). A fault on any rank stops all of them, with one sentence.
    """
    launcher, rank, local_rank, world_size = find_ranks()
    store = step_zero.meet(launcher, rank, local_rank, world_size, datetime.timedelta(seconds=args.init_timeout))
    device, device_fault = choose_device(args.device, local_rank, world_size)
    facts = {"world size": world_size, "local rank": local_rank, "device": str(device), "launcher": launcher, **facts}
    step_zero.check(store, rank, world_size, device, facts, device_fault or fault)
    if world_size > 1:
        backend, timeout = "nccl" if device.type == "cuda" else "gloo", datetime.timedelta(seconds=args.timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        assert dist.get_world_size() == world_size
        heartbeat.start(rank, world_size, args.timeout)
    return rank, world_size, device


# --- checks -----------------------------------------------------------------------------------------------------------


def count_cpus() -> tuple[int, str | None]:
    """The CPUs this rank may use, some of them perhaps shared with others, and a sentence if they are too few."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return os.cpu_count() or 1, None
    launcher, _, _, _ = find_ranks()
    asked = int(os.environ.get("SLURM_CPUS_PER_TASK" if launcher == "srun" else "CPUS_PER_NODE") or 1)
    cpus = len(os.sched_getaffinity(0))
    fault = f"may use {cpus} CPUs, but the job asked for {asked}: look at --cpus-per-task on the srun line"
    return cpus, fault if cpus < asked else None


def check_all_reduce(rank: int, world_size: int, device: torch.device) -> float:
    """Milliseconds of one all-reduce of four bytes, whose result must be right."""
    if world_size == 1:
        return 0.0
    for _ in range(2):  # the first one also makes the connections
        start = time.perf_counter()
        total = torch.tensor(float(rank), device=device)
        dist.all_reduce(total)
        found, right = int(total.item()), world_size * (world_size - 1) // 2
        if found != right:
            step_zero.stop(f"the all-reduce of all ranks gave {found} instead of {right}", rank)
    return (time.perf_counter() - start) * 1000


# --- main -------------------------------------------------------------------------------------------------------------


def main(args: Namespace):
    launcher, _, local_rank, world_size = find_ranks()
    device, _ = choose_device(args.device, local_rank, world_size)
    cpus, fault = count_cpus()
    facts = {"GPU": step_zero.gpu_uuid(device) or "none", "CPUs": cpus, "threads": torch.get_num_threads()}
    rank, world_size, device = init_process_group(args, fault, **facts)
    milliseconds = check_all_reduce(rank, world_size, device)
    if rank == 0:
        print(f"VERDICT: {world_size} ranks started by {launcher} are fine, all-reduce in {milliseconds:.2f} ms")


if __name__ == "__main__":
    main(args)
    step_zero.leave()
