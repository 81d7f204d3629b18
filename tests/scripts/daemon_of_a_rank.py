"""Run by test_preemption.py: a rank that fails while its daemon child waits for a signal."""

import multiprocessing
import signal
import sys
import time

import preemption

preemption.listen()


def clean_up(number, frame):
    print("cleans up", flush=True)
    sys.exit()


def work():
    signal.signal(signal.SIGTERM, clean_up)
    ready.set()
    time.sleep(60)


context = multiprocessing.get_context("fork")
ready = context.Event()
context.Process(target=work, daemon=True).start()
ready.wait()
sys.exit("a rank fails")
