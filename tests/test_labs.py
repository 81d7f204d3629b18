"""Outputs of the pages below blocks of sh, such as those of labs: their commands, in the order in
which somebody types them."""

import re

import pytest

import record
from pages import HOME, assert_shown, bash, shown_by
from prepare_data import draw_images
from slurm import LAUNCHERS, NAMESPACES, wait_for

pytestmark = pytest.mark.matrix


def test_many_gpus(clone):
    """Chapter 2, with two steps in an epoch if it is not recorded."""
    draw_images(clone / "data/images", *([] if record.RECORDING else (128, 20)))
    fresh = bash("./torchrun.sh examples/many_gpus.py", clone, NPROC_PER_NODE=2)
    assert_shown(shown_by(2, r"\[Rank: 1 \| \w+ \| cpu"), fresh)


def test_one_script_twice(clone):
    """Chapter 2's lab: each line is there twice, with the same loss."""
    draw_images(clone / "lab/data/images", 128, 20)
    fresh = bash("cd lab; ../torchrun.sh ../examples/one_gpu.py", clone, NPROC_PER_NODE=2)
    # A line's break may come after the other process's line.
    lines = sorted(re.findall(r"epoch=\d loss=\S+ accuracy=\S+(?= )", fresh))
    assert len(lines) == 6 and lines[::2] == lines[1::2], fresh


def test_endless_loop(clone, cluster):
    """Chapter 6: what the log says after a minute."""
    options = ["--export=ALL,PYTHONPATH=distributed", "--output=endless.out"]
    command = [LAUNCHERS["torchrun"], "docs/labs/endless_loop.py"]
    variables = {"SBATCH_EXPORT": "NONE"}  # as at some sites
    job = cluster.submit(*options, *command, env=variables, cwd=clone)
    log = clone / "endless.out"
    said = re.compile(r"\[Rank \d on .*no step for(.|\n)*endless_loop\.py:\d+\)\n")
    try:
        wait_for(lambda: log.exists() and said.search(log.read_text()), 180)
    finally:
        cluster.exec("scancel", job)
    fresh = said.search(log.read_text())[0].replace(str(clone), HOME)
    assert_shown(shown_by(6, r"\[Rank.*no step for"), fresh)


def test_kill_a_rank(clone, cluster):
    """Fault tolerance: the last rank of the second node, after five lines of steps."""

    def on_the_cluster(command: str) -> str:
        return bash(command, clone, (NAMESPACES, "exec"), **cluster.environment)

    train = "distributed/train_preemptible.py --epochs 500 --log-every 20 --save-every 20"
    submit = "sbatch --parsable --nodes=3 --output=lab.out launch_slurm_with_spare.sh"
    job = on_the_cluster(f"{submit} {train}").strip()
    log = clone / "lab.out"
    try:
        wait_for(
            lambda: log.exists() and re.search(r"(?s)^Start 1 .* loss=", log.read_text(), re.M), 240
        )
        node = re.search(r"^Start 1 on \S+,(\S+)$", log.read_text(), re.M)[1]
        there = f"srun --jobid={job} --overlap --nodelist={node} --nodes=1 --ntasks=1"
        rank = on_the_cluster(f"{there} pgrep --full train_preemptible").split()[-1]
        wait_for(lambda: log.read_text().count(" loss=") >= 5, 240)
        on_the_cluster(f"{there} kill -9 {rank}")
        wait_for(lambda: re.search(r"(?s)^Resumed after.* loss=", log.read_text(), re.M), 240)
    finally:
        on_the_cluster(f"scancel {job}")
    fresh = bash("grep -E '^(Start|Resumed|srun: error|epoch)' lab.out", clone)
    # The page's epoch has not ended, while those of the small data take four steps.
    fresh = re.sub(r"^epoch=\d+ test_loss.*\n", "", fresh, flags=re.M)
    # Those of the end, which came after the look.
    assert_shown(
        shown_by("fault_tolerance", "Start 1 on"),
        re.match(r"(?s).*^Resumed.*?\nepoch.*?\n", fresh, re.M)[0],
    )


def test_silent_mistakes(clone):
    """Chapter 9."""
    padding = "./torchrun.sh docs/labs/padding_broken.py"
    commands = f"./torchrun.sh docs/labs/set_epoch_broken.py\n{padding}\n"
    fresh = bash(f"{commands}NPROC_PER_NODE=4 {padding}", clone, NPROC_PER_NODE=2)
    assert_shown(shown_by(9, "epoch 1 begins with"), fresh)
