"""distributed/work_list.py: each item once, whoever is killed. The recipe that everybody writes,
and the page's list of prompts on the cluster."""

import glob
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import work_list
from conftest import (
    LAUNCHERS,
    NAMESPACES,
    REPOSITORY,
    environment,
    one_rank_a_node,
    ranks,
    run,
    stand_ins,
    wait_for,
)
from test_launchers import copy_file
from test_readme import bash, clone, steps  # noqa: F401  a fixture

PAGE = REPOSITORY / "docs/other_jobs.md"

# Items 0 to 1999 of MEAN seconds, where a write takes 5 ms, so that some kills are in one. The
# process that begins the item POISON is killed.
WORKER = """
import os, random, signal, sys, time
import work_list
os.fsync = lambda file: time.sleep(0.005)
for part in work_list.parts(range(2000), sys.argv[1], size=10, patience=float(sys.argv[2])):
    for item in part.items:
        if str(item) == os.environ.get("POISON"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(random.expovariate(1 / float(os.environ.get("MEAN", 0.001))))
    part.write([item * item for item in part.items])
"""


def start(folder: Path, patience: float = 0.5, **variables):
    env = environment(PYTHONPATH=REPOSITORY / "distributed", **variables)
    command = [sys.executable, "-c", WORKER, str(folder), str(patience)]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def ended(process) -> tuple[int, str]:
    said = process.communicate(timeout=60)[1]
    return process.returncode, said


def answers(folder: Path) -> list:
    """`cat *.jsonl`."""
    lines = "".join(path.read_text() for path in sorted(folder.glob("*.jsonl")))
    return [json.loads(line) for line in lines.splitlines()]


@pytest.mark.parametrize("seed", range(4))
def test_twenty_kills(seed, tmp_path):
    """At any moment, among others that begin. At the end the list is there, in its order."""
    draw, folder = random.Random(seed), tmp_path / "answers"
    processes = [start(folder, MEAN=0.004) for _ in range(4)]
    kills = 0
    while kills < 20:
        time.sleep(draw.uniform(0.01, 0.15))
        for process in processes[:] if draw.random() < 0.2 else [draw.choice(processes)]:
            process.kill()
            kills += process.wait() == -signal.SIGKILL
            process.communicate()
            processes.remove(process)
            assert len(answers(folder)) < 2000, "complete before the kills are over"
        while len(processes) < draw.randint(2, 6):
            processes.append(start(folder, MEAN=0.004))
    assert [ended(process)[0] for process in processes] == [0] * len(processes)
    assert answers(folder) == [item * item for item in range(2000)]


def test_a_slow_process_is_not_a_fault(tmp_path, monkeypatch):
    """It has the same part as the one that took it for dead, and writes last. What is written is on
    the disk before it gets its name."""
    synced, fsync = [], os.fsync
    monkeypatch.setattr(work_list.os, "fsync", lambda file: synced.append(fsync(file)))
    slow = next(work_list.parts("abc", tmp_path, 3))
    fast = next(work_list.parts("abc", tmp_path, 3, patience=0))
    for part in (fast, slow):
        assert part.first == 0 and part.items == "abc"
        part.write([1, 2, 3])
        assert answers(tmp_path) == [1, 2, 3]
    assert list(work_list.parts("abc", tmp_path, 3)) == []
    assert len(synced) == 2


def test_one_process_takes_a_dead_part(tmp_path):
    """The others wait again, because it may kill whoever takes it."""
    path = tmp_path / "000000000.jsonl"
    assert work_list.begin(path, 600) and not work_list.begin(path, 600)
    os.utime(tmp_path / ".000000000.begun", (0, 0))
    assert work_list.begin(path, 600) and not work_list.begin(path, 600)


