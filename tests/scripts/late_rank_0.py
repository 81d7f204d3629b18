"""Runs a train script (argv[2]) with its arguments, on rank 0 only when all others wait in
heartbeat.fail. argv[1] is a folder that all ranks share."""

import os
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

# What the script imports, because the others wait for ten seconds.
import checkpoint  # noqa: F401
import heartbeat
import mnist  # noqa: F401

rank, ranks, folder = os.environ["RANK"], int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])


def sleep(seconds: float):
    (folder / f"waits-{rank}").touch()
    time.sleep(seconds)


heartbeat.time = SimpleNamespace(sleep=sleep)
while rank == "0" and len(list(folder.glob("waits-*"))) < ranks - 1:
    time.sleep(0.1)
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
