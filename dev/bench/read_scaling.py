"""The table and the JSON of dev/bench/scaling.sh, from the logs of its jobs. Needs no torch.

python3 dev/bench/read_scaling.py log/scaling          # reads MODE-SIZE-ROUND.out there, writes scaling.json
"""

import datetime
import json
import os
import re
import statistics
import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

from resilience.arguments import ArgumentParser
from resilience.job import write_atomically

EQUAL = 0.01  # losses that differ by less, on the average of the log lines, are those of the same training


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with the logs")
    parser.add_argument("--command", default="", help="what has made them, for the JSON")
    return parser.parse_args()


def stop(sentence: str):
    sys.exit(f"scaling.sh: {sentence}")


def read_log(path: Path) -> tuple[str, float, dict[str, float]]:
    """The unit of a training's throughput, its median without the first line, and the losses by epoch and step.

    The first line has the start-up in it.
    """
    rates, losses = {}, {}
    for line in path.read_text(errors="replace").splitlines():
        values = dict(re.findall(r"(\w+)=(\S+)", line))
        where = f"{values.get('epoch', 0)}, {values.get('step', '').split('/')[0]}"
        rates |= {(name, where): float(values[name]) for name in values if name.endswith("_per_second")}
        for name in {"loss", "test_loss", "val_loss"} & values.keys():
            losses[f"{where} {name}"] = float(values[name])
    names = {name for name, _ in rates}
    if len(names) != 1 or not losses:
        stop(f"{path} has no log lines with loss= and one of images_per_second= and tokens_per_second=")
    if len(rates) < 3:
        stop(f"{path} has {len(rates)} lines with a throughput, and 3 are needed: a smaller --log-every, or more steps")
    return names.pop().removesuffix("_per_second"), statistics.median([*rates.values()][1:]), losses


def difference(losses: dict[str, float], others: dict[str, float]) -> float | None:
    """The average difference of the log lines that both trainings have, relative to the average loss of the others."""
    both = [where for where in losses if where in others]
    if not both:
        return None
    return sum(abs(losses[where] - others[where]) for where in both) / sum(abs(others[where]) for where in both)


def read_runs(folder: Path) -> tuple[str, list[dict]]:
    """The unit, and a run for each mode and size in the order of modes and ranks: all rounds of it in one."""
    rounds, units = {}, set()
    for path in sorted(folder.glob("*-*x*-*.out")):
        mode, size, _ = path.stem.split("-")
        unit, rate, losses = read_log(path)
        units.add(unit)
        rounds.setdefault((mode, *map(int, size.split("x"))), []).append((rate, losses))
    if len(units) != 1:
        stop(
            f"the logs in {folder} count in different units: {', '.join(sorted(units))}"
            if units
            else f"no logs in {folder}"
        )
    order = sorted(rounds, key=lambda key: (key[0], key[1] * key[2], key[1]))
    first, runs = rounds[order[0]], []
    for mode, nodes, ranks_per_node in order:
        found = rounds[mode, nodes, ranks_per_node]
        rates, losses = [rate for rate, _ in found], found[0][1]
        run = {"mode": mode, "nodes": nodes, "ranks_per_node": ranks_per_node, "rate": statistics.median(rates)}
        ratio = run["rate"] / statistics.median(rate for rate, _ in first)
        more = nodes * ranks_per_node / (order[0][1] * order[0][2])
        run |= {"rates": rates, "speed_up": ratio, "efficiency": ratio / more, "losses": losses}
        runs.append(run | {"difference": difference(losses, first[0][1]) if mode == "strong" else None})
    return units.pop(), runs


def table(unit: str, runs: list[dict]) -> str:
    """In Markdown."""
    lines = [f"| scaling | nodes x ranks | {unit} per second | speed-up | efficiency | last loss | losses differ by |"]
    lines.append("|---|---|---|---|---|---|---|")
    for run in runs:
        differs = "" if run["difference"] is None else f"{run['difference']:.2%}"
        row = [
            run["mode"],
            f"{run['nodes']} x {run['ranks_per_node']}",
            f"{run['rate']:,.0f}",
            f"{run['speed_up']:.2f}",
        ]
        row += [f"{run['efficiency']:.0%}", f"{list(run['losses'].values())[-1]:.4f}", differs]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def growth_table(sizes: list[dict]) -> str:
    """What dev/bench/growth.py has measured, in Markdown."""
    heartbeats, checkpoints = "heartbeats: a second | CPU | read all, s", "checkpoint: check, s | publish, s"
    lines = [f"| ranks | nodes | start-up, s | rendezvous, s | Step 0, s | {heartbeats} | {checkpoints} |"]
    lines.append("|" + "---|" * 10)
    for size in sizes:
        row = [f"{size['ranks']:,}", f"{size['nodes']}", f"{size['start']:.2f}"]
        row += [f"{size['rendezvous']:.2f}", f"{size['step_zero']:.2f}"]
        row += [f"{size['writes_per_second']:.1f}", f"{size['cpu_per_rank']:.3%}", f"{size['read']:.3f}"]
        row += [f"{size['check']:.4f}", f"{size['publish']:.4f}"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def machine() -> str:
    """The processor of this machine, and how many CPUs it has."""
    info = Path("/proc/cpuinfo")  # of Linux
    found = re.search(r"^model name\s*: (.+)$", info.read_text() if info.exists() else "", re.M)
    return f"{found[1] if found else os.uname().machine}, {os.cpu_count()} CPUs"


def main(args: Namespace):
    unit, runs = read_runs(args.folder)
    found = {"date": datetime.date.today().isoformat(), "machine": machine(), "command": args.command, "unit": unit}
    write_atomically(args.folder / "scaling.json", json.dumps(found | {"runs": runs}, indent=1) + "\n")
    print(f"{table(unit, runs)}\nWritten: {args.folder / 'scaling.json'}")
    for run in runs:
        if (run["difference"] or 0) > EQUAL:
            ranks = run["nodes"] * run["ranks_per_node"]
            stop(f"on {ranks} ranks the losses differ by {run['difference']:.1%}: not the same training (--dropout 0?)")


if __name__ == "__main__":
    main(parse_arguments())
