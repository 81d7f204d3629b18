"""docs/troubleshooting.md: every script of docs/failures/ is run, and shows what the page says, or shows it no more."""

import difflib
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

import lint_sbatch
from conftest import REPOSITORY, cells, environment, run
from test_docker import engine  # noqa: F401

FOLDER = REPOSITORY / "docs/failures"
PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text()
ENTRIES = dict(re.findall(r"^### (.+)\n((?:(?!##).*\n)+)", PAGE, re.M))
COMMAND = (
    r"`((?:sbatch --wait |\./torchrun\.sh |docker build --file )docs/failures/\w+\.\w+(?: \.)?|docs/failures/\w+\.sh)`"
)
NOT_SHOWN = r"Not\s+shown\s+here"


def symptoms(entry: str) -> list[str]:
    """The lines of the entry's first block, as regular expressions: "..." is what differs each time."""
    block = re.search(r"^```\n(.*?)^```$", ENTRIES[entry], re.M | re.S)[1]
    return [r"\S.*?".join(map(re.escape, re.split(r"\.\.\.", line))) for line in block.splitlines()]


SHOWN = [(entry, command) for entry, text in ENTRIES.items() for command in re.findall(COMMAND, text)]
ALONE = [command for _, command in SHOWN if "_broken" not in command]


def test_every_entry_is_shown_or_says_why_not():
    assert len(ENTRIES) >= 24 and len(SHOWN) >= 25
    shown = {entry for entry, _ in SHOWN}
    for entry, text in ENTRIES.items():
        assert symptoms(entry), entry
        assert entry in shown or re.search(rf"{NOT_SHOWN}[^.]*:\s+\w+", text), entry


def test_every_file_is_named_and_has_its_pair():
    files = {path.name for path in FOLDER.iterdir() if path.is_file()}
    assert [name for name in sorted(files) if name not in PAGE] == []
    named = {Path(command.removesuffix(" .")).name for _, command in SHOWN}
    assert {name for name in files if "_broken" in name} == {name for name in named if "_broken" in name}
    assert {name.replace("_broken", "_fixed") for name in named} <= files
    assert ALONE == ["docs/failures/queue.sh"]  # it shows the symptoms and repairs them in one go


def test_scripts_are_small_and_pairs_alike():
    for path in FOLDER.glob("*.*"):
        lines = path.read_text().splitlines()
        assert len(lines) <= (45 if path.name == "queue.sh" else 32), path.name
        if "_broken" in path.name:
            fixed = path.with_name(path.name.replace("_broken", "_fixed"))
            compared = difflib.ndiff(lines, fixed.read_text().splitlines())
            changed = [line for line in compared if line.startswith(("- ", "+ "))]
            assert 2 <= len(changed) <= 12, f"{fixed.name}: {changed}"


def lint(path: Path, capsys) -> str:
    lint_sbatch.main([str(path)])
    return capsys.readouterr().out


def test_lint_finds_what_the_page_says(monkeypatch, capsys):
    """And nothing else, nothing in the other job scripts."""
    monkeypatch.chdir(REPOSITORY)
    finds = r"(\w+_broken\.sh)`[^`]*`\w+_fixed\.sh`\.\s+`lint_sbatch\.py`\s+finds\s+it:\s+`([^`]+)`"
    said = re.findall(finds, PAGE)
    assert len(said) == PAGE.count("`lint_sbatch.py`") == 9
    for path in sorted(FOLDER.glob("*.sh")):
        found = lint(path.relative_to(REPOSITORY), capsys)
        sentences = [sentence for name, sentence in said if name == path.name]
        assert len(found.splitlines()) == len(sentences) <= 1, f"{path.name}: {found}"
        assert all(sentence in found for sentence in sentences), found


def test_the_build_copies_what_dockerignore_excludes():
    """What needs no engine: the broken one copies a folder that is not sent to it, the fixed one does not."""
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    copied = {name: re.search(r"^COPY (\S+)", (FOLDER / name).read_text(), re.M)[1] for name in os.listdir(FOLDER)
              if name.endswith("Dockerfile")}  # fmt: skip
    assert copied["build_broken.Dockerfile"] in ignored and copied["build_fixed.Dockerfile"] not in ignored
    assert (REPOSITORY / copied["build_fixed.Dockerfile"]).is_dir()


