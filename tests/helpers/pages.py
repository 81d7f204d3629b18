"""The pages' blocks: their commands, what they show, and how both are compared."""

import itertools
import re
import shutil
import socket
from pathlib import Path

import pytest

import record
from slurm import REPOSITORY, environment, run

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
DOCUMENTS += [REPOSITORY / f"local/{room}/README.md" for room in ("cluster", "laptop")]
# By number, and the appendices by name
CHAPTERS = {int(path.name[:2]): path for path in DOCUMENTS if re.match(r"\d\d_", path.name)}
CHAPTERS["fault_tolerance"] = REPOSITORY / "docs/fault_tolerance.md"
CHAPTERS |= {path.stem[9:]: path for path in DOCUMENTS if path.name.startswith("appendix_")}


def copy_of_repository(folder: Path) -> Path:
    """The files that git tracks."""
    for path in filter(None, run("git", "ls-files", "-z").stdout.split("\0")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / path, folder / path)
    return folder


@pytest.fixture(scope="module")
def clone(tmp_path_factory, tiny) -> Path:
    """A copy with the virtual environment of the tests, and small data."""
    folder = copy_of_repository(tmp_path_factory.mktemp("clone") / "repository")
    (folder / ".venv").symlink_to(REPOSITORY / ".venv")
    shutil.copytree(tiny, folder / "data/mnist")
    return folder


def bash(script: str, clone: Path, prefix: tuple = (), **variables):
    command = [*prefix, "bash", "-euo", "pipefail", "-c", script]
    limit = 900 if record.RECORDING else 300
    done = run(*command, cwd=clone, env=environment(**variables), timeout=limit)
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def steps(path: Path) -> list[tuple[str, str, str]]:
    """(language, commands, what they show, or nothing) of every bash and console block of a
    document."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(), re.M | re.S)
    found = []
    for (language, text), (after, shown) in zip(fences, [*fences[1:], ("end", "")], strict=True):
        if language == "console":
            command, shown = text.split("\n", 1)
            found.append((language, command.removeprefix("$ "), shown))
        elif language == "bash":
            found.append((language, text, shown if after == "" else ""))
    return found


# Whether srun had to wait, what slurmstepd says of an end, states that pass before a look.
BY_CHANCE = r"srun: (job \d+ (queued|has been allocated)|Job \d+ step creation|Step created)"
BY_CHANCE += r"|slurmstepd-\S+: error: \*\*\*"
PASSING = ["PENDING", "CONFIGURING", "COMPLETING"] + ["RUNNING"] * (not record.RECORDING)
BY_CHANCE += rf"|job \d+: ({'|'.join(PASSING)})\b"
# A recorded line is one of the same step.
SAME = r"(?:epoch|step)=[\d/]+" if record.RECORDING else "(?!)"
NUMBER = re.compile(rf"({SAME})|\d+(?:[.:]\d+)*")


def shapes(text: str) -> list[tuple[str, int]]:
    """(shape, number) of the lines of an output. The shape has not what differs from run to run:
    numbers, blanks, the name of a machine, what a rank does just then (watch_job.py), and the order
    of lines that ranks and tasks print at the same time. The numbers of a rank stay."""
    lines = []
    for number, line in enumerate(text.splitlines()):
        line = re.sub(r"^( +\d+  \S+ +)(?:\d+|-)( +\d+ s  ).+", r"\1 0\2 somewhere", line)
        line = re.sub(rf"\b(vm|{re.escape(socket.gethostname())})\b", "HOST", line)
        # PyPI's torch is one for CUDA. Slurm 23.11 has another reason for a job that waits.
        line = re.sub(r"\+(cpu|cu\d+)\b", "", line)
        line = re.sub(r"\((Resources|Priority|InvalidAccount)\)$", "(REASON)", line)
        line = re.sub(r"\b\d+ days?, (?=\d+:)", "", line)
        # The end of a temporary folder's name.
        line = re.sub(r"(_\d\d-\d\d-\d\d)\.\w{6}\b", r"\1.X", line)
        if re.match(r"\[Rank: |task \d+ of |I am rank ", line):
            line = re.sub(r"node-\d+", "node-#", line)
            lines.append((re.sub(r"CPUs: \d+ \| threads: \d+", "CPUs, threads", line), number))
        elif not re.match(BY_CHANCE, line):
            shape = NUMBER.sub(lambda found: found[1] or "#", line)
            lines.append((" ".join(shape.split()), number))
    parts = itertools.groupby(lines, lambda line: line[0].startswith(("[Rank", "task ", "I am")))
    return [line for at_once, part in parts for line in (sorted(part) if at_once else part)]


def shown_by(chapter: int | str, words: str) -> str:
    """The output in a chapter with a line that begins with these words."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", CHAPTERS[chapter].read_text(), re.M | re.S)
    [found] = [text for _, text in blocks if re.search(f"^ *{words}", text, re.M)]
    return found


def assert_shown(shown: str, fresh: str):
    """What a document shows is what the command prints. A line "..." stands for any number of
    lines. When recording, the document gets the fresh lines."""
    found = [("begin", -1), *shapes(fresh), ("end", -1)]
    lines, start, written = [shape for shape, _ in found], 0, []
    for text in re.split(r"^\.\.\.\n", f"begin\n{shown}end\n", flags=re.M):
        part = [shape for shape, _ in shapes(text)]
        places = (
            i for i in range(start, len(lines) - len(part) + 1) if lines[i : i + len(part)] == part
        )
        start = next(places, len(lines)) + len(part)
        assert start <= len(lines), f"not in the output:\n{part}\nThe output:\n{fresh}"
        written.append(sorted(x for _, x in found[start - len(part) : start] if x >= 0))
    if record.RECORDING:
        record.write(shown, written, fresh)


HOME = "/home/me/project"  # where the documents have the repository


def try_block(
    language: str, commands: str, shown: str, clone: Path, prefix: tuple = (), **variables
) -> str:
    """Runs a block, compares what it prints with what the document shows. Returns it."""
    if language == "bash":
        printed = bash(commands, clone, prefix, **variables)
    else:
        command = [*prefix, "bash", "-c", f"exec 2>&1; {commands}"]
        printed = run(*command, cwd=clone, env=environment(**variables)).stdout
    if shown:
        here = printed.replace(str(clone), HOME)
        assert_shown(shown, here)
    return printed


def try_chapter(chapter: int | str, clone: Path, prefix: tuple = (), **variables) -> list[str]:
    """All blocks of a chapter, one after the other. Returns what each has printed."""
    return [try_block(*step, clone, prefix, **variables) for step in steps(CHAPTERS[chapter])]
