"""dev/bench's all-reduce, its fit and the prediction from it; strong and weak scaling by jobs; the figures of both."""

import json
import os
import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from conftest import LAUNCHERS, NAMESPACES, REPOSITORY, environment, free_port, run

sys.path[:0] = [str(REPOSITORY / "dev/bench"), str(REPOSITORY / "dev/figures")]

import predict_scaling
import read_scaling
from predict_scaling import Network

PREDICT = [sys.executable, "dev/bench/predict_scaling.py"]
MODEL = ["--parameters", "1e6", "--layers", "1", "--width", "100", "--tokens", "1000"]
NETWORK = ["--latency", "10", "100", "--bandwidth", "1", "0.1"]


# --- the fit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 8])
def test_fit_recovers_latency_and_bandwidth(ranks):
    known, sizes = Network(25e-6, 1.2e9), [8 << i for i in range(24)]
    exact = {size: known.all_reduce(ranks, size) for size in sizes}
    found = predict_scaling.fit(ranks, exact)
    assert (found.latency, found.bandwidth) == (pytest.approx(25e-6), pytest.approx(1.2e9))

    noisy = {size: time * (1.1 if i % 2 else 0.9) for i, (size, time) in enumerate(exact.items())}
    found = predict_scaling.fit(ranks, noisy)
    assert (found.latency, found.bandwidth) == (pytest.approx(25e-6, rel=0.15), pytest.approx(1.2e9, rel=0.15))


def test_fit_refuses_what_tells_nothing():
    for times in ({8: 1e-4}, {8: 1e-4, 1 << 20: 1e-7}):
        with pytest.raises(ValueError):
            predict_scaling.fit(2, times)
    no_latency = predict_scaling.fit(2, {1000: 1e-7, 2000: 4e-7, 4000: 16e-7})  # a straight line would begin below 0
    assert no_latency.latency == 0 and no_latency.bandwidth > 0


def test_bandwidths_are_those_of_nccl_tests():
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    assert predict_scaling.bus_bandwidth(10**9, 0.1, 8) == (1e10, pytest.approx(1.75e10))
    ring = Network(0, 3e9)  # without latency the bus bandwidth is the link's, for any number of ranks
    for ranks in (2, 4, 64):
        assert predict_scaling.bus_bandwidth(4096, ring.all_reduce(ranks, 4096), ranks)[1] == pytest.approx(3e9)


# --- the prediction ---------------------------------------------------------------------------------------------------


def predicted(monkeypatch, *arguments: str) -> list[dict]:
    monkeypatch.setattr(sys, "argv", ["predict_scaling.py", *MODEL, *arguments])
    args = predict_scaling.parse_arguments()
    head, *rows = predict_scaling.check(args) if args.check else predict_scaling.show(args)
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_prediction_of_a_case_computed_by_hand(monkeypatch):
    """Two nodes of two ranks; 10 us and 1 GB/s inside a node, 100 us and 0.1 GB/s between them; a step of 1 s."""
    rows = predicted(monkeypatch, *NETWORK, "--ranks-per-node", "2", "--step-seconds", "1", "--nodes", "2")
    ddp, fsdp, tensor_parallel = rows
    assert {row["computing, ms"] for row in rows} == {"250.00"}  # the same work, on four ranks
    # 4 MB of gradients in one bucket: 2 x 3 x (0.1 + 1 MB / 0.1 GB/s = 10) ms, of which nothing is hidden
    assert (ddp["communication, ms"], ddp["step, ms"], ddp["efficiency"]) == ("60.60", "310.60", "80%")
    # Two units of 2 MB: each 3 x (0.1 + 0.5 MB / 0.1 GB/s = 5) ms, gathered 3 times, scattered twice; at least 2 show
    assert (fsdp["communication, ms"], fsdp["step, ms"]) == ("76.50", "280.60 to 326.50")
    # In a node: 6 all-reduces of 500 tokens x 100 x 4 bytes, 2 x (0.01 + 0.1) ms each. Between the two replicas half of
    # the parameters, 5 x (0.1 + 0.5 MB / 0.05 GB/s = 10) ms, since both ranks of a node want the link; at least 2 show
    assert tensor_parallel["communication, ms"] == f"{6 * 0.22 + 5 * 10.1:.2f}"
    assert tensor_parallel["step, ms"] == f"{250 + 1.32 + 20.2:.2f} to {250 + 1.32 + 50.5:.2f}"


