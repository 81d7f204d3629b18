"""Predict the time of a training step on more ranks with DDP, FSDP and tensor parallelism. Needs no torch and no job.

    python dev/bench/predict_scaling.py --measured allreduce.json --parameters 124e6 --layers 12 --width 768 \\
        --tokens 32768 --step-seconds 0.9 --nodes 1 2 4 8
    python dev/bench/predict_scaling.py --latency 3 12 --bandwidth 400 45 --ranks-per-node 8 --parameters 124e6 ...
    python dev/bench/predict_scaling.py --measured allreduce.json --parameters 1.2e6 --tokens 64 --check scaling.json

The model is alpha-beta: a ring all-reduce of S bytes over n ranks takes 2(n-1) a + 2(n-1)/n S/b, an all-gather or a
reduce-scatter half of that. Latency a and bandwidth b are those of dev/bench/allreduce.py (--measured), or your own: of
nccl-tests' output a is the time of the smallest message over 2(n-1), b the bus bandwidth of the largest. Ranks of one
node have the first pair, groups that span nodes the second, of which those of a node share the bandwidth.

The step is predicted twice: if no communication is hidden behind computing, and if all is that the method allows (DDP:
all buckets but the last, in the backward pass, two thirds of a step; FSDP: all but the first gather and the last
reduce-scatter; tensor parallelism: nothing). A real step lies in between, where the network does what the model says.
"""

import json
import math
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

from resilience.arguments import ArgumentParser, number, whole_number
from resilience.job import write_atomically

# --- arguments --------------------------------------------------------------------------------------------------------

BYTES = {"fp32": (4, 4), "bf16": (2, 4)}  # of a gathered parameter and an activation; of a gradient
BUCKET = 25 * 2**20  # bytes of DDP's buckets, by its default


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    help = "what dev/bench/allreduce.py has written; of several, inside a node and across nodes"
    source.add_argument("--measured", type=Path, nargs="+", metavar="FILE", help=help)
    help = "microseconds of one hop of the ring: inside a node, and if there are several between nodes"
    source.add_argument("--latency", type=number(0), nargs="+", metavar="US", help=help)
    help = (
        "bus bandwidth in GB/s: inside a node, and if there are several between nodes, all of a node's ranks together"
    )
    parser.add_argument("--bandwidth", type=number(1e-6), nargs="+", metavar="GBPS", help=help)
    parser.add_argument("--parameters", type=number(1, 1e15), required=True, help="of the model, as 124e6")
    parser.add_argument("--layers", type=whole_number(1), help="of the model; without it DDP alone is predicted")
    parser.add_argument("--width", type=whole_number(1), help="channels between the layers, for tensor parallelism")
    help = "units (tokens, images) of a step over all ranks; with --weak of a step of one rank"
    parser.add_argument("--tokens", type=number(1, 1e12), required=True, help=help)
    help = "that one rank takes for a step of --tokens; --check takes it from FILE"
    parser.add_argument("--step-seconds", type=number(1e-9), metavar="SECONDS", help=help)
    parser.add_argument("--weak", action="store_true", help="--tokens for every rank, instead of over all ranks")
    parser.add_argument("--nodes", type=whole_number(1), nargs="+", default=[1, 2, 4, 8], help="default: 1 2 4 8")
    parser.add_argument("--ranks-per-node", type=whole_number(1), help="default: as measured, or 1")
    help = "ranks of a tensor-parallel group (default: those of a node); several groups are FSDP's replicas"
    parser.add_argument("--tensor-parallel", type=whole_number(1), metavar="RANKS", help=help)
    parser.add_argument("--precision", choices=BYTES, default="fp32", help="bf16: train_fsdp.py's, gradients in fp32")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with the JSON of dev/bench/scaling.sh")
    parser.add_argument("--strategy", choices=("DDP", "FSDP", "TP"), default="DDP", help="of the script in --check")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args()
    if bool(args.latency) != bool(args.bandwidth):
        parser.error("--latency and --bandwidth belong together, and --measured stands for both")
    if args.latency and not len(args.latency) == len(args.bandwidth) <= 2:
        parser.error("--latency and --bandwidth take one figure each, inside a node, or two: also between nodes")
    if bool(args.step_seconds) == bool(args.check):
        parser.error("say either --step-seconds, or --check, which has the time of one rank")
    if args.strategy not in strategies(args):
        parser.error(f"--strategy {args.strategy} needs --layers" + " and --width" * (args.strategy == "TP"))
    return args


# --- the alpha-beta model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """Latency of a hop in seconds, bandwidth in bytes per second."""

    latency: float
    bandwidth: float

    def all_reduce(self, ranks: int, size: float) -> float:
        """Seconds for `size` bytes over a ring of `ranks`."""
        return 2 * (ranks - 1) * (self.latency + size / ranks / self.bandwidth)

    def gather(self, ranks: int, size: float) -> float:
        """Seconds of an all-gather to `size` bytes on every rank, or of a reduce-scatter of as many."""
        return self.all_reduce(ranks, size) / 2


