"""A script without torch: prints what this rank was given, as one line of JSON.

After the word `fail` and the folder of the job's log all ranks wait but for rank 1, which ends
with status 3. Before that it waits until its words are in the log, because srun 22.05 may lose the
last lines of a task that ends at once: docs/troubleshooting.md, No error at all.
"""

import faulthandler
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

env = os.environ
given = {
    "rank": int(env["RANK"]),
    "local_rank": int(env["LOCAL_RANK"]),
    "world_size": int(env["WORLD_SIZE"]),
    "master_addr": env["MASTER_ADDR"],
    "master_port": env["MASTER_PORT"],
    "host": env["SLURMD_NODENAME"],
    "job": env["SLURM_JOB_ID"],
    "run": env["RUN"],
    "local_world_size": int(env["LOCAL_WORLD_SIZE"]),
    "threads": env.get("OMP_NUM_THREADS"),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "faulthandler": faulthandler.is_enabled(),
    "recorder": [env["TORCH_FR_DUMP_TEMP_FILE"], env["TORCH_FR_BUFFER_SIZE"]],
    "cuda": env.get("CUDA_VISIBLE_DEVICES"),
    "cpus": sorted(os.sched_getaffinity(0)),
    "bin": env["PATH"].split(":")[0],
    "signals": [signal.getsignal(number).name for number in (signal.SIGTERM, signal.SIGUSR1)],
    "arguments": sys.argv[1:],
}
# One write, so that lines of several ranks do not mix. srun would cut one of more than 1,024 bytes.
os.write(1, f"VARIABLES {json.dumps(given)}\n".encode())
if sys.argv[1:2] == ["fail"] and env["RANK"] == "1":
    words = "these are my last words"
    print(words)
    [log] = Path(sys.argv[2]).glob(f"*-{env['SLURM_JOB_ID']}")
    deadline = time.monotonic() + 20
    while words not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    os._exit(3)
if sys.argv[1:2] == ["fail"]:
    time.sleep(600)
