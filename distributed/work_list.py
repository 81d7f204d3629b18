"""Each item of a long list once, on as many ranks, array tasks and jobs as are free.

    import work_list
    for part in work_list.parts(prompts, "answers", size=100):
        part.write([model(prompt) for prompt in part.items])

The list is anything with a length and slices. answers/000000100.jsonl holds the answers from item
100 on, one line each, and appears when all of them are there, so `cat answers/*.jsonl` is in the
order of the list. Processes need a folder that all of them see, and no process group. Start as many
as you like, whenever you like. After a kill, start them again, in any number. The list is complete
when one of them ends without an error.

A kill loses the part that was in work, so choose a size that takes about a minute.

A process that begins a part makes .000000100.begun, and then has `patience` seconds, ten minutes.
If there are no answers by then, it counts as dead, and another process does the part. If it was
only slow, the part is computed twice, and its answers are there once. Parts that somebody has begun
come last, so one that kills its process does not keep the others from being done.
"""

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


class Part:
    """Some `items` of the list, of which the first one's number is `first`, and the `path` for
    their answers."""

    def __init__(self, path: Path, first: int, items: Sequence):
        self.path, self.first, self.items = path, first, items

    def write(self, answers: list):
        """One answer for each item, anything that JSON can hold. ValueError if the numbers
        differ."""
        if len(answers) != len(self.items):
            raise ValueError(f"{len(answers)} answers to {len(self.items)} items")
        own = self.path.with_name(f".{self.path.stem}.{uuid.uuid4().hex}")
        with open(own, "w") as file:
            file.writelines(json.dumps(answer) + "\n" for answer in answers)
            file.flush()
            # Before the rename, because a node may go down.
            os.fsync(file.fileno())
        os.replace(own, self.path)


def begin(path: Path, patience: float) -> bool:
    """Whether this process is to do the part whose answers belong into `path`."""
    if path.exists():
        return False
    begun = path.with_name(f".{path.stem}.begun")
    try:
        # Only one process can make it, on any file system.
        begun.open("x").close()
    except FileExistsError:
        try:
            if time.time() < begun.stat().st_mtime + patience:
                return False
        except FileNotFoundError:  # somebody has just removed it
            return False
        begun.touch()
    return True


def parts(
    items: Sequence,
    folder: str | Path,
    size: int = 100,
    patience: float = 600,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Part]:
    """The parts that have no answers and that nobody is at, until all parts have answers, or until
    `stop` says so.

    ValueError if the folder has answers to a list of another length, or parts of another size.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Hidden, because aux/launch/requeue_failed.sh takes other new files for a save.
    mark = folder / f".{len(items)} items by {size}"
    # Before its own mark, so that a wrong list leaves none; and with it, in case of two at once.
    for _ in range(2):
        lists = sorted(path.name[1:] for path in {mark, *folder.glob(".* items by *")})
        if len(lists) > 1:
            raise ValueError(f"{folder} has answers to another list: {', '.join(lists)}")
        mark.touch()

    since, said = time.monotonic(), False
    while True:
        there = set(os.listdir(folder))
        missing = [n for n in range(0, len(items), size) if f"{n:09}.jsonl" not in there]
        if not missing:
            return
        # The sort keeps the order of those that nobody has begun, and of the others.
        missing.sort(key=lambda n: f".{n:09}.begun" in there)
        taken = False
        for first in missing:
            path = folder / f"{first:09}.jsonl"
            if stop():
                return
            if begin(path, patience):
                taken = True
                yield Part(path, first, items[first : first + size])
        if taken:
            since = time.monotonic()
            continue
        if time.monotonic() - since > patience / 10 and not said:
            said = True
            print(
                f"work_list.py: waits for {len(missing)} parts of {folder} that others have begun, "
                f"up to {patience:.0f} s. If no other process is left: rm {folder}/.*.begun",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(min(2, patience / 10))
