"""Each script of tests/failures/ shows its symptom, and its fix does not."""

import re
from collections import Counter
from pathlib import Path

import pytest

import lint_sbatch
from conftest import REPOSITORY, cells, environment, run
from test_docker import engine  # noqa: F401  a fixture

FOLDER = REPOSITORY / "tests/failures"
PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text()
# The command, the lines that it shows, and what lint_sbatch.py says
ROW = re.compile(r"^\| `([^`]+)` \| (`.+`) \| (?:`(.*)`)? *\|$", re.M)
ROWS = {
    command: (lines.strip("`").split("`<br>`"), said)
    for command, lines, said in ROW.findall((FOLDER / "README.md").read_text())
}


def symptoms(command: str) -> list[str]:
    """The lines that the command shows as regular expressions, with "..." for what differs."""
    return [r"\S.*?".join(map(re.escape, line.split("..."))) for line in ROWS[command][0]]


def test_every_script_is_in_the_table():
    """A broken script that has no row would never be run."""
    commands = " ".join(ROWS)
    for broken in FOLDER.glob("*_broken.*"):
        assert f"{FOLDER.name}/{broken.name}" in commands, broken.name
        assert broken.with_name(broken.name.replace("_broken", "_fixed")).is_file(), broken.name


# These scripts print their line themselves, because nothing else does.
OWN = "docker|one_node|standalone|gpu_per_task|loader|network|set_epoch|padding"
# Lines that people have posted with their questions
POSTED = """RendezvousTimeoutError
master_addr is only used for static rdzv_backend and when rdzv_endpoint is not specified.
Requested node configuration is not available
Unable to find hostfile, will proceed with training with local resources only
This can potentially cause a hang if this rank to GPU mapping is incorrect
task/affinity: failed to distribute tasks (bind_type:...) - this should never happen
Unable to layout tasks on given cpus
step creation temporarily disabled, retrying (Requested nodes are busy)
UnpicklingError: invalid load key, '\\x00'
received 0 items of ancdata
Should have a model_type key in its config.json
a container with name "..." does not exist, and --container-image is not set
is longer than 107 characters
TypeError: 'NoneType' object is not an iterator
Could not find NET with id 0
HIP error: invalid device function
No backend type associated with device type xpu
The `srun` command is available on your system but is not used
CUDA error: uncorrectable ECC error encountered
CUDA-capable device(s) is/are busy or unavailable
GLIBC_2.xx not found"""


@pytest.mark.parametrize("command", [row for row in ROWS if not re.search(OWN, row)])
def test_the_page_has_the_line(command):
    """At least its longest part, because a reader searches for it, without the exception's name,
    the jobs' names in the queue, and the end of two long ones."""
    page = re.sub(r"\s+", " ", PAGE)
    for line in ROWS[command][0]:
        before = r"^[\w.]+(Error|Warning): (\[\.\.\.\] )?|\[enforce.*err == 0\. |^srun: error: "
        differs = r"\.\.\.|\d{6,}|: |\. |.* PENDING +\(|\)|, Unavail|Error code.*|, which.*"
        parts = re.split(differs, re.sub(before, "", line))
        assert max(parts, key=len).strip() in page, line


@pytest.mark.parametrize("message", POSTED.splitlines())
def test_the_page_has_what_people_post(message):
    assert message in re.sub(r"\s+", " ", PAGE)


def lint(path: Path, capsys) -> str:
    lint_sbatch.main([str(path)])
    return capsys.readouterr().out


def test_lint_finds_what_the_table_says(monkeypatch, capsys):
    """And nothing else, and nothing in the fixed scripts."""
    monkeypatch.chdir(REPOSITORY)
    said = [
        (Path(command.split()[-1]).name, words) for command, (_, words) in ROWS.items() if words
    ]
    assert len(said) > 5
    for path in FOLDER.glob("*.sh"):
        found = lint(path.relative_to(REPOSITORY), capsys)
        expected = [sentence for name, sentence in said if name == path.name]
        assert len(found.splitlines()) == len(expected), f"{path.name}: {found}"
        assert all(sentence in found for sentence in expected), found


def test_lint_prints_what_the_chapter_shows(monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    chapter = (REPOSITORY / "docs/07_ranks.md").read_text()
    files, shown = re.search(
        r"^\$ python aux/lint_sbatch\.py (.+)\n((?:.+\n)+)```", chapter, re.M
    ).groups()
    assert "".join(lint(Path(name), capsys) for name in files.split()) == shown


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
        return job.state == "COMPLETED", job.log + cluster.exec(
            "scontrol", "show", "job", job.id
        ).stdout
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


@pytest.mark.parametrize("command", cells([(command,) for command in ROWS], *QUICK))
def test_the_symptom_is_shown_and_then_gone(command, request, tmp_path):
    if reason := reason_to_skip(command, request):
        pytest.skip(reason)
    succeeded, said = start(command, request, tmp_path)
    for symptom, times in Counter(symptoms(command)).items():
        assert len(re.findall(rf"{symptom}\s*$", said, re.M)) >= times, (
            f"no line {symptom}:\n{said}"
        )
    if "_broken" not in command:  # queue.sh shows the symptoms and repairs them in one go
        assert succeeded, said
        return

    succeeded, says = start(command.replace("_broken", "_fixed"), request, tmp_path)
    if "usr1" in command:  # torchrun fails when it is told to stop, although its ranks have saved
        assert (
            len(re.findall(r"^rank \d: SIGTERM has come, saved after step \d+$", says, re.M)) == 2
        ), says
    else:
        assert succeeded, says
    if "loader" in command:
        broken, fixed = (
            int(re.search(r"waits for data: (\d+) %", text)[1]) for text in (said, says)
        )
        assert broken > 50 and fixed < broken / 2, (broken, fixed)
    else:
        assert not any(re.search(rf"{symptom}\s*$", says, re.M) for symptom in symptoms(command)), (
            says
        )
