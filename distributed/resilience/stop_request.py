"""Being asked to stop, and who may still write. Without torch: a signal may come while that is still being imported.

Slurm asks by SIGUSR1 (the launchers' --signal, passed on by run_job in env.sh) or, when a job is preempted and at its
end, by SIGTERM; a person by ctrl-C. The handler sets a flag and no more, for it may run in the middle of anything. What
follows is done between two steps, by all ranks together: see checkpoint.Boundary.
"""

import os
import re
import signal
import socket
import time
from pathlib import Path

HOST = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
ATTEMPT = os.environ.get("SLURM_RESTART_COUNT", "0")  # how often Slurm has started this job before
received, received_at = 0, 0.0  # the first signal that asked this process to stop, and when


def listen():
    """From now on a signal that asks to stop is a request."""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, remember)


def remember(number: int, frame: object):
    global received, received_at
    if number == signal.SIGINT == received and time.monotonic() - received_at > 2:  # torchrun passes on the first again
        os._exit(130)  # ctrl-C again: now. A checkpoint that is being written does not get its name
    if not received:
        received, received_at = number, time.monotonic()


def ignore(worker: int):
    """A DataLoader's worker_init_fn: Slurm signals every process of a step, and the rank is the one to decide."""
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def tell_launcher(outcome: str, step: int):
    """Leaves "finished" or "stopped", and the step, where run_job in env.sh looks for it. By rank 0."""
    if path := os.environ.get("JOB_OUTCOME"):
        write_whole(Path(path), f"{outcome} {step}\n")


def launcher_asks() -> bool:
    """Whether run_job in env.sh has had a signal, maybe before there was a rank that listened."""
    return os.path.exists(os.environ.get("JOB_STOP", ""))


def token() -> str:
    """Who writes into a checkpoint folder: a start of a job, or a process."""
    return f"job {os.environ.get('SLURM_JOB_ID', 'none')}, start {ATTEMPT}, {HOST}:{os.getpid()}"


def claim(folder: Path) -> str | None:
    """From now on this start of the job is the only one that may write into `folder`. By rank 0. Raises OSError.

    Slurm requeues a job whose node it has lost sight of, and on that node the old ranks may well be alive: one of them
    that comes as late as here gets a sentence instead.
    """
    start = re.fullmatch(r"job (\d+), start (\d+), .*", owner(folder))
    if start and start[1] == os.environ.get("SLURM_JOB_ID") and int(start[2]) > int(ATTEMPT):
        return f"{folder} belongs to a later start of this job: this one has been superseded, and ends"
    write_whole(folder / "owner", token())
    return None


def owner(folder: Path) -> str:
    """Who may write into `folder`. One that cannot be read is still ours: a full disk is not another attempt."""
    try:
        return (folder / "owner").read_text()
    except OSError:
        return token()


def write_whole(path: Path, text: str):
    """A small file that others may read at any time: all of it, or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
