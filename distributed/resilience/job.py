"""The Slurm job that this process belongs to, and small files that others may read at any time. Without torch."""

import os
import socket
from pathlib import Path

HOST = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
JOB = os.environ.get("SLURM_JOB_ID", "none")
RESTART_COUNT = os.environ.get("SLURM_RESTART_COUNT", "0")  # how often Slurm has started this job before


def failure_named() -> bool:
    """Whether JOB_FAILURE names the rank that failed first. What others then have to say explains nothing."""
    return os.path.exists(os.environ.get("JOB_FAILURE", ""))


def write_atomically(path: Path, text: str):
    """Writes a small file atomically: a reader finds the whole text, or what was there before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
