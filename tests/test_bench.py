"""The benchmarks: a missed row is told; both sides train the same; the promised speed, measured."""

import importlib.util
import json
import math
import re
import sys
import sysconfig
from argparse import Namespace
from pathlib import Path

import pytest

from conftest import REPOSITORY, environment, run

sys.path.append(str(REPOSITORY / "dev/bench"))  # last: mnist and language_model are those in distributed/

import rows
from rows import Row


def load(name: str):
    """A program of dev/bench as a module of another name: `mnist` is the one in distributed/."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", REPOSITORY / f"dev/bench/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench():
    return load("mnist")


@pytest.mark.matrix  # minutes, and it wants the machine for itself
def test_promised_speed():
    done = run(sys.executable, "dev/bench/mnist.py", "--check", timeout=900)
    print(done.stdout)
    said = "".join(done.stderr.splitlines()[-1:] if done.returncode else [])
    missed = dict(re.findall(r"(?:^mnist.py: |; )(.+?): ([\d.]+), and at least [\d.]+ is promised", said))
    # Missed on some CPUs: with tiles 33 was seen, without them 2.02, in rounds of 1.78 to 2.36
    known = {"images alone, train_ddp.py": 25}
    known |= {"MNIST step, bf16": 1.5} if "no bfloat16 tiles" in done.stdout else {}
    # On an Intel Xeon whose tiles were turned off 18.9, in float32, which is the faster one there
    known |= {"MNIST to 99 %, synthetic digits": 15} if "no fast bfloat16" in done.stdout else {}
    assert len(missed) == said.count("; ") + bool(said), done.stderr
    assert all(float(ratio) >= known.get(name, math.inf) for name, ratio in missed.items()), done.stderr
    assert done.stdout.count("| passed |") >= 3  # loading and a step always; by the clock unless CPUs are kept busy


# --- rows -------------------------------------------------------------------------------------------------------------


def row(ours: list[float], theirs: list[float], least: float = 2, **more) -> Row:
    return Row("a row", "others", least, [(x, x / 2) for x in ours], [(x, x) for x in theirs], **more)


def test_a_row_is_judged_by_the_median_of_its_rounds():
    found = row([1, 1, 1], [1, 2.5, 9])
    assert found.ratio() == 2.5 and found.verdict() == "passed" and found.quickest() == 1
    assert found.cells() == ["a row", "others", "2.50", "1.00 to 9.00", "1.00", "2.50", "5.00", "2", "passed", ""]
    assert row([1, 1, 1], [1, 1.9, 9]).verdict() == "missed"
    assert row([1, 1, 1], [1, 1.9, 9], by_cpu=True).verdict() == "passed"
    assert row([1], [1.9], ideal=2.0, least=0.95).verdict() == "passed"
    assert row([1], [1.9], ideal=2.0, least=0.96).sentence() == "a row: 0.95, and at least 0.96 is promised"


def test_speed_does_not_make_up_for_quality():
    found = row([1], [100], good=False, quality="accuracy 0.1")
    assert found.verdict() == "missed" and found.sentence() == "a row: accuracy 0.1"


def test_busy_rounds_do_not_count():
    assert row([1, 1], [1, 3], busy=[1.5, 0.1]).ratio() == 3
    assert row([1, 1], [3, 3], busy=[1.5, 0.5]).verdict() == "not judged: other programs used 1.0 CPUs"
    assert row([1, 1], [1, 3], busy=[1.5, 0.1], by_cpu=True).ratio() == 4
    assert row([], [], missing="not installed").verdict() == "not installed"


def test_turns(monkeypatch):
    """The sides alternate, do equally many steps with their numbers, and the first round does not count."""
    calls, clock = [], iter(range(1000))
    monkeypatch.setattr(rows, "now", lambda: (next(clock), 0))
    sides = {name: lambda step, name=name: calls.append((name, step)) for name in "ab"}
    taken, busy = rows.take_turns(sides, rounds=2, turn=2.0)
    assert calls[:4] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)] and len(busy) == 2
    assert calls[4:] == [(name, 2 + 2 * turn + i) for turn in range(3) for name in "ab" for i in range(2)]
    assert taken == {"a": [(0.5, 0)] * 2, "b": [(0.5, 0)] * 2}


def test_parts_of_a_step():
    import torch

    matrix, weight = torch.ones(256, 256), torch.ones(256, 256, requires_grad=True)
    found = rows.parts_of(lambda step: torch.nn.functional.gelu(matrix @ weight).sum().backward(), "ours")
    assert {*found} == {"ours, products", "ours, GELU"} and 0 < sum(found.values()) < 1
    operators = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for part, names in rows.PARTS.items():  # a name that torch no longer has would be a part that is not there
        assert part == "optimizer" or any(re.fullmatch(names, name) for name in operators), part


def test_what_compiling_brings(monkeypatch, capsys):
    """The last lines of language_model.py, which make bench leaves out: it takes a C++ compiler."""
    text, quick = load("language_model"), row([1], [3])
    monkeypatch.setattr(text.characters, "missing_data", lambda *_: None)
    monkeypatch.setattr(text.torch, "set_num_threads", lambda count: None)
    for name, found in {"compare": [quick], "loading": quick, "parse": None, "ours": None}.items():
        monkeypatch.setattr(text, name, lambda *_, found=found: found)
    monkeypatch.setattr(text, "time_of_first_step", lambda step: 10.0)
    for compiled, says in ((0.01, "2.00 times as fast,\nafter a first step of 10.0 s: pays"), (0.03, "never")):
        taken = {"plain": [(0.02, 0.02)], "compiled": [(compiled, compiled)]}
        monkeypatch.setattr(rows, "take_turns", lambda *_, taken=taken: (taken, [0.0]))
        text.main(Namespace(data_dir=None, skip_training=True, skip_compile=False, check=True, rounds=1, seconds=1))
        assert says in capsys.readouterr().out


# --- make bench -------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path, monkeypatch):
    """dev/bench/all.py with benchmarks that report the rows of `found` by name, and fail when they have none."""

    def prepare(**found: list[Row]):
        module = load("all")
        for name in ("REPOSITORY", "PAGE", "RAW"):
            monkeypatch.setattr(module, name, tmp_path / name.lower())
        module.REPOSITORY.mkdir()
        module.PAGE.write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n")
        programs = {}
        for name, reported in found.items():
            programs[name] = str(tmp_path / f"{name}.py")
            lines = f"import sys\nsys.path[:0] = [{str(REPOSITORY / 'dev/bench')!r}]\nimport rows\n"
            lines += "".join(f"rows.report(rows.{one!r})\n" for one in reported) or "sys.exit('no data here')\n"
            (tmp_path / f"{name}.py").write_text(lines)
        monkeypatch.setattr(module, "BENCHES", programs)
        return module

    return prepare


def arguments(**given) -> Namespace:
    folders = {"mnist_dir": "data/mnist", "text_dir": "data/shakespeare"}
    return Namespace(**{"only": None, "check": False, "publish": False, "table": None} | folders | given)


def test_the_table(table, tmp_path, capsys):
    """Of all benchmarks; with its raw data in a file, of which the same table can be made."""
    module = table(first=[row([1], [3])], second=[row([1], [1]), Row("another", "x", 2, missing="not installed")])
    module.main(arguments(publish=True))
    shown = module.PAGE.read_text()
    assert shown.startswith(f"before\n{module.BEGIN}\n20") and shown.endswith(f"\n{module.END}\nafter\n")
    assert (
        "| a row | others | 3.00 | 3.00 to 3.00 | 3.00 | 3.00 | 6.00 | 2 | passed |  |\n" in shown
        and "old" not in shown
    )
    assert (
        "\n1 passed, 1 missed, 1 not judged.\n" in shown
        and "| another | x |  |  |  |  |  | 2 | not installed |" in shown
    )
    capsys.readouterr()
    module.main(arguments(table=module.RAW))
    assert capsys.readouterr().out.strip() in shown
    assert json.loads(module.RAW.read_text())["rows"][0]["theirs"] == [[3, 3]]
    assert f", commit {module.commit()}, `make bench`: " in shown and "load average" in shown
    module.main(arguments(mnist_dir="elsewhere"))
    assert "`make bench DATA_DIR=...`: " in capsys.readouterr().out


def test_the_commit_that_was_measured(tmp_path, monkeypatch):
    """And whether its files have changed; others do not count."""
    module, file = load("all"), tmp_path / "file"
    monkeypatch.setattr(module, "REPOSITORY", tmp_path)
    file.write_text("as it is")
    for words in (["init", "--quiet"], ["add", "file"], ["commit", "--quiet", "--message=one"]):
        done = run("git", "-c", "user.name=a", "-c", "user.email=a@example.org", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    known = run("git", "rev-parse", "--short", "HEAD", cwd=tmp_path).stdout.strip()
    (tmp_path / "another").touch()
    assert len(known) >= 7 and module.commit() == known
    file.write_text("changed")
    assert module.commit() == f"{known} + changes"


def test_check_is_status_1(table):
    module = table(first=[row([1], [3])], second=[row([1], [1])])
    module.main(arguments())
    with pytest.raises(SystemExit) as missed:
        module.main(arguments(check=True))
    assert missed.value.code == "all.py: a row: 1.00, and at least 2 is promised"
    module.main(arguments(check=True, only="first"))


def test_a_benchmark_that_fails(table, capfd):
    module = table(first=[row([1], [3])], broken=[])
    module.main(arguments())
    assert "1 passed, 0 missed, 0 not judged. Failed: broken." in capfd.readouterr().out
    with pytest.raises(SystemExit) as failed:
        module.main(arguments(check=True))
    assert failed.value.code == "all.py: broken has failed"


def test_the_published_table_is_that_of_its_raw_data():
    module = load("all")
    published = module.PAGE.read_text().split(f"{module.BEGIN}\n")[1].split(f"\n{module.END}")[0]
    expected = module.table(json.loads(module.RAW.read_text())) if module.RAW.exists() else "Not measured yet."
    assert published == expected


def test_no_row_is_dropped():
    """The published rows are those that the programs have on such a CPU, each with its gate and its clock."""
    measured = json.loads((REPOSITORY / "docs/benchmarks.json").read_text())
    images, text, launch, ranks = (load(name) for name in ("mnist", "language_model", "launch", "ranks"))
    nanogpt, torchrun, share = "nanoGPT-style loop", "bare torchrun", "one rank, as a share of 2"
    expected = {("text alone", "per-sample text Dataset"): text.LEAST_LOADING}
    for (size, count), (tiles, avx512, fp32) in text.LEASTS.items():
        name = f"language model, {size}, {count} thread{'s' * (count > 1)}"
        expected[f"{name}, bf16", nanogpt] = tiles if "amx_bf16" in measured["extensions"] else avx512
        expected[f"{name}, fp32", nanogpt] = fp32
    for name, least in images.LEASTS.items():
        others = {"images alone": "per-image DataLoader", "MNIST on two": share}
        expected[name, others.get(name[:12], "pytorch/examples-style loop")] = least
    for name, other in zip(ranks.LEASTS, (share, "parallelize_module, DTensor"), strict=True):
        expected[name, other] = ranks.LEASTS[name]
    expected |= {("loop around a step", name): least for name, least in load("overhead").LEASTS.items()}
    for count in (2, 4):
        expected |= {(launch.name_of(name, count), torchrun): least for name, least in launch.LEASTS.items()}
    for other in ("torch.save", "a save at once"):
        expected["steps wait for a checkpoint of 128 MB", other] = load("checkpoint").LOWEST
    expected["all of dev/bench/gpu.py", "on a GPU"] = 0
    found = {(one["name"], one["other"]): one["least"] for one in measured["rows"]}
    assert found == expected and len(measured["rows"]) == len(expected) and not measured["failed"]
    absent = {one["name"]: one["missing"] for one in measured["rows"] if one["missing"]}
    slow = {name: why for name, why in absent.items() if why == "no fast bfloat16 on this CPU"}
    unmeasured = "not measured: its ranks were forked then"
    assert set(absent.values()) <= {"no GPU", "no Enroot or no image here", unmeasured, *slow.values()}
    assert all(name.endswith("bf16") for name in slow) and len(slow) in (0, 5)  # all of them, or none
    by_cpu = r"language model, .*, 1 thread, |(text|images) alone|MNIST step|loop around"
    judged = [one for one in measured["rows"] if not one["missing"]]
    assert all(one["by_cpu"] == bool(re.match(by_cpu, one["name"])) for one in judged)


def test_the_cost_of_checkpoints_is_that_of_its_raw_output():
    page = (REPOSITORY / "docs/fault_tolerance.md").read_text()
    raw = (REPOSITORY / "docs/figures/checkpoint.txt").read_text()
    kinds = ("asks", "asks and saves")
    asked, saved = (re.findall(rf"^\| {kind} \| [\d.]+ \| ([\d.]+) \|", raw, re.M) for kind in kinds)
    for ranks, ratios in enumerate(zip(asked, saved, strict=True), start=1):
        assert re.search(rf"^\| {ranks} .* \| " + " \\| ".join(f"{float(ratio):.3f}" for ratio in ratios), page, re.M)


def test_every_missed_row_has_its_reason():
    """In a bullet that begins with its name, or with words of it; and no bullet is left of a row that has passed."""
    module = load("all")
    measured = module.rows_of(json.loads((REPOSITORY / "docs/benchmarks.json").read_text()))
    missed = [set(f"{one.name}, {one.other}".split(", ")) for one in measured if one.verdict() == "missed"]
    reasons = module.PAGE.read_text().split("\n## What is missed, and why\n")[1].split("\nWhat else is not in")[0]
    bullets = [set(words.split(", ")) for words in re.findall(r"^- \*\*(.+?)\.\*\* ", reasons, re.M)]
    assert len(bullets) == len(re.findall(r"^- ", reasons, re.M))
    assert [words for words in missed if not any(bullet <= words for bullet in bullets)] == []
    assert [bullet for bullet in bullets if not any(bullet <= words for words in missed)] == []


def test_what_is_promised():
    """No gate is loosened to make the table green."""
    mnist, text, others = load("mnist"), load("language_model"), [load(name) for name in ("overhead", "ranks")]
    loading, steps = [40, 40], [1.2, 2, 0.75]
    assert list(mnist.LEASTS.values()) == [*loading, *steps, 20, 20] and mnist.GOAL == 0.99
    assert list(text.LEASTS.values()) == [(1.8, 1.65, 1.15), (1.6, 1.5, 1.15), (3, 1.75, 1.05), (3, 1.75, 1.05)]
    assert (text.LEAST_LOADING, text.HIGHEST_LOSS, text.SEEDS) == (40, 1.90, (0, 1, 2))
    assert [list(module.LEASTS.values()) for module in others] == [[1.7, 2, 2.5], [0.9, 1.4]]
    assert list(load("launch").LEASTS.values()) == [1, 0.91, 1, 0.91] and load("checkpoint").LOWEST == 3


@pytest.mark.parametrize("tiles", [True, False])
def test_a_gate_is_that_of_the_cpu(tiles, monkeypatch):
    """Of the language model in bfloat16; on one thread CPU seconds count."""
    text = load("language_model")

    def parse(folder, *flags):
        return Namespace(precision="fp32" if "fp32" in flags else "bf16", batch_size=1, context=1)

    monkeypatch.setattr(text, "parse", parse)
    for side in ("ours", "theirs"):
        monkeypatch.setattr(text, side, lambda args: Namespace(model=None))
    monkeypatch.setattr(text, "loss_of", lambda *_: 2.0)
    monkeypatch.setattr(text.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(rows, "take_turns", lambda sides, *_: ({name: [(1.0, 1.0)] for name in sides}, [0.0]))
    monkeypatch.setattr(rows, "parts_of", lambda steps, side: {f"{side}, products": 0.5})
    for (size, count), leasts in text.LEASTS.items():
        found = text.compare(Namespace(data_dir=None, rounds=1, seconds=1), size, count, tiles)
        gates = {one.name[-4:]: (one.least, one.by_cpu) for one in found}
        assert gates == {"fp32": (leasts[2], count == 1), "bf16": (leasts[0 if tiles else 1], count == 1)}


def test_a_loss_that_is_worse_is_missed(monkeypatch):
    """However fast the steps were; and what a CPU cannot compute keeps its row."""
    text, losses = load("language_model"), {"theirs": 2.0, "ours": 2.06}
    monkeypatch.setattr(text, "parse", lambda *_: Namespace(precision="fp32", batch_size=1, context=1))
    for side in losses:
        monkeypatch.setattr(text, side, lambda args, side=side: Namespace(model=side))
    monkeypatch.setattr(text, "loss_of", lambda args, side: losses[side])
    monkeypatch.setattr(text.torch, "set_num_threads", lambda count: None)
    turns = {"theirs": [(9.0, 9.0)], "fp32": [(1.0, 1.0)]}
    monkeypatch.setattr(rows, "take_turns", lambda *_: (turns, [0.0]))
    monkeypatch.setattr(rows, "parts_of", lambda steps, side: {f"{side}, products": 0.5})
    fp32, bf16 = text.compare(Namespace(data_dir=None, rounds=1, seconds=1), "nanoGPT's CPU settings", 1, False)
    assert fp32.notes == {"tokens_a_step": 1, "theirs, products": 0.5, "fp32, products": 0.5}
    assert fp32.verdict() == "missed" and fp32.sentence().endswith("loss 2.060, theirs 2.000")
    assert bf16.verdict() == "no fast bfloat16 on this CPU" and bf16.name.endswith("bf16")
    losses["ours"] = 2.04
    fp32, _ = text.compare(Namespace(data_dir=None, rounds=1, seconds=1), "nanoGPT's CPU settings", 1, False)
    assert fp32.verdict() == "passed"
    monkeypatch.setattr(text.os, "sched_getaffinity", lambda _: {0})
    found = text.compare(None, "nanoGPT's CPU settings", 2, False)
    assert [one.verdict() for one in found] == ["one CPU"] * 2


def test_both_sides_begin_with_the_same_numbers(text):
    """The other side's attention, too, which is another class."""
    bench = load("language_model")
    args = bench.parse(text, "--size", "cpu", "--precision", "fp32")
    ours, theirs = (side(args).model.state_dict() for side in (bench.ours, bench.theirs))
    assert [*ours] == [*theirs] and all(bench.torch.equal(ours[name], theirs[name]) for name in ours)


