"""Draws loss, accuracy and throughput of one or several runs from their metrics.jsonl, as runs.png and runs.svg.

    python aux/plot_runs.py checkpoints/28120876
    python aux/plot_runs.py checkpoints/28120876 checkpoints/28120877 --out comparison
    python aux/plot_runs.py checkpoints/28120876 --watch     # drawn again while the run goes on, until ctrl-C

train_preemptible.py, train_fsdp.py and train_tp.py write these files into their --checkpoint-dir.
"""

import json
import sys
import time
from argparse import Namespace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("distributed", "dev/figures")]

import style
from resilience.arguments import ArgumentParser


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a --checkpoint-dir, or a metrics.jsonl")
    parser.add_argument("--out", type=Path, default="runs", help="name of the pictures, without .png and .svg")
    help = "look for new lines every so many seconds (default: 10)"
    parser.add_argument("--watch", type=float, nargs="?", const=10.0, metavar="SECONDS", help=help)
    args = parser.parse_args()
    if args.watch is not None and not 0 < args.watch < 1e6:
        parser.error(f"--watch {args.watch:g} is not a number of seconds above 0")
    return args


def main(args: Namespace):
    alike = len(set(map(name_of, args.runs))) < len(args.runs)
    names = map(str, args.runs) if alike else map(name_of, args.runs)
    files = {
        name: run if run.suffix == ".jsonl" else run / "metrics.jsonl"
        for name, run in zip(names, args.runs, strict=True)
    }
    drawn = None
    while True:
        runs = {name: read(path) for name, path in files.items()}
        empty = [files[name] for name, events in runs.items() if not events]
        if empty and args.watch is None:
            sys.exit(f"plot_runs.py: no metrics in {empty[0]}: is it the --checkpoint-dir of a script named in --help?")
        if len(empty) < len(runs) and runs != drawn:
            draw(runs, args.out)
            last = max(event["step"] for events in runs.values() for event in events)
            print(f"{args.out}.png and {args.out}.svg, up to step {last}", flush=True)
            drawn = runs
        if args.watch is None:
            return
        time.sleep(args.watch)


def name_of(run: Path) -> str:
    """The folder's name: a job id, unless --checkpoint-dir was given."""
    return (run.resolve().parent if run.suffix == ".jsonl" else run.resolve()).name


def read(path: Path) -> list[dict]:
    """The events of a run, none if there is no such file yet.

    A last line that is being written, and holes that a node's crash has left, are skipped.
    """
    events = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            event = json.loads(line)
            events += [event] if isinstance(event["step"], int) else []
        except (ValueError, KeyError, TypeError):
            continue
    return events


def curves(events: list[dict], suffix: str) -> dict[str, tuple[list, list]]:
    """Steps and values of every quantity of which the name ends with `suffix`."""
    names = dict.fromkeys(name for event in events for name in event if name.endswith(suffix))
    with_name = {name: [event for event in events if isinstance(event.get(name), int | float)] for name in names}
    return {name: ([e["step"] for e in found], [e[name] for e in found]) for name, found in with_name.items()}


def draw(runs: dict[str, list[dict]], out: Path):
    """A panel for each of loss, accuracy and throughput that any run has; a run has the same line in all of them."""
    panels = [suffix for suffix in ("loss", "accuracy", "_per_second") if any(curves(r, suffix) for r in runs.values())]
    figure, axes = style.subplots(len(panels), 1, 7, 0.6 + 2.1 * len(panels), sharex=True)
    lines = {}
    for axis, suffix in zip(axes[:, 0], panels, strict=True):
        titles = []
        for number, (run, events) in enumerate(runs.items()):
            for quantity, (steps, values) in curves(events, suffix).items():
                look, title = style.line(number, len(steps)), quantity.replace("_", " ")
                if quantity.startswith(("test", "val")):  # after each evaluation
                    look |= {"markevery": 1, "markersize": 6, "markerfacecolor": "none"}
                    title += " (hollow)"
                titles.append(title)
                [lines[run]] = axis.plot(steps, values, **look)
        axis.set_title(", ".join(dict.fromkeys(titles)))
        if suffix == "_per_second":
            axis.set_ylim(bottom=0)
    axes[-1, 0].set_xlabel("step")
    if len(runs) > 1:
        figure.legend(lines.values(), lines.keys(), loc="outside upper left", ncols=4)
    for kind in ("png", "svg"):
        style.save(figure, Path(f"{out}.{kind}"), f"Runs {', '.join(runs)}")
    style.plt.close(figure)


if __name__ == "__main__":
    try:
        main(parse_arguments())
    except KeyboardInterrupt:  # how --watch ends
        sys.exit(0)
