"""Command lines that cannot be right: each script refuses them with one sentence and does no more.

They are made from what the script's --help lists, so that a new argument is tried as well. Each
runs as a process of its own, in an empty folder, with a secret in the environment and words that
would touch a canary file if a shell read them.
"""

import itertools
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import REPOSITORY, cells, environment, run

SECRET = "canary-8b2e41"  # the value of a variable: no output may hold it
VARIABLES = {"SECRET_TOKEN": SECRET, "PYTHONDONTWRITEBYTECODE": "1"}
# Those that parse their arguments themselves, or have argparse say it in one sentence.
SCRIPTS = [
    "distributed/train_fsdp.py",
    "distributed/train_tp.py",
    "distributed/tensor_parallel_by_hand.py",
    "aux/submit.py",
    "local/cluster/namespaces.sh",
]
WORDS = [
    "$(touch canary)",
    "'; touch canary; '",
    "${SECRET_TOKEN}",
    "%s%n{0.__class__}",
    "x" * 5000,
    "\n touch canary\n",
    "\x1b[2J\x07",
]
NO_NUMBER = (
    r"DIR|FILE|PARTITION|LAUNCHER|PROMPT|INPUT|FOLDER|DEVICE|WORD|[{\[]|^$"  # a value of --help
)
NO_NUMBERS = ["one", "nan", "1_", "½", "", "-1", "1e400", "9" * 5000, "$(touch canary)"]


def bad_lines(script: str) -> list[list[str]]:
    """Arguments that the script cannot accept, by the flags of its --help and their values."""
    shown = "" if script.endswith(".sh") else run(sys.executable, script, "--help").stdout
    option = r"^  (--[\w-]+)(?:,? (\[?[A-Z_]+\]?|\{[\w,]+\}))?(?=  |$)"
    values = dict(re.findall(option, shown, re.M))
    numbers = [flag for flag, value in values.items() if not re.search(NO_NUMBER, value)]

    lines = [["-q$(touch canary)"], ["word", "another"], *([f"--unknown={word}"] for word in WORDS)]
    wrong = itertools.cycle(NO_NUMBERS)
    lines += [[f"{flag}={next(wrong)}"] for flag in numbers]
    lines += [[f"{flag}=1", f"{flag}=one"] for flag in numbers[:1]]
    lines += [[flag] for flag, value in values.items() if value and "[" not in value][:1]
    lines += [[flag, "word"] for flag, value in values.items() if "{" in value]
    lines += [[f"{flag}=1"] for flag, value in values.items() if not value][:1]
    lines += [[flag[:-1] + "_"] for flag in list(values)[:1]]
    return lines


def fault_of(script: str, arguments: list[str], folder: Path) -> str | None:
    """What is not as it should be when the script gets the arguments, or None."""
    folder.mkdir()
    command = [sys.executable if script.endswith(".py") else "bash", REPOSITORY / script]
    variables = environment(CLUSTER="bad-input", **VARIABLES)
    done = run(*command, *arguments, cwd=folder, env=variables, timeout=60)
    said = done.stderr
    checks = {
        "status 1 or 2": done.returncode in (1, 2),
        "one sentence on stderr": len(said.splitlines()) == 1 and len(said) > 10,
        "nothing on stdout": done.stdout == "",
        "no traceback": "Traceback" not in said,
        "no secret": SECRET not in said,
        "no control characters": said.rstrip("\n").isprintable(),
        "nothing written": os.listdir(folder) == [],
    }
    failed = [name for name, holds in checks.items() if not holds]
    return f"not {', '.join(failed)}: {arguments}\n{done.stderr[-2000:]!r}" if failed else None


CASES = [(script, part) for script in SCRIPTS for part in ("one", "all")]


@pytest.mark.parametrize(("script", "part"), cells(CASES, *CASES[::2]))
def test_bad_command_lines_are_refused(script, part, tmp_path):
    lines = bad_lines(script) if part == "all" else [["--unknown=$(touch canary)"]]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda i: fault_of(script, lines[i], tmp_path / str(i)), range(len(lines)))
    faults = [fault for fault in found if fault]
    assert not faults, f"{len(faults)} of {len(lines)}:\n" + "\n".join(faults[:10])
