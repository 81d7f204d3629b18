"""Run by test_work_list.py: 14 parts of argv[3] seconds, of which the process argv[4] writes down
which it computes.

Clocks of nodes are an hour apart. A process sees the folder as it was up to a second ago, and the
times of files as they were a minute ago, unless it opens them, as with NFS.
"""

import os
import random
import sys
import time

import work_list

folder, patience, seconds, number = sys.argv[1], *map(float, sys.argv[2:])
real_time, real_list, real_stat, seen = time.time, os.listdir, os.stat, {}
time.time = lambda: real_time() + 3600 * (number % 3 - 1)


def remembered(seconds, call, path, *rest, **options):
    time.sleep(random.uniform(0, 0.02))
    key, now = (call, str(path)), time.monotonic()
    if key not in seen or seen[key][0] < now - seconds:
        seen[key] = (now, call(path, *rest, **options))
    return seen[key][1]


def utime(path, *rest, touch=os.utime):
    touch(path, *rest)
    seen.pop((real_stat, str(path)), None)


os.listdir = lambda path: remembered(1, real_list, path)
os.stat = lambda path, *rest, **options: remembered(60, real_stat, path, *rest, **options)
os.utime = utime
for part in work_list.parts(range(14), folder, 1, patience=patience):
    with open(f"{folder}-{number:.0f}.log", "a") as log:
        print(part.first, file=log)
    time.sleep(seconds * random.uniform(0.8, 1.2))
    part.write([part.first])
