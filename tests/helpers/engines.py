"""A Docker engine of the tests' own."""

import fcntl
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from slurm import environment, run, wait_for


@pytest.fixture(scope="module")
def engine():
    """The environment in which `docker` reaches an engine: one that runs already, or our own."""
    if run("docker", "info").returncode == 0:
        yield {}
        return
    with open(__file__) as lock:  # two engines would take each other's bridge and rules away
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield from engine_of_our_own()


def engine_of_our_own():
    # Not pytest's: a socket's path may have 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="docker-"))
    variables = {"DOCKER_HOST": f"unix://{folder}/socket"}
    forward = Path("/proc/sys/net/ipv4/ip_forward")
    forwarded, rules = forward.read_text(), run("iptables-save").stdout
    command = ["dockerd", f"--host={variables['DOCKER_HOST']}", f"--data-root={folder}/data"]
    command += [f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(lambda: run("docker", "info", env=environment(**variables)).returncode == 0)
        yield variables
    finally:
        process.terminate()
        process.wait(60)
        # What dockerd leaves behind: its bridge, its rules, a kernel that forwards.
        run("ip", "link", "delete", "docker0")
        chains = ":INPUT ACCEPT\n:FORWARD ACCEPT\n:OUTPUT ACCEPT\n"
        empty = f"*filter\n{chains}COMMIT\n*nat\nCOMMIT\n"
        subprocess.run(["iptables-restore"], input=empty + rules, text=True, check=True)
        forward.write_text(forwarded)
        shutil.rmtree(folder)


def succeed(*command: object, **options):
    done = run(*command, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
