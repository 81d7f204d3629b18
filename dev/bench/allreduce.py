"""Latency and bandwidth of an all-reduce by size, over the job's own ranks: NCCL or gloo.

    ./torchrun.sh dev/bench/allreduce.py
    sbatch --nodes=2 --gpus-per-node=8 launch_slurm_with_torchrun.sh dev/bench/allreduce.py

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
    # A launcher sets RANK, LOCAL_RANK and WORLD_SIZE. In a step of srun without a launcher there
    # are Slurm's own numbers. Any other process is the only one.
    slurm = os.environ if 0 <= int(os.environ.get("SLURM_STEP_ID", -1)) < 2**31 else {}
    rank = int(os.environ.get("RANK", slurm.get("SLURM_PROCID", 0)))
    local_rank = int(os.environ.get("LOCAL_RANK", slurm.get("SLURM_LOCALID", 0)))
    world_size = int(os.environ.get("WORLD_SIZE", slurm.get("SLURM_NTASKS", 1)))
    if world_size == 1:
        remedy = "use a launcher or ./torchrun.sh"
        sys.exit(f"allreduce.py: one rank has nobody to reduce with: {remedy}")
    device = torch.device("cpu")
    if args.device == "auto" and torch.cuda.is_available():
        device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
    faulthandler.dump_traceback_later(300, exit=True)
    backend, gpu = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=gpu)

    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, os.uname().nodename)
    nodes = [[r for r, host in enumerate(hosts) if host == node] for node in dict.fromkeys(hosts)]
    faulthandler.cancel_dump_traceback_later()
    if dist.get_rank() == 0:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
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
    synchronize(tensor)
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    synchronize(tensor)
    mean = torch.tensor((time.perf_counter() - start) / calls, device=tensor.device)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def synchronize(tensor: torch.Tensor):
    if tensor.is_cuda:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(parse_arguments())
