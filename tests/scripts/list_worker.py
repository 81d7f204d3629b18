"""Run by test_work_list.py: items 0 to 1999, or ITEMS, of MEAN seconds.

A write takes 5 ms, so that some kills are in one. The process that begins the item POISON is
killed.
"""

import os
import random
import signal
import sys
import time

import work_list

os.fsync = lambda file: time.sleep(0.005)
items = range(int(os.environ.get("ITEMS", 2000)))
for part in work_list.parts(items, sys.argv[1], size=10, patience=float(sys.argv[2])):
    for item in part.items:
        if str(item) == os.environ.get("POISON"):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(random.expovariate(1 / float(os.environ.get("MEAN", 0.001))))
    part.write([item * item for item in part.items])
