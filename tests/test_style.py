"""What the repository promises of its own files: blocks that are the same, screens not overfull, clean linters."""

import re
import subprocess

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


def test_train_ddp_says_from_what_it_has_grown():
    assert ("distributed/train_ddp.py", "local/train_single.py") in [row[:2] for row in grown()]


def test_the_process_group_is_one_block_everywhere():
    scripts = [path for path in TRACKED if path.startswith(("distributed/", "aux/")) and path.endswith(".py")]
    texts = [blocks(path)["process group"] for path in scripts if "process group" in blocks(path)]
    assert len(texts) >= 2 and len(set(texts)) == 1


def test_launchers_begin_alike():
    """The four ways differ in their last lines only: guards, env.sh, default and missing script are the same."""
    texts = [(REPOSITORY / launcher).read_text() for launcher in [*LAUNCHERS.values(), "run_script.sh"]]
    same = [text[text.index("set -euo") : text.index('(in $PWD)"')] for text in texts]
    assert len(set(same)) == 1


def test_screens():
    for path in [*LAUNCHERS.values(), "run_script.sh", "torchrun.sh"]:
        assert len((REPOSITORY / path).read_text().splitlines()) <= 60, path
    assert len((REPOSITORY / "env.sh").read_text().splitlines()) <= 134  # a screen to edit, one that stops and requeues
    for path in TRACKED:
        if re.search(r"(^|/)train_\w+\.py$", path):
            assert len((REPOSITORY / path).read_text().splitlines()) <= 320, path


def test_linters_and_paths():
    lint = run("make", "lint")
    assert lint.returncode == 0, lint.stdout + lint.stderr
    machine = [f"{REPOSITORY}/", "/home/" + "user"]
    for path in TRACKED:
        text = (REPOSITORY / path).read_text(errors="replace")
        assert not any(name in text for name in machine), path


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
