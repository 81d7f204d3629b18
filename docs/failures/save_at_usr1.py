"""What usr1_broken.sh and usr1_fixed.sh start: steps until SIGUSR1 comes, then a save."""

import os
import signal
import sys
import time

stop = False


def remember(number, frame):
    global stop
    stop = True


signal.signal(signal.SIGUSR1, remember)
for step in range(1, 201):  # the handler only sets a flag: no save in the midst of a step
    time.sleep(0.5)
    if stop:
        print(f"rank {os.environ['RANK']}: SIGUSR1 has come, saved after step {step}", flush=True)
        sys.exit()
sys.exit("no signal came")
