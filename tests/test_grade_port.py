"""grade_port.py: right ports of the exam's scripts pass, each wrong one fails by its sentence."""

import re
import sys

import pytest
import torch

from pages import CHAPTERS
from slurm import REPOSITORY

sys.path.append(str(REPOSITORY / "docs/labs"))
import grade_port

RIGHT = {path.stem: path.read_text() for path in (REPOSITORY / "tests/scripts/port").glob("*.py")}
# A mistake of a port: what is replaced, by what, and the sentence that names it
VIT = {
    "each rank takes the whole batch": (
        ("per_rank = options.batch_size // world_size", "per_rank = options.batch_size"),
        "one GPU trains 24 steps and four ranks 6: the batch",
    ),
    "each rank reads all": (
        ("per_rank, sampler=sampler,", "per_rank, sampler=list(range(8 * per_rank)),"),
        "the ranks together have to read each sample once an epoch",
    ),
    "no set_epoch": (
        ("    sampler.set_epoch(epoch)\n", ""),
        "reads the same samples in each epoch",
    ),
    "all ranks print": (
        ("        if rank == 0:\n            said", "        if True:\n            said"),
        "each line of steps and epochs has to come once",
    ),
    "no gradients are averaged": (
        ("logits = ddp(images)", "logits = model(images)"),
        "step 2: the loss is",
    ),
    "the schedule steps once for each rank": (
        (
            "        schedule.step()\n",
            "        for _ in range(world_size):\n            schedule.step()\n",
        ),
        "the learning rates of four ranks are not vit.py's",
    ),
    "the average is scaled": (
        ("mean.lerp_(weight, 0.05)", "mean.lerp_(weight, 0.05 * world_size)"),
        "on four ranks, position in `averaged` differs",
    ),
    "each rank counts for itself": (
        ("    dist.all_reduce(correct)\n", ""),
        "on four ranks, accuracy and best of epoch 1 are",
    ),
    "SIGTERM is not asked for": (
        ("        stopped = preemption.asked(device, step)\n", "        stopped = False\n"),
        "after a SIGTERM the job is FAILED",
    ),
    "the epoch begins anew": (
        ("    sampler.start = step % len(train_loader) * per_rank\n", ""),
        "after a SIGTERM, it trains ",
    ),
    "the average begins anew": (
        (
            "        part.load_state_dict(saved[name])\n",
            '        if name != "averaged":\n            part.load_state_dict(saved[name])\n',
        ),
        "after a SIGTERM, position in `averaged` differs",
    ),
}
OVER_TOKENS = ". See docs/appendix_your_script.md"
MEANS = ", .*: a mean of {} means is not the mean over all tokens" + OVER_TOKENS
SIZE = "step 2: .* on four ranks, .*: the gradients have another size" + OVER_TOKENS
TOKENS = {
    "mean of the ranks' means": (
        ("        dist.all_reduce(count)\n", ""),
        ("(loss * world_size / count)", "(loss / count)"),
        ("summed / count", "summed / count / world_size"),
        "step 5: .* on four ranks" + MEANS.format("the ranks'"),
    ),
    "mean of the ranks' means, but not in the log": (
        (
            "        dist.all_reduce(count)\n",
            "        own = count.clone()\n        dist.all_reduce(count)\n",
        ),
        ("(loss * world_size / count)", "(loss / own)"),
        "step 6: .* on four ranks" + MEANS.format("the ranks'"),
    ),
    "mean of the two batches' means": (
        (
            "            (loss * world_size / count)",
            "            own = (targets != PADDING).sum()\n"
            "            dist.all_reduce(own)\n"
            "            (loss * world_size / own / ACCUMULATED)",
        ),
        "step 6: .* on one rank" + MEANS.format("the two batches'"),
    ),
    "the count is not summed over the ranks": (
        ("        dist.all_reduce(count)\n", ""),
        ("summed / count", "summed / count / world_size"),
        SIZE,
    ),
    "DDP's average is forgotten": (
        ("(loss * world_size / count)", "(loss / count)"),
        SIZE,
    ),
    "the loss of rank 0": (
        ("        dist.all_reduce(summed)\n", ""),
        "step 1: .* on four ranks, .*: it is not the mean over all tokens" + OVER_TOKENS,
    ),
}
TRAINER = {
    "each rank takes the whole batch": (
        ("options.batch_size // world_size,", "options.batch_size,"),
        "one GPU trains 24 steps and four ranks 6: the batch. See docs/frameworks.md#begin-with",
    ),
    "no callback for SIGTERM": (
        ("callbacks=[Print(), Stop()]", "callbacks=[Print()]"),
        "after a SIGTERM the job is FAILED, .*. See docs/frameworks.md#the-trainer-of-",
    ),
    "it resumes from nothing": (
        ("resume_from_checkpoint=newest(options.checkpoint)", ""),
        "after a SIGTERM, steps 1 to [0-9]+ are trained twice. See docs/frameworks.md#the-trainer-",
    ),
}
TASKS = {"vit": VIT, "tokens": TOKENS, "trainer": TRAINER}
WRONG = [(task, mistake) for task, mistakes in TASKS.items() for mistake in mistakes]


