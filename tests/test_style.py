"""What the repository promises of its own files: blocks that are the same, clean linters."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

import sizes
from slurm import LAUNCHERS, REPOSITORY, TRACKED, run

# Jobs run on Python 3.10, as Ubuntu 22.04 has it, and the submission from a laptop on 3.11.
ON_SUBMISSION = ["local/laptop/submission.py"]
IN_JOBS = [
    path
    for path in TRACKED
    if re.match(r"(distributed|local|dev|aux)/.*\.py$", path)
    and not path.startswith(tuple(ON_SUBMISSION))
]


def blocks(path: str) -> dict[str, str]:
    """The blocks of a script by name; each begins at a ruler, and ends at the next one."""
    text = (REPOSITORY / path).read_text()
    parts = re.split(r"^# --- (.+?) -+$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def grown() -> list[tuple[str, str, list[str]]]:
    """(script, parent, the blocks that differ) of each docstring that says how a script grew."""
    found = []
    for path in TRACKED:
        if path.startswith(("distributed/", "local/")) and path.endswith(".py"):
            said = re.search(r"^Grown from (\S+): (.+?)\.$", (REPOSITORY / path).read_text(), re.M)
            found += [(path, said[1], said[2].split(", "))] if said else []
    return found


@pytest.mark.parametrize(("script", "parent", "said"), grown())
def test_exactly_the_named_blocks_differ(script, parent, said):
    ours, theirs = blocks(script), blocks(parent)
    assert [name for name in ours if ours[name] != theirs.get(name)] == said
    both = [name for name in theirs if name in ours]
    assert [name for name in ours if name in theirs] == both, "the same names in the same order"


def test_launchers_differ_in_their_srun_alone():
    """Between the header and srun; and a container's has only more lines."""
    texts = [(REPOSITORY / name).read_text() for name in [*LAUNCHERS.values(), "run_script.sh"]]
    between = [
        text[text.index("set -euo pipefail\n") : text.index("\nsrun ")].splitlines()
        for text in texts
    ]
    assert between[0] == between[1] == between[2]
    assert set(between[0]) <= set(between[3])


@pytest.mark.parametrize("path", [name for name in TRACKED if name.endswith(".md")])
def test_prose_has_100_columns(path):
    """But for a line that no space divides, such as a link or a message."""
    text = re.sub(r"^```.*?^```$", "", (REPOSITORY / path).read_text(), flags=re.M | re.S)
    for line in text.splitlines():
        if len(line) > 100 and not line.startswith(("|", "!", "<")):
            whole = re.sub(r"(`+).*?\1", lambda span: span[0].replace(" ", "_"), line)
            assert len(whole.removeprefix("Also:").split()) == 1, line


def test_launchers_ask_for_the_same():
    """But for their nodes, tasks and CPUs, and what the spare nodes are for."""
    names = [*LAUNCHERS.values(), "run_script.sh", "launch_slurm_with_spare.sh"]
    texts = [(REPOSITORY / name).read_text() for name in names]
    asked = [re.findall(r"^##?SBATCH (--\S+)", text, re.M) for text in texts]
    own = "--(nodes|ntasks-per-node|cpus-per-task)=.*|--no-kill"
    headers = [[option for option in its if not re.fullmatch(own, option)] for its in asked]
    assert all(header == headers[0] for header in headers)
    assert {"--output=%x_%j.out", "--open-mode=append", "--requeue"} < set(headers[0])


def test_docker_ignores_what_git_ignores():
    """git does so in every folder, and Docker with **/."""
    git, docker = (
        re.findall(r"^[^#\n]+", (REPOSITORY / name).read_text(), re.M)
        for name in (".gitignore", ".dockerignore")
    )
    names = [name.rstrip("/") for name in git]
    same = {name[1:] if name[0] == "/" else f"**/{name}" for name in names}
    assert {".git", *same} == set(docker)


def test_in_the_background():
    """`make test &` starts it with SIGINT ignored, which a cluster would inherit."""
    handler = "signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    command = ["bash", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable]
    done = run(*command, f"import conftest, signal; assert {handler}", cwd=REPOSITORY / "tests")
    assert done.returncode == 0, done.stderr


def test_what_a_command_has_started_ends_with_it():
    """In a session of its own as well, as torchrun's ranks are."""
    sleeps = f"sleep 600.{os.getpid()}"
    with pytest.raises(subprocess.TimeoutExpired):
        run("bash", "-c", f"setsid {sleeps} & wait", timeout=2)
    assert run("pgrep", "--full", f"^{sleeps}").stdout == ""


def sentences(text: str) -> Iterator[str]:
    """A program's strings of several words, with {} for what they are filled with."""
    tree = ast.parse(text)
    inner = {id(part) for x in ast.walk(tree) if isinstance(x, ast.JoinedStr) for part in x.values}
    inner |= {id(x.value) for x in ast.walk(tree) if isinstance(x, ast.Expr)}  # docstrings
    for each in ast.walk(tree):
        parts = each.values if isinstance(each, ast.JoinedStr) else [each]
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in parts]
        if id(each) not in inner and all(isinstance(part, str) for part in parts):
            said = "".join(parts)
            if len(re.findall(r"(?:^| )[a-z]{2,}(?=[ ,:;]|$)", said)) > 2:
                yield said


