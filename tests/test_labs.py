"""Outputs of the pages below blocks of sh, such as those of labs: their commands, in the order in
which somebody types them."""

import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

import record
from conftest import LAUNCHERS, NAMESPACES, environment, run, wait_for
from test_readme import HOME, assert_shown, bash, clone, shapes, shown_by  # noqa: F401

pytestmark = pytest.mark.matrix


def test_one_script_twice(clone):  # noqa: F811  the fixture
    """Chapter 2. The order of two processes' lines is by chance, and on the page not."""
    shown = shown_by(2, "Data: SYNTHETIC")
    batches = 150 if shown.endswith("...\n") else 1000
    with record.stop_early(clone, batches):
        fresh = bash("./torchrun.sh local/train_single.py --epochs 1", clone, NPROC_PER_NODE=2)
    lines = defaultdict(list)
    for shape, number in shapes(fresh):
        lines[shape].append(fresh.splitlines(keepends=True)[number])
    assert all(len(both) == 2 for both in lines.values()), fresh
    assert_shown(
        shown, "".join(lines[shape].pop(0) for shape, _ in shapes(shown) if shape != "...")
    )


def test_endless_loop(clone, cluster):  # noqa: F811
    """Chapter 4: what the log says after a minute."""
    command = [LAUNCHERS["torchrun"], "tests/failures/endless_loop.py"]
    variables = {"PYTHONPATH": "distributed"}
    job = cluster.submit("--output=endless.out", *command, env=variables, cwd=clone)
    log = clone / "endless.out"
    said = re.compile(r"\[Rank \d on .*no step for(.|\n)*endless_loop\.py:\d+\)\n")
    try:
        wait_for(lambda: log.exists() and said.search(log.read_text()), 180)
    finally:
        cluster.exec("scancel", job)
    fresh = said.search(log.read_text())[0].replace(str(clone), HOME)
    assert_shown(shown_by(4, r"\[Rank.*no step for"), fresh)


def test_crash_a_node(clone):  # noqa: F811
    """Chapter 5, on a cluster of its own."""
    variables = {"CLUSTER": f"lab-{os.getpid()}"}
    train = "distributed/train_preemptible.py --epochs 500 --log-every 20 --save-every 20"
    submit = f"sbatch --exclude=node-1 --output=lab.out launch_slurm_with_spare.sh {train}"
    log, state = clone / "lab.out", Path(f"/run/slurm-cluster-{variables['CLUSTER']}")
    try:
        bash(f"{NAMESPACES} up --nodes 4", clone, **variables)
        bash(submit, clone, (NAMESPACES, "exec"), **variables)
        wait_for(lambda: log.exists() and " step=60/" in log.read_text(), 240)
        bash(f'kill -9 "$(cat {state}/node-3.pid)"', clone)
        wait_for(lambda: re.search(r"(?s)^Resumed after.* loss=", log.read_text(), re.M), 240)
        shown = bash("grep -E '^(Start|Left|Resumed|srun: error|epoch)' lab.out", clone)
        assert_shown(shown_by(5, "Start 1 on"), shown)
    finally:
        run(NAMESPACES, "down", env=environment(**variables))


def test_silent_mistakes(clone):  # noqa: F811
    """Chapter 8."""
    padding = "./torchrun.sh tests/failures/padding_broken.py"
    commands = f"./torchrun.sh tests/failures/set_epoch_broken.py\n{padding}\n"
    fresh = bash(f"{commands}NPROC_PER_NODE=4 {padding}", clone, NPROC_PER_NODE=2)
    assert_shown(shown_by(8, "epoch 1 begins with"), fresh)
