"""The commands of README and docs, run as they stand, block by block, in a copy of the
repository; diffs, pictures. Blocks of bash and console are run, those of sh only shown."""

import os
import re
import time
from pathlib import Path

import pytest

import record
from pages import CHAPTERS, DOCUMENTS, assert_shown, bash, shown_by, steps, try_block, try_chapter
from slurm import LAUNCHERS, NAMESPACES, REPOSITORY, at_once, environment, run
from write_diffs import DIFF, with_diffs

TEXT = "\n".join(path.read_text() for path in DOCUMENTS)
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.M | re.S)


def block(containing: str) -> str:
    found = [text for text in BLOCKS if containing in text]
    assert len(found) == 1, f"one block of the documents has {containing!r}"
    return found[0]


# --- what a block shows ---


def test_the_comparison_can_fail():
    rank = "[Rank: {0} | vm | world size: 2 | local rank: {0} | device: cpu]\n"
    zero, one = rank.format(0), rank.format(1)
    fresh = f"{one}{zero}Data: drawn\nepoch=1 step=4/4 loss=0.5\nFinished: epoch=1\n"
    assert_shown(f"{zero}{one}Data: drawn\n...\nFinished: epoch=3\n", fresh)
    assert_shown("...\nepoch=1 step=99/100 loss=1.25\nFinished: epoch=1\n", fresh)
    for wrong in (
        f"{zero}{zero}...\n",
        f"{zero}{one}Finished: epoch=1\n",
        f"{zero}{one}Data: drawn\n",
        "Data: drawn\n...\n",
        "...\nepoch=1 steps=4/4 loss=0.5\n...\n",
        "...\nFinished: epoch=1\n...\nData: drawn\n...\n",
    ):
        with pytest.raises(AssertionError, match="not in the output"):
            assert_shown(wrong, fresh)


# --- the blocks ---


def test_every_block_is_run():
    """Here, but five pages: containers.md in test_enroot.py, local/laptop/README.md in
    test_laptop.py, local/cluster/README.md in test_docker_compose.py, recipes.md in
    test_recipes.py, other_jobs.md in test_work_list.py and test_programs.py."""
    tried = (1, 3, 7, 8, 9, 10, 11, "launchers")  # by try_chapter
    chapters = [CHAPTERS[chapter] for chapter in tried]
    others = [path for path in DOCUMENTS if path not in chapters]
    counts = {
        str(path.relative_to(REPOSITORY)): path.read_text().count("```bash\n") for path in others
    }
    assert {name: count for name, count in counts.items() if count} == {
        "README.md": 1,
        "docs/containers.md": 1,
        "local/laptop/README.md": 1,
        "local/cluster/README.md": 1,
        "docs/other_jobs.md": 5,
        "docs/recipes.md": 6,
    }


def test_make_train(clone):
    [step] = steps(REPOSITORY / "README.md")
    shown = try_block(*step, clone)
    assert "SYNTHETIC" in shown and re.search(
        r"^epoch=1 test_loss=\S+ test_accuracy=0\.\d+\nFinished: epoch=1, ", shown, re.M
    )


@pytest.mark.matrix
def test_chapter_on_one_machine(clone):
    """Without Slurm."""
    assert try_chapter(9, clone)


def follow_two_jobs(printed: str, clone: Path, prefix: tuple, variables: dict):
    """The queue and the logs of chapter 1, after what sbatch has printed."""
    for _ in range(60):
        queue = bash("squeue --me", clone, prefix, **variables)
        if re.search(r" PD .*\((Resources|Priority)\)\n.* R .*node-\[", queue):
            break
        time.sleep(0.5)
    assert_shown(shown_by(1, "JOBID PARTITION"), queue)
    jobs = re.findall(r"Submitted batch job (\d+)", printed)
    for job, end in zip(jobs, ("VERDICT: all well", "Finished: "), strict=True):
        log = clone / f"{LAUNCHERS['torchrun']}_{job}.out"
        state = f"scontrol show job {job} | grep -o 'JobState=[A-Z]*'"
        ends = f"while {state} | grep -qE 'PENDING|RUNNING|COMPLETING'; do sleep 1; done; {state}"
        assert bash(ends, clone, prefix, **variables) == "JobState=COMPLETED\n", log.read_text()
        shown = shown_by(1, end)
        if not record.RECORDING:
            # The small data have one line of steps.
            shown = re.sub(r"^(epoch=1 step=.*\n|\.\.\.\n)+", "...\n", shown, flags=re.M)
        # After its end torchrun may complain that the other node has ended first.
        assert_shown(shown, re.match(rf"(.*\n)*?{end}.*\n", log.read_text())[0])


def test_chapter_of_slurm(clone):
    """On the cluster of two nodes that one of its blocks starts. The two jobs of README and of the
    chapter end with the logs that it shows."""
    variables = {"CLUSTER": f"readme-{os.getpid()}"}
    prefix = (NAMESPACES, "exec")
    others = steps(CHAPTERS[1])
    [start] = [step for step in others if step[1] == "make cluster\n"]
    others.remove(start)
    try:
        assert "is up" in try_block(*start, clone, **variables)
        for step in others:
            printed = try_block(*step, clone, prefix, **variables)
            if "aux/check_ranks.py\nsbatch" in step[1]:
                follow_two_jobs(printed, clone, prefix, variables)
        bash("make cluster-down", clone, **variables)
        assert not Path(f"/run/slurm-cluster-{variables['CLUSTER']}").exists()
    finally:
        run(NAMESPACES, "down", env=environment(**variables))


