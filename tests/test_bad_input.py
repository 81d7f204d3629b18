"""Command lines that cannot be right, generated from a seed: each is refused with one sentence,
at once, and no more.

They are made from what every script's --help says, so that a new argument is tried without a
word here. All are run as processes of their own, in an empty folder, with a secret in the
environment and words that would touch a canary file.
"""

import os
import random
import re
import string
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import LAUNCHERS, REPOSITORY, cells, environment, run

SECRET = "canary-8b2e41"  # the value of a variable: no output may hold it
SCRIPTS = {  # how many command lines for each
    "local/train_single.py": 6,
    "distributed/train_ddp.py": 8,
    "distributed/train_preemptible.py": 10,
    "distributed/train_fsdp.py": 100,
    "distributed/train_tp.py": 100,
    "distributed/tensor_parallel_by_hand.py": 20,
    "aux/check_ranks.py": 40,
    "aux/prepare_data.py": 60,
    "aux/lint_sbatch.py": 15,
    "aux/watch_job.py": 15,
    "aux/plot_runs.py": 3,
    "aux/submit.py": 15,
    "distributed/train_task.py": 10,
    "local/cluster/namespaces.sh": 20,
}
# argparse as it is: its usage comes before the sentence.
PLAIN = (
    "local/train_single.py",
    "distributed/train_ddp.py",
    "aux/check_ranks.py",
    "aux/plot_runs.py",
    "aux/prepare_data.py",
)
# They import torch first: fewer lines, fewer at once.
FLAT = (*PLAIN, "distributed/train_preemptible.py")
IN_JOBS = {"srun": 8, "torchrun": 2, "spawn": 2}  # and these, by the launchers on the cluster
FEW_IN_JOBS = {"srun": 1, "torchrun": 1, "spawn": 1}
HOSTILE = [
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "| touch canary",
    "\n touch canary\n",
    "a[$(touch canary)]",
    "'; touch canary; '",
    '"; touch canary; "',
    "$SECRET_TOKEN",
    "${SECRET_TOKEN}",
    "%(SECRET_TOKEN)s",
    "{SECRET_TOKEN}",
    "__import__('os').system('touch canary')",
    "{0.__class__}",
    "\x1b[2J\x07",
    "%s%n%d",
    "\\",
    "",
    " ",
    "*",
    "ä€😀",
    "../" * 50,
    "9" * 5000,
    "x" * 5000,
]
NO_NUMBERS = ["one", "1e", "0x10", "1,5", "nan", "1_", "None", "1 2", "½", *HOSTILE]
OUT_OF_RANGE = ["-1", "-0.5", "-9999999999", "1e400", "-inf", "9" * 30, "-" + "9" * 30]


@dataclass
class Option:
    """An option as --help shows it: its flag, its choices, and whether it takes a value, and one
    of any kind."""

    flag: str
    value: str
    choices: list[str]

    @property
    def is_text(self) -> bool:
        return bool(re.search(r"DIR|FILE|PROMPT|INPUT|FOLDER|DEVICE|WORD", self.value))


def read_options(script: str) -> list[Option]:
    """What `--help` lists; none for those that know no options."""
    shown = run(sys.executable, script, "--help") if script.endswith(".py") else None
    found = re.findall(
        r"^  (--[\w-]+)(?:,? (\[?[A-Z_]+\]?|\{[\w,]+\}))?(?=  |$)",
        shown.stdout if shown else "",
        re.M,
    )
    return [
        Option(flag, value, value.strip("{}").split(",") if "{" in value else [])
        for flag, value in found
    ]


def bad_line(pick: random.Random, script: str, options: list[Option]) -> list[str]:
    """Arguments that the script cannot accept, whatever else they hold.

    argparse by itself repeats them as they are, so that plain scripts are given none that would
    not print in one line.
    """
    while True:
        line = any_bad_line(pick, script, options)
        if script not in PLAIN or all(argument.isprintable() for argument in line):
            return line


def any_bad_line(pick: random.Random, script: str, options: list[Option]) -> list[str]:
    valued = [option for option in options if option.value and not option.value.startswith("[")]
    if script in PLAIN:  # torch checks the others, with a traceback
        valued = [option for option in valued if option.flag not in ("--seed", "--learning-rate")]
    numbers = [option for option in valued if not option.is_text and not option.choices]
    kinds = ["unknown", "abbreviated", "positional", "short"]
    kinds += ["missing", "choice"] * bool(valued) + [
        "no number",
        "out of range",
        "given twice",
    ] * 2 * bool(numbers)
    kinds += ["flag with value"] * any(not option.value for option in options)
    kind = pick.choice(kinds)
    word = "".join(pick.choices(string.ascii_lowercase, k=6))
    nasty = pick.choice(HOSTILE)
    if script == "aux/lint_sbatch.py":  # a file that is not there
        return [pick.choice([word, f"{word}.py", *HOSTILE])]
    if kind == "abbreviated" and options:
        bad = [pick.choice(options).flag[:-1] + "_"]
    elif kind == "positional":
        bad = [nasty if nasty and not nasty.startswith("-") else word, word]
    elif kind == "short":
        bad = [f"-{pick.choice('qxyz')}{nasty}"]
    elif kind == "missing":
        bad = [pick.choice(valued).flag]
        return harmless(pick, numbers) + bad  # last, so that nothing can be its value
    elif kind == "choice" and (chosen := [x for x in valued if x.choices or "DEVICE" in x.value]):
        bad = [
            pick.choice(chosen).flag,
            pick.choice([word, *(x for x in HOSTILE if not x.startswith("-"))]),
        ]
    elif kind == "no number":
        bad = [f"{pick.choice(numbers).flag}={pick.choice(NO_NUMBERS)}"]
    elif kind == "out of range":
        bad = [f"{pick.choice(numbers).flag}={pick.choice(OUT_OF_RANGE)}"]
    elif kind == "given twice":
        flag = pick.choice(numbers).flag
        bad = [f"{flag}=1", f"{flag}={pick.choice(NO_NUMBERS)}"]
    elif kind == "flag with value":
        bad = [f"{pick.choice([option.flag for option in options if not option.value])}={nasty}"]
    else:
        bad = [f"--{word}={nasty}"]
    lines = [harmless(pick, numbers), bad]
    pick.shuffle(lines)
    return lines[0] + lines[1]


