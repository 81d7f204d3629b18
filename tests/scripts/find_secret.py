"""A stand-in for a train script that looks for what is in SECRET_TOKEN in the command lines of
all processes."""

import os
from pathlib import Path

for process in Path("/proc").glob("[0-9]*"):
    try:
        if os.environ["SECRET_TOKEN"].encode() in (process / "cmdline").read_bytes():
            print(f"LEAK in the command line of process {process.name}")
    except OSError:
        continue  # it has ended meanwhile
print("LOOKED")