def test_a_part_that_kills_its_process(tmp_path):
    """Comes last, though it is early in the list; and the list is never complete."""
    for answered in (1, 199, 199):
        assert ended(start(tmp_path, 600, POISON=15))[0] == -signal.SIGKILL
        there = {path.name for path in tmp_path.glob("*.jsonl")}
        assert len(there) == answered and "000000010.jsonl" not in there
        os.utime(tmp_path / ".000000010.begun", (0, 0))


def test_a_start_without_an_answer_has_saved_nothing(tmp_path, monkeypatch):
    """For aux/launch/requeue_failed.sh, which would otherwise requeue such a job for ever."""
    script = f"source aux/launch/requeue_failed.sh {tmp_path}/answers"
    script += f"; sleep 0.1; {sys.executable} -c '{WORKER}' {tmp_path}/answers 600"
    stand_ins(tmp_path, {"squeue": "echo RUNNING 0"})
    for name in ("aux/launch/requeue_failed.sh", "aux/launch/requeue_failed.py"):
        copy_file(name, tmp_path)
    (tmp_path / "log/7").mkdir(parents=True)
    env = environment(SLURM_JOB_ID=7, POISON=0, PYTHONPATH=REPOSITORY / "distributed")
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    done = run("bash", "-c", script, cwd=tmp_path, env=env)
    assert "Not requeued: the run has saved nothing" in done.stderr, done.stdout + done.stderr
    assert list(tmp_path.glob("answers/.000000000.begun"))


def test_a_process_that_waits_says_so_once(tmp_path):
    """And what to do, if those that have begun the rest are dead."""
    for _ in zip(range(1), work_list.parts(range(2000), tmp_path, 10), strict=False):
        pass  # begun, and left
    waits = start(tmp_path, 20)
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.jsonl"))) == 199, 60)
        time.sleep(3)
        assert waits.poll() is None
        for path in tmp_path.glob(".*.begun"):
            path.unlink()
    finally:
        status, said = ended(waits)
    sentence = rf"work_list.py: waits for 1 parts of {tmp_path} that others have begun, up to 20 s"
    assert re.fullmatch(rf"{sentence}\. If no .* left: rm {tmp_path}/\.\*\.begun\n", said), said
    assert status == 0 and len(answers(tmp_path)) == 2000


def test_stopped(tmp_path):
    """Between two parts, also while it waits for others."""
    taken = []
    for part in work_list.parts("abc", tmp_path, 1, stop=lambda: len(taken) > 1):
        taken.append(part.first)
        part.write([0])
    assert taken == [0, 1]
    next(work_list.parts("abc", tmp_path, 1))
    looks = iter([False, False, True])
    assert list(work_list.parts("abc", tmp_path, 1, stop=lambda: next(looks))) == []
    assert len(answers(tmp_path)) == 2


def test_a_wrong_list_by_several_at_once(tmp_path):
    """Is refused to all, and leaves the right one as it was."""
    next(work_list.parts(range(20), tmp_path, 10)).write([0] * 10)

    def refused(_) -> bool:
        with pytest.raises(ValueError, match="has answers to another list"):
            next(work_list.parts(range(21), tmp_path, 10))
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(refused, range(400)))
    next(work_list.parts(range(20), tmp_path, 10))


def test_refused(tmp_path):
    part = next(work_list.parts(range(20), tmp_path, 10))
    with pytest.raises(ValueError, match="9 answers to 10 items"):
        part.write([0] * 9)
    for items, size in ((range(21), 10), (range(20), 5)):
        said = f"has answers to another list: 20 items by 10, {len(items)} items by {size}"
        with pytest.raises(ValueError, match=said):
            next(work_list.parts(items, tmp_path, size))
    part.write([0] * 10)
    next(work_list.parts(range(20), tmp_path, 10))


# --- the page ---

# As most scripts have it.
RECIPE = """
done = set()
for path in glob.glob("answers/*.jsonl"):
    done |= {json.loads(line)["item"] for line in open(path)}
missing = [item for item in range(len(prompts)) if item not in done]
with open(f"answers/{rank}.jsonl", "a") as file:
    for item in missing[rank::world_size]:
        print(json.dumps({"item": item, "answer": model(prompts[item])}), file=file, flush=True)
"""