def harmless(pick: random.Random, numbers: list[Option]) -> list[str]:
    chosen = pick.sample(numbers, k=min(len(numbers), pick.randint(0, 2)))
    return [f"{option.flag}=1" for option in chosen]


def is_refused(done, seconds: float, folder: Path, script: str = "") -> str | None:
    """What is not as it should be with a run of `script` that has ended, or None."""
    output, said = done.stdout + done.stderr, done.stderr
    if script in PLAIN:
        said = re.sub(r"\Ausage: .*\n( .*\n)*", "", said)
    checks = {
        "status 1 or 2": done.returncode in (1, 2),
        "one sentence on stderr": len(said.splitlines()) == 1 and len(said) > 10,
        "nothing on stdout": done.stdout == "",
        "no traceback": "Traceback" not in output,
        "no secret": SECRET not in output,
        "no control characters": said.rstrip("\n").isprintable(),
        "nothing written": os.listdir(folder) == [],
        "at once": script in FLAT or seconds < 5,
    }
    failed = [name for name, holds in checks.items() if not holds]
    return (
        f"not {', '.join(failed)}: {done.args}\n{done.returncode} {output[-2000:]!r} {seconds:.1f} "
        "s"
        if failed
        else None
    )


def try_out(script: str, arguments: list[str], folder: Path) -> str | None:
    folder.mkdir(parents=True)
    command = [
        *([sys.executable] if script.endswith(".py") else ["bash"]),
        REPOSITORY / script,
        *arguments,
    ]
    variables = {"SECRET_TOKEN": SECRET, "PYTHONDONTWRITEBYTECODE": "1", "CLUSTER": "bad-input"}
    start = time.monotonic()
    done = run(*command, cwd=folder, env=environment(**variables), timeout=60)
    return is_refused(done, time.monotonic() - start, folder, script)


# make test tries the first few lines of each, make test-all the others.
FEW = 3
PARTS = [(script, slice(0, FEW)) for script in SCRIPTS]
PARTS += [(script, slice(FEW, None)) for script, count in SCRIPTS.items() if count > FEW]


@pytest.mark.parametrize(("script", "part"), cells(PARTS, *PARTS[: len(SCRIPTS)]))
def test_bad_command_lines_are_refused(script, part, tmp_path):
    """Each script has its own sequence: a new script does not change what the others are given."""
    pick, options = random.Random(script), read_options(script)
    lines = [bad_line(pick, script, options) for _ in range(SCRIPTS[script])][part]
    with ThreadPoolExecutor(2 if script in FLAT else 4) as pool:
        found = pool.map(lambda i: try_out(script, lines[i], tmp_path / str(i)), range(len(lines)))
    faults = [fault for fault in found if fault]
    assert not faults, f"{len(faults)} of {len(lines)}:\n" + "\n".join(faults[:10])


@pytest.mark.parametrize(
    "counts", cells([(FEW_IN_JOBS,), (IN_JOBS,)], (FEW_IN_JOBS,)), ids=["few", "all"]
)
def test_bad_command_lines_are_refused_in_jobs(counts, cluster, tmp_path):
    """By every launcher, all at once: FAILED, one sentence of the script's, and nothing that
    bash would add to it."""
    pick, jobs = random.Random("jobs"), []
    script = "distributed/train_preemptible.py"
    options = read_options(script)
    for way, count in counts.items():
        for i in range(count):
            node = f"node-{20 + len(jobs)}"
            size = [
                "--nodes=1",
                f"--nodelist={node}",
                "--gpus-per-node=1",
                f"--output={tmp_path}/{way}-{i}",
            ]
            size += ["--ntasks-per-node=1"] if way == "srun" else []
            command = [LAUNCHERS[way], script, *bad_line(pick, script, options)]
            variables = {"SECRET_TOKEN": SECRET, "PYTHONDONTWRITEBYTECODE": "1"}
            jobs.append((way, command, cluster.submit(*size, *command, env=variables)))
    for way, command, number in jobs:
        job = cluster.wait(number)
        said = [line for line in job.log.splitlines() if "--help lists" in line]
        assert job.state == "FAILED" and len(said) == 1 and said[0].isprintable(), (
            f"{command}\n{job.log}"
        )
        assert SECRET not in job.log and not re.search(
            r"line \d+: |syntax error|command not found", job.log
        ), job.log
        assert way == "torchrun" or "Traceback" not in job.log, job.log
    assert not list(REPOSITORY.glob("canary*"))


def test_every_script_is_tried():
    scripts = {
        str(path.relative_to(REPOSITORY))
        for path in REPOSITORY.glob("*/**/*.py")
        if ".venv" not in path.parts
    }
    runs = {
        path for path in scripts if 'if __name__ == "__main__"' in (REPOSITORY / path).read_text()
    }
    runs -= {"distributed/spawn_ranks.py"}  # what it is given is the script's
    outside = ("tests/", "dev/")
    assert {path for path in runs if not path.startswith(outside)} <= set(SCRIPTS), (
        "a script that is not tried"
    )