def bus_bandwidth(size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """algbw and busbw of an all-reduce in bytes per second, as nccl-tests define them.

    The second is what the links carry: the same for any number of ranks if they are the limit.
    """
    return size / seconds, size / seconds * 2 * (ranks - 1) / ranks


def fit(ranks: int, seconds: dict[int, float]) -> Network:
    """The network whose all-reduces of so many bytes come nearest to the measured `seconds`.

    Least squares of the relative errors: in seconds, the largest messages alone would decide. Raises ValueError.
    """
    rows = [(2 * (ranks - 1) / time, 2 * (ranks - 1) / ranks * size / time) for size, time in seconds.items()]
    xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(column) for column in zip(*rows, strict=True))
    determinant = xx * yy - xy * xy
    if len(rows) < 2 or determinant <= 1e-9 * xx * yy:
        raise ValueError("latency and bandwidth take messages of at least two sizes that differ much")
    latency, per_byte = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    if latency < 0:
        latency, per_byte = 0.0, y / yy
    if per_byte <= 0:
        raise ValueError("the times do not grow with the size of the message: measure larger ones")
    return Network(latency, 1 / per_byte)


# --- prediction -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The ranks of a job and what connects them: `inside` a node, `between` nodes (None where it is not known)."""

    nodes: int
    ranks_per_node: int
    inside: Network | None
    between: Network | None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def network(self, ranks: int, per_node: int) -> Network:
        """That of a group, of which so many are on a node. Its node's other groups want the links at the same time."""
        if ranks <= per_node:
            return self.inside
        return Network(self.between.latency, self.between.bandwidth * per_node / self.ranks_per_node)


def ddp(args: Namespace, layout: Layout, compute: float) -> tuple[float, float]:
    """Seconds of communication in a step, and how much of it can be hidden: in the backward pass, all but a bucket."""
    size = args.parameters * BYTES[args.precision][1]
    buckets, network = math.ceil(size / BUCKET), layout.network(layout.ranks, layout.ranks_per_node)
    one = network.all_reduce(layout.ranks, size / buckets)
    return buckets * one, min((buckets - 1) * one, compute * 2 / 3)


def sharded(args: Namespace, network: Network, ranks: int, parameters: float) -> tuple[float, float]:
    """FSDP over so many ranks: seconds of communication, and those at the step's beginning and end.

    A unit for each layer and one for the rest, as large. Gathered for the forward pass, again for the backward pass but
    for the last unit, and reduce-scattered.
    """
    units, (gathered, gradient) = args.layers + 1, BYTES[args.precision]
    gather, scatter = (network.gather(ranks, parameters * size / units) for size in (gathered, gradient))
    return (2 * units - 1) * gather + units * scatter, gather + scatter


def fsdp(args: Namespace, layout: Layout, compute: float) -> tuple[float, float]:
    network = layout.network(layout.ranks, layout.ranks_per_node)
    seconds, ends = sharded(args, network, layout.ranks, args.parameters)
    return seconds, min(seconds - ends, compute)