def test_both_sides_train_on_the_same_text(text):
    bench = load("language_model")
    args = bench.parse(text, "--size", "cpu", "--precision", "fp32")
    windows, batch = bench.characters.windows(text, "train", args.context), bench.theirs(args).batch
    for step in (0, 7):
        ours, (x, y) = bench.characters.random_batch(args, windows, step, 0, 1, bench.CPU), batch(step)
        assert bench.torch.equal(ours[:, :-1], x) and bench.torch.equal(ours[:, 1:], y)


def test_bfloat16_is_judged_without_tiles(bench, monkeypatch):
    def training(data_dir, precision, rounds, steps):
        return row([1], [3], quality="accuracy 0.9", notes={"accuracy": 0.9})

    monkeypatch.setattr(bench, "training", training)
    monkeypatch.setattr(bench.torch.cpu, "get_capabilities", dict, raising=False)
    monkeypatch.setattr(bench, "bfloat16_is_faster", lambda: True)
    fp32, bf16 = bench.measure(Namespace(only="step", rounds=1, steps=1), None)
    assert fp32.quality == "accuracy 0.9" and bf16.quality == "accuracy 0.9, no bfloat16 tiles"
    assert bf16.verdict() == "passed"
    monkeypatch.setattr(bench, "bfloat16_is_faster", lambda: False)
    _, bf16 = bench.measure(Namespace(only="step", rounds=1, steps=1), None)
    assert bf16.verdict() == "no fast bfloat16 on this CPU" and bf16.least == 2


