"""Jobs submitted earlier: the record of each in slurm-jobs/; its state, log, exit status and
files, from any shell."""

import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import BinaryIO

from . import remote, slurmfile
from .remote import ConnectionFailed, explain, host_of
from .slurmfile import fail

# The last file of a submission's archive, older than every file that the job makes.
MARK = ".submission.json"
RETRY_SECONDS = 300  # how long a job is followed without a connection to the cluster


def save(folder: Path, record: dict):
    """Writes what status, logs, cancel and fetch need to know about a job: nothing secret."""
    path = folder / f"{record['env']}-{record['job']}.json"
    record["file"] = str(path)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(path)  # other shells read it at any time: the whole file, old or new


def find_record(args: Namespace) -> dict:
    folder = slurmfile.find().parent / "slurm-jobs"
    known = sorted(path.stem for path in folder.glob("*-*.json"))
    matches = [
        name for name in known if name == f"{args.env or name.rpartition('-')[0]}-{args.job}"
    ]
    if not matches:
        fail(
            f"no job {args.job} was submitted from here; {folder} has {', '.join(known) or 'none'}"
        )
    if len(matches) > 1:
        fail(f"{' and '.join(matches)} are two jobs: add --env")
    return json.loads((folder / f"{matches[0]}.json").read_text())


def watch(record: dict, show_log: bool, follow: bool = True) -> int:
    """Follows the job to its end, over as many connections as it takes, and returns its exit
    status; or looks only once."""
    job, log, position, printed = record["job"], record["log"] if show_log else "/dev/null", 0, ""
    connected = time.monotonic()
    while True:
        try:
            with remote.run(
                record["cluster"], "watch", job, log, position, "yes" if follow else "no"
            ) as lines:
                while (header := lines.readline().split()) and (info := read_info(lines)):
                    # Slurm forgets old jobs: take the last known state.
                    if info["JobState"] == "UNKNOWN":
                        info = record.get("info", info)
                    state = info["JobState"], info.get("Reason")
                    if state != printed and (follow or not show_log):
                        print(
                            describe(record, info),
                            file=sys.stderr if follow else sys.stdout,
                            flush=True,
                        )
                    printed, position = state, int(header[1])
                    position += copy(lines, int(header[2]))
                    connected = time.monotonic()
                    if header[0] == b"ended":
                        save(Path(record["file"]).parent, record | {"info": info})
                    if header[0] == b"ended" and follow:
                        return exit_status(record, info)
            if not follow:
                return 0
            raise ConnectionFailed("the output is incomplete", started=True)
        except ConnectionFailed as error:
            why, permanent = explain(record["cluster"], error.message)
            if permanent or not follow or time.monotonic() - connected > RETRY_SECONDS:
                again = command_for("logs --follow" if show_log else "status", job)
                fail(f"{why}; job {job} is not affected, try again with: {again}")
            print(f"{why}; job {job} is not affected, trying again", file=sys.stderr, flush=True)
            time.sleep(2)


def read_info(lines: BinaryIO) -> dict[str, str]:
    """Slurm's NAME=VALUE words up to an empty line; an empty dict if the connection broke before
    it."""
    info = {}
    while (line := lines.readline()) != b"\n":
        if not line:
            return {}
        info |= dict(word.partition("=")[::2] for word in line.decode().split())
    return info


def copy(lines: BinaryIO, size: int) -> int:
    """The next `size` bytes of the log to standard output; returns their number."""
    left = size
    while left and (part := lines.read1(min(left, 1 << 16))):
        left -= len(part)
        sys.stdout.buffer.write(part)
        sys.stdout.flush()
    return size - left


def command_for(verb: str, job: int) -> str:
    """The command line of a verb, as typed in this folder."""
    return f"python {os.path.relpath(Path(__file__).parents[1] / 'submit.py')} {verb} {job}"


def describe(record: dict, info: dict[str, str]) -> str:
    if info["JobState"] == "UNREACHABLE":
        return (
            f"job {record['job']}: Slurm does not answer on {host_of(record['cluster'])} at the "
            "moment"
        )
    if info["JobState"] == "UNKNOWN":
        return (
            f"job {record['job']}: Slurm on {host_of(record['cluster'])} has forgotten it and "
            "keeps no accounting"
        )
    where = f" on {nodes}" if (nodes := info.get("NodeList")) not in (None, "", "(null)") else ""
    why = f" ({reason})" if (reason := info.get("Reason", "None")) != "None" else ""
    return f"job {record['job']}: {info['JobState']}{why}{where}, run time {info['RunTime']}"


def exit_status(record: dict, info: dict[str, str]) -> int:
    """The status to exit with: the job's own. Prints a sentence if the job did not complete."""
    state, job = info["JobState"], record["job"]
    code, signal = (int(number) for number in info.get("ExitCode", "0:0").split(":"))
    if state == "COMPLETED":
        return 0
    status = code or (128 + signal if signal else 1) if state == "FAILED" else 1
    sentences = {
        "FAILED": f"job {job} failed with exit status {status}",
        "CANCELLED": f"job {job} was cancelled",
        "TIMEOUT": f"job {job} reached its time limit",
        "UNKNOWN": f"the final state of job {job} is unknown",
    }
    what = sentences.get(state, f"job {job} ended in state {state}")
    print(f"submit.py: {what}; its log: {command_for('logs', job)}", file=sys.stderr, flush=True)
    return status


def fetch(record: dict) -> int:
    """Copies every file that the job wrote into slurm-jobs/ENV-JOB. If that fails, an earlier
    copy stays as it was."""
    folder = Path(record["file"]).with_suffix("")
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with remote.run(record["cluster"], "fetch", record["folder"], MARK) as stream:
            count = unpack(stream, temporary / folder.name, host_of(record["cluster"]))
        shutil.rmtree(folder, ignore_errors=True)
        (temporary / folder.name).rename(folder)
    except ConnectionFailed as error:
        fail(f"{explain(record['cluster'], error.message)[0]}; nothing was fetched, try again")
    except (OSError, tarfile.TarError) as error:
        fail(f"fetching the files of job {record['job']} failed: {error}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(
        f"Fetched {count} files of job {record['job']} into {os.path.relpath(folder)}", flush=True
    )
    return 0


def unpack(stream: BinaryIO, folder: Path, host: str) -> int:
    """Extracts the archive's regular files into `folder`, none outside. Returns their number."""
    folder.mkdir()
    count = 0
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            path = Path(os.path.normpath(member.name))
            if not member.isreg() or path.is_absolute() or path.parts[0] == "..":
                fail(f"{host} sends {member.name!r}, which is not a file of the job")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("wb") as file:
                shutil.copyfileobj(archive.extractfile(member), file)
            count += 1
    return count


def cancel(record: dict) -> int:
    try:
        with remote.run(record["cluster"], "cancel", record["job"]):
            pass
    except ConnectionFailed as error:
        fail(explain(record["cluster"], error.message)[0])
    print(f"Cancelled job {record['job']}")
    return 0
