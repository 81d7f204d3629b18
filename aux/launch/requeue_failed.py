"""Puts a failed job back into the queue if its run has saved. requeue_failed.sh calls it:

    python3 aux/launch/requeue_failed.py STATUS SAVES

STATUS is that of the job script, and SAVES the folder or file in which the run saves.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path


def say(sentence: str):
    print(sentence, file=sys.stderr, flush=True)


def job_id() -> str:
    """Of an array only this task, because the array's id can mean all of them."""
    env = os.environ
    if "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env["SLURM_JOB_ID"]


def requeues() -> str:
    """How often Slurm had requeued the job when it began. The launcher counts its own starts in
    SLURM_RESTART_COUNT, and then has Slurm's number in JOB_RESTARTS."""
    return os.environ.get("JOB_RESTARTS") or os.environ.get("SLURM_RESTART_COUNT") or "0"


def slurm(*command: str) -> str | None:
    """What a command of Slurm's answers, or None if it fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env)
    return done.stdout.strip() if done.returncode == 0 else None


def is_running(tells: bool = True) -> bool:
    """Whether the job is neither ending nor started anew. A busy Slurm is asked for a minute, and
    one that does not answer has not said no."""
    fields = "--Format=state:20,restartcnt:9"
    for pause in (0, 5, 10, 20, 30):
        time.sleep(pause)
        shown = slurm("squeue", "--noheader", f"--jobs={job_id()}", fields)
        if shown is not None:
            break
    if not shown or shown.split() == ["RUNNING", requeues()]:
        return True
    if tells:
        say(f"Slurm says {', restart '.join(shown.split())}: no new start")
    return False


def has_saved(saves: Path, started: Path) -> bool:
    """Whether a checkpoint in the folder, or the file, is newer than the file `started`.

    Unfinished files (part, .step_100) and logs do not count, and neither does `owner`, in which
    checkpoint.py notes at each start who may write.
    """
    if not started.exists():
        return False
    since = started.stat().st_mtime_ns
    paths = [saves] if saves.is_file() else []
    for folder, folders, files in os.walk(saves):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [Path(folder, name) for name in files]
    for path in paths:
        if path.name == "owner" or path.name.endswith(("part", ".log")):
            continue
        if path.name.startswith(".") or "tfevents" in path.name:
            continue
        if path != saves and path.is_symlink():
            continue
        with contextlib.suppress(OSError):  # gone meanwhile
            if path.stat().st_mtime_ns > since:
                return True
    return False


def requeue(folder: Path, status: int, saves: Path):
    """Puts the job back into the queue, if it has failed and has saved, and says so."""
    if status == 0 or not is_running(tells=False):
        return
    counted, failures = folder / "failures", 0
    if not has_saved(saves, folder / "started"):
        if requeues() == "0" and not counted.exists():
            return say("Not requeued: the run has saved nothing")
        with contextlib.suppress(OSError, ValueError):
            failures = int(counted.read_text())
        failures += 1
    with contextlib.suppress(OSError):  # a full disk
        counted.write_text(f"{failures}\n")
    if failures > 3:
        return say("Not requeued: three requeues without a save")
    for pause in (0, 5, 10, 20):  # Slurm may be busy
        time.sleep(pause)
        if slurm("scontrol", "requeue", job_id()) is not None:
            return say(f"Failed with status {status}, and requeued: it resumes by itself")
        if not is_running(tells=False):
            return None
    say("Not requeued: Slurm refuses, see above")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    requeue(Path("log", os.environ["SLURM_JOB_ID"]), int(sys.argv[1]), Path(sys.argv[2]))
