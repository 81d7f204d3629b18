"""A rank with processes of its own: which of them end, with it or before it, and does it end?

    process_tree.py METHOD stop|fail KIND ...

It starts one of each KIND by METHOD, and says `ready` when all are at work. Each process leaves a
file KIND-PID in the working directory. With `stop` it works on until it is asked to stop, and ends
as chapter 7's scripts do; with `fail` it raises an error.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import preemption

preemption.listen()
LOADERS = {"loader": {}, "persistent": {"persistent_workers": True}, "dataset": {}}


def note(kind: str, process: int):
    Path(f"{kind}-{process}").touch()


def work(kind: str):
    note(kind, os.getpid())
    while True:
        time.sleep(0.02)


class Numbers:
    """A data set. The process that reads it leaves its file, or starts a pool that does."""

    def __init__(self, kind: str):
        self.kind = kind

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        if index == 0 and self.kind == "dataset":
            self.pool = multiprocessing.get_context(method).Pool(1)
            self.pool.apply_async(work, (self.kind,))
        elif index == 0:
            note(self.kind, os.getpid())
        time.sleep(0.002)
        return index


def start(kind: str) -> object:
    """Returns what the rank keeps: of a loader the batches, on which it goes on reading."""
    context = multiprocessing.get_context(method)
    if kind == "program":
        program = subprocess.Popen(["sleep", "1000"])
        note(kind, program.pid)
        return program
    if kind in ("daemon", "process"):
        process = context.Process(target=work, args=(kind,), daemon=kind == "daemon")
        process.start()
        return process
    if kind == "pool":
        pool = context.Pool(1)
        pool.apply_async(work, (kind,))
        return pool
    if kind == "executor":
        executor = ProcessPoolExecutor(1, context)
        executor.submit(work, kind)
        return executor
    from torch.utils.data import DataLoader

    options = LOADERS[kind]
    if kind != "dataset":
        workers = {"num_workers": 1, "multiprocessing_context": method}
        options = options | workers | {"worker_init_fn": preemption.ignore}
    return iter(DataLoader(Numbers(kind), 2, **options))


def main(how: str, kinds: list[str]):
    if not LOADERS.keys() & set(kinds):
        # `end` asks whether there is a process group, and the import takes seconds.
        alone = SimpleNamespace(is_initialized=lambda: False)
        sys.modules |= {"torch": SimpleNamespace(distributed=alone), "torch.distributed": alone}
    started = [start(kind) for kind in kinds]
    batches = [part for kind, part in zip(kinds, started, strict=True) if kind in LOADERS]

    def step():
        for part in batches:
            next(part)
        time.sleep(0.01)

    while {path.name.split("-")[0] for path in Path().glob("*-*")} < set(kinds):
        step()
    print("ready", flush=True)
    if how == "fail":
        raise RuntimeError("a rank fails")
    while not preemption.received:
        step()
    # All ranks stop after the same step, which may be ten steps later.
    for _ in range(10):
        step()
    print("saved", flush=True)
    preemption.end(True)


method = sys.argv[1]
if __name__ == "__main__":
    main(sys.argv[2], sys.argv[3:])