def test_example_of_the_page():
    """docs/scaling.md shows what its command prints."""
    page = (REPOSITORY / "docs/scaling.md").read_text()
    [command] = re.findall(r"^python (dev/bench/predict_scaling.py --latency .*?)\n```\n", page, re.M | re.S)
    [table] = re.findall(r"^```\n(\| nodes .*?)^```$", page, re.M | re.S)
    done = run(sys.executable, *command.replace("\\\n", " ").split())
    assert done.returncode == 0 and done.stdout == table, done.stderr


def test_weak_scaling_and_one_rank(monkeypatch):
    rows = predicted(monkeypatch, *NETWORK, "--step-seconds", "1", "--weak", "--nodes", "1", "4")
    assert [row["step, ms"] for row in rows[:3]] == ["1000.00"] * 3 and rows[0]["efficiency"] == "100%"
    assert {row["computing, ms"] for row in rows[3:]} == {"1000.00"}
    # One rank a node, so the group of tensor parallelism is one rank, too: the rest of it is FSDP over the nodes
    assert rows[5]["communication, ms"] == rows[4]["communication, ms"]


def test_buckets_are_hidden_in_the_backward_pass(monkeypatch):
    many = ["--parameters", str(25 * 2**20), *NETWORK, "--ranks-per-node", "2", "--nodes", "1"]  # four buckets
    one = 2 * (10e-6 + 25 * 2**20 / 2 / 1e9) * 1e3
    for seconds, hidden in (("1", 3 * one), ("0.03", 10)):  # all but the last, or as much as fits into 2/3 of 15 ms
        ddp = predicted(monkeypatch, *many, "--step-seconds", seconds)[0]
        compute = float(seconds) / 2 * 1e3
        assert ddp["step, ms"] == f"{compute + 4 * one - hidden:.2f} to {compute + 4 * one:.2f}"


def scaling_json(path: Path, *runs: tuple[str, int, int, float]) -> Path:
    names = ("mode", "nodes", "ranks_per_node", "rate")
    path.write_text(json.dumps({"unit": "tokens", "runs": [dict(zip(names, row, strict=True)) for row in runs]}))
    return path


def test_prediction_is_held_against_what_was_measured(monkeypatch, tmp_path):
    """One rank computes 1,000 tokens a second; two nodes would need 0.5 s + 2 x (0.1 ms + 2 MB / 0.1 GB/s) a step."""
    right = 1000 / 0.5402
    runs = [("strong", 1, 1, 1000), ("strong", 2, 1, right), ("strong", 2, 1, right / 1.25), ("weak", 2, 1, right)]
    path = scaling_json(tmp_path / "scaling.json", *runs)
    rows = predicted(monkeypatch, *NETWORK, "--check", str(path))
    assert [row["error"] for row in rows[:2]] == ["+0%", "+25%"]
    assert rows[0]["tokens per second, predicted"] == rows[0]["measured"] == f"{right:,.0f}"
    assert rows[2]["tokens per second, predicted"] == f"{2000 / 1.0402:,.0f}"  # twice the tokens in a step


