"""Latency and bandwidth of an all-reduce by size, over the job's own ranks: NCCL on GPUs, gloo on CPUs.

    ./torchrun.sh dev/bench/allreduce.py
    sbatch --nodes=2 --gpus-per-node=8 --cpus-per-task=96 launch_slurm_with_torchrun.sh dev/bench/allreduce.py

The columns are those of nccl-tests: time of one call in place, averaged over the ranks; algbw is bytes over time, busbw
that times 2(n-1)/n. First the ranks of each node among themselves, all nodes at once; then, where there are several,
all ranks of the job. A line below each table fits 2(n-1) a + 2(n-1)/n S/b, the time of a ring, to what was measured: a
is the latency of a hop, b the bandwidth. dev/bench/predict_scaling.py predicts the step of a model from the file.
"""

import datetime
import json
import math
import os
import re
import statistics
import sys
import time
from argparse import ArgumentTypeError, Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

from predict_scaling import bus_bandwidth, fit
from read_scaling import machine
from resilience.arguments import ArgumentParser, device_name, number, whole_number
from resilience.job import write_atomically

# --- arguments --------------------------------------------------------------------------------------------------------


def size_in_bytes(text: str) -> int:
    """An argparse type: 8, 64K, 64M, 8G, in powers of 1024 as in nccl-tests; a multiple of 4."""
    found = re.fullmatch(r"([1-9][0-9]{0,11})([KMG]?)", text)
    size = int(found[1]) * 1024 ** " KMG".index(found[2] or " ") if found else 0
    if size < 4 or size % 4:
        raise ArgumentTypeError(f"{text!r} is no size in bytes, as 8, 64K, 64M or 8G, which is a multiple of 4")
    return size


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    device = os.environ.get("TRAIN_DEVICE", "auto")
    parser.add_argument("--device", type=device_name, default=device, help="auto, cpu or cuda; or TRAIN_DEVICE")
    parser.add_argument("--smallest", type=size_in_bytes, default="8", metavar="BYTES", help="first message")
    parser.add_argument("--largest", type=size_in_bytes, default="64M", metavar="BYTES", help="last message")
    parser.add_argument("--factor", type=whole_number(2), default=2, help="from one message to the next")
    parser.add_argument("--rounds", type=whole_number(1), default=5, help="of which the median is shown")
    parser.add_argument("--seconds", type=number(0), default=0.1, help="of a round, of at most 20 calls and at least 1")
    parser.add_argument("--json", type=Path, default="allreduce.json", metavar="FILE", help="where the figures go")
    parser.add_timeout_arguments()
    args = parser.parse_args()
    if args.smallest * args.factor > args.largest:
        parser.error("--largest is --smallest times --factor, or more: a fit takes two sizes")
    return args


if __name__ == "__main__":
    args = parse_arguments()  # before torch: a typing mistake costs no second

import torch
import torch.distributed as dist

from resilience.place import Place, backend_of, find_ranks, init_process_group, ranks_of_nodes

MOST_CALLS = 20  # in a round, as nccl-tests has it

# --- measurement ------------------------------------------------------------------------------------------------------


def time_calls(place: Place, tensor: torch.Tensor, group: dist.ProcessGroup | None, calls: int) -> float:
    """Seconds of one all-reduce of `tensor` in its group, averaged over `calls` and over all ranks of the job."""
    place.barrier()
    if tensor.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    [total] = place.all_reduced([(time.perf_counter() - start) / calls])
    return total / place.world_size