NAME = r"(?<![\w/-])(?:--[a-z][a-z-]+|[A-Z][A-Z0-9]*_[A-Z0-9_]*[A-Z0-9])(?![\w-])"
PLACE = r"(?<![\w./-])((?:aux|dev|distributed|docs|examples|local|tests)/[\w./-]+\.\w+)"
ENTRY = r"(?:(?<=\.md), ([^.;:]+))?"


def test_what_a_sentence_names_is_there():
    """A variable or an option stands in a page or in another program, or in a table of shapes; a
    file is in the repository, and has the entry that is named behind it."""
    texts = {
        path: (REPOSITORY / path).read_text()
        for path in TRACKED
        if path.endswith((".md", ".py", ".sh")) and not path.startswith("tests/")
    }
    known = {path: {*re.findall(NAME, text)} for path, text in texts.items()}
    shapes = {f"--{name.replace('_', '-')}" for name in sizes.TABLE}
    counts = [0, 0]
    for path, text in texts.items():
        if path.endswith(".py") and path.startswith(("aux", "distributed", "examples", "local")):
            elsewhere = shapes.union(*(known[other] for other in known if other != path))
            for said in sentences(text):
                names, places = re.findall(NAME, said), re.findall(f"{PLACE}{ENTRY}", said)
                assert {*names} <= elsewhere, (path, said)
                for place, entry in places:
                    assert place in TRACKED and entry in texts.get(place, entry), (path, said)
                counts = [counts[0] + len(names), counts[1] + len(places)]
    assert min(counts) > 10, counts


MNIST = ["distributed/train_ddp.py", "distributed/train_preemptible.py", "local/laptop/train.py"]


def test_an_option_is_the_same_in_every_program():
    """--device, and all that the scripts share which train on MNIST. Only the folders differ."""
    programs = ["local/train_single.py", *MNIST, "distributed/train_fsdp.py", "aux/sample.py"]
    done = run(sys.executable, "tests/scripts/options.py", *programs)
    single, *others = json.loads(done.stdout).values()
    for its in others:
        assert its["--device"] == single["--device"]
    for its in others[: len(MNIST)]:
        shared = single.keys() & its.keys() - {"--data-dir", "--checkpoint-dir"}
        assert len(shared) > 4 and all(its[name] == single[name] for name in shared)
    assert len(others) == 5 and single["--device"]["choices"] == ["auto", "cpu"]


def test_linters():
    lint = run("make", "lint")
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_one_list_of_dependencies():
    """pyproject.toml has it; requirements.txt says the same for plain pip."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    requirements = (REPOSITORY / "requirements.txt").read_text().split()
    assert project["dependencies"] == requirements
    _, *pinned = (REPOSITORY / "dev/constraints.txt").read_text().splitlines()
    packages = [line.split("==")[0] for line in pinned]
    assert packages == [line.split(">=")[0] for line in requirements]


def test_one_version():
    """A copy of env.sh names the version, and the changelog begins with it."""
    texts = [
        (REPOSITORY / name).read_text()
        for name in ("CHANGELOG.md", "env.sh", "pyproject.toml", "CITATION.cff")
    ]
    version, date = re.search(r"^## (\d+\.\d+) \((.+)\)$", texts[0], re.M).groups()
    assert f"\n# pytorch-on-slurm {version}: " in texts[1]
    assert f'\nversion = "{version}"\n' in texts[2]
    assert f'\nversion: "{version}"\ndate-released: {date}\n' in texts[3]


def test_the_tests_that_tested_md_lists():
    """They exist, for each promise."""
    page = (REPOSITORY / "dev/tested.md").read_text()
    section = page.partition("## What is promised\n")[2].partition("\n## ")[0]
    _, *rows = re.findall(r"^\| .* \| (.*) \|$", section, re.M)
    for row in rows:
        names = [re.fullmatch(r"(\w+), (\w+)\*?", test).groups() for test in row.split("; ")]
        for file, name in names:
            [path] = (REPOSITORY / "tests").rglob(f"test_{file}.py")
            assert f"def test_{name}(" in path.read_text(), name
    assert len(rows) >= 40


# --- Python's versions ---


def violations(version: str, *paths: object) -> str:
    """What vermin finds that is newer than `version`; empty if nothing is."""
    options = ["--no-tips", "--eval-annotations", "--violations", f"--target={version}-"]
    done = run(Path(sys.executable).with_name("vermin"), *options, *paths)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_jobs_run_on_python_3_10():
    assert len(IN_JOBS) > 20 and violations("3.10", *IN_JOBS) == ""


def test_run_script_sh_requeues_with_python_3_6():
    """The host's own, beside a container. These are called in the container alone."""
    found = re.findall(r"'(\S+)' ", violations("3.6", "distributed/preemption.py"))
    assert found == ["multiprocessing.parent_process", "os.register_at_fork", "shlex.join"]


@pytest.mark.parametrize("path", ["aux/lint_sbatch.py", "aux/check_site.py"])
def test_login_nodes_run_python_3_9(path):
    """pre-commit takes the python3 of a login node."""
    assert violations("3.9", path) == ""


def test_submission_runs_on_python_3_11():
    assert violations("3.11", *ON_SUBMISSION) == ""
    assert "tomllib" in violations("3.10", *ON_SUBMISSION), "the check can fail"


def test_a_task_in_a_job_imports_nothing_of_the_submission():
    script = "import sys, slurm_task; print({'tomllib', 'submission'} & set(sys.modules))"
    done = run(sys.executable, "-c", script, cwd=REPOSITORY / "local/laptop")
    assert done.stdout == "set()\n", done.stdout + done.stderr