@pytest.mark.matrix
def test_what_buildkit_says(engine):  # noqa: F811
    """By Debian's docker.io where it is installed: newer clients have BuildKit in a plugin, which may be missing."""
    said = re.search(r"BuildKit\s+says\s+`([^`]+)`", ENTRIES["The container does not build"])[1]
    docker = shutil.which("docker", path="/usr/bin") or "docker"
    build = [docker, "build", "--tag", f"tests-{os.getpid()}", "--file"]
    variables = environment(**engine, DOCKER_BUILDKIT=1)
    broken = run(*build, FOLDER / "build_broken.Dockerfile", ".", env=variables)
    if "buildx component is missing" in broken.stderr:
        pytest.skip("this docker has no BuildKit")
    assert broken.returncode and said in broken.stderr, broken.stderr
    fixed = run(*build, FOLDER / "build_fixed.Dockerfile", ".", env=variables)
    assert fixed.returncode == 0, fixed.stderr
    run(docker, "image", "rm", build[3], env=variables)


def test_the_chapter_on_finding_faults(monkeypatch, capsys):
    """What the linter prints is what the chapter shows, and env.sh lets the variables of the table through."""
    chapter = (REPOSITORY / "docs/13_finding_what_is_wrong.md").read_text()
    monkeypatch.chdir(REPOSITORY)
    files = re.search(r"`python aux/lint_sbatch\.py (.+)` prints\n\n```\n((?:.+\n)+)```", chapter)
    found = "".join(lint(Path(name), capsys) for name in files[1].split())
    assert found == files[2] and found.count("\n") == 2
    set_by_env = re.findall(r'(\w+)="\$\{\1:-(\w+)\}"', (REPOSITORY / "env.sh").read_text())
    said = re.findall(r"^\| (\w+)=\w+ \| .*`env\.sh` sets (\w+) if you set nothing", chapter, re.M)
    assert said == set_by_env and len(said) == 2
    for name in re.findall(r"`(?:python )?(aux/\w+\.py)", chapter):
        assert (REPOSITORY / name).is_file()


def start(command: str, request, folder: Path) -> tuple[bool, str]:
    """Runs a command as the page has it, bounded in time: whether it succeeded, and all that it says."""
    words = command.split()
    if words[0] == "docker":
        variables = environment(**request.getfixturevalue("engine"), DOCKER_BUILDKIT=0)
        done = run(*words, env=variables)
        if built := re.search(r"^Successfully built (\w+)$", done.stdout, re.M):
            run("docker", "image", "rm", built[1], env=variables)
        return done.returncode == 0, done.stdout + done.stderr
    cluster = request.getfixturevalue("cluster") if words[-1].endswith(".sh") else None
    if words[0] == "sbatch":
        log = [] if "log_folder_broken" in command else [f"--output={folder}/log"]
        job = cluster.sbatch(*log, *words[2:])
        shown = cluster.exec("scontrol", "show", "job", job.id).stdout
        return job.state == "COMPLETED", job.log + shown
    done = cluster.exec(*words, timeout=300) if cluster else run(*words, timeout=200)
    return done.returncode == 0, done.stdout + done.stderr


def other_build_of_torch(command: str) -> bool:
    """Two scripts show what a torch without CUDA says."""
    import torch

    return ("cuda_" in command or "torchvision_" in command) and torch.version.cuda is not None


QUICK = [pair for pair in SHOWN if "set_epoch" in pair[1]]


@pytest.mark.parametrize(("entry", "command"), cells(SHOWN, *QUICK))
def test_the_symptom_is_shown_and_then_gone(entry, command, request, tmp_path):
    if other_build_of_torch(command):
        pytest.skip("this torch is built for CUDA")
    ended_well, said = start(command, request, tmp_path)
    for symptom, times in Counter(symptoms(entry)).items():
        assert len(re.findall(rf"{symptom}\s*$", said, re.M)) >= times, f"no line {symptom}:\n{said}"
    if command in ALONE:
        assert ended_well, said
        return
    fixed_well, says = start(command.replace("_broken", "_fixed"), request, tmp_path)
    if "usr1" in command:  # torchrun, told to stop, fails although its ranks have saved
        assert len(re.findall(r"^rank \d: SIGTERM has come, saved after step \d+$", says, re.M)) == 2, says
    else:
        assert fixed_well, says
    if "loader" in command:
        broken, fixed = (int(re.search(r"waits for data: (\d+) %", text)[1]) for text in (said, says))
        assert broken > 50 and fixed < broken / 2, (broken, fixed)
        return
    for symptom in symptoms(entry):
        assert not re.search(rf"{symptom}\s*$", says, re.M), says
