"""Draw loss, accuracy and throughput of runs from their metrics.jsonl, as runs.png and runs.svg.

    python aux/plot_runs.py checkpoints/28120876
    python aux/plot_runs.py checkpoints/28120876 checkpoints/28120877 --out comparison
    python aux/plot_runs.py checkpoints/28120876 --watch     # draws again, until ctrl-C

train_fsdp.py and train_tp.py write metrics.jsonl into --checkpoint-dir.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a --checkpoint-dir")
    help = "name of the pictures, without .png and .svg"
    parser.add_argument("--out", type=Path, default=Path("runs"), help=help)
    help = "look for new lines every SECONDS seconds (default: 10)"
    parser.add_argument("--watch", type=float, nargs="?", const=10.0, metavar="SECONDS", help=help)
    args = parser.parse_args()
    if args.watch is not None and not 0 < args.watch < 1e6:
        parser.error(f"--watch {args.watch:g} is not a number of seconds above 0")
    return args


def main(args: argparse.Namespace):
    drawn = None
    while True:
        runs = {str(run): read(run) for run in args.runs}
        empty = [run for run, events in runs.items() if not events]
        if empty and args.watch is None:
            sys.exit(f"plot_runs.py: no metrics in {empty[0]}: is it a --checkpoint-dir?")
        if len(empty) < len(runs) and runs != drawn:
            draw(runs, args.out)
            last = max(event["step"] for events in runs.values() for event in events)
            print(f"{args.out}.png and {args.out}.svg, up to step {last}", flush=True)
            drawn = runs
        if args.watch is None:
            return
        time.sleep(args.watch)


def read(run: Path) -> list[dict]:
    """The events of a run, given as a folder or a metrics.jsonl; none if there is no file yet.

    A line that is being written, and holes that a node's crash has left, are skipped.
    """
    path = run if run.suffix == ".jsonl" else run / "metrics.jsonl"
    if not path.exists():
        return []
    events = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and isinstance(event.get("step"), int):
            events.append(event)
    return events


def curves(events: list[dict], suffix: str) -> dict[str, tuple[list, list]]:
    """Steps and values of every quantity whose name ends with `suffix`."""
    found = {}
    for event in events:
        for name, value in event.items():
            if name.endswith(suffix) and isinstance(value, int | float):
                steps, values = found.setdefault(name, ([], []))
                steps.append(event["step"])
                values.append(value)
    return found


def draw(runs: dict[str, list[dict]], out: Path):
    """A panel each for loss, accuracy and throughput. Values of evaluations have hollow markers."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("plot_runs.py needs matplotlib: python -m pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    suffixes = [
        suffix
        for suffix in ("loss", "accuracy", "_per_second")
        if any(curves(events, suffix) for events in runs.values())
    ]
    size = (7, 0.6 + 2.1 * len(suffixes))
    figure, axes = plt.subplots(
        len(suffixes), 1, figsize=size, layout="constrained", squeeze=False, sharex=True
    )
    for axis, suffix in zip(axes[:, 0], suffixes, strict=True):
        for number, (run, events) in enumerate(runs.items()):
            for name, (steps, values) in curves(events, suffix).items():
                look = {"color": f"C{number}", "marker": "os^Dv"[number % 5], "markersize": 4}
                look["markevery"] = max(1, len(steps) // 10)
                if name.startswith(("test", "val")):
                    look |= {"markevery": 1, "markersize": 7, "markerfacecolor": "none"}
                label = name.replace("_", " ")
                axis.plot(
                    steps, values, label=f"{run}, {label}" if len(runs) > 1 else label, **look
                )
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
        if suffix == "_per_second":
            axis.set_ylim(bottom=0)
    axes[-1, 0].set_xlabel("step")

    for kind in ("png", "svg"):
        # Whole or not at all, because a viewer may be reading the previous picture.
        unfinished = Path(f"{out}.{os.getpid()}.part")
        figure.savefig(unfinished, format=kind, dpi=150)
        os.replace(unfinished, f"{out}.{kind}")
    plt.close(figure)


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except KeyboardInterrupt:
        sys.exit(0)
