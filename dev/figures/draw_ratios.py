"""Draw as ratios what has paid off, and fill the table of docs/14_faster.md: from what `make bench` has measured.

    python dev/figures/draw_ratios.py
    python dev/figures/draw_ratios.py --raw log/benchmarks.json --folder log --page log/page.md     # a run of your own

Each bar is a row of docs/benchmarks.md. Two ranks stand there as a share of 2, and here as times as fast as one.
"""

import argparse
import json
import sys
from argparse import Namespace
from pathlib import Path

import style

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "dev/bench"))

from rows import Row

BEGIN = "<!-- begin: written by dev/figures/draw_ratios.py -->\n"
EXAMPLES, NANOGPT, ONE_RANK = "pytorch/examples-style loop", "nanoGPT-style loop", "one rank, as a share of 2"
SMALL, LARGE = "language model, nanoGPT's CPU settings, 1 thread", "language model, 10.65 million parameters, 1 thread"
BARS = {  # what was changed: a bar for each row (its name, its other side), with what tells it from its neighbours
    "loader: a batch is one indexing": {
        ("images alone, train_ddp.py", "per-image DataLoader"): "images",
        ("text alone", "per-sample text Dataset"): "text",
    },
    "a step on one thread": {
        ("MNIST step, fp32", EXAMPLES): "ConvNet, float32",
        ("MNIST step, bf16", EXAMPLES): "ConvNet, bfloat16",
        (f"{SMALL}, fp32", NANOGPT): "small transformer, float32",
        (f"{SMALL}, bf16", NANOGPT): "small transformer, bfloat16",
        (f"{LARGE}, fp32", NANOGPT): "larger transformer, float32",
        (f"{LARGE}, bf16", NANOGPT): "larger transformer, bfloat16",
    },
    "a plain loop around a tiny step": {
        ("loop around a step", "Accelerate"): "in place of Accelerate",
        ("loop around a step", "Lightning"): "in place of Lightning",
        ("loop around a step", "HF Trainer"): "in place of the HF Trainer",
    },
    "two ranks in place of one": {
        ("MNIST on two ranks, fp32", ONE_RANK): "ConvNet",
        ("two ranks, DistributedDataParallel", ONE_RANK): "small transformer",
    },
    "launch to first step, four ranks": {
        ("launch to first step, srun, 4 ranks", "bare torchrun"): "srun starts them",
        ("launch to first step, torchrun, 4 ranks", "bare torchrun"): "torchrun starts them",
        ("launch to first step, spawn, 4 ranks", "bare torchrun"): "mp.spawn starts them",
        ("launch to first step, container, 4 ranks", "bare torchrun"): "torchrun, in a container",
    },
    "network and schedule, to 99 %": {
        ("MNIST to 99 %, real files", EXAMPLES): "real digits",
        ("MNIST to 99 %, synthetic digits", EXAMPLES): "drawn digits",
    },
}


def parse_arguments() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    raw, folder, page = (REPOSITORY / "docs" / name for name in ("benchmarks.json", "figures", "14_faster.md"))
    parser.add_argument("--raw", type=Path, default=raw, help="written by make bench")
    parser.add_argument("--folder", type=Path, default=folder, help="where ratios.svg goes")
    parser.add_argument("--page", type=Path, default=page, help="whose table is filled")
    return parser.parse_args()


def main(args: Namespace):
    try:
        found = json.loads(args.raw.read_text())["rows"]
        measured = [Row(**{name: value for name, value in row.items() if name != "load"}) for row in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        stop(f"{args.raw} is not raw data of make bench ({error!r})")
    rows = {(row.name, row.other): row for row in measured}
    if all(row not in rows or rows[row].missing for bars in BARS.values() for row in bars):
        stop(f"{args.raw} has none of the rows that are drawn here")
    draw(rows, args.folder / "ratios.svg")
    style.fill(args.page, BEGIN, table(rows))


def stop(sentence: str):
    sys.exit(f"draw_ratios.py: {sentence}")


def faster(row: Row) -> float:
    """How many times as fast as the other side."""
    return row.ratio() * row.ideal


def draw(rows: dict[tuple, Row], path: Path):
    """A bar for each row, from 1 on, on a logarithmic scale; groups below each other, each with its name above it."""
    shown = {group: [row for row in bars if row in rows and not rows[row].missing] for group, bars in BARS.items()}
    shown = {group: bars for group, bars in shown.items() if bars}
    names = []
    figure, [[axes]] = style.subplots(1, 1, 7, 0.8 + 0.2 * (len(shown) + sum(map(len, shown.values()))))
    for number, (group, bars) in enumerate(shown.items()):
        names.append(group)
        for row in bars:
            times, color, missed = faster(rows[row]), style.COLOURS[number], rows[row].verdict() == "missed"
            axes.barh(len(names), times - 1, left=1, height=0.7, color=color, alpha=0.2 if missed else 0.75)
            axes.text(max(times, 1) * 1.04, len(names), f"{times:.3g}" + ", missed" * missed, va="center")
            names.append(BARS[group][row])
    axes.set_yticks(range(len(names)), names)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() in shown else "normal")
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.axvline(1, color=style.GREY, linewidth=0.8)
    axes.set(xscale="log", xlabel="times as fast as the other side")
    axes.set_xticks(marks := [1, 2, 5, 10, 20, 50, 100, 200], [str(mark) for mark in marks])
    axes.set_xticks([], minor=True)
    axes.set_xlim(right=1.6 * max(faster(rows[row]) for bars in shown.values() for row in bars))
    style.save(figure, path, "How many times as fast: loader, step, loop, ranks, network")
    style.plt.close(figure)


def table(rows: dict[tuple, Row]) -> str:
    """The same as Markdown, with the names that the rows have in docs/benchmarks.md."""
    lines = ["| what was changed | | row; its other side | times as fast | verdict |", "|---|---|---|---|---|"]
    for group, bars in BARS.items():
        for number, (row, words) in enumerate(bars.items()):
            times, verdict = "", rows[row].verdict() if row in rows else "not measured"
            if row in rows and not rows[row].missing:
                found = rows[row]
                share = f" ({found.ratio():.2f} of {found.ideal:g})" if found.ideal != 1 else ""
                times = f"{faster(found):.2f}{share}"
            what = group if number == 0 else ""
            lines.append(f"| {what} | {words} | {row[0]}; {row[1]} | {times} | {verdict} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(parse_arguments())
