"""Scripts of other frameworks, under each launcher: docs/frameworks.md, and what it says of them.
Optuna's trials (docs/recipes.md), and a stream of samples (docs/data_at_scale.md).

`make test-all` installs the frameworks into .venv-guests, beside the torch of .venv.
"""

import re
import sys

import pytest

from slurm import LAUNCHERS, REPOSITORY, environment, ranks, run, wait_for

pytestmark = pytest.mark.matrix

FOLDER = REPOSITORY / "examples"
PAGE = (REPOSITORY / "docs/frameworks.md").read_text()
# The table at its top: a link to the script, then "yes" or "no" for each launcher.
CELL = r" \| (yes|no)\b[^|]*"
ROW = rf"^\| [^|]*with_(\w+)\.py\){CELL * 3} \|$"
TABLE = {
    guest: dict(zip(LAUNCHERS, cells, strict=True)) for guest, *cells in re.findall(ROW, PAGE, re.M)
}


def trained_together(log: str) -> bool:
    """Whether four ranks say that they are of four, and all have the same weights."""
    said = re.findall(r"^rank (\d) of (\d+): weights (\S+)$", log, re.M)
    ranks, sizes, weights = zip(*said, strict=True) if said else ((), (), ())
    return sorted(ranks) == list("0123") and set(sizes) == {"4"} and len(set(weights)) == 1


def test_the_table_has_every_guest():
    assert {f"with_{guest}" for guest in TABLE} == {path.stem for path in FOLDER.glob("with_*.py")}


@pytest.mark.parametrize("guest", TABLE)
def test_guest(guest, packages, cluster, tmp_path):
    """What the table says, by all launchers at once."""
    script = f"examples/with_{guest}.py"
    jobs = {}
    for way, launcher in LAUNCHERS.items():
        command = [f"--output={tmp_path}/%j", launcher, script, tmp_path / way, 2]
        jobs[way] = cluster.submit(*command, env=packages)
    for way, ended in [(way, cluster.wait(job, timeout=300)) for way, job in jobs.items()]:
        right = ended.state == "COMPLETED" and trained_together(ended.log)
        assert right == (TABLE[guest][way] == "yes"), f"{way}: {ended.state}\n{ended.log}"


def test_script_that_spawns(cluster, tmp_path):
    """By the copy of a launcher that the page makes."""
    [command] = re.findall(r"^sed .*$", PAGE, re.M)
    made = run("bash", "-c", command.replace("> ", f"> {tmp_path}/"))
    assert made.returncode == 0, made.stderr
    launcher = tmp_path / command.rpartition(" ")[2]
    ended = cluster.sbatch(f"--output={tmp_path}/%j", launcher, FOLDER / "with_spawn.py")
    assert ended.state == "COMPLETED" and trained_together(ended.log), ended.log


# What a save leaves last, and the words of a start that has found it.
RESUMED = {
    "deepspeed": ("latest", "resumes from /"),
    "lightning": ("*[0-9]*", "Restored all states from the checkpoint at "),
    "trainer": ("*[0-9]*", "resumes from /"),
}


@pytest.mark.parametrize("guest", RESUMED)
def test_requeued(guest, packages, cluster, tmp_path):
    """After a requeue by Slurm, the script resumes from its last checkpoint."""
    saved, words = RESUMED[guest]
    script = f"examples/with_{guest}.py"
    launcher = LAUNCHERS["torchrun"]
    command = [f"--output={tmp_path}/log", launcher, script, tmp_path / "saved", 100000]
    job = cluster.submit(*command, env=packages)
    wait_for(lambda: list(tmp_path.glob(f"saved/{saved}")), 180)
    assert cluster.exec("scontrol", "requeue", job).returncode == 0
    cluster.start_again(job, 180)
    wait_for(lambda: words in (tmp_path / "log").read_text(), 180)
    cluster.exec("scancel", job)
    assert cluster.wait(job).state == "CANCELLED"


def test_lightning_requeues_itself(packages, cluster, tmp_path):
    """At SIGUSR1, if srun starts the ranks. It saves wherever a rank happens to be, and so hangs if
    one is in a collective already: in steps of a second all are at the same line when it comes."""
    step = "        inputs, targets = batch\n"
    code = (FOLDER / "with_lightning.py").read_text()
    assert step in code
    script = tmp_path / "with_slow_steps.py"
    script.write_text(code.replace(step, f"        __import__('time').sleep(1)\n{step}"))
    command = [f"--output={tmp_path}/log", LAUNCHERS["srun"], script, tmp_path / "saved", 100000]
    job = cluster.submit(*command, env=packages)
    wait_for(lambda: list(tmp_path.glob("saved/*.ckpt")), 180)
    cluster.exec("scancel", "--signal=USR1", job)
    cluster.start_again(job, 180)
    assert (tmp_path / "saved/hpc_ckpt_1.ckpt").exists()
    wait_for(lambda: RESUMED["lightning"][1] in (tmp_path / "log").read_text(), 180)
    cluster.exec("scancel", job)
    assert cluster.wait(job).state == "CANCELLED"


def test_the_page_shows_the_scripts():
    """Each Python block is a piece of a script, as it is."""
    scripts = [path.read_text() for path in FOLDER.glob("with_*.py")]
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(blocks) == 3
    for block in blocks:
        assert any(block in script for script in scripts), block


# --- trials and a stream ---

COUNT = """
import sys
from optuna import load_study
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
study = load_study(storage=JournalStorage(JournalFileBackend(sys.argv[1])), study_name="rate")
print(len(study.trials), sum(trial.state.is_finished() for trial in study.trials))
"""


def test_search(packages, tmp_path):
    """All ranks train with what rank 0 was told, and a second job continues."""
    for _ in range(2):
        done = ranks(2, "examples/search.py", tmp_path / "study.log", **packages)
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^rank (\d): (\S+)$", done.stdout, re.M)
        both = [[line for rank, line in found if rank == number] for number in "01"]
        assert len(set(both[0])) == 5 and both[0] == both[1]
    count = run(
        sys.executable, "-c", COUNT, tmp_path / "study.log", env=environment(**packages)
    ).stdout
    assert count == "10 10\n"


SHARDS = """
import sys
from datasets import Dataset
numbers = Dataset.from_dict({"x": list(range(64))})
for shard in range(8):
    numbers.shard(8, shard).to_parquet(f"{sys.argv[1]}/{shard:03}.parquet")
"""


def python(packages: dict, *command: object, **variables: object) -> list[int]:
    env = environment(**packages, **variables)
    done = run(sys.executable, *command, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def test_stream(packages, tmp_path):
    """Each sample once, the same rest of an epoch after a stop, another order in the next."""
    variables = packages | {"HF_HOME": tmp_path}
    python(variables, "-c", SHARDS, tmp_path)
    command = ["examples/stream.py", tmp_path]
    first, second = (python(variables, *command, 0, 0, RANK=rank, WORLD_SIZE=2) for rank in (0, 1))
    assert len(first) == len(second) == 32 and sorted(first + second) == list(range(64))
    resumed = python(variables, *command, 0, 11, RANK=0, WORLD_SIZE=2)
    assert resumed == first[11:]
    assert python(variables, *command, 1, 0, RANK=0, WORLD_SIZE=2) != first
