"""grade_port.py: two right ports of vit.py pass, and each wrong one fails by its sentence."""

import re
import sys

import pytest

from pages import CHAPTERS
from slurm import REPOSITORY

RIGHT = (REPOSITORY / "tests/scripts/port/by_hand.py").read_text()
# A mistake of a port: what is replaced, by what, and the sentence that names it
WRONG = {
    "each rank takes the whole batch": (
        "per_rank = options.batch_size // world_size",
        "per_rank = options.batch_size",
        "one GPU trains 24 steps and four ranks 6: the batch",
    ),
    "each rank reads all": (
        "per_rank, sampler=sampler,",
        "per_rank, sampler=list(range(8 * per_rank)),",
        "the ranks together have to read each drawing once an epoch",
    ),
    "no set_epoch": (
        "    sampler.set_epoch(epoch)\n",
        "",
        "reads the same drawings in each epoch",
    ),
    "all ranks print": (
        "        if rank == 0:\n            said",
        "        if True:\n            said",
        "each line of steps and epochs has to come once",
    ),
    "no gradients are averaged": (
        "logits = ddp(images)",
        "logits = model(images)",
        "step 2: the loss is",
    ),
    "the schedule steps once for each rank": (
        "        schedule.step()\n",
        "        for _ in range(world_size):\n            schedule.step()\n",
        "the learning rates of four ranks are not vit.py's",
    ),
    "the average is scaled": (
        "mean.lerp_(weight, 0.05)",
        "mean.lerp_(weight, 0.05 * world_size)",
        "on four ranks, the averaged position differs",
    ),
    "each rank counts for itself": (
        "    dist.all_reduce(correct)\n",
        "",
        "on four ranks, accuracy and best of epoch 1 are",
    ),
    "SIGTERM is not asked for": (
        "        stopped = preemption.asked(device, step)\n",
        "        stopped = False\n",
        "after a SIGTERM the job is FAILED",
    ),
    "the epoch begins anew": (
        "    sampler.start = step % len(train_loader) * per_rank\n",
        "",
        "after a SIGTERM, it trains ",
    ),
    "the average begins anew": (
        "        part.load_state_dict(saved[name])\n",
        '        if name != "averaged":\n            part.load_state_dict(saved[name])\n',
        "after a SIGTERM, the averaged position differs",
    ),
}


def graded(port: str, cluster, folder) -> str:
    """What the grader says of a script."""
    script = folder / "mine.py"
    script.write_text(port)
    done = cluster.exec(sys.executable, "docs/labs/grade_port.py", script, timeout=560)
    assert done.returncode == (0 if done.stdout.endswith("PASSED\n") else 1), done.stderr
    return done.stdout


# What people write instead of preemption.py
ASKED = """flag = torch.tensor(float(len(signals)))
        dist.all_reduce(flag)
        stopped = flag.item() > 0
"""
END = """signal.signal(signal.SIGTERM, signal.SIG_IGN)  # scontrol inherits it
if stopped and rank == 0:
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
if stopped:
    time.sleep(60)  # Slurm ends the job
"""
BY_SIGNAL = [
    (
        "import preemption\n\npreemption.listen()\n",
        "import signal\nimport subprocess\nimport time\n",
    ),
    (
        "parser = ",
        "signals = []\nsignal.signal(signal.SIGTERM, lambda *_: signals.append(1))\nparser = ",
    ),
    ("stopped = preemption.asked(device, step)\n", ASKED),
    ("preemption.end(stopped)\n", END),
]


# A worker that hears SIGTERM ends its rank, and one that ignores it keeps a failed rank alive.
WORKERS = 'workers = {"num_workers": 1, "multiprocessing_context": "fork"}\n'
IGNORES = 'workers["worker_init_fn"] = preemption.ignore\n'
NO_WORKERS = [(WORKERS, "workers = {}\n"), (IGNORES, "")]
IGNORED = 'workers["worker_init_fn"] = lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n'


def changed(*changes: tuple[str, str]) -> str:
    port = RIGHT
    for old, new in changes:
        assert port.count(old) == 1, old
        port = port.replace(old, new)
    return port


@pytest.mark.matrix
@pytest.mark.parametrize("changes", [[], BY_SIGNAL + NO_WORKERS], ids=["preemption", "signal"])
def test_right(changes, cluster, tmp_path):
    said = graded(changed(*changes), cluster, tmp_path).splitlines()
    assert said == [
        "four ranks on two nodes train what one rank trains",
        "a rank that fails ends the job",
        "after a SIGTERM it resumes, with no step twice",
        "after the time limit it resumes, with no step twice",
        "PASSED",
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("mistake", WRONG)
def test_wrong(mistake, cluster, tmp_path):
    *change, sentence = WRONG[mistake]
    said = graded(changed(change), cluster, tmp_path).splitlines()[-1]
    assert said.startswith("FAILED: ") and sentence in said and ". See docs/" in said


@pytest.mark.matrix
def test_workers_that_keep_a_failed_rank_alive(cluster, tmp_path):
    said = graded(changed(*BY_SIGNAL, (IGNORES, IGNORED)), cluster, tmp_path).splitlines()[-1]
    assert said.startswith("FAILED: 30 s after a rank has failed, the job is RUNNING. See docs/")


@pytest.mark.matrix
def test_what_the_exam_shows(cluster, tmp_path):
    """vit.py as it is, on four ranks."""
    shown = re.search(r"```\n(FAILED: .*\n)```", CHAPTERS["your_script"].read_text())[1]
    assert graded((REPOSITORY / "docs/labs/vit.py").read_text(), cluster, tmp_path) == shown