@pytest.mark.parametrize(
    ("strategy", "options", "most", "least"),
    [
        # Two units of 2 MB, each (0.01 + 1 MB / 1 GB/s = 1) ms, gathered 3 times and scattered twice; at least 2 show
        ("FSDP", [], 500 + 5 * 1.01, 500 + 2 * 1.01),
        # 6 all-reduces of 1,000 tokens x 100 x 4 bytes, 2 x (0.01 + 0.2) ms each, all of which show
        ("TP", ["--tensor-parallel", "2"], 500 + 6 * 0.42, 500 + 6 * 0.42),
    ],
)
def test_prediction_of_another_strategy_is_held(strategy, options, most, least, monkeypatch, tmp_path):
    """Against its script's jobs: two ranks of a node, where one rank needs 1 s for a step of 1,000 tokens."""
    runs = [("strong", 1, 1, 1000), ("strong", 1, 2, 1e6 / most / 1.25)]
    path = scaling_json(tmp_path / "scaling.json", *runs)
    [row] = predicted(monkeypatch, *NETWORK, "--check", str(path), "--strategy", strategy, *options)
    both = [f"{1e6 / step:,.0f}" for step in (most, least)]
    assert row["tokens per second, predicted"] == " to ".join(dict.fromkeys(both)), row
    assert row["error"].startswith("+25%") and row["nodes x ranks"] == "1 x 2", row
    few = ["--parameters", "1e6", "--tokens", "1000", *NETWORK, "--strategy", strategy, "--check", str(path)]
    missing = "--layers and --width" if strategy == "TP" else "--layers"
    done = run(*PREDICT, *few)
    assert done.returncode == 2 and f": --strategy {strategy} needs {missing} (" in done.stderr, done.stderr


ONE = ["--step-seconds", "1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*ONE], "one of the arguments --measured --latency is required"),
        (["--latency", "1", *ONE], "--latency and --bandwidth belong together"),
        (["--latency", "1", "--bandwidth", "1", "2", *ONE], "take one figure each"),
        ([*NETWORK], "say either --step-seconds, or --check"),
        ([*NETWORK, "--check", "nowhere.json"], "cannot read nowhere.json"),
        ([*NETWORK, "--check", "README.md"], "README.md is no JSON"),
        (["--measured", "{empty}", *ONE], "has not been written by dev/bench/allreduce.py"),
        (["--measured", "{no_fit}", *ONE], "1 x 2 ranks take figures inside a node"),
        (["--latency", "1", "--bandwidth", "1", "--nodes", "2", *ONE], "take figures between nodes"),
        ([*NETWORK, "--ranks-per-node", "4", "--tensor-parallel", "3", *ONE], "--tensor-parallel 3 fits neither"),
        ([*NETWORK, "--check", "{alone}"], "has no run of one rank"),
        ([*NETWORK, *ONE, "--json", "{empty}/file"], "cannot write"),
    ],
)
def test_bad_input_of_the_prediction(arguments, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY)
    (tmp_path / "empty").write_text("{}")
    (tmp_path / "no_fit").write_text(
        json.dumps({"ranks_per_node": 2, "groups": [{"name": "inside a node", "ranks": 2}]})
    )
    scaling_json(tmp_path / "alone", ("strong", 2, 1, 1000.0))
    files = {name: tmp_path / name for name in ("empty", "no_fit", "alone")}
    arguments = [text.format(**files) for text in arguments]
    monkeypatch.setattr(sys, "argv", ["predict_scaling.py", *MODEL, *arguments])
    with pytest.raises(SystemExit) as ended:
        predict_scaling.main(predict_scaling.parse_arguments())
    printed = capsys.readouterr().err if ended.value.code == 2 else f"{ended.value.code}\n"
    assert says in printed and printed.count("\n") == 1 and printed.startswith("predict_scaling.py: ")


# --- logs -------------------------------------------------------------------------------------------------------------


def write_log(folder: Path, name: str, rates: tuple, loss: float = 1.0, unit: str = "images") -> Path:
    """As train_ddp.py and Progress log."""
    lines = [
        f"epoch=1 step={i}0/90 loss={loss / i:.6f} {unit}_per_second={rate} time_left=0:00:01" for i, rate in rates
    ]
    (folder / f"{name}.out").write_text(
        "\n".join(["launcher: 2 ranks on node-1", *lines, "epoch=1 test_loss=0.25 test_accuracy=0.9", ""])
    )
    return folder


