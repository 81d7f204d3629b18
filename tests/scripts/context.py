"""A task without torch: every rank prints its place as one line of JSON, and rank 0's is what it
returns."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "local/laptop"))

from slurm_task import JobContext, task


@task(time=5, nodes=2, ntasks_per_node=2)
def show(arguments: list[str], job: JobContext | None = None) -> dict | None:
    if job is None:
        return None
    # As people have it: it is set already.
    os.environ.setdefault("MASTER_PORT", str(29500 + job.job_id % 1000))
    place = asdict(job) | {"output_dir": str(job.output_dir), "five": job.torch_distributed_env()}
    os.write(1, f"CONTEXT {json.dumps(place)}\n".encode())
    return {"rank": job.rank, "world_size": job.world_size, "arguments": arguments}


returned = show(sys.argv[1:])
# At once: print's parts would come between two ranks' lines.
os.write(1, f"returned {returned}\n".encode())
