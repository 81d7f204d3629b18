"""Run by test_preemption.py: a pool ends while one of its workers works."""

import os
import time

forks = []


def slow():
    """The second worker is slow to begin, as on a busy machine."""
    time.sleep(len(forks) - 1)


os.register_at_fork(before=lambda: forks.append(1), after_in_child=slow)
import preemption

preemption.listen()
import multiprocessing
import sys


def work(number):
    if number:
        time.sleep(60)
    return number


if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        print(next(pool.imap_unordered(work, range(4))))
    print("ended")
