"""Run by test_preemption.py: a fork server that has imported a file that listens."""

import multiprocessing
import os
import signal
from multiprocessing.forkserver import _forkserver

import meanings

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meanings"])
    with context.Pool(1) as pool:
        print(pool.apply(meanings.meaning))
    server = _forkserver._forkserver_pid
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(server, number)
    with context.Pool(1) as pool:
        print(pool.apply(meanings.meaning))
    print(_forkserver._forkserver_pid == server)
