"""Each script of docs/labs/ shows its symptom, and its repair does not; tasks.py grades both."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

import lint_sbatch
from lab_table import LABS, ROWS, task_of
from slurm import REPOSITORY, at_once, cells, environment, run

sys.path.append(str(LABS))
import tasks


def symptoms(command: str) -> list[str]:
    """The lines that the command shows as regular expressions, with "..." for what differs."""
    return [r"\S.*?".join(map(re.escape, line.split("..."))) for line in ROWS[command][0]]


def test_every_script_is_in_the_table():
    """A broken script that has no row would never be run."""
    commands = " ".join(ROWS)
    for broken in LABS.glob("*_broken.*"):
        assert f"{LABS.name}/{broken.name}" in commands, broken.name
        assert broken.with_name(broken.name.replace("_broken", "_fixed")).is_file(), broken.name


def lint(path: Path, capsys) -> str:
    lint_sbatch.main([str(path)])
    return capsys.readouterr().out


def test_lint_finds_what_the_table_says(monkeypatch, capsys):
    """And nothing else, and nothing in the fixed scripts."""
    monkeypatch.chdir(REPOSITORY)
    said = {Path(command.split()[-1]).name: words for command, (_, words) in ROWS.items() if words}
    assert len(said) > 5
    for path in LABS.glob("*.sh"):
        found = lint(path.relative_to(REPOSITORY), capsys)
        expected = said.get(path.name)
        assert found.count("\n") == bool(expected) and (expected or "") in found, path.name


def start(command: str, request, folder: Path) -> tuple[bool, str]:
    """Runs a command of the page, with a limit. Returns its success, and all that it says."""
    words = command.split()
    if words[0] == "docker":
        variables = environment(**request.getfixturevalue("engine"), DOCKER_BUILDKIT=0)
        done = run(*words, env=variables)
        if built := re.search(r"^Successfully built (\w+)$", done.stdout, re.M):
            run("docker", "image", "rm", built[1], env=variables)
    elif words[0] == "sbatch":
        cluster = request.getfixturevalue("cluster")
        log = [] if "log_folder_broken" in command else [f"--output={folder}/log"]
        job = cluster.sbatch(*log, *words[2:])
        shown = cluster.exec("scontrol", "show", "job", job.id).stdout
        return job.state == "COMPLETED", job.log + shown
    elif words[-1].endswith(".sh"):
        done = request.getfixturevalue("cluster").exec(*words, timeout=300)
    else:
        done = run(*words, timeout=200)
    return done.returncode == 0, done.stdout + done.stderr


def reason_to_skip(command: str, request) -> str | None:
    """Two scripts show what a torch without CUDA says, and one an older Slurm."""
    import torch

    if "cuda_" in command and torch.version.cuda is not None:
        return "this torch is built for CUDA"
    if "log_folder_" in command:
        version = request.getfixturevalue("cluster").exec("sbatch", "--version").stdout.split()[-1]
        if [int(part) for part in version.split(".")[:2]] >= [23, 11]:
            return "this Slurm creates the folder of a log"
    return None


# Those without torch.
QUICK = [(command,) for command in ROWS if re.search("one_node|log_folder", command)]
TASKS = [command for command in ROWS if task_of(command) in tasks.TASKS]


@pytest.mark.slurm
@pytest.mark.parametrize("command", cells([(command,) for command in ROWS], *QUICK))
def test_the_symptom_is_shown_and_then_gone(command, request, tmp_path):
    if reason := reason_to_skip(command, request):
        pytest.skip(reason)
    succeeded, said = start(command, request, tmp_path)
    for symptom, times in Counter(symptoms(command)).items():
        found = re.findall(rf"{symptom}\s*$", said, re.M)
        assert len(found) >= times, f"no line {symptom}:\n{said}"
    if "_broken" not in command:  # queue.sh shows the symptoms and repairs them in one go
        assert succeeded, said
        return

    succeeded, says = start(command.replace("_broken", "_fixed"), request, tmp_path)
    if "usr1" in command:  # torchrun fails when it is told to stop, although its ranks have saved
        saved = r"^rank \d: SIGTERM has come, saved after step \d+$"
        assert len(re.findall(saved, says, re.M)) == 2, says
    else:
        assert succeeded, says
    if "loader" in command:
        broken, fixed = (int(re.search(r"for data: (\d+) %", x)[1]) for x in (said, says))
        assert broken > 50 and fixed < broken / 2, (broken, fixed)
    else:
        left = [
            symptom for symptom in symptoms(command) if re.search(rf"{symptom}\s*$", says, re.M)
        ]
        assert not left, says
    if command in TASKS and command.startswith("sbatch"):
        name = task_of(command)
        assert tasks.missing(name, said) and not tasks.missing(name, says), (said, says)


def test_twenty_tasks():
    assert len(TASKS) == len(tasks.TASKS) == 20


# Those that sbatch starts are graded above.
GRADED = [("one_node",), *((task_of(row),) for row in TASKS if not row.startswith("sbatch"))]


@pytest.mark.parametrize("name", cells(GRADED, ("one_node",)))
def test_a_grader_fails_on_the_fault_and_passes_on_the_repair(name, cluster, tmp_path):
    def scenario(what: str, verdict: str):
        [script] = LABS.glob(f"{name}_{what}.*")
        answer = tmp_path / script.name
        answer.write_bytes(script.read_bytes())
        graded = cluster.exec("python3", LABS / "tasks.py", name, answer, timeout=280)
        assert graded.stdout.startswith(verdict), graded

    at_once(scenario, [("broken", "FAILED: "), ("fixed", "PASSED\n")])
