"""Write the table of Slurm's versions in dev/tested.md from the reports of make test-slurm.

python dev/slurm_table.py log/slurm/*.xml    # 24.11.5.xml is pytest's --junitxml under 24.11.5
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "dev/tested.md"


def read(report: Path) -> Counter:
    """How many tests of each file passed, and how many ran."""
    counts = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {outcome.tag for outcome in case}
        if "skipped" not in outcomes:
            file = (case.get("classname") or case.get("name")).split(".")[1]
            counts[file, "ran"] += 1
            counts[file, "passed"] += not outcomes & {"failure", "error"}
    return counts


def main(reports: list[str]):
    versions = defaultdict(Counter)
    for report in map(Path, reports):
        # The variants' report is 24.11.5-variants.xml.
        versions[report.stem.partition("-")[0]].update(read(report))
    columns = sorted(versions, key=lambda version: [int(part) for part in version.split(".")])
    rows = ["| tests | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for file in sorted({file for count in versions.values() for file, _ in count}):
        text = ast.get_docstring(ast.parse((REPOSITORY / f"tests/{file}.py").read_text()))
        about = re.split(r"\.\s|\.$", text)[0].replace("\n", " ")
        counts = [versions[version] for version in columns]
        cells = [f"{count[file, 'passed']} of {count[file, 'ran']}" for count in counts]
        rows.append(f"| `{file}.py`: {about} | " + " | ".join(cells).replace("0 of 0", "-") + " |")
    table = "\n".join(rows) + "\n"
    text, count = re.subn(r"(?m)^\| tests \|.*\n(?:\|.*\n)+", lambda _: table, PAGE.read_text())
    if count != 1:
        sys.exit(f"{PAGE} has no table that begins with | tests |")
    PAGE.write_text(text)
    print(table, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
