"""Run by test_spawn_ranks.py: two ranks that count how often they are told to stop."""

import os
import signal
import time

asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
open(f"ready-{os.environ['RANK']}", "w").close()
while len([name for name in os.listdir() if name.startswith("ready-")]) < 2:
    time.sleep(0.1)
if os.environ["RANK"] == "0":
    os.kill(os.getppid(), signal.SIGTERM)
while not asked:
    time.sleep(0.1)
time.sleep(3)
os.write(1, f"RANK {os.environ['RANK']} was asked {len(asked)} times\n".encode())
