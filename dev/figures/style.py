"""One style for the figures: dark on white, so that they can be read on a light and a dark page.

A line has a colour, a dash and a marker of its own: nothing is told by colour alone.
"""

import sys
from pathlib import Path

try:
    import matplotlib
except ImportError:
    sys.exit("figures need matplotlib: make .venv/tests installs it")
matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

GREY = "#59636e"
COLOURS = ["#1f6099", "#b4501a", "#1a7f52", "#9a3f8b", "#7a6200", "#b03a36"]
DASHES = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (8, 3))]
MARKERS = ["o", "s", "^", "D", "v", "P"]
SETTINGS = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.handlelength": 3,
}


def subplots(rows: int, columns: int, width: float, height: float, **options) -> tuple:
    """A figure of so many inches, and a matrix (rows, columns) of axes."""
    plt.rcParams.update(SETTINGS)
    size = (width, height)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)


def line(number: int, points: int) -> dict:
    """How line `number` of so many points looks, for plot()."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markevery": max(1, points // 10),
    }


def save(figure: Figure, path: Path):
    """Writes a PNG with a palette, which is a third as large as one without."""
    from PIL import Image

    figure.savefig(path, dpi=110)
    plt.close(figure)
    Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)