def graded(task: str, port: str, cluster, packages: dict, folder) -> str:
    """What the grader says of a script."""
    script = folder / "mine.py"
    script.write_text(port)
    command = [sys.executable, "docs/labs/grade_port.py", task, script]
    done = cluster.exec(*command, env=packages, timeout=560)
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


def changed(task: str, *changes: tuple[str, str]) -> str:
    port = RIGHT[task]
    for old, new in changes:
        assert port.count(old) == 1, old
        port = port.replace(old, new)
    return port


@pytest.mark.matrix
@pytest.mark.parametrize(
    "task, changes",
    [("vit", []), ("vit", BY_SIGNAL + NO_WORKERS), ("tokens", []), ("trainer", [])],
    ids=["vit", "vit by signal", "tokens", "trainer"],
)
def test_right(task, changes, cluster, packages, tmp_path):
    said = graded(task, changed(task, *changes), cluster, packages, tmp_path).splitlines()
    others = [
        "a rank that fails ends the job",
        "after a SIGTERM it resumes, with no step twice",
        "after the time limit it resumes, with no step twice",
    ]
    same = "four ranks on two nodes train what one process trains"
    assert said == [same, *(others if task != "tokens" else []), "PASSED"]


@pytest.mark.matrix
@pytest.mark.parametrize("task, mistake", WRONG)
def test_wrong(task, mistake, cluster, packages, tmp_path):
    *changes, sentence = TASKS[task][mistake]
    said = graded(task, changed(task, *changes), cluster, packages, tmp_path).splitlines()[-1]
    assert re.match(f"FAILED: .*{sentence}.*", said) and ". See docs/" in said, said


@pytest.mark.matrix
def test_workers_that_keep_a_failed_rank_alive(cluster, tmp_path):
    port = changed("vit", *BY_SIGNAL, (IGNORES, IGNORED))
    said = graded("vit", port, cluster, {}, tmp_path).splitlines()[-1]
    assert said.startswith("FAILED: 30 s after a rank has failed, the job is RUNNING. See docs/")


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Jobs of vit.py that Slurm shows with these records; after the last one, COMPLETED."""

    def submit(name: str, *records: dict) -> grade_port.Job:
        shown = iter(records)
        monkeypatch.setattr(grade_port, "slurm", lambda *command: "7\n")
        ended = {"JobState": "COMPLETED"}
        monkeypatch.setattr(grade_port, "ask_scontrol", lambda number: next(shown, ended))
        return grade_port.Job("vit", tmp_path / "mine.py", tmp_path / name, 2, 4)

    monkeypatch.setattr(grade_port.time, "sleep", lambda seconds: None)
    return submit


HELD = ["JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "launch_failed_requeued_held"]


@pytest.mark.parametrize("reason", HELD)
def test_a_job_that_slurm_holds(reason, job):
    held = job("held", {"JobState": "PENDING", "Reason": reason})
    with pytest.raises(grade_port.Wrong) as wrong:
        held.wait()
    assert str(wrong.value).startswith(f"Slurm holds job 7, so it never starts ({reason}), ")
    section = grade_port.LABS.parent / "troubleshooting.md"
    assert str(wrong.value).endswith(". See docs/troubleshooting.md#a-job-stays-in-the-queue")
    assert "\n### A job stays in the queue\n" in section.read_text()


def test_a_job_that_waits(job, capsys):
    records = [{"JobState": "PENDING", "Reason": "Resources"}] * 30
    assert job("soon", *records[:9]).wait() == "COMPLETED"
    assert job("later", *records).wait() == "COMPLETED"
    assert capsys.readouterr().err == "job 7 waits in the queue (Resources)\n"


WEIGHTS = {"position": torch.zeros(2, 3)}
WRONG_WEIGHTS = [
    ({"averaged": WEIGHTS["position"]}, "no weights by their names in `averaged` of "),
    ({"model": WEIGHTS}, "no weights by their names in `averaged` of "),
    ({"averaged": {"position": torch.zeros(4)}}, "on four, position in `averaged` differs"),
    ({"averaged": {"other": torch.zeros(2, 3)}}, "on four, the weights in `averaged` have other"),
]


@pytest.mark.parametrize("saved, sentence", WRONG_WEIGHTS)
def test_weights_of_another_form(saved, sentence, job):
    one, four = job("one"), job("four")
    torch.save({"averaged": WEIGHTS}, one.checkpoint)
    torch.save({"averaged": {"position": torch.zeros(2, 3).double()}}, four.checkpoint)
    grade_port.same_weights(one, four, "on four", "section")
    torch.save(saved, four.checkpoint)
    with pytest.raises(grade_port.Wrong, match=f"^{sentence}"):
        grade_port.same_weights(one, four, "on four", "section")


@pytest.mark.matrix
def test_what_the_exam_shows(cluster, tmp_path):
    """vit.py as it is, on four ranks."""
    shown = re.search(r"```\n(FAILED: .*\n)```", CHAPTERS["your_script"].read_text())[1]
    vit = (REPOSITORY / "docs/labs/vit.py").read_text()
    assert graded("vit", vit, cluster, {}, tmp_path) == shown
