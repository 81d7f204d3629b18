"""Draw what dev/bench/ has measured of scaling, and fill the tables of docs/scaling.md: from the JSON in docs/figures.

    python dev/figures/draw_scaling.py
    python dev/figures/draw_scaling.py --folder log/scaling --page log/scaling/page.md  # yours, in a copy of the page

scaling.json and allreduce*.json make scaling.svg, growth.json makes growth.svg; all of them, and prediction*.json, make
a table each. What is not there is left out.
"""

import argparse
import json
import os
import sys
from argparse import Namespace
from pathlib import Path

import style

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "dev/bench"))

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

import read_scaling
from predict_scaling import Network

BEGIN = "<!-- begin: written by dev/figures/draw_scaling.py -->\n"


def parse_arguments() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder, page = REPOSITORY / "docs/figures", REPOSITORY / "docs/scaling.md"
    parser.add_argument("--folder", type=Path, default=folder, help="with the JSON; the figures go there, too")
    parser.add_argument("--page", type=Path, default=page, help="whose tables are filled")
    return parser.parse_args()


def main(args: Namespace):
    names = ("scaling.json", "growth.json", "prediction*.json", "allreduce*.json")
    found = {path.stem: read_json(path) for name in names for path in sorted(args.folder.glob(name))}
    reduces = {name: values for name, values in found.items() if name.startswith("allreduce") and with_fit(values)}
    parts = []
    if "scaling" in found:
        draw_scaling(found["scaling"], list(reduces.values()), args.folder / "scaling.svg")
        parts.append(scaling_part(found["scaling"], args))
    parts += [reduce_part(reduces)] if reduces else []
    parts += [prediction_part(values) for name, values in found.items() if name.startswith("prediction")]
    if "growth" in found:
        draw_growth(found["growth"]["sizes"], args.folder / "growth.svg")
        parts.append(growth_part(found["growth"], args))
    if not parts:
        stop(f"no scaling.json, growth.json, allreduce.json or prediction.json in {args.folder}")
    style.fill(args.page, BEGIN, "\n".join(parts))


def stop(sentence: str):
    sys.exit(f"draw_scaling.py: {sentence}")


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        stop(f"cannot read {path}: {error}")


# --- figures ----------------------------------------------------------------------------------------------------------


