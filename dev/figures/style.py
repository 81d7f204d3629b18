"""One style for all figures: transparent, with text in a grey that can be read on a light and on a dark page.

A line has a colour, a dash and a marker of its own, and a filled cell a shade and a word: nothing is told by colour
alone. `import style` ends the program with one sentence where matplotlib is missing.
"""

import os
import sys
from pathlib import Path

try:
    import matplotlib
except ImportError:
    sys.exit("figures need matplotlib: python -m pip install -r requirements-figures.txt")
matplotlib.use("Agg")  # files alone: nodes have no screen
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

END = "<!-- end -->\n"
GREY = "#7f7f7f"  # on white 4.0 : 1, on GitHub's dark page 4.7 : 1
COLOURS = ["#2f7ebc", "#d9722b", "#2a9d6a", "#b65fa5", "#a98600", "#c0504d"]  # of middling lightness, as the grey
DASHES = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 3))]
MARKERS = ["o", "s", "^", "D", "v", "P"]
SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.handlelength": 3,
    "savefig.transparent": True,
    "savefig.dpi": 150,
    "svg.hashsalt": "figures",  # the same data give the same file
}
SETTINGS |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)


def subplots(rows: int, columns: int, width: float, height: float, **options) -> tuple:
    """A figure of so many inches, and a matrix (rows, columns) of axes."""
    plt.rcParams.update(SETTINGS)
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **options)


def line(number: int, points: int = 0) -> dict:
    """What makes line `number` differ from the others, for plot(); with `points` also about ten markers."""
    look = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}
    if points:
        look |= {"marker": MARKERS[number % len(MARKERS)], "markevery": max(1, points // 10)}
    return look


def save(figure: Figure, path: Path, title: str):
    """Writes the figure, PNG or SVG by the name's end, whole or not at all: a viewer may be reading the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    metadata = {"Title": title, "Date": None} if path.suffix == ".svg" else {"Title": title}
    try:
        figure.savefig(unfinished, format=path.suffix[1:], metadata=metadata)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def fill(page: Path, begin: str, text: str):
    """Puts the text between the mark `begin` and the next END of a page. A page that is not there has nothing else."""
    old = page.read_text() if page.exists() else f"{begin}{END}"
    if old.count(begin) != 1 or END not in old.split(begin)[1]:
        sys.exit(f"{page} has no block that begins with {begin.strip()} and ends with {END.strip()}")
    before, rest = old.split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{END}{rest.split(END, 1)[1]}")
