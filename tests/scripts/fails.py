"""Run by test_spawn_ranks.py: rank 1 ends as it is told, and the others go on."""

import os
import sys
import time

how = sys.argv[1]
if os.environ["RANK"] == "1":
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError(7)
    os.kill(os.getpid(), int(how))
time.sleep(100)
