"""Write the diffs, excerpts and the tree of the documents anew: each is what its command prints.

    python dev/write_diffs.py $(git ls-files '*.md')      # changes the files, prints their names

The command is a comment, which readers do not see, above a blank line and the block:
<!-- git diff --no-index -U2 OLD NEW -->, with "blocks data, model" after NEW to show only these,
by the names on their rulers; <!-- sed -n '...' FILE -->; <!-- cat FILE -->. The blocks above the
first ruler are docstring and imports. <!-- tree FOLDER ... --> shows the first sentence of each
file in these folders.
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
TREE = re.compile(r"^(<!-- tree ([^\n]+) -->\n\n```\n)(.*?)(^```$)", re.M | re.S)


def first_sentence(path: Path) -> str:
    """What a file says that it is: the first sentence of its docstring, heading or comment."""
    text = path.read_text()
    if path.suffix == ".md":
        return re.match(r"# (?:\S+/: )?(.*)", text)[1]
    begins = '^"""' if path.suffix == ".py" else "^# (?=[A-Z])"
    words = re.split(begins, text, maxsplit=1, flags=re.M)[1].split("\n\n")[0]
    words = " ".join(words.replace("\n# ", " ").replace('"""', " ").split())
    return re.match(r".*?(?=\.?$|\. )", words)[0]


def tree(folders: list[str]) -> str:
    """Each folder and its files, with what they say that they are."""
    lines = []
    for folder in folders:
        listed = subprocess.run(
            ["git", "ls-files", folder], cwd=REPOSITORY, capture_output=True, text=True
        )
        lines.append(f"{folder + '/':30}{first_sentence(REPOSITORY / folder / 'README.md')}")
        for name in listed.stdout.splitlines():
            path = REPOSITORY / name
            if path.parent == REPOSITORY / folder and path.suffix in (".py", ".sh"):
                lines.append(f"  {path.name:28}{first_sentence(path)}")
    return "\n".join([*lines, ""])


def split_at_rulers(hunk: str, path: str) -> list[tuple[str, list[str]]]:
    """(block, lines) for every part of a hunk with changes, by the blocks of the new file."""
    head, *body = hunk.splitlines()
    text = (REPOSITORY / path).read_text()
    above = text.splitlines()
    del above[int(re.match(r"@@ \S+ \+(\d+)", head)[1]) :]
    rulers = [ruler[1] for line in above if (ruler := re.match(r"# --- (.+?) -+$", line))]
    first = "imports" if any(line.startswith("import ") for line in above) else "docstring"
    parts = [(rulers[-1] if rulers else first, [])]
    for line in body:
        ruler = re.match(r"[ +]# --- (.+?) -+$", line)
        if "\n# --- " in text and parts[-1][0] == "docstring" and line[1:].startswith("import "):
            parts.append(("imports", []))
        if ruler:
            parts.append((ruler[1], []))
        if not ruler or line.startswith("+"):
            parts[-1][1].append(line)
    return [(block, lines) for block, lines in parts if any(line[0] in "+-" for line in lines)]


def hunks_by_block(command: str) -> list[tuple[str, str]]:
    """(block, hunk) for every hunk of `git diff`. A hunk begins with its block's name, which tells
    a reader more than line numbers do."""
    shown = subprocess.run(command.split(), cwd=REPOSITORY, capture_output=True, text=True)
    if shown.returncode != 1:
        sys.exit(f"{command}: no difference, or {shown.stderr.strip()}")
    new = command.split()[-1]
    has_rulers = "\n# --- " in (REPOSITORY / new).read_text()
    named = []
    for hunk in re.findall(r"^@@ .*\n(?:[ +\-\\].*\n)*", shown.stdout, re.M):
        for block, lines in split_at_rulers(hunk, new):
            head = f"@@ {block} @@" if has_rulers else "@@"
            # An empty line of context is a blank in git's diff.
            lines = ["" if line == " " else line for line in lines]
            named.append((block, "\n".join([head, *lines, ""])))
    return named


def with_diffs(text: str) -> str:
    """The document, every diff and excerpt in it as it is now."""

    def fresh(found: re.Match) -> str:
        head, command, names = found[1], found[2], found[3]
        wanted = names.split(", ") if names else None
        hunks = hunks_by_block(command)
        shown = [hunk for block, hunk in hunks if wanted is None or block in wanted]
        return f"{head}{''.join(shown)}```"

    def excerpt(found: re.Match) -> str:
        options = {"cwd": REPOSITORY, "capture_output": True, "text": True, "check": True}
        done = subprocess.run(shlex.split(found[2]), **options)
        return f"{found[1]}{done.stdout}```"

    text = TREE.sub(lambda found: f"{found[1]}{tree(found[2].split())}```", text)
    return EXCERPT.sub(excerpt, DIFF.sub(fresh, text))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        text = Path(name).read_text()
        if with_diffs(text) != text:
            Path(name).write_text(with_diffs(text))
            print(name)