def test_logs_become_runs(tmp_path):
    for number, rate in enumerate((100, 110, 90), start=1):  # the first line of a log is not counted
        write_log(tmp_path, f"strong-1x1-{number}", ((1, 5), (2, rate), (3, rate)))
        write_log(tmp_path, f"strong-2x2-{number}", ((1, 5), (2, 2 * rate), (3, 2 * rate)), loss=1.005)
        write_log(tmp_path, f"weak-2x2-{number}", ((1, 5), (2, "4e+02"), (3, 400)), loss=3.0)
    unit, runs = read_scaling.read_runs(tmp_path)
    assert unit == "images" and [run["mode"] for run in runs] == ["strong", "strong", "weak"]
    assert [run["rate"] for run in runs] == [100, 200, 400] and runs[0]["rates"] == [100, 110, 90]
    assert [(run["speed_up"], run["efficiency"]) for run in runs] == [(1, 1), (2, 0.5), (4, 1)]
    # Three log lines of which each is 0.5 % more, and a test loss that is equal
    expected = 0.005 * (1 + 1 / 2 + 1 / 3) / (1 + 1 / 2 + 1 / 3 + 0.25)
    assert runs[1]["difference"] == pytest.approx(expected, rel=1e-3) and runs[2]["difference"] is None
    assert "| strong | 2 x 2 | 200 | 2.00 | 50% | 0.2500 | 0.44% |" in read_scaling.table(unit, runs)


def test_other_losses_are_no_scaling(tmp_path):
    """The figures are written, and the status is 1."""
    write_log(tmp_path, "strong-1x1-1", ((1, 100), (2, 100), (3, 100)))
    write_log(tmp_path, "strong-1x2-1", ((1, 200), (2, 200), (3, 200)), loss=1.1)
    done = run(sys.executable, "dev/bench/read_scaling.py", tmp_path)
    assert done.returncode == 1 and "200" in done.stdout and (tmp_path / "scaling.json").exists()
    assert re.fullmatch(r"scaling.sh: on 2 ranks the losses differ by 8.8%: .*\(--dropout 0\?\)\n", done.stderr)


def test_logs_that_cannot_be_compared(tmp_path):
    def two_units():
        write_log(tmp_path, "strong-1x1-1", ((1, 1), (2, 1), (3, 1)))
        write_log(tmp_path, "weak-1x2-1", ((1, 1), (2, 1), (3, 1)), unit="tokens")

    for prepare, says in (
        (lambda: None, "no logs in"),
        (lambda: (tmp_path / "strong-1x1-1.out").write_text("VERDICT\n"), "has no log lines with loss="),
        (lambda: write_log(tmp_path, "strong-1x1-1", ((1, 5), (2, 9))), "has 2 lines with a throughput, and 3 are"),
        (two_units, "units"),
    ):
        prepare()
        with pytest.raises(SystemExit) as ended:
            read_scaling.read_runs(tmp_path)
        assert says in str(ended.value.code) and "\n" not in str(ended.value.code)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "which train script?"),
        (["nowhere.py"], "no such train script: nowhere.py"),
        (["--launcher", "nowhere.sh", "env.sh"], "no such launcher: nowhere.sh"),
        (["--sizes", "1x1 2", "env.sh"], "--sizes takes nodes x ranks of a node"),
        (["--sizes"], "--sizes takes a value"),
        (["--size", "1x1", "env.sh"], "there is no option --size"),
        (["--modes", "both", "env.sh"], "--modes takes"),
        (["--rounds", "0", "env.sh"], "--rounds takes a whole number"),
        (["--cpus-per-rank", "x", "env.sh"], "--cpus-per-rank takes a whole number"),
        (["distributed/train_ddp.py", "--epochs", "1"], "give the script one, or say --modes strong"),
        (["env.sh", "--batch-size", "64", "--checkpoint-dir", "x"], "leave --checkpoint-dir out"),
    ],
)
def test_bad_input_of_scaling_sh(arguments, says, tmp_path):
    refused = run("./dev/bench/scaling.sh", *arguments)
    assert refused.returncode == 1 and says in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert refused.stderr.startswith("scaling.sh: ") and not refused.stdout


