"""distributed/work_list.py: each item once, whoever is killed. And the recipe that everybody
writes."""

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
from slurm import REPOSITORY, environment, run, wait_for

WORKER, SLOW_WORKER = (f"{REPOSITORY}/tests/scripts/{name}list_worker.py" for name in ("", "slow_"))


def start(folder: Path, patience: float = 1, **variables):
    env = environment(PYTHONPATH=REPOSITORY / "distributed", **variables)
    command = [sys.executable, WORKER, str(folder), str(patience)]
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


@pytest.mark.parametrize("seconds", [2.4, 5])
def test_a_part_that_takes_longer_than_patience(seconds, tmp_path):
    """Is computed once, by eight processes on nodes whose clocks differ, of which two wait for the
    last parts."""
    folder = tmp_path / "answers"
    env = environment(PYTHONPATH=REPOSITORY / "distributed")
    command = [sys.executable, SLOW_WORKER, folder, "2", str(seconds)]
    processes = [subprocess.Popen([*command, str(n)], env=env) for n in range(8)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 8
    computed = "".join(path.read_text() for path in tmp_path.glob("answers-*.log"))
    assert sorted(map(int, computed.split())) == list(range(14))
    assert answers(folder) == list(range(14))


def test_a_suspended_process_is_not_a_fault(tmp_path, monkeypatch):
    """It has the same part as the one that took it for dead, and writes last. What is written is on
    the disk before it gets its name."""
    slow = next(work_list.parts("abc", tmp_path, 3))
    os.utime(tmp_path / ".000000000.1.begun", (0, 0))
    synced, fsync = [], os.fsync
    monkeypatch.setattr(work_list.os, "fsync", lambda file: synced.append(fsync(file)))
    fast = next(work_list.parts("abc", tmp_path, 3))
    for part in (fast, slow):
        assert part.first == 0 and part.items == "abc"
        part.write([1, 2, 3])
        assert answers(tmp_path) == [1, 2, 3]
    assert list(work_list.parts("abc", tmp_path, 3)) == []
    assert len(synced) == 2


def test_one_process_takes_a_dead_part(tmp_path):
    """The others wait again, because it may kill whoever takes it. Others have answers by now."""
    for number in (1, 2):
        tries = work_list.unanswered(tmp_path, 20, 10)
        assert tries == {0: number - 1, 10: 0}
        assert work_list.begin(tmp_path, [0], tries) == 0
        assert work_list.begin(tmp_path, [0], tries) is None
    (tmp_path / "000000010.jsonl").touch()
    assert work_list.begin(tmp_path, [10], {10: 0}) is None
    assert not list(tmp_path.glob(".000000010.*"))


def test_a_part_that_kills_its_process(tmp_path):
    """Comes last, though it is early in the list. It is tried three times, and left."""
    for answered in (1, 199, 199):
        assert ended(start(tmp_path, 600, POISON=15))[0] == -signal.SIGKILL
        there = {path.name for path in tmp_path.glob("*.jsonl")}
        assert len(there) == answered and "000000010.jsonl" not in there
        for begun in tmp_path.glob(".000000010.*.begun"):
            os.utime(begun, (0, 0))
    status, said = ended(start(tmp_path, 600))
    assert status == 1 and len(list(tmp_path.glob("*.jsonl"))) == 199
    assert f"ListError: {tmp_path} has no answers to the items 10 to 19 (the first is 0)" in said
    [command] = re.findall(r"rm \S+(?=, and start again\n)", said)
    assert run("bash", "-c", command).returncode == 0
    assert ended(start(tmp_path, 600)) == (0, "")
    assert answers(tmp_path) == [item * item for item in range(2000)]
    assert [path.name for path in tmp_path.glob(".*")] == [work_list.MARK]


def test_a_part_that_kills_its_job(tmp_path):
    """It takes the other rank with it, and another part. That part is not left."""
    statuses = []
    while len(statuses) < 10:
        job = [start(tmp_path, 2, ITEMS=100, POISON=10, MEAN=0.05) for _ in range(2)]
        wait_for(lambda job=job: None not in [rank.poll() for rank in job] or failed(job), 60)
        for rank in job:
            rank.kill()
        results = [ended(rank) for rank in job]
        statuses.append(max(status for status, _ in results))
        if -signal.SIGKILL not in [status for status, _ in results] or 1 in statuses:
            break
    assert len(statuses) == 4 and statuses[-1] == 1, results
    assert any("no answers to the items 10 to 19 " in said for _, said in results), results
    assert len(answers(tmp_path)) == 90


def failed(job: list) -> bool:
    return any(rank.poll() for rank in job)


def test_a_write_that_fails(tmp_path, monkeypatch):
    """Leaves nothing, and is no try. What a kill in a write leaves goes in the end."""
    with monkeypatch.context() as full:
        [part] = next(zip(work_list.parts("abc", tmp_path, 3), strict=False))
        full.setattr(work_list.os, "fsync", lambda file: os.write(-1, b""))
        with pytest.raises(OSError):
            part.write([1, 2, 3])
    assert [path.name for path in tmp_path.iterdir()] == [work_list.MARK]
    (tmp_path / ".000000000.0123.part").touch()
    for part in work_list.parts("abc", tmp_path, 3):
        part.write([1, 2, 3])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {work_list.MARK, "000000000.jsonl"}


def test_a_process_that_waits_says_so_once(tmp_path):
    """And what to do, if those that have begun the rest are dead."""
    for _ in zip(range(1), work_list.parts(range(2000), tmp_path, 10), strict=False):
        pass  # begun, and left
    waits = start(tmp_path, 20)
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.jsonl"))) == 199, 60)
        time.sleep(3)
        assert waits.poll() is None
        [begun] = tmp_path.glob(".*.begun")
        here = f"process {os.getpid()} on {os.uname().nodename}"
        assert begun.read_text().startswith(f"the part from item 0 on: {here}")
        for path in tmp_path.glob(".*.begun"):
            path.unlink()
    finally:
        status, said = ended(waits)
    sentence = rf"work_list.py: waits for 1 parts of {tmp_path} that others have begun, and begins"
    sentence += r" one again 20 s after its process has died\. Which processes: (cat \S+)\. If none"
    found = re.fullmatch(rf"{sentence} of them is left: rm {tmp_path}/\.\*\.begun\n", said)
    assert found and found[1] == f"cat {tmp_path}/.*.begun", said
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


def test_two_lists_in_a_new_folder_at_once(tmp_path, monkeypatch):
    """The second comes between the first one's look and its mark, and has the folder."""
    publish, second = work_list.publish, []

    def late(*arguments):
        monkeypatch.setattr(work_list, "publish", publish)
        second.append(next(work_list.parts(range(20, 40), tmp_path, 10)))
        publish(*arguments)

    monkeypatch.setattr(work_list, "publish", late)
    with pytest.raises(ValueError, match="has answers to another list: its sha256 is"):
        next(work_list.parts(range(20), tmp_path, 10))
    second[0].write([0] * 10)
    next(work_list.parts(range(20, 40), tmp_path, 10)).write([0] * 10)
    assert len(answers(tmp_path)) == 20


def test_a_wrong_list_by_several_at_once(tmp_path):
    """Is refused to all, and leaves the right one as it was."""
    next(work_list.parts(range(20), tmp_path, 10)).write([0] * 10)
    before = sorted(path.name for path in tmp_path.iterdir())

    def refused(_) -> bool:
        with pytest.raises(ValueError, match="has answers to another list"):
            next(work_list.parts(range(21), tmp_path, 10))
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(refused, range(400)))
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    next(work_list.parts(range(20), tmp_path, 10))


