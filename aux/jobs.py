"""Jobs that submit.py has submitted: what slurm-jobs/ keeps of each; its state, log, end and files, from any shell."""

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

import slurmfile
from remote import Lost, answer, explain, host_of
from resilience.stop_request import write_whole
from slurmfile import fail

MARK = ".submission.json"  # the last file of a submission's archive; older than every file that the job makes
PATIENCE = 300  # seconds for which a job is followed without reaching the cluster


def save(folder: Path, record: dict):
    """Keeps what the verbs need to know of a job: nothing secret."""
    record["file"] = str(folder / f"{record['env']}-{record['job']}.json")
    write_whole(Path(record["file"]), json.dumps(record, indent=1) + "\n")


def find_record(args: Namespace) -> dict:
    folder = slurmfile.find().parent / "slurm-jobs"
    known = sorted(path.stem for path in folder.glob("*-*.json"))
    found = [name for name in known if name == f"{args.env or name.rpartition('-')[0]}-{args.job}"]
    if not found:
        fail(f"no job {args.job} was submitted from here; {folder} knows {', '.join(known) or 'none'}")
    if len(found) > 1:
        fail(f"{' and '.join(found)} are two jobs: say --env as well")
    return json.loads((folder / f"{found[0]}.json").read_text())


def watch(record: dict, show_log: bool, follow: bool = True) -> int:
    """Follows the job to its end, over as many connections as it takes, and returns its exit status; or looks once."""
    job, log, at, told = record["job"], record["log"] if show_log else "/dev/null", 0, ""
    reached = time.monotonic()
    while True:
        try:
            with answer(record["cluster"], "watch", job, log, at, "yes" if follow else "no") as lines:
                while (header := lines.readline().split()) and (facts := read_facts(lines)):
                    if facts["JobState"] == "UNKNOWN":  # to Slurm, which forgets; then what it said last time
                        facts = record.get("facts", facts)
                    state = facts["JobState"], facts.get("Reason")
                    if state != told and (follow or not show_log):
                        print(describe(record, facts), file=sys.stderr if follow else sys.stdout, flush=True)
                    told, at = state, int(header[1])
                    at += copy(lines, int(header[2]))
                    reached = time.monotonic()
                    if header[0] == b"ended":
                        save(Path(record["file"]).parent, record | {"facts": facts})
                    if header[0] == b"ended" and follow:
                        return verdict(record, facts)
            if not follow:
                return 0
            raise Lost("its answer ends too early", begun=True)
        except Lost as lost:
            why, hopeless = explain(record["cluster"], lost.said)
            if hopeless or not follow or time.monotonic() - reached > PATIENCE:
                again = later("logs --follow" if show_log else "status", job)
                fail(f"{why}; that does not touch job {job}, look again with: {again}")
            print(f"{why}; job {job} goes on, trying again", file=sys.stderr, flush=True)
            time.sleep(2)


def read_facts(lines: BinaryIO) -> dict[str, str]:
    """Slurm's NAME=VALUE words up to an empty line; none if there is no such line, the connection being broken."""
    facts = {}
    while (line := lines.readline()) != b"\n":
        if not line:
            return {}
        facts |= dict(word.partition("=")[::2] for word in line.decode().split())
    return facts


def copy(lines: BinaryIO, size: int) -> int:
    """The next `size` bytes of the log to standard output; how many of them there were."""
    left = size
    while left and (part := lines.read1(min(left, 1 << 16))):
        left -= len(part)
        sys.stdout.buffer.write(part)
        sys.stdout.flush()
    return size - left


def later(verb: str, job: int) -> str:
    """What to type to look after a job from another shell."""
    return f"python {os.path.relpath(Path(__file__).with_name('submit.py'))} {verb} {job}"


def describe(record: dict, facts: dict[str, str]) -> str:
    if facts["JobState"] == "UNREACHABLE":
        return f"job {record['job']}: Slurm does not answer on {host_of(record['cluster'])} just now"
    if facts["JobState"] == "UNKNOWN":
        return f"job {record['job']}: Slurm on {host_of(record['cluster'])} has forgotten it and keeps no accounting"
    where = f" on {nodes}" if (nodes := facts.get("NodeList")) not in (None, "", "(null)") else ""
    why = f" ({reason})" if (reason := facts.get("Reason", "None")) != "None" else ""
    return f"job {record['job']}: {facts['JobState']}{why}{where}, run time {facts['RunTime']}"


def verdict(record: dict, facts: dict[str, str]) -> int:
    """Says in a sentence how a job that ended otherwise than well has ended. Returns the exit status to end with."""
    state, job = facts["JobState"], record["job"]
    code, signal = (int(number) for number in facts.get("ExitCode", "0:0").split(":"))
    if state == "COMPLETED":
        return 0
    status = code or (128 + signal if signal else 1) if state == "FAILED" else 1
    sentences = {
        "FAILED": f"job {job} has failed with exit status {status}",
        "CANCELLED": f"job {job} was cancelled",
        "TIMEOUT": f"job {job} was ended by its time limit",
        "UNKNOWN": f"how job {job} has ended is not known",
    }
    what = sentences.get(state, f"job {job} has ended as {state}")
    print(f"submit.py: {what}; its log: {later('logs', job)}", file=sys.stderr, flush=True)
    return status


def fetch(record: dict) -> int:
    """Brings every file that the job has made into slurm-jobs/ENV-JOB: all of them, or what was there before stays."""
    folder = Path(record["file"]).with_suffix("")
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with answer(record["cluster"], "fetch", record["folder"], MARK) as stream:
            count = unpack(stream, temporary / folder.name, host_of(record["cluster"]))
        shutil.rmtree(folder, ignore_errors=True)
        (temporary / folder.name).rename(folder)
    except Lost as lost:
        fail(f"{explain(record['cluster'], lost.said)[0]}; nothing is fetched, try again")
    except (OSError, tarfile.TarError) as error:
        fail(f"fetching what job {record['job']} has made failed: {error}")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"Fetched {count} files of job {record['job']} into {os.path.relpath(folder)}", flush=True)
    return 0


def unpack(stream: BinaryIO, folder: Path, host: str) -> int:
    """Regular files alone, and none outside of `folder`, whatever the archive says. Returns how many there were."""
    folder.mkdir()
    count = 0
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            path = Path(os.path.normpath(member.name))
            if not member.isreg() or path.is_absolute() or path.parts[0] == "..":
                fail(f"{host} sends {member.name!r}, which is no file of the job")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with (folder / path).open("wb") as file:
                shutil.copyfileobj(archive.extractfile(member), file)
            count += 1
    return count


def cancel(record: dict) -> int:
    try:
        with answer(record["cluster"], "cancel", record["job"]):
            pass
    except Lost as lost:
        fail(explain(record["cluster"], lost.said)[0])
    print(f"Cancelled job {record['job']}")
    return 0
