"""dev/cluster_report.py: what is well, and what is broken, each in a row of the page."""

import getpass
import itertools
import re
import shutil
import sys
from types import SimpleNamespace

import pytest

import cluster_report
from slurm import LAUNCHERS, REPOSITORY, ranks, run

# In the place of check_ranks.py, and of train scripts.
HANGS = "import time\ntime.sleep(600)\n"
BROKEN = """
import os, sys, time
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if "--tensor-parallel" in sys.argv and rank == 1:
    sys.exit(f"no luck in {{os.getcwd()}}/a.py at 10.9.8.7:61000")
if "--size" in sys.argv:
    print(f"step=30/100 loss=1 tokens_per_second={{800 * ranks + 200}} mfu=0.4")
elif "1000" in sys.argv:
    print("no step for 60 s. First to look at: rank 0 on n1 (step 7), which is in")
else:
    for step, loss in zip((10, 20, 30, 40, 50), {losses}):
        print(f"step={{step}}/50 loss={{loss * (1 + (step == 20) / 30)}}")
# Somebody else's end would be the run's.
time.sleep(2)
"""


@pytest.fixture
def copy(tmp_path):
    """What a reader copies, in a folder of its own."""
    for name in ("aux", "dev", "distributed"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    for name in ("env.sh", "torchrun.sh", LAUNCHERS["torchrun"]):
        shutil.copy(REPOSITORY / name, tmp_path)
    return tmp_path


def change(path, old: str, new: str):
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new))


def rows(log: str) -> dict[str, str]:
    """The results of the page, by their part."""
    page = log[log.index("# Cluster report") :]
    return dict(re.findall(r"^\| (.*?) \| (.*?) \| \d+ \|$", page, re.M))


