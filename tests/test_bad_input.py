"""Command lines that cannot be right: each script refuses them with one sentence and does no more.

They are made from what the script's --help lists, so that a new argument is tried as well. Each
runs as a process of its own, in an empty folder, with a secret in the environment and words that
would touch a canary file if a shell read them.
"""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import LAUNCHERS, REPOSITORY, cells, environment, run

SECRET = "canary-8b2e41"  # the value of a variable: no output may hold it
VARIABLES = {"SECRET_TOKEN": SECRET, "PYTHONDONTWRITEBYTECODE": "1"}
SCRIPTS = [
    "local/train_single.py",
    "distributed/train_ddp.py",
    "distributed/train_preemptible.py",
    "distributed/train_fsdp.py",
    "distributed/train_tp.py",
    "distributed/train_task.py",
    "distributed/tensor_parallel_by_hand.py",
    "aux/check_ranks.py",
    "aux/prepare_data.py",
    "aux/lint_sbatch.py",
    "aux/watch_job.py",
    "aux/plot_runs.py",
    "aux/submit.py",
    "local/cluster/namespaces.sh",
]
# argparse as it is: its usage comes before the sentence, and repeats what cannot be printed.
# These import torch, or what is as large, first.
PLAIN = [*SCRIPTS[:2], "aux/check_ranks.py", "aux/plot_runs.py", "aux/prepare_data.py"]
WORDS = [
    "$(touch canary)",
    "'; touch canary; '",
    "${SECRET_TOKEN}",
    "%s%n{0.__class__}",
    "x" * 5000,
]
UNPRINTABLE = ["\n touch canary\n", "\x1b[2J\x07"]
NO_NUMBERS = ["one", "nan", "1_", "½", "", "-1", "1e400", "9" * 5000, "$(touch canary)"]


@dataclass
class Option:
    """An option of --help: its flag, and its value in capitals or braces."""

    flag: str
    value: str

    @property
    def is_number(self) -> bool:
        text = r"DIR|FILE|PROMPT|INPUT|FOLDER|DEVICE|WORD|[{\[]|^$"
        return not re.search(text, self.value)


def read_options(script: str) -> list[Option]:
    """None of a script without --help. torch checks two of the plain scripts' numbers."""
    if script.endswith(".sh"):
        return []
    shown = run(sys.executable, script, "--help").stdout
    found = re.findall(r"^  (--[\w-]+)(?:,? (\[?[A-Z_]+\]?|\{[\w,]+\}))?(?=  |$)", shown, re.M)
    by_torch = ("--seed", "--learning-rate") if script in PLAIN else ()
    return [Option(flag, value) for flag, value in found if flag not in by_torch]


def bad_lines(script: str) -> list[list[str]]:
    """Arguments that the script cannot accept, the most important ones first."""
    words = WORDS if script in PLAIN else [*WORDS, *UNPRINTABLE]
    if script == "aux/lint_sbatch.py":  # its arguments are files, and these are not there
        return [[word] for word in words]
    options = read_options(script)
    numbers = [option.flag for option in options if option.is_number]
    lines = [[f"--unknown={word}"] for word in words]
    for i, flag in enumerate(numbers):
        lines.insert(2 * i + 1, [f"{flag}={NO_NUMBERS[i % len(NO_NUMBERS)]}"])
    lines += [[f"{flag}=1", f"{flag}=one"] for flag in numbers[:1]]
    lines += [[option.flag] for option in options if option.value and "[" not in option.value][:1]
    lines += [[option.flag, "word"] for option in options if "{" in option.value]
    lines += [[f"{option.flag}=1"] for option in options if not option.value][:1]
    lines += [[option.flag[:-1] + "_"] for option in options[:1]]
    return [*lines, ["-q$(touch canary)"], ["word", "another"]]


def fault_of(script: str, arguments: list[str], folder: Path) -> str | None:
    """What is not as it should be when the script gets the arguments, or None."""
    folder.mkdir()
    command = [sys.executable if script.endswith(".py") else "bash", REPOSITORY / script]
    variables = environment(CLUSTER="bad-input", **VARIABLES)
    done = run(*command, *arguments, cwd=folder, env=variables, timeout=60)
    said = re.sub(r"\Ausage: .*\n( .*\n)*", "", done.stderr) if script in PLAIN else done.stderr
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
QUICK = [(script, "one") for script in SCRIPTS if script not in PLAIN]


@pytest.mark.parametrize(("script", "part"), cells(CASES, *QUICK))
def test_bad_command_lines_are_refused(script, part, tmp_path):
    lines = bad_lines(script) if part == "all" else [["--unknown=$(touch canary)"]]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda i: fault_of(script, lines[i], tmp_path / str(i)), range(len(lines)))
    faults = [fault for fault in found if fault]
    assert not faults, f"{len(faults)} of {len(lines)}:\n" + "\n".join(faults[:10])


@pytest.mark.matrix
def test_bad_command_lines_are_refused_in_jobs(cluster, tmp_path):
    """By every launcher: FAILED, one sentence of the script's, and nothing that bash adds."""
    arguments = [f"--unknown={word}" for word in [*WORDS, *UNPRINTABLE]]
    submitted = {}
    for way, launcher in LAUNCHERS.items():
        size = ["--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1"]
        command = [*size, f"--output={tmp_path}/{way}", launcher, SCRIPTS[2], *arguments]
        submitted[way] = cluster.submit(*command, env=VARIABLES)
    for way, number in submitted.items():
        job = cluster.wait(number)
        said = [line for line in job.log.splitlines() if "--help lists" in line]
        assert job.state == "FAILED" and len(said) == 1 and said[0].isprintable(), job.log
        assert SECRET not in job.log, job.log
        assert not re.search(r"line \d+: |syntax error|command not found", job.log), job.log
        assert way == "torchrun" or "Traceback" not in job.log, job.log
    assert not list(REPOSITORY.glob("canary*"))


def test_every_script_is_tried():
    scripts = [
        path
        for folder in ("aux", "distributed", "local")
        for path in Path(REPOSITORY, folder).rglob("*.py")
    ]
    runs = {
        str(path.relative_to(REPOSITORY))
        for path in scripts
        if 'if __name__ == "__main__"' in path.read_text()
    }
    assert runs - {"distributed/spawn_ranks.py"} <= set(SCRIPTS)
