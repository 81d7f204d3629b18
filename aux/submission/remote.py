"""Runs the functions of remote.sh on a cluster, over SSH or on this machine.

Agents, aliases, jump hosts and connection sharing are set up in ~/.ssh/config. Messages of ssh,
sbatch and the rest go straight to the terminal.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

SCRIPT = Path(__file__).with_name("remote.sh")
READY = b"remote.sh is ready\n"  # printed first; anything before it is from ~/.bashrc
SSH_OPTIONS = ["BatchMode=yes", "StrictHostKeyChecking=yes", "ClearAllForwardings=yes"]
# A silent connection counts as broken after 15 seconds.
SSH_OPTIONS += ["ConnectTimeout=6", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
SSH_OPTIONS += ["LogLevel=ERROR"]
# As over SSH, a job gets no other variables of a shell on this machine.
LOCAL_VARIABLES = re.compile(
    "HOME|LANG|LANGUAGE|LC_.*|LD_LIBRARY_PATH|LOGNAME|PATH|SBATCH_.*|SHELL|SLURM_CONF|TERM|TMPDIR"
    "|TZ|USER"
)


class RemoteFailed(Exception):
    """A function of remote.sh, or ssh, has ended with this exit status, and has said why.
    `started` is whether remote.sh was running."""

    def __init__(self, status: int, started: bool):
        self.status, self.started = status, started
        # 255 is the status of ssh itself; a negative one means that it was killed.
        self.is_connection = status == 255 or status < 0


def command_line(cluster: dict, *command: object) -> list[str]:
    """The command line that runs a function of remote.sh on the cluster.

    ssh joins its arguments with blanks, and the remote shell splits them again, so they are quoted
    here, and only here.
    """
    shell = ["sh", "-c", SCRIPT.read_text(), "remote.sh", *map(str, command)]
    if cluster["backend"] == "local":
        return shell
    config = cluster["backend_config"]
    ssh = ["ssh", "-T", *(f"-o{option}" for option in SSH_OPTIONS)]
    for key, flag in (("username", "-l"), ("port", "-p"), ("identity_file", "-i")):
        if key in config:
            ssh += [flag, str(config[key])]
    return [*ssh, "--", config["hostname"], f"exec {shlex.join(shell)}"]


@contextmanager
def run(cluster: dict, *command: object, stdin=subprocess.DEVNULL) -> Iterator[BinaryIO]:
    """Yields the output of a function of remote.sh. Raises RemoteFailed at its end if it failed."""
    variables = dict(os.environ)
    if cluster["backend"] == "local":
        variables = {x: variables[x] for x in variables if LOCAL_VARIABLES.fullmatch(x)}
    words = command_line(cluster, *command)
    process = subprocess.Popen(words, stdin=stdin, stdout=subprocess.PIPE, env=variables)
    started = False
    try:
        while not started and (line := process.stdout.readline()):
            # ~/.bashrc may print something without a line break before it.
            started = line.endswith(READY)
        if started:
            yield process.stdout
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    if status != 0 or not started:
        raise RemoteFailed(status or 1, started)