@pytest.mark.matrix
def test_chapters_of_launchers(clone, cluster):
    """Every job of theirs ends well, but for the one that has too few tasks."""

    def scenario(chapter: int | str, folder: Path):
        printed = "".join(
            try_chapter(chapter, folder, prefix=(NAMESPACES, "exec"), **cluster.environment)
        )
        ids = [int(job) for job in re.findall(r"Submitted batch job (\d+)", printed)]
        ended = [cluster.wait(job, timeout=240) for job in ids]
        logs = [job.log for job in ended if job.state == "COMPLETED"]
        refused = [job for job in ended if "Unable to create step" in job.log]
        assert len(refused) == (chapter == "launchers"), ended
        assert len(logs) == len(ended) - len(refused), ended

    at_once(scenario, [(chapter, clone) for chapter in (8, "launchers")])


@pytest.mark.matrix
def test_chapters_of_language_models(clone):
    """The second takes the text of the first. Without internet, as here, that is the one that
    Python brings along."""
    shown = "".join(try_chapter(10, clone) + try_chapter(11, clone))
    found = re.findall(r"^step=100/100 val_loss=(\S+)$", shown, re.M)
    losses = [float(loss) for loss in found]
    # FSDP, then tensor parallel
    assert len(losses) == 2 and losses[0] < 3.2
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert len(shown.partition("\nSample from checkpoints/tp/step_100:\n")[2]) > 200


@pytest.mark.matrix
def test_chapter_of_the_proof(clone):
    """One process, two ranks and four: the columns are the same training, and not only of the
    same shape."""
    with record.stop_early(clone, 20):
        shown = try_chapter(3, clone)[0]
    lines = [re.findall(r" loss=(\S+)", line) for line in shown.splitlines()]
    rows = [[float(loss) for loss in line] for line in lines]
    assert len(rows) == 5 and rows[-1][0] < rows[0][0]
    assert all(row == pytest.approx([row[0]] * 3, abs=1e-4) for row in rows), shown


@pytest.mark.matrix
def test_chapter_of_surviving(clone, cluster):
    """A job that is stopped, requeued and resumed."""
    shown = try_chapter(7, clone, prefix=(NAMESPACES, "exec"), **cluster.environment)
    [stopped] = re.findall(r"^Stopped after step (\d+), saved$", shown[0], re.M)
    assert re.findall(r"^Resumed after step (\d+)$", shown[0], re.M) == [stopped]


def test_files_of_a_copy(clone):
    """`cp` of the files that a project of one's own takes along: those that the table above it
    names for torchrun, and a script."""
    bash(block("../my-project"), clone)
    project = clone.parent / "my-project"
    files = [path for path in project.rglob("*.*") if not path.is_symlink()]
    row = r"^\| (\w+) \| .+ \| (`env\.sh`, .+) \|$"
    rows = re.findall(row, CHAPTERS["launchers"].read_text(), re.M)
    named = {launcher: re.findall(r"`([^`]+)`", cell) for launcher, cell in rows}
    for launcher, names in named.items():
        text = (clone / LAUNCHERS[launcher]).read_text()
        assert names[1] == LAUNCHERS[launcher]
        assert all((clone / name).is_file() for name in names)
        assert all(name in text for name in names if name != names[1]), launcher
    scripts = [f"distributed/{name}.py" for name in ("train_ddp", "heartbeat", "mnist")]
    assert {str(path.relative_to(project)) for path in files} == {*named["torchrun"], *scripts}
    assert (project / ".venv/bin/python").exists()


# --- what is generated, and what is promised ---


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_diffs_are_fresh(path):
    """`python dev/write_diffs.py README.md docs/*.md` writes them anew."""
    text = path.read_text()
    # One that begins with a file's name is a patch, which another test applies.
    commands = re.findall(r"^```diff\n(?!---)", text, re.M)
    assert len(DIFF.findall(text)) == len(commands), "a diff without its command above it"
    assert with_diffs(text) == text


ROOMS = "aux|dev|distributed|docs|examples|local|sites|tests"


def anchors(path: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    heads = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "path",
    [
        *DOCUMENTS,
        *(REPOSITORY / name for name in ("AGENTS.md", "CHANGELOG.md", ".github/SECURITY.md")),
        REPOSITORY / "dev/tested.md",
    ],
    ids=lambda path: str(path.relative_to(REPOSITORY)),
)
def test_links_and_paths_lead_somewhere(path):
    text = path.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.M)
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        if path.name == "CHANGELOG.md":  # names what is gone
            continue
        assert all(target in targets for target in re.findall(r"^make ([a-z-]+)", span)), span
        for name in re.findall(rf"(?<![\w./-])(?:{ROOMS})/[\w/-]+\.\w+", span):
            assert (REPOSITORY / name).exists(), name