def tensor_parallel(args: Namespace, layout: Layout, compute: float, tokens: float) -> tuple[float, float]:
    """Four all-reduces of a group's activations a layer, one behind the embedding and one before the head.

    `tokens` are those of a step over all ranks.
    """
    group = min(args.tensor_parallel or layout.ranks_per_node, layout.ranks)
    per_node, copies = min(group, layout.ranks_per_node), layout.ranks // group
    network, size = layout.network(group, per_node), tokens / copies * args.width * BYTES[args.precision][0]
    seconds, hidden = (4 * args.layers + 2) * network.all_reduce(group, size), 0.0
    if copies > 1:
        network = layout.network(copies, max(1, layout.ranks_per_node // group))
        more, ends = sharded(args, network, copies, args.parameters / group)
        seconds, hidden = seconds + more, min(more - ends, compute)
    return seconds, hidden


def predict(args: Namespace, strategy: str, layout: Layout, weak: bool) -> tuple[float, float, float]:
    """Seconds of computing, of communication, and how much of that can be hidden, in a step on all ranks."""
    tokens = args.tokens * (layout.ranks if weak else 1)
    compute = args.step_seconds / (1 if weak else layout.ranks)
    if layout.ranks == 1:
        return compute, 0.0, 0.0
    if strategy == "TP":
        return compute, *tensor_parallel(args, layout, compute, tokens)
    return compute, *{"DDP": ddp, "FSDP": fsdp}[strategy](args, layout, compute)


# --- figures ----------------------------------------------------------------------------------------------------------


def stop(sentence: str):
    sys.exit(f"predict_scaling.py: {sentence}")


def read_json(path: Path, key: str, writer: str) -> dict:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        stop(f"cannot read {path}: {error.strerror}")
    except ValueError:
        stop(f"{path} is no JSON")
    return found if isinstance(found, dict) and key in found else stop(f"{path} has not been written by {writer}")


def networks(args: Namespace) -> tuple[Network | None, Network | None, int]:
    """Inside a node, between nodes, and the ranks of a node."""
    if args.latency:
        pairs = [Network(a / 1e6, b * 1e9) for a, b in zip(args.latency, args.bandwidth, strict=True)]
        return pairs[0], pairs[-1] if len(pairs) > 1 else None, args.ranks_per_node or 1
    found = [read_json(path, "groups", "dev/bench/allreduce.py") for path in args.measured]
    groups = [group for measured in found for group in measured["groups"] if "latency" in group]  # else it has no fit
    known = {group["name"]: Network(group["latency"], group["bandwidth"]) for group in groups}
    ranks_per_node = args.ranks_per_node or max(measured["ranks_per_node"] for measured in found)
    return known.get("inside a node"), known.get("across nodes"), ranks_per_node


def layout_of(args: Namespace, known: tuple, nodes: int, ranks_per_node: int) -> Layout:
    """So many nodes, connected as `networks` knows. Stops with a sentence where it does not."""
    inside, between, _ = known
    missing = (
        "between nodes" if nodes > 1 and not between else "inside a node" if ranks_per_node > 1 and not inside else ""
    )
    if missing:
        where = f"in {args.measured[0]}" if args.measured else "in --latency and --bandwidth"
        stop(f"{nodes} x {ranks_per_node} ranks take figures {missing}, which are not {where}")
    group, ranks = args.tensor_parallel or 1, nodes * ranks_per_node
    if max(group, ranks_per_node) % min(group, ranks_per_node) or ranks % min(group, ranks):
        stop(f"--tensor-parallel {group} fits neither into a node of {ranks_per_node} ranks nor onto whole nodes")
    return Layout(nodes, ranks_per_node, inside, between)


# --- main -------------------------------------------------------------------------------------------------------------


def strategies(args: Namespace) -> Sequence[str]:
    return ("DDP", "FSDP", "TP")[: 1 + bool(args.layers) + bool(args.layers and args.width)]


def span(low: float, high: float, form: str) -> str:
    """Both ends, or one of them where they look the same."""
    low, high = format(low, form), format(high, form)
    return low if low == high else f"{low} to {high}"


def show(args: Namespace) -> list[list[str]]:
    """The head of the table, and its rows."""
    known = networks(args)
    head = ["nodes", "ranks", "strategy", "computing, ms", "communication, ms", "step, ms", "efficiency"]
    rows = []
    for nodes in args.nodes:
        layout = layout_of(args, known, nodes, known[2])
        for strategy in strategies(args):
            compute, communication, hidden = predict(args, strategy, layout, args.weak)
            least, most = compute + communication - hidden, compute + communication
            row = [f"{nodes}", f"{layout.ranks}", strategy, f"{compute * 1e3:.2f}", f"{communication * 1e3:.2f}"]
            rows.append([*row, span(least * 1e3, most * 1e3, ".2f"), span(compute / most, compute / least, ".0%")])
    return [head, *rows]


def check(args: Namespace) -> list[list[str]]:
    """The prediction beside what dev/bench/scaling.sh has measured: the head of the table, and its rows."""
    known, found = networks(args), read_json(args.check, "runs", "dev/bench/scaling.sh")
    alone = next((run for run in found["runs"] if run["nodes"] * run["ranks_per_node"] == 1), None)
    if not alone:
        stop(f"{args.check} has no run of one rank to predict from")
    args.step_seconds = args.tokens / alone["rate"]
    head, rows = ["scaling", "nodes x ranks", f"{found['unit']} per second, predicted", "measured", "error"], []
    for run in found["runs"]:
        if run is alone:
            continue
        layout, weak = layout_of(args, known, run["nodes"], run["ranks_per_node"]), run["mode"] == "weak"
        compute, communication, hidden = predict(args, args.strategy, layout, weak)
        units = args.tokens * (layout.ranks if weak else 1)
        rates = [units / (compute + communication), units / (compute + communication - hidden)]
        error = span(*(rate / run["rate"] - 1 for rate in rates), "+.0%")
        size = f"{run['nodes']} x {run['ranks_per_node']}"
        rows.append([run["mode"], size, span(*rates, ",.0f"), f"{run['rate']:,.0f}", error])
    return [head, *rows]


def main(args: Namespace):
    table = check(args) if args.check else show(args)
    for row in (table[0], ["---"] * len(table[0]), *table[1:]):
        print("| " + " | ".join(row) + " |")
    if args.json:
        try:
            write_atomically(args.json, json.dumps({"command": shlex.join(sys.argv), "table": table}, indent=1) + "\n")
        except OSError as error:
            stop(f"cannot write {args.json}: {error.strerror}")


if __name__ == "__main__":
    main(parse_arguments())
