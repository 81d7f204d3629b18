"""This process's Slurm job, how it gets back into the queue, and small files. Without torch."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

HOST = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
JOB = os.environ.get("SLURM_JOB_ID", "none")
# How often Slurm has started this job before.
RESTART_COUNT = os.environ.get("SLURM_RESTART_COUNT", "0")
MAX_RESTARTS = 100


def requeue(progress: bool, command: str) -> str | None:
    """Puts this job back into the queue, and says so. Only on rank 0, when all ranks have saved.

    `progress` is whether the run has got further since its last start: one that has not would be
    requeued for ever. `command` is what to type otherwise. Returns None if the job will run again,
    or why it will not, in a few words.
    """
    if not progress:
        return "it made no progress since its last start"
    if int(RESTART_COUNT) >= MAX_RESTARTS:
        return f"it has been requeued {RESTART_COUNT} times"
    # In a container. run_script.sh looks for this file, requeues, and says so.
    if shutil.which("scontrol") is None:
        write_atomically(Path("log", JOB, "requeue"), command)
        return None
    script = Path(__file__).with_name("requeue.sh")
    done = subprocess.run(["bash", script], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return done.stdout.strip()
    print(done.stdout, end="", flush=True)
    return None


def resume_command(checkpoint_dir: Path) -> str:
    """What to type to go on: the launcher is the job's name, unless it was given another one."""
    command = [os.environ.get("SLURM_JOB_NAME", "LAUNCHER"), *sys.argv]
    if "--resume" not in command:
        command.append("--resume")
    if not any(word.startswith("--checkpoint-dir") for word in command):
        command += ["--checkpoint-dir", str(checkpoint_dir)]
    return f"sbatch {shlex.join(command)}"


def write_atomically(path: Path, text: str):
    """A reader finds the whole text, or what was there before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
