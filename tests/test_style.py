"""What the repository promises of its own files: blocks that are the same, screens not overfull, clean linters."""

import re
import subprocess
import sys

import pytest

from conftest import LAUNCHERS, REPOSITORY, run

TRACKED = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True).stdout.split()


def blocks(path: str) -> dict[str, str]:
    """The blocks of a script by name; each begins at a ruler, and ends at the next one."""
    text = (REPOSITORY / path).read_text()
    parts = re.split(r"^# --- (.+?) -+$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def grown() -> list[tuple[str, str, list[str]]]:
    """(script, parent, names of the blocks that differ) for every docstring that says from what a script has grown."""
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


def test_every_script_says_from_what_it_has_grown():
    parents = [("distributed/train_ddp.py", "local/train_single.py")]
    parents += [("distributed/train_preemptible.py", "distributed/train_ddp.py")]
    parents += [("distributed/train_fast.py", "distributed/train_ddp.py")]
    parents += [("distributed/train_tp.py", "distributed/train_fsdp.py")]
    assert set(parents) <= {row[:2] for row in grown()}


@pytest.mark.parametrize("path", [path for path in TRACKED if re.match(r"(distributed|local)/train_\w+\.py$", path)])
def test_six_headings(path):
    """The same in all train scripts; where main() is a function, it tells the story on one screen."""
    text = (REPOSITORY / path).read_text()
    names = re.findall(r"^(?:    )?# --- ([a-z ]+)", text, re.M)
    six = ["arguments", "process group", "data", "model", "checkpoint", "training"]
    found = [name.strip() for name in names if name.strip() in six]
    assert found == six, path
    if path.endswith(("train_fsdp.py", "train_tp.py")):
        assert len(re.search(r"^def main\(.*?\n\n\n", text, re.M | re.S)[0].splitlines()) <= 36


WAYS = [*LAUNCHERS.values(), "run_script.sh"]


def test_launchers_begin_alike():
    """Guards, env.sh and the default script are the same in the four ways; in a container, python is not the node's."""
    texts = [(REPOSITORY / launcher).read_text() for launcher in WAYS]
    same = [text[text.index("set -euo") : text.index("if (($# == 0))")] for text in texts]
    python = [line for line in same[0].splitlines() if line.startswith("command -v python")]
    assert len(python) == 1 and len(set(same[:3])) == 1 and same[3] == same[0].replace(f"{python[0]}\n", "")
    for text in texts:
        assert text.count("if (($# == 0)); then set -- distributed/train_ddp.py; fi  ") == 1
        assert re.search(r'^finish_job "\$\{status:-0\}" "\$@"  ', text, re.M)


def test_a_launcher_has_one_literal_srun():
    """In the foreground, with a reason for its flags above it. No trap forwards a signal: Slurm sends it to ranks."""
    for path in (*WAYS, "env.sh", "torchrun.sh", "aux/job.sh", "aux/run_task.sh"):
        text = (REPOSITORY / path).read_text()
        assert not re.search(r"asked_to_stop|stop_file|kill (-s |-|--signal=)?(SIG)?USR1|\btrap (?!: |'' )", text), path
    for launcher in WAYS:
        text = (REPOSITORY / launcher).read_text()
        code = re.sub(r"^\s*#.*$", "", text, flags=re.M)
        found = re.findall(r"^srun (?:.*\\\n)*(?:.*bash --norc -pc '\n(?:.*\n)*?\s+' )?.*$", code, re.M)
        assert len(found) == len(re.findall(r"\bsrun --", code)) == 1, launcher
        assert re.sub(r"    # .*\Z", "", found[0]).endswith('"$@" || status=$?'), launcher
        reasons = "\n".join(re.findall(r"^# --.*", text, re.M)).replace("--ntasks...", "--ntasks, --ntasks-per-node")
        for flag in re.findall(r"(?<![\w-])(--[a-z-]+)[= ]", re.split(r"bash --norc|\./aux", found[0])[0]):
            assert re.search(rf"{flag}\b(?!-)", reasons), f"{launcher}: {flag}"
        assert re.search(r"^# --wait +EDIT: ", text, re.M), launcher
        assert re.search(r"^#SBATCH --signal=USR1@120 ", text, re.M), launcher  # without B: the ranks get it, too
        assert not re.search(r"&\s*$|\bwait\b(?!=)", found[0], re.M), launcher


LINES = {  # at most
    "env.sh": 50,
    "torchrun.sh": 40,
    "local/train_single.py": 131,
    "distributed/train_ddp.py": 170,
    "distributed/train_fast.py": 195,
    "distributed/train_preemptible.py": 160,
    "distributed/train_fsdp.py": 215,
    "distributed/train_tp.py": 230,
}


@pytest.mark.parametrize("path", [*LINES, *WAYS])
def test_screens(path):
    limit = LINES.get(path, 45 if path == "run_script.sh" else 40)  # run_script.sh: also for Pyxis and Apptainer
    text = (REPOSITORY / path).read_text()
    assert len(text.splitlines()) <= limit
    if path == "run_script.sh":  # Enroot's flow is to be read there
        create = '\n            create_container enroot create --name "$CONTAINER_NAME" "$CONTAINER_IMAGE"\n'
        assert f"container_exists ||{create}" in text
        assert 'enroot start --root --rw --mount "$folder:/workspace/mnt"' in text
    if path == "env.sh":  # the arithmetic, then the lines to edit
        arithmetic, _, yours = text.partition("\n# --- your cluster ---")
        assert arithmetic.count("$((") == text.count("$((") and yours.count("# EDIT: ") > 5
        assert re.findall(r"^(.+?)=.*# EDIT: ", arithmetic, re.M) == ["# MASTER_ADDR"]


def test_data_parallelism_adds_few_lines():
    """Fewer than sixty, and it takes few away: the diff is the lesson of chapters 2 and 3."""
    shown = run("git", "diff", "--no-index", "--numstat", "local/train_single.py", "distributed/train_ddp.py")
    added, removed = map(int, shown.stdout.split()[:2])
    assert 40 < added < 60 and removed < added / 2, shown.stdout


def test_names_are_pytorchs_and_slurms():
    """Not the home-made ones of before, also as a part: resume, claim, rendezvous, shutdown, remote say the same."""
    old = r"(take_|pass_|passed_)(up|over)|in_the_way|out_of_reach|speak_as|befall|\bthere\.sh|last[_ ]words"
    old += r"|dead rank's|asked_to_stop|Boundary|def (meet|leave|lost)\("
    for path in set(TRACKED) - {"tests/test_style.py"}:
        text = re.sub(r"\bdef test_\w+", "", (REPOSITORY / path).read_text(errors="replace"))  # sentences
        assert not re.search(old, text), path


def test_the_list_of_files_is_whole():
    listed = (REPOSITORY / "docs/README.md").read_text()
    assert " ".join(sorted({path.split("/")[1] for path in TRACKED if path.startswith("aux/")})) == (
        "bench check_ranks.py container.sh figures import_image.sh install.sh job.sh lint_sbatch.py prepare_data.py "
        "quiet_torchrun.py run_task.sh site slurm_task.py stage_environment.sh submission submit.py watch_job.py "
        "write_diffs.py"
    )
    for path in TRACKED:
        folder, _, rest = path.partition("/")
        if folder in ("aux", "distributed"):
            name = rest.split("/")[0] + "/" * ("/" in rest)
            assert f"`{folder}/{name}`" in listed or f"`{name}`" in listed, path


def test_docker_ignores_what_git_ignores():
    """In the words of each: what has no slash in front is ignored in every folder by git, and with **/ by Docker."""
    git, docker = (
        re.findall(r"^[^#\n]+", (REPOSITORY / name).read_text(), re.M) for name in (".gitignore", ".dockerignore")
    )
    names = [name.rstrip("/") for name in git]
    assert {".git", *(name[1:] if name[0] == "/" else f"**/{name}" for name in names)} == set(docker)


def test_what_lets_srun_read_the_last_lines_stands_once():
    scripts = [path for path in TRACKED if path.endswith((".sh", ".py")) and not path.startswith(("tests/", "local/"))]
    waits = [path for path in scripts if re.search(r"^sleep 1\b", (REPOSITORY / path).read_text(), re.M)]
    assert waits == ["aux/run_task.sh"]
    for launcher in WAYS:
        assert (REPOSITORY / launcher).read_text().count("./aux/run_task.sh ") == 1, launcher


@pytest.mark.parametrize("profile", ["true", "false"])
def test_modules_are_loaded(profile, tmp_path):
    """By env.sh's line, also where a site's /etc/profile ends with a status other than 0."""
    [line] = re.findall(r"^# (source /etc/profile .*?) +# EDIT", (REPOSITORY / "env.sh").read_text(), re.M)
    (tmp_path / "profile").write_text(f'module() {{ echo "$@"; }}\n{profile}\n')
    line = line.replace("/etc/profile", str(tmp_path / "profile"))
    done = run("bash", "-c", f"set -eo pipefail\n{line}\necho then the job")
    assert done.stdout == "load cuda/12.8\nthen the job\n" and done.returncode == 0, done.stderr


def test_in_the_background():
    """`make test &`: a shell without job control starts it with SIGINT ignored, which a cluster would inherit."""
    code = "import conftest, signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    done = run("bash", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, code, cwd=REPOSITORY / "tests")
    assert done.returncode == 0, done.stderr


def test_linters_and_paths():
    lint = run("make", "lint")
    assert lint.returncode == 0, lint.stdout + lint.stderr
    machine = [f"{REPOSITORY}/", "/home/" + "user"]
    for path in TRACKED:
        text = (REPOSITORY / path).read_text(errors="replace")
        assert not any(name in text for name in machine), path


def test_what_is_for_cuda_alone():
    """Memory is pinned, and copies are asynchronous, for CUDA alone; where NCCL may run, a barrier has its device."""
    paths = [path for path in TRACKED if re.match(r"(distributed|local)/.*\.py$", path) and "by_hand" not in path]
    lines = [line for path in paths for line in (REPOSITORY / path).read_text().splitlines()]
    pinned = [line for line in lines if re.search(r"\b(pin_memory|non_blocking)=", line)]
    barriers = [line for line in lines if "dist.barrier(" in line]
    assert len(pinned) > 5 and all('device.type == "cuda"' in line for line in pinned), pinned
    assert len(barriers) > 3 and all("device_ids=" in line for line in barriers), barriers


def test_requirements_are_torch_and_torchvision_pinned():
    lines = (REPOSITORY / "requirements.txt").read_text().split()
    assert [line.split("==")[0] for line in lines] == ["torch", "torchvision"]
    assert all(re.fullmatch(r"[a-z]+==\d+\.\d+\.\d+", line) for line in lines)


def test_make_help_lists_every_target():
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = re.findall(r"^([a-z-]+):[^=\n]*?## ", makefile, re.M)
    shown = run("make", "help").stdout
    assert {"train", "test", "cluster", "help"} <= set(targets)
    assert all(f"make {target} " in shown for target in targets)
