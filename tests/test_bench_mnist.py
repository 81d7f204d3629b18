"""The promised speed, measured; a missed gate is told; both sides of the benchmark train the same network."""

import importlib.util
import sys
from argparse import Namespace

import pytest

from conftest import REPOSITORY, run


@pytest.fixture
def bench(monkeypatch):
    """aux/bench/mnist.py as a module of another name: `mnist` is the one in distributed/."""
    monkeypatch.setattr(sys, "argv", ["mnist.py"])  # the module changes it, to get train_ddp.py's defaults
    spec = importlib.util.spec_from_file_location("bench_mnist", REPOSITORY / "aux/bench/mnist.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.matrix  # more than a minute, and it wants the machine for itself
def test_promised_speed():
    done = run(sys.executable, "aux/bench/mnist.py", "--check", timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert done.stdout.count("passed") >= 2  # feeding and a step always; two ranks unless others keep the CPUs busy


def test_missed_gate_is_one_sentence(bench, mnist, monkeypatch, capsys):
    monkeypatch.setattr(bench, "GATES", dict.fromkeys(bench.GATES, 0) | {"two ranks, fp32": 0.75})
    monkeypatch.setattr(bench, "launch", lambda ranks, *_: 100.0)  # two ranks no faster than one
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 2)
    args = Namespace(check=True, rounds=1, steps=1, launches=1)

    monkeypatch.setattr(bench, "used_by_others", lambda: 0.0)
    with pytest.raises(SystemExit) as missed:
        bench.main(args, mnist)
    assert missed.value.code == "mnist.py: two ranks, fp32 reaches 0.50, and at least 0.75 is promised"

    clock = iter(range(0, 4000, 1000))  # others use 1,000 CPU seconds in no time: no verdict
    monkeypatch.setattr(bench, "used_by_others", lambda: next(clock))
    bench.main(args, mnist)
    assert "NOT JUDGED" in capsys.readouterr().out


def test_both_sides_are_the_same_network(bench):
    """Up to the columns of the first linear layer, which ours has in the order of channels_last."""
    import torch

    theirs, ours = bench.their_network().eval(), bench.train_ddp.ConvNet(0.25).eval()
    weights = dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True))
    columns = weights["linear1.weight"].view(128, 64, 12, 12)
    ours.load_state_dict(weights | {"linear1.weight": columns.permute(0, 2, 3, 1).flatten(1)})
    images = torch.randn(8, 1, 28, 28)
    torch.testing.assert_close(ours(images).log_softmax(1), theirs(images))
