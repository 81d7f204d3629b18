"""The benchmarks: they run with tiny sizes, and the published numbers are those of the data."""

import re
import sys
from argparse import Namespace

import pytest

from conftest import LAUNCHERS, REPOSITORY, environment, run

sys.path.append(str(REPOSITORY / "dev/bench"))

import compare
import gpu_report
import launch
from compare import Row

# --- published numbers ---


def test_the_page_has_the_table_of_its_data():
    page = compare.PAGE.read_text()
    published = page.split(compare.BEGIN)[1].split(compare.END)[0]
    assert published == compare.table(*compare.read(compare.DATA))


# --- compare.py ---


def test_a_ratio_is_the_median_of_its_rounds():
    row = Row("a", "b", [1, 2, 1], [3, 2, 2.5], "loss 1")
    assert row.line() == "| a | b | 2.50 | 1.00 to 3.00 | loss 1 |"
    assert Row("a", "b", missing="no cluster here").line() == "| a | b |  |  | no cluster here |"


def test_a_side_that_fails_ends_the_comparison():
    args = Namespace(mnist_dir="nowhere", text_dir="nowhere", lines=2)
    with pytest.raises(SystemExit, match="must be 1 or more"):
        compare.seconds(args, "dev/bench/scaling.py --rounds 0 env.sh", 1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "only", ["images, the loader", "MNIST step, fp32", "CPU settings, 1 thread, fp32"]
)
def test_both_sides_run(only, tiny, text, tmp_path):
    folders = ["--mnist-dir", tiny, "--text-dir", text]
    command = [sys.executable, "dev/bench/compare.py", "--rounds", 1, "--lines", 2, *folders]
    done = run(*command, "--only", only, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^\| .*{only} \| .+ \| \d+\.\d\d \| ", done.stdout, re.M), done.stdout


# --- the others ---


@pytest.mark.matrix
def test_launches():
    """On a cluster of its own; the container's rows only where Enroot is."""
    done = run(sys.executable, "dev/bench/launch.py", "--rounds", 1, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [name for name in launch.LAUNCHERS if name != "container" or launch.has_container()]
    measured = re.findall(
        r"^launch to first step, (\w+), \d ranks: [\d.]+ s, bare", done.stdout, re.M
    )
    assert measured == kinds * 2


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
