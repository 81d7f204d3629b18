"""The benchmarks: they run with tiny sizes, and the published numbers are those of the data."""

import json
import re
import sys
from statistics import median

import pytest

from conftest import LAUNCHERS, REPOSITORY, environment, run

sys.path.append(str(REPOSITORY / "dev/bench"))

import compare
import gpu_report


def test_the_chapter_has_the_ratios_of_the_data():
    lines = (REPOSITORY / "dev/bench/benchmarks.jsonl").read_text().splitlines()
    _, *published = [json.loads(line) for line in lines]
    assert [row["name"] for row in published] == [name for name, *_ in compare.rows()]
    page = (REPOSITORY / "docs/09_faster.md").read_text()
    table = page.partition("| what was changed | compared with | times as fast |\n")[2]
    shown = re.findall(r"^\| .+ \| .+ \| ([\d.]+) \|$", table.partition("\n\n")[0], re.M)
    ratios = [f"{median(compare.ratios(row)):.2f}" for row in published]
    assert len(shown) == 6 and shown == [ratio for ratio in ratios if ratio in shown]


def test_a_ratio_is_the_median_of_its_rounds():
    row = {"name": "a", "other": "b", "ours": [1, 2, 1], "theirs": [3, 2, 2.5], "result": "loss 1"}
    assert compare.line(row) == "| a | b | 2.50 | 1.00 to 3.00 | loss 1 |\n"


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["images, the loader", "MNIST step, fp32", "1 thread, fp32"])
def test_both_sides_run(name, tiny, text):
    [(_, _, *sides)] = [row for row in compare.rows() if name in row[0]]
    for side in sides:
        command = f"{side.args[0]} --data-dir {text if 'thread' in name else tiny}"
        seconds, loss = compare.train(command, lines=2)
        assert 0 < seconds < 10 and float(loss) >= 0


@pytest.mark.matrix
def test_launches():
    """On a cluster of its own."""
    done = run(
        sys.executable, "dev/bench/compare.py", "--only", "launch", "--rounds", 1, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    measured = re.findall(r"^\| launch to first step, (\w+), 4 ranks", done.stdout, re.M)
    assert measured == list(compare.LAUNCHERS)


@pytest.mark.matrix
def test_all_reduce_of_one_rank_is_one_sentence():
    done = run(sys.executable, "dev/bench/allreduce.py", env=environment(WORLD_SIZE=1))
    assert done.returncode == 1
    assert done.stderr.startswith("allreduce.py: one rank has nobody to reduce with")


SMALL = ["--device", "cpu", "--largest", "1", "--rounds", "1", "--calls", "2"]


@pytest.mark.matrix
def test_all_reduce_across_nodes(cluster):
    """2 x 2 ranks: first each node's, then all; busbw is 1 and 1.5 times algbw."""
    job = cluster.sbatch(LAUNCHERS["srun"], "dev/bench/allreduce.py", *SMALL)
    assert job.state == "COMPLETED", job.log
    tables = re.findall(r"^All-reduce (.+), (\d) ranks$", job.log, re.M)
    assert tables == [("inside a node", "2"), ("across nodes", "4")], job.log
    last = re.findall(r"^\| 524288 \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|", job.log, re.M)
    for (algbw, busbw), factor in zip(last, (1, 1.5), strict=True):
        assert float(busbw) == pytest.approx(factor * float(algbw), abs=0.002)


@pytest.mark.matrix
def test_scaling(cluster, tiny):
    """The same losses on 1, 2 and 4 ranks; nothing is left behind; a failed job is one sentence."""
    scaling = [sys.executable, "dev/bench/scaling.py", "--rounds", 1, "--out", tiny / "scaling"]
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
    failed = cluster.exec(*scaling, "--sizes", "1x2", "--", "tests/scripts/fail.py", timeout=200)
    assert failed.returncode == 1 and "scaling.py: the job on 1x2 has failed" in failed.stderr


@pytest.mark.matrix
def test_gpu_report(tmp_path):
    """The dry run of make gpu-report: each part of the page has what it is for."""
    out = tmp_path / "gpu.md"
    done = run(sys.executable, "dev/gpu_report.py", "--device=cpu", "--out", out, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = dict(re.findall(r"^## (.*)\n\n((?:(?!## ).*\n)+)", out.read_text(), re.M))
    assert list(parts) == [title for together in gpu_report.PARTS for title in together]
    rows = re.findall(r"^\| (.*) \| \d+\.\d+ \| .* \| \d+ \|$", parts["Speed and memory"], re.M)
    assert rows == list(gpu_report.SPEED_OF_CPU)
    assert re.search(r"^cpu  \d+\.\d+( \d+\.\d+){4}$", parts["Losses beside the CPU's"], re.M)
    assert "Timeout (0:00:20)!" in parts["A rank that never comes"]
    assert parts["Two ranks on one GPU"].count("status 0 ") == 3
    [losses] = re.findall(r"resumed run's: \[\['(.*)'\], \['(.*)'\]\]", parts["Checkpoints"])
    assert losses[0] == losses[1]
    assert parts["Profile"].count("aten::") > 4
    assert len(re.findall(r"^\| --\S+ \S+ \| \d+ \|$", parts["Handwritten digits"], re.M)) == 3