def test_rows_of_a_gpu(tmp_path, monkeypatch):
    """A / B at most 0.05 is B / A at least 20. They name the GPU, and B's other side."""
    gpu, file = load("gpu"), tmp_path / "rows"
    monkeypatch.setattr(gpu.torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setenv("BENCH_ROWS", str(file))
    for name, a in (("feeding / step", 0.04), ("feeding / step", 0.1), ("save / async save", 3.0)):
        gpu.report(name, Namespace(device="cuda"), [(a, 1.0)] * 3)
    found = load("all").rows_of({"rows": [json.loads(line) for line in file.read_text().splitlines()]})
    assert [(one.name, one.other, one.least, one.verdict()) for one in found] == [
        ("GPU: step / feeding", "step", 20, "passed"),
        ("GPU: step / feeding", "step", 20, "missed"),
        ("GPU: save / async save", "save", 0, "no gate"),
    ]
    assert [round(one.ratio(), 6) for one in found] == [25, 10, 3]
    assert [one.quality for one in found] == ["a GPU, at most 0.05"] * 2 + ["a GPU"]


def test_whole_trainings_are_judged(monkeypatch):
    """Where the text is Tiny Shakespeare."""
    text, found = load("language_model"), [row([1], [3])]
    monkeypatch.setattr(text.characters, "read_vocabulary", lambda folder: {"source": "Tiny Shakespeare"})
    text.judge_losses(Namespace(data_dir="x"), found, {"ours": [1.88, 1.91], "theirs": [1.7, 1.9]})
    assert found[0].verdict() == "passed" and found[0].notes["ours, seed 1"] == 1.91
    assert found[0].quality.endswith("whole trainings: loss 1.895, at most 1.90, theirs 1.800")
    text.judge_losses(Namespace(data_dir="x"), found, {"ours": [1.90, 1.91], "theirs": [1.7, 1.9]})
    assert found[0].verdict() == "missed"
    monkeypatch.setattr(text.characters, "read_vocabulary", lambda folder: {"source": "another"})
    text.judge_losses(Namespace(data_dir="x"), other := [row([1], [3])], {"ours": [9], "theirs": [9]})
    assert other[0].verdict() == "passed"


@pytest.mark.parametrize("file", ["benchmarks_amx.json", "benchmarks_slow_bf16.json"])
def test_the_ratios_of_other_cpus(file):
    """Of each such run the page has all rows in bfloat16, and all that were missed there and have passed here."""
    module, raw = load("all"), json.loads((REPOSITORY / "docs" / file).read_text())
    [bullet] = [part for part in module.PAGE.read_text().split("\n- ") if f"]({file})" in part]
    assert raw["date"] in bullet and ("amx_bf16" in raw["extensions"]) == ("amx" in file)
    here = {(row.name, row.other): row.verdict() for row in published()}
    told = [row for row in module.rows_of(raw) if not row.missing and row.name.endswith("bf16")]
    told += [row for row in missed(module.rows_of(raw)) if here[row.name, row.other] == "passed" and row not in told]
    assert [f"{row.ratio():.2f}" for row in told] == re.findall(r"\b\d+\.\d\d\b(?! million)", bullet.split("\n\n")[0])


def published() -> list[Row]:
    module = load("all")
    return module.rows_of(json.loads(module.RAW.read_text()))


def missed(found: list[Row]) -> list[Row]:
    return [row for row in found if row.verdict() == "missed"]


# --- the benchmarks ---------------------------------------------------------------------------------------------------


def test_missed_gate_is_one_sentence(bench, mnist, monkeypatch, capsys):
    monkeypatch.setattr(bench, "launch", lambda ranks, *_: (0.01, 0.01, 1.0))  # two ranks no faster than one
    args = Namespace(check=True, only="ranks", rounds=1, steps=1, launches=1, data_dir=mnist)

    monkeypatch.setattr(bench.rows, "used_by_others", lambda: 0.0)
    with pytest.raises(SystemExit) as missed:
        bench.main(args, mnist)
    assert missed.value.code == "mnist.py: MNIST on two ranks, fp32: 0.50, and at least 0.75 is promised"

    clock = iter(range(0, 4000, 1000))  # others use 1,000 CPU seconds in no time: no verdict
    monkeypatch.setattr(bench.rows, "used_by_others", lambda: next(clock))
    bench.main(args, mnist)
    assert "not judged: other programs used" in capsys.readouterr().out

    monkeypatch.setattr(bench, "launch", lambda ranks, *_: (0.01 / ranks, 0.01, float(ranks)))  # and learn less
    monkeypatch.setattr(bench.rows, "used_by_others", lambda: 0.0)
    with pytest.raises(SystemExit) as missed:
        bench.main(args, mnist)
    said = "mnist.py: MNIST on two ranks, fp32: loss 2.000, of one rank with the same batches 1.000"
    assert missed.value.code == said


def test_the_race_ends_with_99_percent(bench, mnist, monkeypatch):
    """Not before; and a model that is worse is missed, however fast it was."""
    monkeypatch.setattr(bench, "our_race", lambda *_: ((1.0, 1.0), 0.989))
    monkeypatch.setattr(bench, "their_race", lambda *_: 0.99)
    monkeypatch.setattr(bench.rows, "seconds", lambda work: (work(), (100.0, 100.0))[1])
    monkeypatch.setattr(bench.rows, "used_by_others", lambda: 0.0)
    found = bench.race("MNIST to 99 %, real files", mnist, 1, 2)
    assert found.ratio() == 100 and found.sentence().endswith(": accuracy 0.9890, theirs 0.9900")
    monkeypatch.setattr(bench, "our_race", lambda *_: ((1.0, 1.0), 0.99))
    assert bench.race("MNIST to 99 %, real files", mnist, 1, 2).verdict() == "passed"
    none = next(bench.races(None, 1))
    assert none.verdict() == "not judged: no real files (--data-dir)"


def test_frameworks_that_are_not_installed(monkeypatch, capsys):
    bench = load("overhead")
    pinned = dict(line.split("==") for line in (REPOSITORY / "requirements-bench.txt").read_text().splitlines())
    assert [*pinned] == [*bench.PACKAGES.values()] and all(pinned.values())
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    bench.main(Namespace(rounds=1, steps=300, check=True))
    out, err = capsys.readouterr()
    assert out.count("| not installed |") == 3
    assert err.startswith("overhead.py: Accelerate, Lightning, HF Trainer: not installed here (pip install -r requ")


def test_the_loop_that_is_timed_is_that_of_train_ddp():
    """With another model, which learns; the clock runs between two of its steps."""
    bench = load("overhead")
    (wall, cpu), loss = bench.measure(bench.train_ddp, 300)
    assert cpu > 0 and 0 < wall < 1 and loss < 1.9  # of ten classes, 2.3 to begin with


def test_no_cluster(monkeypatch, capsys):
    bench = load("launch")
    refused = Namespace(returncode=1, stderr="namespaces.sh: needs root: sudo namespaces.sh ...\n")
    monkeypatch.setattr(bench, "on_cluster", lambda *_: refused)
    bench.main(Namespace(rounds=1, check=True))
    out, err = capsys.readouterr()
    assert (
        out.count("| no cluster here |") == 8
        and err == "launch.py: namespaces.sh: needs root: sudo namespaces.sh ...\n"
    )


TEXT = [
    ("language_model.py", ["--rounds", 1, "--seconds", 0, "--skip-training", "--skip-compile"], 9),
    ("ranks.py", ["--rounds", 1, "--seconds", 0], 2),
    ("checkpoint.py", ["--rounds", 1, "--skip-training"], 2),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("script", "flags", "count"), TEXT)
def test_benchmarks_of_text(script, flags, count, text, tmp_path):
    """Every row is reported, and its quality holds."""
    file = tmp_path / "rows"
    done = run(sys.executable, f"dev/bench/{script}", "--data-dir", text, *flags, env=named(file), timeout=600)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == count and all(one["good"] for one in found), done.stdout
    assert all(one["ours"] or one["missing"] == "no fast bfloat16 on this CPU" for one in found), done.stdout


@pytest.mark.matrix
def test_benchmark_of_frameworks(tmp_path):
    """With the packages themselves, in an environment that has them besides this one's."""
    assert run(sys.executable, "-m", "venv", tmp_path / "venv").returncode == 0
    python, here = tmp_path / "venv/bin/python", sysconfig.get_path("purelib")
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    Path(site, "here.pth").write_text(f"{here}\n")
    install = [python, "-m", "pip", "install", "--quiet", "--requirement", "requirements-bench.txt"]
    installed = run(*install, timeout=600)
    assert installed.returncode == 0, installed.stderr
    done = run(python, "dev/bench/overhead.py", "--rounds", 1, env=named(tmp_path / "rows"), timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [one["other"] for one in found] == ["Accelerate", "Lightning", "HF Trainer"]
    assert all(one["good"] and one["ours"] and not one["missing"] for one in found), done.stdout


@pytest.mark.matrix
def test_benchmark_of_launches(tmp_path):
    done = run(sys.executable, "dev/bench/launch.py", "--rounds", 1, env=named(tmp_path / "rows"), timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    launch = load("launch")
    names = [launch.name_of(name, ranks) for ranks in (2, 4) for name in launch.LAUNCHERS]
    assert [one["name"] for one in found] == names
    container = "" if launch.has_container() else "no Enroot or no image here"
    assert [one["missing"] for one in found] == ["", "", "", container] * 2, found
    launched = [one for one in found if not one["missing"]]
    assert all(one["ours"][0][0] > 0.5 and not one["ours"][0][1] for one in launched), found


@pytest.mark.matrix
def test_a_copy_on_the_nodes_own_disks_is_faster_than_a_slow_file_system():
    done = run(sys.executable, "dev/bench/staging.py", "--rounds", 1, timeout=900)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"and ([\d.]+) times where the job imports it again", done.stdout)[1]) > 3, done.stdout


def named(file) -> dict[str, str]:
    return environment(BENCH_ROWS=file, OMP_NUM_THREADS=1)


def test_both_sides_are_the_same_network(bench, mnist):
    import torch

    def end(loader, batches):
        raise bench.Enough

    theirs, ours = bench.their_network().eval(), bench.run_train_ddp(mnist, "fp32", end)["model"].eval()
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    images = torch.randn(8, 1, 28, 28)
    torch.testing.assert_close(ours(images).log_softmax(1), theirs(images))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_momentum_after_a_first_step_that_is_skipped(precision):
    """torch 2.13's fused SGD makes the momentum without writing it, when GradScaler finds an overflow in step 1."""
    import torch

    text = (REPOSITORY / "distributed/train_preemptible.py").read_text()
    lines = text[text.index("fused = ") : text.index('if args.precision == "fp16" and device.type == "cpu"')]
    args = Namespace(precision=precision, learning_rate=0.02)
    script = {"torch": torch, "args": args, "device": torch.device("cpu"), "model": torch.nn.Linear(2, 2)}
    exec(lines, script)
    optimizer, scaler = script["optimizer"], script["scaler"]
    assert optimizer.defaults["fused"] == (precision == "fp32")  # which is faster
    scaler.scale(script["model"].weight.sum() * math.inf).backward()
    scaler.step(optimizer)
    assert bool(optimizer.state_dict()["state"]) == (precision == "fp32")


def test_ours_is_the_script_as_it_trains_elsewhere(bench, mnist, tmp_path):
    """The same weights after three steps as in a run of train_ddp.py whose epoch has three steps."""
    import torch

    data = bench.first_images(mnist, tmp_path / "data", 3 * 64)
    command = [sys.executable, "distributed/train_ddp.py", "--device", "cpu", "--epochs", 1, "--log-every", 1]
    alone = run(*command, "--data-dir", data, "--checkpoint-dir", tmp_path / "out")
    assert alone.returncode == 0, alone.stderr

    def whole_epoch(loader, batches):
        yield from batches
        raise bench.Enough

    ours = bench.run_train_ddp(data, "fp32", whole_epoch)["model"]
    torch.testing.assert_close(torch.load(tmp_path / "out/checkpoint_epoch_1.pt")["model"], ours.state_dict())
