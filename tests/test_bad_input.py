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
from test_launchers import in_all_ways

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
    "aux/check_site.py",
    "aux/prepare_data.py",
    "aux/lint_sbatch.py",
    "aux/watch_job.py",
    "aux/submit.py",
    "local/cluster/namespaces.sh",
]
# argparse as it is: its usage comes before the sentence, and repeats what cannot be printed.
# These import torch, or what is as large, first.
PLAIN = [*SCRIPTS[:3], "aux/check_ranks.py", "aux/prepare_data.py"]
PLAIN += ["aux/watch_job.py", "aux/check_site.py", "aux/lint_sbatch.py"]
PLAIN += ["distributed/train_task.py"]
WORDS = [
    "$(touch canary)",
    "'; touch canary; '",
    "${SECRET_TOKEN}",
    "%s%n{0.__class__}",
    "x" * 5000,
]
UNPRINTABLE = ["\n touch canary\n", "\x1b[2J\x07"]
NO_NUMBER = (
    r"DIR|FILE|PARTITION|LAUNCHER|PROMPT|INPUT|FOLDER|DEVICE|WORD|[{\[]|^$"  # a value of --help
)
NO_NUMBERS = ["one", "nan", "1_", "½", "", "-1", "1e400", "9" * 5000, "$(touch canary)"]


def bad_lines(script: str) -> list[list[str]]:
    """Arguments that the script cannot accept, by the flags of its --help and their values."""
    words = WORDS if script in PLAIN else [*WORDS, *UNPRINTABLE]
    if script == "aux/lint_sbatch.py":  # its arguments are files, and these are not there
        return [[word] for word in words]
    shown = "" if script.endswith(".sh") else run(sys.executable, script, "--help").stdout
    option = r"^  (--[\w-]+)(?:,? (\[?[A-Z_]+\]?|\{[\w,]+\}))?(?=  |$)"
    by_torch = ("--seed", "--learning-rate") if script in PLAIN else ()
    found = re.findall(option, shown, re.M)
    values = {flag: value for flag, value in found if flag not in by_torch}
    numbers = [flag for flag, value in values.items() if not re.search(NO_NUMBER, value)]

    lines = [["-q$(touch canary)"], ["word", "another"], *([f"--unknown={word}"] for word in words)]
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
    size = ["--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1"]
    script = (SCRIPTS[3], *arguments)
    for way, job in in_all_ways(cluster, tmp_path, *script, size=size, env=VARIABLES).items():
        said = [line for line in job.log.splitlines() if "--help lists" in line]
        assert job.state == "FAILED" and len(said) == 1 and said[0].isprintable(), job.log
        assert SECRET not in job.log, job.log
        assert not re.search(r"line \d+: |syntax error|command not found", job.log), job.log
        assert way == "torchrun" or "Traceback" not in job.log, job.log
    assert not list(REPOSITORY.glob("canary*"))


def test_every_script_is_tried():
    paths = [*REPOSITORY.glob("aux/**/*.py"), *REPOSITORY.glob("distributed/**/*.py")]
    runs = [path for path in paths if 'if __name__ == "__main__"' in path.read_text()]
    names = {str(path.relative_to(REPOSITORY)) for path in runs}
    starters = {"distributed/spawn_ranks.py", "distributed/preemption.py"}
    assert names - starters <= set(SCRIPTS)