def test_bad_input_of_allreduce_and_growth():
    for script, arguments, says in (
        ("allreduce.py", ["--largest", "7"], "'7' is no size in bytes"),
        ("allreduce.py", ["--smallest", "1M", "--largest", "1M"], "a fit takes two sizes"),
        ("growth.py", ["--ranks", "12"], "--ranks takes multiples of 8"),
    ):
        refused = run(sys.executable, f"dev/bench/{script}", *arguments)
        assert refused.returncode == 2 and says in refused.stderr and len(refused.stderr.splitlines()) == 1


def test_growth_on_one_node(tmp_path):
    """Eight ranks meet, and publish a checkpoint, by the package's own code; without a cluster."""
    script = [sys.executable, REPOSITORY / "dev/bench/growth.py", "--task", "rendezvous", "--ranks", 8]
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    done = run(*script, cwd=tmp_path, env=environment(**place))
    assert done.returncode == 0, done.stderr
    measured = json.loads(re.search(r"^MEASURED (.*)$", done.stdout, re.M)[1])
    assert set(measured) == {"rendezvous", "step_zero", "check", "publish"} and min(measured.values()) > 0
    assert len(list(tmp_path.glob("log/*/checkpoints/checkpoint_step_1/*.distcp"))) == 8


# --- figures ----------------------------------------------------------------------------------------------------------

GROUP = {"name": "across nodes", "ranks": 2, "latency": 1e-5, "bandwidth": 1e9, "errors": [0.1, 0.2, 0.3]}
SIZES = {"start": 1.0, "rendezvous": 0.1, "step_zero": 0.2, "writes_per_second": 4.0, "most_writes_in_a_second": 8}
SIZES |= {"check": 0.03, "publish": 0.04}


def draw(folder: Path, page: Path):
    import draw_scaling  # and with it matplotlib, which no other test here needs

    draw_scaling.main(Namespace(folder=folder, page=page))


