"""Each item of a long list once, on as many ranks, array tasks and jobs as are free.

    import work_list
    for part in work_list.parts(prompts, "answers", size=100, model="qwen-0.6b"):
        part.write([model(prompt) for prompt in part.items])

The list is anything with a length and slices, of what JSON can hold, or of paths.
answers/000000100.jsonl holds the answers from item 100 on, one line each, and appears when all of
them are there, so `cat answers/*.jsonl` is in the order of the list. Processes need a folder that
all of them see, on a file system with hard links, and no process group. Start as many as you like,
whenever you like. After a kill, start them again, in any number. The list is complete when one of
them ends without an error.

A folder belongs to one list: to these items, in parts of this size, answered by this `model`, a
name for whatever else the answers depend on. Any other list is refused.

A kill loses the part that was in work, so choose a size that takes about a minute.

A process that begins a part makes .000000100.1.begun, and a thread touches that file until the part
is written, however long it takes. If nothing has touched it for `patience` seconds, ten minutes,
the process counts as dead, and another one begins the part again, with .000000100.2.begun. If the
first was only suspended, the part is computed twice, and its answers are there once. A process that
hangs keeps its part, because nobody can tell a hang from a long part. `cat answers/.*.begun` says
where it is, so that you can end it, and Slurm ends it at the job's time limit.

Parts that nobody has begun come first. A part that two processes did not survive comes last, when
no other part is in work, because it may end its whole job. After a third one it is left, and once
all others have answers, every process ends with an error that names its items.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

TRIES = 3
# Hidden, because aux/launch/requeue_failed.sh takes other new files for a save.
MARK = ".list"


class ListError(ValueError):
    """The folder belongs to another list, or some items have no answers in the end."""


class Part:
    """Some `items` of the list, of which the first one's number is `first`, and the `path` for
    their answers. This process is the first, second or third (`number`) that has begun it."""

    def __init__(self, folder: Path, first: int, items: Sequence, number: int):
        self.path, self.first = folder / f"{first:09}.jsonl", first
        self.items, self.number = items, number

    def write(self, answers: list):
        """One answer for each item, anything that JSON can hold. ValueError if the numbers
        differ."""
        if len(answers) != len(self.items):
            raise ValueError(f"{len(answers)} answers to {len(self.items)} items")
        text = "".join(json.dumps(answer) + "\n" for answer in answers)
        tries = [begun_file(self.path.parent, self.first, n + 1) for n in range(self.number)]
        try:
            publish(self.path, text, os.replace)
        except OSError:
            # A full disk is not the items' fault, so this was no try.
            tries[-1].unlink(missing_ok=True)
            raise
        for begun in tries:
            begun.unlink(missing_ok=True)


def parts(
    items: Sequence,
    folder: str | Path,
    size: int = 100,
    patience: float = 600,
    stop: Callable[[], bool] = lambda: False,
    model: str = "",
) -> Iterator[Part]:
    """The parts that have no answers and that nobody is at, until all parts have answers, or until
    `stop` says so.

    ListError, before the first part, if the folder has answers to other items, by another model or
    in parts of another size; and after the last one, if some were left.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    about = {"length": len(items), "size": size, "model": model}
    claim(folder, about | {"sha256": checksum(items, size)})

    since, said = time.monotonic(), False
    while True:
        # Anew for each part, because others have begun and written theirs.
        tries = unanswered(folder, len(items), size)
        if not tries:
            # What processes have left that were killed while they wrote.
            for path in folder.glob(".[0-9]*"):
                path.unlink(missing_ok=True)
            return
        if stop():
            return

        first = begin(folder, [n for n in tries if tries[n] == 0], tries)
        if first is None:
            dead = without_process(folder, tries, patience)
            first = begin(folder, [n for n in dead if tries[n] < TRIES - 1], tries)
            if first is None and len(dead) == len(tries):
                # No part is in work that the last try of another one could end.
                last = [n for n in dead if tries[n] < TRIES]
                if not last:
                    raise ListError(advice(folder, dead, len(items), size))
                first = begin(folder, last[:1], tries)

        if first is not None:
            number = tries[first] + 1
            with touched(begun_file(folder, first, number), patience / 10):
                yield Part(folder, first, items[first : first + size], number)
            since = time.monotonic()
            continue
        if time.monotonic() - since > patience / 10 and not said:
            said = True
            print(
                f"work_list.py: waits for {len(tries)} parts of {folder} that others have begun, "
                f"and begins one again {patience:.0f} s after its process has died. Which "
                f"processes: cat {folder}/.*.begun. If none of them is left: rm {folder}/.*.begun",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(min(2, patience / 10))


def unanswered(folder: Path, length: int, size: int) -> dict[int, int]:
    """The parts without answers, by their first item, and how often each has been begun."""
    names = set(os.listdir(folder))
    tries = {n: 0 for n in range(0, length, size) if f"{n:09}.jsonl" not in names}
    for name in names:
        if found := re.fullmatch(r"\.(\d+)\.(\d)\.begun", name):
            first, number = map(int, found.groups())
            if first in tries:
                tries[first] = max(tries[first], number)
    return tries


def begun_file(folder: Path, first: int, number: int) -> Path:
    """What the first, second or third (`number`) process makes that begins a part."""
    return folder / f".{first:09}.{number}.begun"


def begin(folder: Path, firsts: list[int], tries: dict[int, int]) -> int | None:
    """Begins one of these parts, and returns its first item. None if others were faster."""
    who = f"process {os.getpid()} on {os.uname().nodename}"
    if "SLURM_JOB_ID" in os.environ:
        who += f", job {os.environ['SLURM_JOB_ID']}"
    for first in firsts:
        begun = begun_file(folder, first, tries[first] + 1)
        try:
            # Only one process can make it, on any file system.
            with begun.open("x") as file:
                file.write(f"the part from item {first} on: {who}\n")
        except FileExistsError:
            continue
        # The answers may have come since the folder was listed.
        if not (folder / f"{first:09}.jsonl").exists():
            return first
        begun.unlink(missing_ok=True)
    return None


@contextlib.contextmanager
def touched(begun: Path, every: float) -> Iterator[None]:
    """In its block a thread touches the file, every so many seconds."""
    over = threading.Event()

    def touch():
        while not over.wait(every):
            with contextlib.suppress(OSError):  # the file server is away, or the file
                os.utime(begun)

    threading.Thread(target=touch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def without_process(folder: Path, tries: dict[int, int], patience: float) -> list[int]:
    """The parts that were begun, and whose process has touched nothing for so many seconds."""
    # By the file server's clock, because those of the nodes may differ.
    os.utime(folder / MARK)
    now = (folder / MARK).stat().st_mtime
    dead = []
    for first, number in tries.items():
        try:
            # Opened, because NFS then asks its server, and otherwise may remember an older time.
            with begun_file(folder, first, number).open() as file:
                touched_at = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:  # not begun, or written just now
            continue
        if now - touched_at > patience:
            dead.append(first)
    return dead


def advice(folder: Path, firsts: list[int], length: int, size: int) -> str:
    items = ", ".join(f"{first} to {min(first + size, length) - 1}" for first in firsts)
    return (
        f"{folder} has no answers to the items {items} (the first is 0), because {TRIES} processes "
        f"that tried did not survive it. All others have answers. When you have found out why: "
        f"rm {folder}/.*.begun, and start again"
    )


def checksum(items: Sequence, size: int) -> str:
    """Of all items, in slices of `size`. TypeError if JSON cannot hold one."""

    def text_of(item: object) -> str:
        if isinstance(item, os.PathLike):
            return str(item)
        kind = type(item).__name__
        raise TypeError(f"an item has a {kind}: pass its path, and open it in the loop")

    digest = hashlib.sha256()
    for first in range(0, len(items), size):
        for item in items[first : first + size]:
            digest.update(json.dumps(item, default=text_of).encode() + b"\n")
    return digest.hexdigest()[:16]


def claim(folder: Path, about: dict):
    """Makes the folder that of the list with these values. ListError if it is another list's."""
    mark = folder / MARK
    # Before the look at the mark, which is older than any answer.
    answered = any(folder.glob("[0-9]*.jsonl"))
    if not mark.exists():
        if answered:
            what = f"answers, but no {MARK} that says to which list"
            raise ListError(f"{folder} has {what}: choose another folder")
        # Of two lists at once one gets the name, because a link replaces nothing.
        with contextlib.suppress(FileExistsError):
            publish(mark, json.dumps(about) + "\n", os.link)
    theirs = json.loads(mark.read_text())
    for name, value in about.items():
        if theirs.get(name) != value:
            what = f"answers to another list: its {name} is {theirs.get(name)}, not {value}"
            raise ListError(f"{folder} has {what}. Choose another folder")


def publish(path: Path, text: str, give_name: Callable):
    """Writes a file that is there whole or not at all."""
    own = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.part")
    try:
        with open(own, "w") as file:
            file.write(text)
            file.flush()
            # Before it gets its name, because a node may go down.
            os.fsync(file.fileno())
        give_name(own, path)
    finally:
        own.unlink(missing_ok=True)