@pytest.mark.long
def test_broken_scripts(copy):
    """On three ranks, of which two can share a batch: a script that never ends, wrong losses, a
    rank that fails, a wrong rank that is named, and one script that is well."""
    (copy / "hangs.py").write_text(HANGS)
    checks = "aux/check_ranks.py --timeout 60"
    change(copy / "dev/cluster_report.py", f'"{checks}", 200', '"hangs.py", 5')
    for name, options in cluster_report.OPTIONS.items():
        losses = [float(loss) for loss in cluster_report.EXPECTED[options].split()]
        if name != "preemptible":
            (copy / f"distributed/train_{name}.py").write_text(BROKEN.format(losses=losses))
    parts = ["checks", "losses", "speed", "hang"]
    done = ranks(3, "dev/cluster_report.py", *parts, cwd=copy, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    found = rows(done.stdout)
    said = r"\*\*FAILED\*\*: rank \d has not ended after 5 s"
    assert re.fullmatch(said, found["`check_ranks.py`"])
    # One step of five is off.
    for name in ("ddp", "fsdp"):
        said = "**FAILED**: losses, and in parentheses those of one CPU: "
        assert found[f"losses of `train_{name}.py`"].startswith(said), found
    said = "**FAILED**: rank 1: no luck in a.py at ADDRESS:61000"
    assert found["losses of `train_fsdp.py --tensor-parallel 2`"] == said
    well = found["losses of `train_preemptible.py`"]
    # By rounding 0.03 % at most, on any CPU
    assert re.fullmatch(r"within 0\.0\d+% of one CPU's, on 2 of 3 ranks", well), well
    speeds = [result for part, result in found.items() if part.startswith("speed-")]
    three = "2,600 tokens/s, MFU 40.0%, 87% of 3 times one rank's"
    assert speeds == ["1,000 tokens/s, MFU 40.0%", three, three]
    said = "**FAILED**: rank 0 said: no step for 60 s. First to look at: rank 0 on n1"
    assert found["rank 1 is frozen"].startswith(said), found
    assert ": 5 of 9 rows FAILED\n" in done.stdout


@pytest.mark.parametrize(
    ("count", "share"), [(2, 2), (3, 2), (8, 8), (40, 32), (56, 48), (64, 48), (96, 96), (128, 96)]
)
def test_as_many_ranks_as_can_share_a_batch(count, share):
    assert cluster_report.sharers(count) == share


def test_how_long_saves_hold_the_training_up(monkeypatch):
    """A step takes a tenth of a second, those after the two saves 1 and 2 s, and the next ones a
    fifth."""
    took = dict.fromkeys(range(1, 106), 0.1) | {51: 1.0, 101: 2.0}
    took |= dict.fromkeys((52, 53, 54, 102, 103, 104), 0.2)

    class Run(cluster_report.Run):
        def __init__(self, *_, **__):
            self.text = "".join(f"step={step}/100000 loss=1\n" for step in took)
            self.times = [*itertools.accumulate(took.values())]
            self.fault, self.seconds, self.key = "", 9, "run-1"

    monkeypatch.setattr(cluster_report, "Run", Run)
    monkeypatch.setattr(cluster_report, "ROWS", [])
    cluster_report.save()
    said = "they hold the training up for 0.90 and 1.90 s, and the three steps after take 2.00 to"
    assert f"{said} 2.00 of the usual 0.100 s" in cluster_report.ROWS[0]


DEAF = """
import os, signal, sys, time
assert "SLURM_JOB_ID" not in os.environ, "it would requeue the report's job"
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append("train_fsdp" in sys.argv[0]))
for step in range(5, 26, 5):
    print(f"step={step}/25 loss=1", flush=True)
    time.sleep(0.2)
    if any(told):
        sys.exit(print(f"Stopped after step {step}, saved"))
"""


@pytest.mark.long
def test_a_stop_that_is_not_heard_and_one_that_does_not_resume(copy):
    for name in ("preemptible", "fsdp"):
        (copy / f"distributed/train_{name}.py").write_text(DEAF)
    done = ranks(2, "dev/cluster_report.py", "stop", cwd=copy, timeout=100, SLURM_JOB_ID=7)
    found, what = rows(done.stdout), "stop and resume of `train_{}.py`"
    said = "**FAILED**: SIGTERM after step 5 did not stop it"
    assert found[what.format("preemptible")] == said, done
    said = r"\*\*FAILED\*\*: stopped after step \d+, and did not resume there"
    assert re.fullmatch(said, found[what.format("fsdp")]) and done.returncode == 1, done


OPTIONS = ["--nodes=2", "--gpus-per-node=1", LAUNCHERS["torchrun"], "dev/cluster_report.py"]


@pytest.mark.matrix
def test_all_is_well(cluster, copy):
    job = cluster.sbatch(*OPTIONS, cwd=copy, timeout=900)
    assert job.state == "COMPLETED" and ": All is well\n" in job.log, job.log
    page = job.log[job.log.index("# Cluster report") :]
    assert (copy / f"log/{job.id}/report/page.md").read_text().strip() == page.strip()
    found = rows(job.log)
    assert len(found) == 12, page
    assert found["stop and resume of `train_fsdp.py`"].endswith("digit for digit")
    twice = found["stop and resume of `train_fsdp.py`, on 1 and then on 2 ranks"]
    assert "resumed with the losses of a whole run" in twice
    assert "First to look at: rank 1 on node 2 (step" in found["rank 1 is frozen"]
    hidden = (r"node-\d", re.escape(str(copy)), rf"\b{getpass.getuser()}\b", r"10\.7\.")
    assert not re.findall("|".join(hidden), page), page
    # The job's own requeue is not a part's.
    assert "Requeued" not in job.log and cluster.show(job.id)["Restarts"] == "0"


@pytest.mark.matrix
def test_fsdp_over_one_rank(text, tmp_path):
    """The row trains as train_fsdp.py does, with its weights in FSDP's hands."""
    train = ["--num-hidden-layers", 2, "--hidden-size", 64, "--context", 32, "--batch-size", 4]
    train += ["--steps", 3, "--log-every", 1, "--no-compile", "--device", "cpu"]
    train += ["--data-dir", text]
    losses = []
    for script in (["distributed/train_fsdp.py"], ["dev/variants.py", "one_rank"]):
        done = run(sys.executable, *script, *train, "--checkpoint-dir", tmp_path / script[-1][:3])
        losses.append(re.findall(r"^step=\d/3 loss=(\S+)", done.stdout, re.M))
    assert len(losses[0]) == 3 and losses[0] == losses[1], done


@pytest.mark.matrix
def test_one_gpu(copy):
    """Its rehearsal: each row has its figures. What is not there is left out, and no fault."""
    shutil.copytree(REPOSITORY / "local", copy / "local")
    shutil.copytree(REPOSITORY / "examples", copy / "examples")
    done = run(sys.executable, "dev/cluster_report.py", "save", "alone", cwd=copy, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {part.partition(":")[0]: result for part, result in rows(done.stdout).items()}
    assert found.keys() == {"two saves of 0.1b", *cluster_report.ALONE}
    assert found.pop("1.7b-float8") == "left out: No module named 'torchao'"
    assert re.fullmatch(r"they hold .* for -?\d.* the usual \d.*", found.pop("two saves of 0.1b"))
    for name, result in found.items():
        unit = "images" if name.startswith(("digits", "jpegs")) else "tokens"
        assert re.match(rf"[\d,]+ {unit}/s", result), (name, result)


NAMES = [
    ("gpu01:6 jwb0001i:61234 gpu010", "node 1:6 node 2:61234 gpu010"),
    ("no route to gpu01-hsn0.site.example.de", "no route to node 1"),
    ("[2001:db8::17]:61000 fe80::1 10.1.2.3", "[ADDRESS]:61000 ADDRESS ADDRESS"),
    ("eth0:10.0.0.5<0> ib0:fe80::1<0>", "eth0:ADDRESS<0> ib0:ADDRESS<0>"),
    ("[::ffff:10.1.2.3]:61", "[::ffff:ADDRESS]:61"),
    ("loss=1.5 at 12:30:05, /home/me/x.py", "loss=1.5 at 12:30:05, x.py"),
]


@pytest.mark.parametrize(("said", "shown"), NAMES)
def test_what_the_page_does_not_tell(said, shown, monkeypatch):
    """Names of nodes, of their network adapters, and addresses, because it is for an issue."""
    monkeypatch.setattr(cluster_report, "HOSTS", ["gpu01", "jwb0001"])
    assert cluster_report.clean(said) == shown


def test_the_rows_of_chapter_5(monkeypatch):
    """On two nodes of eight GPUs, with the images/s of chapter 4's last row for one of them: in the
    form of the chapter's table, whose own row has the same hours."""
    page = (REPOSITORY / "docs/05_a_second_node.md").read_text()
    checks = "inside a node: 361.20 to 362.00 GB/s on the bus"
    checks = ["all-reduce of 1024 MiB: 38.25 GB/s on the bus, the sum is right", checks]
    rates = {1: 3110, 8: 22_400, 16: 0}
    places = {"CHECKS": checks, "ranks_per_node": 8, "world_size": 16, "PROJECT": []}
    places |= {"device_name": lambda: "H200", "measure": lambda name, *row: rates[row[2]]}
    for name, value in places.items():
        monkeypatch.setattr(cluster_report, name, value)
    cluster_report.project()
    rows = ["| one H200 | 3,110 | 10.3 |  | |", "| one node of 8 | 22,400 | 11.4 | 361.20 | |"]
    # One that fails has no row here.
    assert rows == cluster_report.PROJECT
    rates[16] = 41_000
    cluster_report.project()
    assert cluster_report.PROJECT[-1] == "| two nodes, 16 | 41,000 | 12.5 | 38.25 | |"
    for line in cluster_report.PROJECT[-2:]:
        assert f"\n{line[: line.index(' |')]} |" in page
    text = cluster_report.page()
    assert "\n".join(["|---|---|---|---|---|", *rows]) in text
    [heads] = re.findall(r"^\| GPUs \| images/s .*$", page, re.M)
    assert heads in text and "| 3,110 | 10.3 |" in page
    [command] = re.findall(r"^    launch_\S+ (dev/cluster_report.py.*)$", page, re.M)
    assert command.split()[1:] == ["checks", "project"]


JPEGS = (REPOSITORY / "examples/jpeg_speed.py").read_text()
[WORKERS] = re.findall(r"^env, cpus = .*?^workers = .*?$", JPEGS, re.M | re.S)
CPUS = [
    # By hand: one process, and torchrun's eight ranks
    (16, {}, 14),
    (96, {"LOCAL_WORLD_SIZE": 8}, 11),
    # torchrun's eight ranks in a job, and a run on one of them
    (64, {"CPUS_PER_NODE": 64, "NPROC_PER_NODE": 8, "LOCAL_WORLD_SIZE": 8}, 7),
    (64, {"CPUS_PER_NODE": 64, "NPROC_PER_NODE": 8, "LOCAL_WORLD_SIZE": 1}, 7),
    # srun's, each bound to its own CPUs
    (12, {"CPUS_PER_NODE": 96, "NPROC_PER_NODE": 8, "LOCAL_WORLD_SIZE": 8}, 11),
    (1, {"CPUS_PER_NODE": 8, "NPROC_PER_NODE": 8, "LOCAL_WORLD_SIZE": 8}, 0),
]


@pytest.mark.parametrize("cpus, variables, workers", CPUS)
def test_a_loader_worker_for_each_cpu_of_a_rank(cpus, variables, workers):
    on_node = variables.get("LOCAL_WORLD_SIZE", 1)
    may_use = SimpleNamespace(environ=variables, sched_getaffinity=lambda _: range(cpus))
    found = {"os": may_use, "on_node": on_node, "changes": ["workers"]}
    exec(WORKERS, found)
    assert found["workers"] == workers


ONE_OF_EIGHT = """
import os, pathlib, sys
sys.path.append("dev")
import cluster_report as report
report.store = report.dist.HashStore()
report.ranks_per_node, report.folder = 8, pathlib.Path(sys.argv[1])
print(report.Run(f"{sys.argv[1]}/workers.py", ranks=1).text)
"""


def test_a_run_on_one_rank_has_the_cpus_of_one_rank(tmp_path):
    """On a node of eight ranks, by hand: else a speed is compared with that of more CPUs."""
    lines = ["import os", "os.sched_getaffinity = lambda _: range(64)"]
    lines += ["on_node, changes = int(os.environ['LOCAL_WORLD_SIZE']), ['workers']"]
    (tmp_path / "workers.py").write_text("\n".join([*lines, WORKERS, "print(on_node, workers)"]))
    done = run(sys.executable, "-c", ONE_OF_EIGHT, tmp_path)
    assert done.stdout.split() == ["1", "7"], done


@pytest.mark.matrix
def test_two_ranks_on_jpegs(tmp_path):
    """Each reads shards of its own, and rank 0 says how many images both had."""
    done = ranks(2, "examples/jpeg_speed.py", tmp_path, "workers", "channels_last", timeout=120)
    assert done.returncode == 0, done
    assert re.fullmatch(r"images_per_second=\d+\.\d\n", done.stdout), done
    assert len([*tmp_path.glob("*.tar")]) == 32
    assert [path.name for path in tmp_path.glob("trace*")] == [
        "trace-workers-channels_last.json.gz"
    ]