def measure(args: Namespace, place: Place, group: dist.ProcessGroup | None) -> dict[int, float]:
    """Seconds of an all-reduce by the size of the message in bytes. Ends the run when a sum is wrong."""
    seconds, size, ranks = {}, args.smallest, dist.get_world_size(group)
    while size <= args.largest:
        tensor = torch.full((size // 4,), dist.get_rank(group) + 1.0, device=place.device)
        dist.all_reduce(tensor, group=group)
        wrong = int((tensor != ranks * (ranks + 1) / 2).sum())
        place.stop_if_any(
            f"{wrong} of {len(tensor)} sums of an all-reduce over {ranks} ranks are wrong" if wrong else None
        )
        tensor.zero_()  # sums of it stay finite, however often
        first = time_calls(place, tensor, group, 2)  # the same on all ranks, and so is what follows from it
        calls = max(1, min(MOST_CALLS, int(args.seconds / first)))
        seconds[size] = statistics.median(time_calls(place, tensor, group, calls) for _ in range(args.rounds))
        size *= args.factor
    return seconds


def report(name: str, ranks: int, seconds: dict[int, float]) -> dict:
    """Prints the table of a group, and its fit if there is one. Returns what goes into the file."""
    try:
        network = fit(ranks, seconds)
    except ValueError as error:
        network, fitted = None, f"no fit: {error}"
    print(f"\nAll-reduce {name}, {ranks} ranks\n| bytes | time, us | algbw, GB/s | busbw, GB/s | a ring's, us |")
    print("|---|---|---|---|---|")
    rows = []
    for size, taken in seconds.items():
        algbw, busbw = bus_bandwidth(size, taken, ranks)
        model = network.all_reduce(ranks, size) if network else math.nan
        print(f"| {size} | {taken * 1e6:.1f} | {algbw / 1e9:.3f} | {busbw / 1e9:.3f} | {model * 1e6:.1f} |")
        rows.append({"bytes": size, "seconds": taken, "algbw": algbw, "busbw": busbw})
    found = {"name": name, "ranks": ranks, "sizes": rows}
    if network:
        errors = [abs(network.all_reduce(ranks, size) / taken - 1) for size, taken in seconds.items()]
        found |= {**vars(network), "errors": errors}
        fitted = f"latency of a hop {network.latency * 1e6:.1f} us, bandwidth {network.bandwidth / 1e9:.3f} GB/s; "
        fitted += f"the ring's times are {statistics.median(errors):.0%} off, at most {max(errors):.0%}"
    print(fitted)
    return found


# --- main -------------------------------------------------------------------------------------------------------------


def groups_of(nodes: list[range]) -> dict[str, dist.ProcessGroup | None]:
    """The groups to measure, by their names: this rank's node, and all ranks, as far as these differ."""
    if len(nodes) == 1:
        return {"inside a node": None}
    if len(nodes[0]) == 1:
        return {"across nodes": None}
    mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in nodes])
    return {"inside a node": mine, "across nodes": None}


def find_fault(args: Namespace) -> str | None:
    """What would make the measurement useless, in one sentence, or None."""
    launcher, rank, _, world_size = find_ranks()
    if world_size == 1:
        return "one rank alone has nobody to reduce with: use a launcher, or ./torchrun.sh"
    if len({len(ranks) for ranks in ranks_of_nodes(launcher, world_size)}) > 1:
        return "the nodes have unequal numbers of ranks: ask for --ntasks-per-node"
    folder = args.json.absolute().parent
    if rank == 0 and not (folder.is_dir() and os.access(folder, os.W_OK)):
        return f"cannot write {args.json}: there is no such folder, or it is not ours"
    return None


def main(args: Namespace):
    place = init_process_group(args, find_fault(args))
    nodes = ranks_of_nodes(place.launcher, place.world_size)
    seconds = {
        name: (dist.get_world_size(group), measure(args, place, group)) for name, group in groups_of(nodes).items()
    }
    fault = None
    if place.rank == 0:
        device = torch.cuda.get_device_name() if place.device.type == "cuda" else machine()
        found = {"date": datetime.date.today().isoformat(), "backend": backend_of(place.device), "device": device}
        found |= {"torch": torch.__version__, "nodes": len(nodes), "ranks_per_node": len(nodes[0])}
        try:
            found["groups"] = [report(name, *measured) for name, measured in seconds.items()]
            write_atomically(args.json, json.dumps(found, indent=1) + "\n")
            print(f"Written: {args.json}")
        except OSError as error:
            fault = f"cannot write {args.json}: {error.strerror}"
    place.stop_if_any(fault)
    place.shutdown()


if __name__ == "__main__":
    main(args)