def test_the_recipe_that_loses_answers(tmp_path, monkeypatch):
    """Rank 1 starts later. And a kill leaves half a line, which no start can read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answers").mkdir()
    code = compile(RECIPE, "recipe", "exec")

    def rank(number: int, begin_rank_1_at: int = -1):
        """One of two, of 20 prompts."""

        def model(prompt: int) -> int:
            if prompt == begin_rank_1_at:
                rank(1)
            return prompt

        names = {"glob": glob, "json": json, "model": model, "prompts": range(20)}
        exec(code, names | {"rank": number, "world_size": 2})

    rank(0, begin_rank_1_at=10)
    items = {answer["item"] for answer in answers(tmp_path / "answers")}
    assert 0 < len(items) < 20, items

    for path in tmp_path.glob("answers/*"):
        path.unlink()
    Path("answers/0.jsonl").write_text('{"item": 0, "answer')
    with pytest.raises(json.JSONDecodeError):
        rank(0)


@pytest.fixture
def model(clone, tmp_path) -> Path:  # noqa: F811
    """A checkpoint in the place of the page's, with a token for each byte."""
    prepare = [sys.executable, "aux/prepare_data.py", "text", "--tokenizer", "bytes"]
    prepare += ["--input", *sorted(clone.glob("docs/*.md")), "--data-dir", tmp_path / "data"]
    assert run(*prepare, cwd=clone).returncode == 0
    train = ["distributed/train_fsdp.py", "--data-dir", tmp_path / "data", "--steps", 2]
    train += ["--checkpoint-dir", clone / "checkpoints/text", "--device", "cpu"]
    done = ranks(0, *train, cwd=clone)
    assert done.returncode == 0, done.stdout + done.stderr
    return clone / "checkpoints/text"


@pytest.mark.matrix
def test_prompts_on_the_cluster(clone, model, cluster, tmp_path):  # noqa: F811
    """The page's block, by torchrun. Then the list twice in one, by srun: stopped, requeued and
    continued. Every answer is there once, in the order of the list."""
    [block] = [text for language, text, _ in steps(PAGE) if "answer_prompts.py" in text]
    counted = bash(block, clone, (NAMESPACES, "exec"), **cluster.environment)
    prompts = (clone / "prompts.txt").read_text().splitlines()
    numbers = re.findall(r"^ *(\d+) (?:prompts.txt|answers.jsonl)$", counted, re.M)
    assert numbers == [str(len(prompts))] * 2, counted
    expected = [json.loads(line) for line in (clone / "answers.jsonl").read_text().splitlines()]
    assert [answer["prompt"] for answer in expected] == prompts
    assert all(len(answer["answer"]) > 10 for answer in expected)

    (tmp_path / "prompts").write_text("\n".join(prompts + prompts) + "\n")
    folder = tmp_path / "answers"
    command = [f"--output={tmp_path}/log", f"--chdir={clone}", *one_rank_a_node("srun")]
    command += [LAUNCHERS["srun"], "distributed/answer_prompts.py", model, tmp_path / "prompts"]
    number = cluster.submit(*command, folder, "--part", 1, "--length", 20, cwd=clone)
    wait_for(lambda: len(answers(folder)) > 10, 120)
    cluster.exec("scancel", "--signal=TERM", number)
    wait_for(lambda: cluster.show(number)["Restarts"] == "1", 60)
    assert len(answers(folder)) < len(prompts) * 2, "there is something to continue"
    for begun in folder.glob(".*.begun"):
        begun.unlink()
    cluster.start_again(number, 60)
    job = cluster.wait(number, timeout=240)
    assert job.state == "COMPLETED", job
    assert job.log.count("Requeued: it resumes by itself") == 1
    found = answers(folder)
    assert found[: len(prompts)] == expected
    assert [answer["prompt"] for answer in found] == prompts + prompts
