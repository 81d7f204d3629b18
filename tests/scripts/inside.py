"""What a rank sees in its container, as JSON in a file that the line SEEN names, without torch."""

import json
import os
import sys
from pathlib import Path

seen = {
    "host": os.environ["SLURMD_NODENAME"],
    "variables": [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")],
    "environment": dict(os.environ),
    "image": Path("/etc/which-image").read_text() if Path("/etc/which-image").exists() else None,
    "folder": os.getcwd(),
    "arguments": sys.argv[1:],
}
# Into a file: srun breaks long lines of several tasks apart.
path = Path(f"seen-{os.environ['SLURM_JOB_ID']}-{os.environ['RANK']}.json")
path.write_text(json.dumps(seen))
print(f"SEEN {os.environ['SLURM_SUBMIT_DIR']}/{path}", flush=True)
