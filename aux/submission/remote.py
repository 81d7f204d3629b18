"""Runs the functions of remote.sh on a cluster, over SSH or on this machine.

Agents, aliases, jump hosts and connection sharing are set up in ~/.ssh/config. Host keys are
checked.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .slurmfile import fail

SCRIPT = Path(__file__).with_name("remote.sh")
READY = "remote.sh is ready\n"  # printed first; anything before it is from ~/.bashrc
KEPT_VARIABLES = re.compile(
    "HOME|LANG|LANGUAGE|LC_.*|LD_LIBRARY_PATH|LOGNAME|PATH|SBATCH_.*|SHELL|SLURM_CONF|TERM|TMPDIR"
    "|TZ|USER"
)


class ConnectionFailed(Exception):
    """ssh could not connect, or lost the connection. `message` is ssh's; `started` says whether
    remote.sh was already running."""

    def __init__(self, message: str, started: bool):
        self.message, self.started = message, started


def host_of(cluster: dict) -> str:
    return (
        "this machine" if cluster["backend"] == "local" else cluster["backend_config"]["hostname"]
    )


def destination(cluster: dict) -> list[str]:
    config = cluster["backend_config"]
    flags = {"username": "-l", "port": "-p", "identity_file": "-i"}
    words = [
        word for key, flag in flags.items() if key in config for word in (flag, str(config[key]))
    ]
    return [*words, "--", config["hostname"]]


def command_line(cluster: dict, *command: object) -> list[str]:
    """The command line that runs a function of remote.sh on the cluster.

    ssh joins its arguments with blanks, and the remote shell splits them again, so they are quoted
    here, and only here.
    """
    shell = ["sh", "-c", SCRIPT.read_text(), "remote.sh", *map(str, command)]
    if cluster["backend"] == "local":
        return shell
    options = [
        "BatchMode=yes",
        "StrictHostKeyChecking=yes",
        "ConnectTimeout=6",
        "LogLevel=ERROR",
        "ClearAllForwardings=yes",
    ]
    # A silent link counts as broken after 15 s.
    options += [
        "ServerAliveInterval=5",
        "ServerAliveCountMax=3",
    ]
    return [
        "ssh",
        "-T",
        *(f"-o{option}" for option in options),
        *destination(cluster),
        f"exec {shlex.join(shell)}",
    ]


@contextmanager
def run(cluster: dict, *command: object, stdin=subprocess.DEVNULL) -> Iterator[BinaryIO]:
    """Yields the output of a function of remote.sh. If that fails, this program ends with the last
    line of its stderr.

    Raises ConnectionFailed.
    """
    started, env = False, None
    # As over SSH, only the variables that the Slurmfile names enter the job.
    if cluster["backend"] == "local":
        env = {name: value for name, value in os.environ.items() if KEPT_VARIABLES.fullmatch(name)}
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                command_line(cluster, *command),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=env,
            )
        except FileNotFoundError as error:
            fail(f"{error.filename} is not installed on this machine")
        try:
            while not started and (line := process.stdout.readline()):
                started = line == READY.encode()
            if started:
                yield process.stdout
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            stderr.seek(0)
            message = stderr.read().decode(errors="replace").rpartition(READY)[2].strip()
    # 255 is the status of ssh itself; a negative one means that it was killed.
    if cluster["backend"] == "ssh" and (status == 255 or status < 0):
        raise ConnectionFailed(message, started)
    if status != 0 or not started:
        fail(
            f"{host_of(cluster)}: "
            f"{message.splitlines()[-1] if message else f'sh ended with exit status {status}'}"
        )
    if message:
        print(message, file=sys.stderr)


def explain(cluster: dict, message: str) -> tuple[str, bool]:
    """One sentence on why ssh failed and what to do about it; and whether another attempt would
    also fail."""
    host, last = host_of(cluster), message.splitlines()[-1] if message else "ssh gives no reason"
    if "Host key verification failed" in message:
        ask = [
            "ssh",
            "-o",
            "BatchMode=yes",
            "-o",
            "StrictHostKeyChecking=yes",
            "-v",
            *destination(cluster),
            "true",
        ]
        log = subprocess.run(ask, capture_output=True, text=True, stdin=subprocess.DEVNULL).stderr
        kind, fingerprint = [
            ("kind", "unknown"),
            *re.findall(r"Server host key: (\S+) (\S+)", log),
        ][-1]
        accept = shlex.join(
            ["ssh", "-o", "StrictHostKeyChecking=ask", *destination(cluster), "true"]
        )
        if changed := re.search(r"Offending (?:\S+ )?key in (\S+):(\d+)", message):
            return (
                f"refused: the host key of {host} is not the one in line {changed[2]} of "
                f"{changed[1]}, but "
                f"{fingerprint} ({kind}). Somebody may be listening. If your site confirms the new "
                "key, delete that "
                f"line and type: {accept}"
            ), True
        return (
            f"the host key of {host} is unknown. It is {fingerprint} ({kind}): compare it with the "
            "one that your "
            f"site publishes, and accept it with: {accept}"
        ), True
    if "Permission denied" in message:
        return (
            f"{host} refuses the login ({last}): make ssh work without a password (ssh-copy-id, "
            "ssh-add)",
            True,
        )
    return f"no connection to {host} ({last})", False
