"""Run by test_spawn_ranks.py as a module, which starts a process and imports its package."""

import multiprocessing
import os
import sys

from theirs.other import double

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        said = pool.map(double, [2])
    os.write(1, f"RANK {os.environ['RANK']} {said} {sys.argv[1:]}\n".encode())
