"""Every file is in the room that its folder's README.md names, and AGENTS.md shows the tree."""

import re
from pathlib import Path

import pytest

from slurm import REPOSITORY, TRACKED
from write_diffs import with_diffs

FOLDERS = "aux aux/launch dev distributed docs/labs examples local local/cluster"
FOLDERS += " local/laptop sites tests"
PAGES = "".join(
    (REPOSITORY / name).read_text()
    for name in TRACKED
    if name.endswith(".md") and not name.startswith("CHANGELOG")
)


def files(folder: str, *endings: str) -> list[str]:
    """The files of a folder, without those below it."""
    found = [Path(name) for name in TRACKED if name.endswith(endings)]
    return [path.name for path in found if str(path.parent) == folder]


def imports(text: str) -> set[str]:
    """The modules that a Python file imports by their names."""
    return set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M))


@pytest.mark.parametrize("folder", FOLDERS.split())
def test_a_folder_opens_with_its_rule(folder):
    heading, _ = (REPOSITORY / folder / "README.md").read_text().split("\n", 1)
    assert heading.startswith(f"# {folder}/: ") or folder in ("docs/labs", "local/cluster")


def test_a_launcher_starts_what_is_in_distributed_or_a_script_there_imports_it():
    paths = [REPOSITORY / "distributed" / name for name in files("distributed", ".py")]
    scripts = [*paths, *(REPOSITORY / "examples" / name for name in files("examples", ".py"))]
    imported = set().union(*(imports(path.read_text()) for path in scripts))
    for path in paths:
        started = rf"(launch_\S+|torchrun)\.sh distributed/{path.name}"
        assert path.stem in imported or re.search(started, PAGES + path.read_text()), path.name


def test_you_type_what_is_in_aux():
    for name in files("aux", ".py", ".sh"):
        assert f"aux/{name}" in PAGES, name


def test_a_job_script_names_what_is_in_aux_launch():
    """A launcher, a job script on a page, or a file there that one of these names."""
    scripts = [path.read_text() for path in REPOSITORY.glob("*.sh")]
    scripts += [path.read_text() for path in (REPOSITORY / "aux/launch").glob("*.sh")]
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```$", PAGES, re.M | re.S)
    for name in files("aux/launch", ".py", ".sh"):
        assert any(f"aux/launch/{name}" in text for text in scripts + blocks), name


def test_nothing_outside_imports_what_is_for_a_laptop():
    room = {name.removesuffix(".py") for name in files("local/laptop", ".py")}
    for name in TRACKED:
        if name.endswith(".py") and not name.startswith(("local/laptop/", "tests/")):
            assert not room & imports((REPOSITORY / name).read_text()), name


def test_a_page_links_to_each_example():
    for name in files("examples", ".py"):
        assert f"examples/{name}" in PAGES.replace("examples/README.md", ""), name


def test_a_test_has_the_name_of_what_it_guards():
    """Of a file, a folder or a page. tests/README.md has the others, each with a reason."""
    guarded = set()
    for path in (Path(name) for name in TRACKED if not name.startswith("tests/")):
        names = [path.stem, path.name, *(folder.name for folder in path.parents)]
        guarded |= {re.sub("[-.]", "_", name.lower()) for name in names}
    lines = re.findall(r"^- (`test_[^:]+): .", (REPOSITORY / "tests/README.md").read_text(), re.M)
    others = set(re.findall(r"`test_(\w+)\.py`", " ".join(lines)))
    tests = {name.removeprefix("test_").removesuffix(".py") for name in files("tests", ".py")}
    assert tests - guarded - {"conftest"} <= others <= tests


def test_no_test_imports_a_test():
    for path in (REPOSITORY / "tests").glob("*.py"):
        assert not [name for name in imports(path.read_text()) if name.startswith("test_")], path


def test_agents_md_shows_the_tree():
    page = (REPOSITORY / "AGENTS.md").read_text()
    assert "<!-- tree " in page and with_diffs(page) == page
