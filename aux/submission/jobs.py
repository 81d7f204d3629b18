"""Jobs submitted earlier: the record of each in slurm-jobs/; its state, log, exit status and
files, from any shell."""

import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from . import remote, slurmfile
from .slurmfile import fail

RETRY_SECONDS = 300  # how long a job is followed without a connection to the cluster


def save(folder: Path, record: dict):
    """Writes what status, logs, cancel and fetch need to know about a job: nothing secret."""
    path = folder / f"{record['env']}-{record['job']}.json"
    record["file"] = str(path)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def find_record(job: str, environment: str | None) -> dict:
    """The record of a job. Stops with a sentence if there is none, or more than one."""
    folder = slurmfile.find().parent / "slurm-jobs"
    paths = sorted(folder.glob(f"{environment or '*'}-{job}.json"))
    if not paths:
        fail(f"no job {job} was submitted from here: there is no record in {folder}")
    if len(paths) > 1:
        fail(f"{' and '.join(path.stem for path in paths)} are several jobs: add --env")
    # The folder may have been moved since.
    return json.loads(paths[0].read_text()) | {"file": str(paths[0])}


def watch(record: dict, show_log: bool) -> int:
    """Follows the job to its end, over as many connections as it takes, and returns its exit
    status."""
    cluster, job = record["cluster"], record["job"]
    log = record["log"] if show_log else "/dev/null"
    position, connected = 0, None
    while True:
        try:
            with remote.run(cluster, "watch", job, log, position) as stream:
                while part := stream.read1(1 << 16):
                    position += len(part)
                    sys.stdout.buffer.write(part)
                    sys.stdout.flush()
            return 0
        except remote.RemoteFailed as error:
            if not error.is_connection:
                return error.status
            if error.started:
                connected = time.monotonic()
            if connected is None or time.monotonic() - connected > RETRY_SECONDS:
                raise
        print(f"job {job} is not affected, trying again", file=sys.stderr, flush=True)
        time.sleep(2)


def show(record: dict, *command: object) -> int:
    """The output of a command on the cluster."""
    with remote.run(record["cluster"], *command) as stream:
        shutil.copyfileobj(stream, sys.stdout.buffer)
    return 0


def fetch(record: dict) -> int:
    """Copies every file that the job wrote into slurm-jobs/ENV-JOB. If that fails, an earlier
    copy stays as it was."""
    folder = Path(record["file"]).with_suffix("")
    count = 0
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        new = Path(scratch, folder.name)
        new.mkdir()
        try:
            with (
                remote.run(record["cluster"], "fetch", record["folder"]) as stream,
                tarfile.open(fileobj=stream, mode="r|") as archive,
            ):
                for member in archive:
                    path = Path(member.name)
                    if not member.isreg() or path.is_absolute() or ".." in path.parts:
                        fail(f"the cluster sends {member.name!r}, which is not a file of the job")
                    archive.extract(member, new, set_attrs=False)
                    count += 1
        except tarfile.TarError:
            fail("nothing was fetched, because the archive is incomplete: try again")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    print(f"Fetched {count} files of job {record['job']} into {os.path.relpath(folder)}")
    return 0