def log_axes(axes: Axes, ranks: list[int], title: str):
    """Ranks by powers of two, and their numbers alone."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [f"{number:,}" for number in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("ranks")
    axes.set_title(title)


def draw_scaling(found: dict, reduces: list[dict], path: Path):
    """Speed-up over ranks, the best of each number; beside it the bus bandwidth by size, measured and fitted."""
    figure, matrix = style.subplots(1, 1 + bool(reduces), 7 if reduces else 3.5, 2.8)
    axes, runs = matrix[0][0], found["runs"]
    ranks = sorted({run["nodes"] * run["ranks_per_node"] for run in runs})
    axes.plot(ranks, [number / ranks[0] for number in ranks], color=style.GREY, linewidth=0.8, label="ideal")
    modes = [mode for mode in ("strong", "weak") if any(run["mode"] == mode for run in runs)]
    for number, mode in enumerate(modes):
        best = {ranks[0]: 1.0}  # one rank is both
        for run in runs:
            count = run["nodes"] * run["ranks_per_node"]
            if run["mode"] == mode:
                best[count] = max(best.get(count, 0), run["speed_up"])
        axes.plot(*zip(*sorted(best.items()), strict=True), **style.line(number, len(best)), label=f"{mode} scaling")
    log_axes(axes, ranks, f"{found['unit']} per second relative to one rank;\nthe fastest layout of so many ranks")
    axes.set_yscale("log", base=2)
    axes.set_yticks(marks := [2**i for i in range(ranks[-1].bit_length())], [f"{mark}" for mark in marks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.legend()
    if reduces:
        draw_reduces(matrix[0][1], [group for measured in reduces for group in with_fit(measured)])
    style.save(figure, path, "Speed-up of a training by ranks; bus bandwidth of an all-reduce by size")


def with_fit(measured: dict) -> list[dict]:
    """The groups of an allreduce.json in which a latency and a bandwidth have been found."""
    return [group for group in measured["groups"] if "latency" in group]


def draw_reduces(axes: Axes, groups: list[dict]):
    """Points are measured, lines are the ring's."""
    for number, group in enumerate(groups):
        sizes, factor = [row["bytes"] for row in group["sizes"]], 2 * (group["ranks"] - 1) / group["ranks"]
        look = style.line(number, 10 * len(sizes))
        measured = [row["busbw"] / 1e9 for row in group["sizes"]]
        network = Network(group["latency"], group["bandwidth"])
        fitted = [size * factor / network.all_reduce(group["ranks"], size) / 1e9 for size in sizes]
        axes.plot(sizes, measured, linestyle="none", marker=style.MARKERS[number], color=look["color"])
        axes.plot(sizes, fitted, **style.line(number), label=f"{group['name']}, {group['ranks']} ranks")
    axes.set_xscale("log", base=2)
    axes.set_xticks(marks := [2**i for i in range(3, 40, 6) if 2**i <= max(sizes)], [short(mark) for mark in marks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yscale("log")
    axes.set_xlabel("bytes")
    axes.set_title("all-reduce: bus bandwidth, GB/s;\npoints measured, lines fitted")
    axes.legend()


def short(size: int) -> str:
    """8, 512, 32K, 2M: in powers of 1024."""
    power = min(3, (size.bit_length() - 1) // 10)
    return f"{size >> 10 * power}{' KMG'[power].strip()}"


def draw_growth(sizes: list[dict], path: Path):
    """Seconds by ranks; beside them what heartbeats write."""
    figure, matrix = style.subplots(1, 2, 7, 2.8)
    left, right = matrix[0]
    ranks = [size["ranks"] for size in sizes]
    names = {
        "start": "start-up",
        "rendezvous": "rendezvous",
        "step_zero": "Step 0",
        "read": "reading all heartbeats",
        "check": "checking a checkpoint",
        "publish": "publishing a checkpoint",
    }
    for number, (name, label) in enumerate(names.items()):
        left.plot(ranks, [size[name] for size in sizes], **style.line(number, len(ranks)), label=label)
    log_axes(left, ranks, "seconds")
    left.set_yscale("log")
    left.legend(loc="upper center", bbox_to_anchor=(0.45, -0.25), ncols=2)  # below: the lines cross everywhere
    names = {"writes_per_second": "on average", "most_writes_in_a_second": "most in one second"}
    for number, (name, label) in enumerate(names.items()):
        right.plot(ranks, [size[name] for size in sizes], **style.line(number, len(ranks)), label=label)
    log_axes(right, ranks, "heartbeats written in a second, by all ranks")
    right.set_yscale("log")
    right.legend(loc="upper center", bbox_to_anchor=(0.45, -0.25), ncols=2)
    style.save(figure, path, "Start-up, rendezvous, Step 0, checkpoints and heartbeats by ranks")


# --- page -------------------------------------------------------------------------------------------------------------


def picture(args: Namespace, name: str, words: str) -> str:
    return f"![{words}]({os.path.relpath(args.folder / name, args.page.parent)})\n\n"


def scaling_part(found: dict, args: Namespace) -> str:
    shown = picture(args, "scaling.svg", "Speed-up of a training by ranks; bus bandwidth of an all-reduce by size")
    source = f"`dev/bench/scaling.sh {found['command']}`, {found['date']}, {found['machine']}:\n\n"
    return shown + source + read_scaling.table(found["unit"], found["runs"]) + "\n"


def reduce_part(reduces: dict[str, dict]) -> str:
    lines = ["| all-reduce | ranks | latency of a hop, us | bandwidth, GB/s | a ring's times are off: median, most |"]
    lines.append("|---|---|---|---|---|")
    for measured in reduces.values():
        for group in with_fit(measured):
            errors = sorted(group["errors"])
            row = [f"{group['name']}, {measured['backend']}", f"{group['ranks']}", f"{group['latency'] * 1e6:.1f}"]
            row += [f"{group['bandwidth'] / 1e9:.2f}", f"{errors[len(errors) // 2]:.0%}, {errors[-1]:.0%}"]
            lines.append("| " + " | ".join(row) + " |")
    where = dict.fromkeys(f"{measured['date']}, {measured['device']}" for measured in reduces.values())
    return f"`dev/bench/allreduce.py`, {'; '.join(where)}, fitted:\n\n" + "\n".join(lines) + "\n"


def prediction_part(found: dict) -> str:
    head, *rows = found["table"]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return f"`{found['command']}`:\n\n" + "\n".join(lines) + "\n"


def growth_part(found: dict, args: Namespace) -> str:
    shown = picture(args, "growth.svg", "Start-up, rendezvous, Step 0, checkpoints and heartbeats by ranks")
    source = f"`{found['command']}`, {found['date']}, {found['machine']}:\n\n"
    return shown + source + read_scaling.growth_table(found["sizes"]) + "\n"


if __name__ == "__main__":
    main(parse_arguments())