PROMPTS = ["a", {"b": [1.5, None]}, Path("c.png")]
OTHERS = {
    # other items of the same number, of another number, parts of another size, another model
    "its sha256 is [0-9a-f]{16}, not [0-9a-f]{16}": (["a", "d", "c.png"], 2, "step_1"),
    "its length is 3, not 4": ([*PROMPTS, "d"], 2, "step_1"),
    "its size is 2, not 3": (PROMPTS, 3, "step_1"),
    "its model is step_1, not step_2": (PROMPTS, 2, "step_2"),
}


def test_refused(tmp_path):
    """Whatever would mix answers. Nothing is lost."""
    part = next(work_list.parts(PROMPTS, tmp_path, 2, model="step_1"))
    for others in ([0], [0, 1, 2]):
        with pytest.raises(ValueError, match=f"{len(others)} answers to 2 items"):
            part.write(others)
    part.write([0, 1])
    for said, (items, size, model) in OTHERS.items():
        with pytest.raises(ValueError, match=f"has answers to another list: {said}. Choose anoth"):
            next(work_list.parts(items, tmp_path, size, model=model))
    next(work_list.parts(PROMPTS, tmp_path, 2, model="step_1")).write([2])
    assert answers(tmp_path) == [0, 1, 2]
    (tmp_path / work_list.MARK).unlink()
    with pytest.raises(ValueError, match=r"has answers, but no \.list that says to which list"):
        next(work_list.parts(PROMPTS, tmp_path, 2, model="step_1"))
    with pytest.raises(TypeError, match="an item has a Random: pass its path"):
        next(work_list.parts([random.Random()], tmp_path / "new"))


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