def test_figures_and_page(tmp_path):
    """Drawn from small data; what is around the block stays; twice is the same; a page without the block is refused."""
    sizes = [{"bytes": size, "seconds": 1e-4, "busbw": size * 1e4} for size in (8, 512, 32768)]
    reduced = {"date": "2026-01-31", "device": "some CPU", "backend": "gloo", "groups": [GROUP | {"sizes": sizes}]}
    for mode, size, rate in (("strong", "1x1", 100), ("strong", "1x2", 180), ("weak", "1x2", 190)):
        write_log(tmp_path, f"{mode}-{size}-1", ((1, rate), (2, rate), (3, rate)))
    unit, runs = read_scaling.read_runs(tmp_path)
    found = {"date": "2026-01-31", "machine": "some CPU", "command": "--sizes 1x1", "unit": unit, "runs": runs}
    rows = [{"ranks": ranks, "nodes": ranks // 8, "cpu_per_rank": 1e-4, "read": 0.1, **SIZES} for ranks in (8, 64)]
    predicted = {"command": "predict_scaling.py", "table": [["nodes", "error"], ["1", "+3%"]]}
    files = {"scaling": found, "allreduce_2x1": reduced, "growth": found | {"sizes": rows}, "prediction": predicted}
    files["prediction_tp"] = predicted | {"table": [["nodes", "error"], ["2", "+5%"]]}
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    page = tmp_path / "page.md"
    page.write_text((REPOSITORY / "docs/scaling.md").read_text())
    draw(tmp_path, page)
    text = page.read_text()
    for row in (
        "| strong | 1 x 2 | 180 | 1.80 | 90% |",
        "| across nodes, gloo | 2 | 10.0 | 1.00 | 20%, 30% |",
        "| 1 | +3% |",
        "| 2 | +5% |",
    ):
        assert row in text
    assert "| 64 | 8 | 1.00 | 0.10 | 0.20 | 4.0 | 0.010% | 0.100 | 0.0300 | 0.0400 |" in text
    assert "](scaling.svg)" in text and "](growth.svg)" in text
    assert text.startswith("# Scaling\n") and text.count("<!-- end -->") == 1
    assert all("</svg>" in (tmp_path / name).read_text() for name in ("scaling.svg", "growth.svg"))
    draw(tmp_path, page)
    assert page.read_text() == text
    page.write_text("no block\n")
    with pytest.raises(SystemExit, match="has no block"):
        draw(tmp_path, page)


def test_page_is_what_its_figures_say(tmp_path):
    """docs/scaling.md has the tables of the JSON in docs/figures, or says that there is none."""
    page, folder = REPOSITORY / "docs/scaling.md", REPOSITORY / "docs/figures"
    if not (folder / "scaling.json").exists():
        assert "Not measured yet" in page.read_text()
        return
    copy = tmp_path / "docs"
    (copy / "figures").mkdir(parents=True)
    for path in folder.glob("*.json"):
        (copy / "figures" / path.name).write_text(path.read_text())
    (copy / "scaling.md").write_text(page.read_text())
    draw(copy / "figures", copy / "scaling.md")
    assert (copy / "scaling.md").read_text() == page.read_text()
    for name in ("scaling.svg", "growth.svg"):
        assert (copy / "figures" / name).read_text() == (folder / name).read_text(), name
    grown = json.loads((folder / "growth.json").read_text())["sizes"]
    assert [size["ranks"] for size in grown] == [8, 64, 512, 4096]


# --- real ranks and jobs ----------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_all_reduce_by_torchrun(tmp_path):
    """Two ranks: sizes, definitions, a fit; and the prediction takes its file."""
    path = tmp_path / "allreduce.json"
    arguments = ["--largest", "2M", "--factor", "8", "--rounds", "2", "--seconds", "0.01", "--json", path]
    done = run("./torchrun.sh", "dev/bench/allreduce.py", "--device", "cpu", *arguments)
    assert done.returncode == 0, done.stderr
    [group] = json.loads(path.read_text())["groups"]
    assert (group["name"], group["ranks"]) == ("inside a node", 2)
    assert [row["bytes"] for row in group["sizes"]] == [8 << 3 * i for i in range(7)]
    for row in group["sizes"]:
        assert row["busbw"] == row["algbw"] == pytest.approx(row["bytes"] / row["seconds"])  # 2(n-1)/n is 1
        assert f"| {row['bytes']} | {row['seconds'] * 1e6:.1f} |" in done.stdout
    assert group["latency"] >= 0 and group["bandwidth"] > 0
    found = run(*PREDICT, "--measured", path, *MODEL, "--step-seconds", "1", "--nodes", "1")
    assert found.returncode == 0 and "| 1 | 2 | DDP | 500.00 |" in found.stdout, found.stderr


@pytest.mark.matrix
def test_all_reduce_of_one_rank_and_of_a_full_disk(tmp_path):
    for command, says in (
        ([sys.executable], "one rank alone has nobody to reduce with"),
        (["./torchrun.sh"], "cannot write /dev/full/allreduce.json"),
    ):
        small = ["--largest", "1K", "--rounds", "1", "--seconds", "0", "--json", "/dev/full/allreduce.json"]
        done = run(*command, "dev/bench/allreduce.py", "--device", "cpu", *small)
        said = re.findall(r"^\[Rank .*|.*Traceback.*allreduce\.py", done.stderr, re.M)
        assert done.returncode == 1 and len(said) == 1 and says in said[0], done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_all_reduce_across_nodes(launcher, cluster, tmp_path):
    """2 x 2 ranks: first each node's, then all; under every launcher."""
    path = tmp_path / "allreduce.json"
    arguments = ["--largest", "4K", "--factor", "8", "--rounds", "1", "--seconds", "0", "--json", path]
    job = cluster.sbatch(f"--output={tmp_path}/log", LAUNCHERS[launcher], "dev/bench/allreduce.py", *arguments)
    assert job.state == "COMPLETED", job.log
    groups = json.loads(path.read_text())["groups"]
    assert [(group["name"], group["ranks"]) for group in groups] == [("inside a node", 2), ("across nodes", 4)]
    for row in groups[1]["sizes"]:
        assert row["busbw"] == pytest.approx(row["bytes"] / row["seconds"] * 1.5)


@pytest.mark.matrix
def test_scaling_by_jobs(cluster, tiny, tmp_path):
    """Strong and weak on 1, 2 and 4 ranks: equal losses, more images in a step of weak scaling, nothing left behind."""
    before = {path.name for path in (REPOSITORY / "checkpoints").glob("*")}
    options = ["--sizes", "1x1 1x2 2x2", "--rounds", "1", "--out", tmp_path]
    script = ["distributed/train_ddp.py", "--data-dir", tiny, "--batch-size", "60", "--dropout", "0"]
    command = ["./dev/bench/scaling.sh", *options, *script, "--epochs", "3", "--log-every", "1"]
    done = cluster.exec(*command, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "scaling.json").read_text())
    sizes = [(run["mode"], run["nodes"], run["ranks_per_node"]) for run in found["runs"]]
    assert sizes == [("strong", 1, 1), ("strong", 1, 2), ("strong", 2, 2), ("weak", 1, 2), ("weak", 2, 2)]
    assert found["unit"] == "images" and all(run["rate"] > 0 for run in found["runs"])
    assert all(run["difference"] < 1e-3 for run in found["runs"][:3])
    assert [len(run["losses"]) for run in found["runs"]] == [18, 18, 18, 9, 6]  # steps of three epochs, and three tests
    assert {path.name for path in (REPOSITORY / "checkpoints").glob("*")} == before
    assert "world size: 4" in (tmp_path / "weak-2x2-1.out").read_text()


@pytest.mark.matrix
def test_scaling_by_a_job_that_fails(cluster, tmp_path):
    options = ["--modes", "strong", "--sizes", "1x2", "--rounds", "1", "--out", tmp_path]
    done = cluster.exec("./dev/bench/scaling.sh", *options, "tests/scripts/fail.py", "exit", timeout=200)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert re.fullmatch(r"scaling.sh: the job of strong scaling on 1x2 has failed, see \S+\n", done.stderr)


@pytest.mark.matrix
def test_growth_on_small_clusters(tmp_path):
    """8 and 16 ranks: all start, meet and beat; more of them write no more than thirty heartbeats a second."""
    variables = environment(CLUSTER=f"growth-{os.getpid()}")
    command = [sys.executable, "dev/bench/growth.py", "--ranks", "8", "16", "--rounds", "1", "--out", tmp_path]
    try:
        done = run(*command, timeout=400, env=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not Path(f"/run/slurm-cluster-{variables['CLUSTER']}").exists()
    finally:
        run(NAMESPACES, "down", env=variables)
    sizes = json.loads((tmp_path / "growth.json").read_text())["sizes"]
    assert [(size["ranks"], size["nodes"], size["processes"]) for size in sizes] == [(8, 1, 1), (16, 2, 2)]
    for size in sizes:
        assert 0 < size["start"] < 60 and 0 < size["rendezvous"] < 60 and 0 < size["step_zero"] < 60
        assert 0 < size["check"] < 5 and 0 < size["publish"] < 5
        assert size["ranks"] / 4 < size["writes_per_second"] < size["ranks"]  # one in two seconds, or in three
        assert f"Step 0: {size['ranks']} ranks" in (tmp_path / f"beat-{size['ranks']}.out").read_text()
