"""Write the diffs and excerpts of the documents anew: each is what the command above it prints.

    python dev/write_diffs.py README.md docs/*.md         # changes the files, prints their names

The command is a comment, which readers do not see, above a blank line and the block:
<!-- git diff --no-index -U0 OLD NEW -->, with "blocks data, model" after NEW to show only these,
by the names on their rulers; <!-- sed -n '...' FILE -->; <!-- cat FILE -->. The blocks above the
first ruler are docstring and imports.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DIFF = re.compile(
    r"^(<!-- (git diff --no-index \S+ \S+ \S+)(?: blocks ([^\n]+))? -->\n\n```diff\n)(.*?)(^```$)",
    re.M | re.S,
)
EXCERPT = re.compile(r"^(<!-- ((?:sed -n|cat) [^\n]+) -->\n\n```\w*\n)(.*?)(^```$)", re.M | re.S)


def blocks_of(hunks: list[str], path: str) -> list[str]:
    """For every hunk the block of the new file in which it begins."""
    lines, names = (REPOSITORY / path).read_text().splitlines(), []
    for hunk in hunks:
        above = lines[: int(re.match(r"@@ \S+ \+(\d+)", hunk)[1])]
        rulers = [
            ruler[1] for ruler in (re.match(r"# --- (.+?) -+$", line) for line in above) if ruler
        ]
        head = "imports" if any(line.startswith("import ") for line in above) else "docstring"
        names.append(rulers[-1] if rulers else head)
    return names


def hunks_by_block(command: str) -> list[tuple[str, str]]:
    """(block, hunk) for every hunk of `git diff`. A hunk begins with its block's name, which tells
    a reader more than line numbers do."""
    shown = subprocess.run(command.split(), cwd=REPOSITORY, capture_output=True, text=True)
    if shown.returncode != 1:
        sys.exit(f"{command}: no difference, or {shown.stderr.strip()}")
    new = command.split()[-1]
    has_rulers = "\n# --- " in (REPOSITORY / new).read_text()
    hunks = re.findall(r"^@@ .*\n(?:[ +\-\\].*\n)*", shown.stdout, re.M)
    named = []
    for block, hunk in zip(blocks_of(hunks, new), hunks, strict=True):
        head = f"@@ {block} @@" if has_rulers else "@@"
        lines = hunk.split("\n", 1)[1]
        named.append((block, f"{head}\n{lines}"))
    return named


def with_diffs(text: str) -> str:
    """The document, every diff and excerpt in it as it is now."""

    def fresh(found: re.Match) -> str:
        head, command, names = found[1], found[2], found[3]
        wanted = names.split(", ") if names else None
        hunks = [
            hunk for block, hunk in hunks_by_block(command) if wanted is None or block in wanted
        ]
        return f"{head}{''.join(hunks)}```"

    def excerpt(found: re.Match) -> str:
        done = subprocess.run(
            shlex.split(found[2]), cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        return f"{found[1]}{done.stdout}```"

    return EXCERPT.sub(excerpt, DIFF.sub(fresh, text))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        text = Path(name).read_text()
        if with_diffs(text) != text:
            Path(name).write_text(with_diffs(text))
            print(name)
