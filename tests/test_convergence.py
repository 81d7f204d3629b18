"""The published comparison of all launchers: its losses agree, and one that differs is told."""

import copy
import json
import math
import shutil
import sys

import pytest

import prove_convergence
from conftest import REPOSITORY

PUBLISHED = REPOSITORY / "docs/figures/convergence.json"
LOSSES = json.loads(PUBLISHED.read_text())


def test_the_published_losses_agree(tmp_path, monkeypatch, capsys):
    """With the figure drawn again; the appendix has the largest differences."""
    shutil.copy2(PUBLISHED, tmp_path)
    monkeypatch.setattr(sys, "argv", ["prove_convergence.py", "--draw"])
    monkeypatch.setattr(prove_convergence, "OUT", tmp_path)
    prove_convergence.main()
    table = capsys.readouterr().out
    assert table.endswith("VERDICT: all launchers agree\n")
    drawn, published = tmp_path / "convergence.svg", PUBLISHED.with_suffix(".svg")
    assert drawn.read_text() == published.read_text()
    planned = (prove_convergence.image_runs(), prove_convergence.text_runs())
    for training, runs in zip(LOSSES["trainings"], planned, strict=True):
        names = [(run["family"], run["name"]) for run in training["runs"]]
        assert names == [(family, name) for family, name, _ in runs]
        one, *others, control = training["runs"]
        largest = max(prove_convergence.difference(run, one) for run in others)
        told = prove_convergence.difference(control, one)
        row = f"| {training['name']} | {len(others)} | {largest:.1e} | {told:.1e} |\n"
        assert row in (REPOSITORY / "docs/appendix_agree.md").read_text()


@pytest.mark.parametrize(
    ("number", "loss", "sentence"),
    [
        (3, 9.0, "srun, 4 ranks on 2 nodes' differs by "),
        (3, math.nan, "srun, 4 ranks on 2 nodes' differs by inf, the limit is 0.0001"),
        (-1, None, "the images do not show that a learning rate is 1 % higher"),
    ],
)
def test_what_differs_is_told(number, loss, sentence):
    """A run with one wrong loss, and a control that has the losses of one process."""
    training = copy.deepcopy(LOSSES["trainings"][0])
    if loss is None:
        training["runs"][number] = training["runs"][0]
    else:
        training["runs"][number]["losses"]["50"] = loss
    [fault] = prove_convergence.judge(training)
    assert sentence in fault


def test_losses_of_a_plain_log():
    log = "epoch=1 step=1/2 loss=2.5 x\nepoch=1 step=2/2 loss=2.25 x\nepoch=1 test_loss=2.0 x\n"
    log += log.replace("epoch=1", "epoch=2").replace("2.5", "1.5")
    losses, evaluations = prove_convergence.read_log(log)
    assert losses == {1: 2.5, 2: 2.25, 3: 1.5, 4: 2.25} and evaluations == {2: 2.0, 4: 2.0}
