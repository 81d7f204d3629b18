"""Latency and bandwidth of an all-reduce by size, over the job's own ranks: NCCL or gloo.

    ./torchrun.sh aux/allreduce.py
    sbatch --nodes=2 --gpus-per-node=8 launch_slurm_with_torchrun.sh aux/allreduce.py

The columns are those of nccl-tests: the time of one call in place, averaged over the ranks; algbw
is bytes over time, and busbw is algbw times 2(n-1)/n. If there are several nodes with several
ranks each, it measures the ranks of every node among themselves first, then all ranks.
"""

import argparse
import faulthandler
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto")
    parser.add_argument("--largest", type=int, default=64, metavar="MIB", help="end at this size")
    parser.add_argument("--rounds", type=int, default=5, help="show the median of so many rounds")
    parser.add_argument("--calls", type=int, default=20, help="make so many calls in a round")
    args = parser.parse_args()
    if min(args.largest, args.rounds, args.calls) < 1:
        parser.error("--largest, --rounds and --calls must be 1 or more")
    return args


def main(args: argparse.Namespace):
    # A launcher sets RANK, LOCAL_RANK (the number on this node) and WORLD_SIZE. A bare srun sets
    # its own, and any other process is alone: srun sets SLURM_STEP_NUM_TASKS, and env.sh unsets an
    # inherited one.
    env = os.environ
    rank = int(env.get("RANK", env.get("SLURM_PROCID", 0)))
    local_rank = int(env.get("LOCAL_RANK", env.get("SLURM_LOCALID", 0)))
    world_size = int(env.get("WORLD_SIZE", env.get("SLURM_STEP_NUM_TASKS", 1)))
    if world_size == 1:
        remedy = "use a launcher or ./torchrun.sh"
        sys.exit(f"allreduce.py: one rank has nobody to reduce with: {remedy}")
    device = torch.device("cpu")
    # CUDA, ROCm or XPU. Apple's MPS has no collectives.
    if args.device == "auto" and torch.accelerator.is_available() and sys.platform != "darwin":
        # GPU number local_rank. If Slurm shows each rank only its own, that is number 0.
        number = local_rank if torch.accelerator.device_count() > 1 else 0
        torch.accelerator.set_device_index(number)
        device = torch.device(torch.accelerator.current_accelerator().type, number)
    faulthandler.dump_traceback_later(300, exit=True)
    backend = dist.get_default_backend_for_device(device)
    gpu = None if device.type == "cpu" else device
    dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=gpu)

    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, os.uname().nodename)
    nodes = [[r for r, host in enumerate(hosts) if host == node] for node in dict.fromkeys(hosts)]
    faulthandler.cancel_dump_traceback_later()
    if dist.get_rank() == 0:
        where = "CPU" if gpu is None else torch.get_device_module(device).get_device_name()
        print(f"{dist.get_backend()} on {where}, torch {torch.__version__}, {len(nodes)} nodes")
    if len(nodes) > 1 and len(nodes[0]) > 1:
        mine, _ = dist.new_subgroups_by_enumeration(nodes)
        measure(args, device, mine, "inside a node")
    measure(args, device, None, "across nodes" if len(nodes) > 1 else "inside a node")

    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    # A thread of gloo can outlive the group and crash Python's shutdown, which this skips.
    os._exit(0)


def measure(args: argparse.Namespace, device: torch.device, group, name: str):
    """Prints the table of a group on rank 0."""
    ranks = dist.get_world_size(group)
    if dist.get_rank() == 0:
        print(f"\nAll-reduce {name}, {ranks} ranks")
        print("| bytes | time, us | algbw, GB/s | busbw, GB/s |")
        print("|---|---|---|---|")
    size = 8
    while size <= args.largest << 20:
        tensor = torch.full((size // 4,), dist.get_rank(group) + 1.0, device=device)
        dist.all_reduce(tensor, group=group)
        if (tensor != ranks * (ranks + 1) / 2).any():
            sys.exit(f"allreduce.py: a sum over {ranks} ranks is wrong")
        # Sums of zeros stay finite, however many there are.
        tensor.zero_()
        times = [time_calls(args.calls, tensor, group) for _ in range(args.rounds)]
        seconds = statistics.median(times)
        if dist.get_rank() == 0:
            algbw = size / seconds / 1e9
            busbw = algbw * 2 * (ranks - 1) / ranks
            print(f"| {size} | {seconds * 1e6:.1f} | {algbw:.3f} | {busbw:.3f} |", flush=True)
        size *= 4


def time_calls(calls: int, tensor: torch.Tensor, group) -> float:
    """Seconds of one call, averaged over the calls and over all ranks of the job."""
    dist.barrier()
    gpu = torch.get_device_module(tensor.device)
    gpu.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    gpu.synchronize()
    mean = torch.tensor((time.perf_counter() - start) / calls, device=tensor.device)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


if __name__ == "__main__":
    main(parse_arguments())
