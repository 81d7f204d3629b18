"""The table of docs/labs/README.md: each command with what it shows."""

import re
from pathlib import Path

from slurm import REPOSITORY

LABS = REPOSITORY / "docs/labs"
# The command, the lines that it shows, and what lint_sbatch.py says
ROW = re.compile(r"^\| `([^`]+)` \| (`.+`) \| (?:`(.*)`)? *\|$", re.M)
ROWS = {
    command: (lines.strip("`").split("`<br>`"), said)
    for command, lines, said in ROW.findall((LABS / "README.md").read_text())
}


def task_of(command: str) -> str:
    return Path(command).stem.removesuffix("_broken")
