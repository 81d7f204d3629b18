"""A cluster that submit.py reaches over SSH, or this machine; the functions of there.sh are run on it.

Agents, aliases, jump hosts and connections kept open are ssh's own affair, in ~/.ssh/config. Host keys are checked.
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

from slurmfile import fail

THERE = Path(__file__).with_name("there.sh")
KEPT = re.compile(
    "HOME|LANG|LANGUAGE|LC_.*|LD_LIBRARY_PATH|LOGNAME|PATH|SBATCH_.*|SHELL|SLURM_CONF|TERM|TMPDIR|TZ|USER"
)


class Lost(Exception):
    """There is no connection any more, or never was one; then `said` is why, in ssh's words."""

    def __init__(self, said: str, begun: bool):
        self.said, self.begun = said, begun


def host_of(cluster: dict) -> str:
    return "this machine" if cluster["backend"] == "local" else cluster["backend_config"]["hostname"]


def destination(cluster: dict) -> list[str]:
    config = cluster["backend_config"]
    flags = {"username": "-l", "port": "-p", "identity_file": "-i"}
    words = [word for key, flag in flags.items() if key in config for word in (flag, str(config[key]))]
    return [*words, "--", config["hostname"]]


def there(cluster: dict, *command: object) -> list[str]:
    """The command line that runs a function of there.sh on the cluster.

    ssh joins its arguments with blanks, and a shell there splits them again: they are quoted here, and only here.
    """
    shell = ["sh", "-c", THERE.read_text(), "there.sh", *map(str, command)]
    if cluster["backend"] == "local":
        return shell
    options = [
        "BatchMode=yes",
        "StrictHostKeyChecking=yes",
        "ConnectTimeout=6",
        "LogLevel=ERROR",
        "ClearAllForwardings=yes",
    ]
    options += ["ServerAliveInterval=5", "ServerAliveCountMax=3"]  # a silent link counts as broken after 15 s
    return ["ssh", "-T", *(f"-o{option}" for option in options), *destination(cluster), f"exec {shlex.join(shell)}"]


@contextmanager
def answer(cluster: dict, *command: object, stdin=subprocess.DEVNULL) -> Iterator[BinaryIO]:
    """What a function of there.sh prints. If it fails, its last sentence is this program's; raises Lost."""
    begun, env = False, None
    if cluster["backend"] == "local":  # as over SSH: nothing of this shell goes along unless the Slurmfile names it
        env = {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
    with tempfile.TemporaryFile() as stderr:
        try:
            process = subprocess.Popen(
                there(cluster, *command), stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, env=env
            )
        except FileNotFoundError as error:
            fail(f"{error.filename} is not installed here")
        try:
            while not begun and (line := process.stdout.readline()):
                begun = line == b"there.sh begins\n"
            if begun:
                yield process.stdout
            status = process.wait()
        finally:
            process.kill()
            process.wait()
            stderr.seek(0)
            said = stderr.read().decode(errors="replace").rpartition("there.sh begins\n")[2].strip()
    if cluster["backend"] == "ssh" and (status == 255 or status < 0):  # ssh's own, or it was killed
        raise Lost(said, begun)
    if status != 0 or not begun:
        fail(f"{host_of(cluster)}: {said.splitlines()[-1] if said else f'sh ended with exit status {status}'}")
    if said:
        print(said, file=sys.stderr)


def explain(cluster: dict, said: str) -> tuple[str, bool]:
    """Why ssh does not get through and what to do about it, in one sentence; and whether to try again is hopeless."""
    host, last = host_of(cluster), said.splitlines()[-1] if said else "ssh does not say why"
    if "Host key verification failed" in said:
        asking = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-v", *destination(cluster), "true"]
        told = subprocess.run(asking, capture_output=True, text=True, stdin=subprocess.DEVNULL).stderr
        kind, fingerprint = [("kind", "unknown"), *re.findall(r"Server host key: (\S+) (\S+)", told)][-1]
        accept = shlex.join(["ssh", "-o", "StrictHostKeyChecking=ask", *destination(cluster), "true"])
        if changed := re.search(r"Offending (?:\S+ )?key in (\S+):(\d+)", said):
            return (
                f"refused: the host key of {host} is not the one that line {changed[2]} of {changed[1]} has, but "
                f"{fingerprint} ({kind}). Somebody may be listening. If your site confirms the new one, delete that "
                f"line and type: {accept}"
            ), True
        return (
            f"the host key of {host} is not known here. It is {fingerprint} ({kind}): compare that with what your "
            f"site says, and accept it with: {accept}"
        ), True
    if "Permission denied" in said:
        return f"{host} does not let you in ({last}): make ssh work without a password (ssh-copy-id, ssh-add)", True
    return f"no connection to {host} ({last})", False
