"""The tools that measure: they run, with tiny sizes. What pages compute from measured numbers."""

import re
import sys

import pytest

from conftest import LAUNCHERS, REPOSITORY, environment, run, stand_ins

SMALL = ["--device", "cpu", "--largest", "1", "--rounds", "1", "--calls", "2"]


@pytest.mark.matrix
def test_all_reduce_across_nodes(cluster):
    """2 x 2 ranks: first each node's, then all; busbw is 1 and 1.5 times algbw."""
    job = cluster.sbatch(LAUNCHERS["srun"], "aux/allreduce.py", *SMALL)
    assert job.state == "COMPLETED", job.log
    tables = re.findall(r"^All-reduce (.+), (\d) ranks$", job.log, re.M)
    assert tables == [("inside a node", "2"), ("across nodes", "4")], job.log
    last = re.findall(r"^\| 524288 \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|", job.log, re.M)
    for (algbw, busbw), factor in zip(last, (1, 1.5), strict=True):
        assert float(busbw) == pytest.approx(factor * float(algbw), abs=0.002)


@pytest.mark.matrix
def test_scaling(cluster, tiny):
    """The same losses on 1, 2 and 4 ranks; nothing is left behind; a failed job is one sentence."""
    scaling = [sys.executable, "aux/scaling.py", "--rounds", 1, "--out", tiny / "scaling"]
    script = ["--", "distributed/train_ddp.py", "--data-dir", tiny, "--batch-size", "60"]
    script += ["--epochs", "3", "--log-every", "1"]
    before = {path.name for path in (REPOSITORY / "checkpoints").glob("*")}
    done = cluster.exec(*scaling, "--sizes", "1x1", "1x2", "2x2", *script, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = re.findall(r"^\| (\dx\d) \| .+ \| (\S+) \|$", done.stdout, re.M)
    assert [size for size, _ in rows] == ["1x1", "1x2", "2x2"]
    losses = [float(loss) for _, loss in rows]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-3)
    assert {path.name for path in (REPOSITORY / "checkpoints").glob("*")} == before
    fails = ["--sizes", "1x2", "--", "tests/scripts/variables.py", "fail"]
    failed = cluster.exec(*scaling, *fails, timeout=200)
    assert failed.returncode == 1 and "scaling.py: the job on 1x2 has failed" in failed.stderr


@pytest.mark.parametrize(("more", "cpus"), [([], 8), (["--cpu"], 1), (["--cpus-per-rank=3"], 3)])
def test_scaling_asks_for_cpus(more, cpus, tmp_path):
    """With one CPU, a GPU's rank would wait for data."""
    job = "for word; do [[ $word != --output=* ]] || log=${word#*=}; done\n"
    job += 'for step in 1 2; do echo " loss=1 images_per_second=9"; done >"$log"; echo "$@" >asked'
    env = environment(PATH=f"{stand_ins(tmp_path / 'tools', {'sbatch': job})}:/usr/bin:/bin")
    for name in ("train.py", "launch.sh"):
        (tmp_path / name).touch()
    command = [sys.executable, REPOSITORY / "aux/scaling.py", "--launcher=launch.sh"]
    command += ["--sizes", "1x1", "1x2"]
    done = run(*command, *more, "--", "train.py", cwd=tmp_path, env=env)
    assert "| 1x2 | 9 | 1.00 | 50% | 1 |" in done.stdout, done
    assert f" --cpus-per-task={cpus} launch.sh train.py\n" in (tmp_path / "asked").read_text()


FASTER, SECOND_NODE = (
    (REPOSITORY / "docs" / name).read_text() for name in ("04_faster.md", "05_a_second_node.md")
)


def test_one_table_of_the_project():
    """Hours and cost follow from the images per second. The figure and the next chapter repeat
    them, and the bars are as long as their numbers."""
    row = r"^\| `?([\w.]+[^|`]*)`? \| ([\d,]+) \| \d+ % \| [\d.]+ \| ([\d.]+) \| (\d+) \|$"
    rows = re.findall(row, FASTER, re.M)
    names, shown, hours, costs = zip(*rows, strict=True)
    rates = [int(rate.replace(",", "")) for rate in shown]
    computed = [90 * 1.28e6 / rate / 3600 for rate in rates]
    assert len(rows) == 7
    assert [float(value) for value in hours] == [round(value, 1) for value in computed]
    assert [int(value) for value in costs] == [round(3 * value) for value in computed]

    figure = (REPOSITORY / "docs/figures/speed.svg").read_text()
    bar = r'>([^<]+)</text>\n<rect .* width="([\d.]+)" height="20"/>\n<text .*>([\d,]+)</text>'
    found, widths, numbers = zip(*re.findall(bar, figure), strict=True)
    assert (found, numbers) == (names, shown)
    scale = float(widths[-1]) / rates[-1]
    assert [float(width) for width in widths] == pytest.approx([scale * x for x in rates], abs=0.1)
    spoken = re.search('aria-label="(.*)"', figure)[1]
    assert re.findall(r"\b([\d,]*\d{3})[,.]", spoken) == [*shown]

    ours = re.findall(r"^\| one H200, .* \| ([\d,]+) \| ([\d.]+) \|.*\| us \|$", SECOND_NODE, re.M)
    assert ours == [(shown[0], hours[0]), (shown[-1], hours[-1])]


def test_what_a_second_node_costs_is_computed():
    """All-reduces of 16 ranks, and how much faster two nodes are than one."""
    rows = re.findall(
        r"^\| (?:eight|one) adapters? of .*? \| (.*GB/s) \| (.*) \|$", SECOND_NODE, re.M
    )
    assert len(rows) == 3
    for busbw, cells in rows:
        buses = [float(value) for value in re.findall(r"[\d.]+", busbw)]
        columns = [re.findall(r"[\d.]+", cell) for cell in cells.split(" | ")]
        for times, factors, weights, step in (
            (*columns[:2], 25.6e6, 128 / 3.110),
            (*columns[2:], 124e6, 32 * 1024 / 538),
        ):
            sent = [4 * weights * 2 * 15 / 16 / bus / 1e6 for bus in buses]
            faster = [2 * step / max(step, step / 3 + ms) for ms in sent]
            assert [float(ms) for ms in times] == pytest.approx(sent, rel=0.15)
            # A cell has one number if both are the same.
            assert {float(factor) for factor in factors} == {round(value, 1) for value in faster}
