"""Submission from a laptop: a network namespace without Slurm, a real sshd on the cluster's first node, Slurm behind it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import LAUNCHERS, REPOSITORY, environment, read_metrics, run
from test_launchers import NASTY

SUBMIT = [sys.executable, "aux/submit.py"]
ADDRESS = "10.7.0.1"  # node-1's
SLEEP = "#!/bin/bash\necho asleep on $SLURMD_NODENAME\nexec sleep 600\n"


@dataclass
class Laptop:
    """Mount and network namespaces of their own, held by a process; a home folder, a clone of the repository."""

    cluster: object
    holder: int
    home: Path
    clone: Path
    base: Path

    def command(self, *command: object) -> list[str]:
        return ["nsenter", f"--target={self.holder}", "--net", "--mount", f"--wd={self.clone}", *map(str, command)]

    def environment(self, **variables: object) -> dict[str, str]:
        return environment(HOME=self.home, OMP_NUM_THREADS=1, **variables)

    def run(self, *command: object, timeout: float = 120, **variables: object) -> subprocess.CompletedProcess:
        return run(*self.command(*command), env=self.environment(**variables), timeout=timeout)

    def submit(self, *arguments: object, timeout: float = 120, **variables) -> subprocess.CompletedProcess:
        return self.run(*SUBMIT, *arguments, timeout=timeout, **variables)

    def start(self, *arguments: object, **variables: object) -> subprocess.Popen:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = self.command(*SUBMIT, *arguments)
        return subprocess.Popen(command, env=self.environment(**variables), start_new_session=True, **pipes)

    def ssh_configuration(self, known_hosts: str) -> None:
        (self.home / ".ssh/known_hosts").write_text(known_hosts)


def job_of(shown: str) -> int:
    return int(re.search(r"^Submitted batch job (\d+) ", shown, re.M)[1])


def host(*command: object):
    done = run(*command)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def start_sshd(cluster, folder: Path, port: int, mounts: str) -> subprocess.Popen:
    """sshd on node-1, in a mount namespace of its own; with root's keys alone, and nothing of this machine's settings."""
    folder.mkdir()
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host_key")
    shadow = re.sub(r"^root:[^:]*", "root:*", Path("/etc/shadow").read_text(), flags=re.M)
    (folder / "shadow").write_text(shadow)
    inside = f"/run/slurm-cluster-{cluster.environment['CLUSTER']}/inside"
    (folder / "sshd_config").write_text(
        f"Port {port}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder.parent}/user_key.pub\nPidFile none\n"
        f"UsePAM no\nPermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nStrictModes no\n"
        f"SetEnv SLURM_CONF={inside}/slurm.conf\n"
    )
    script = f"mount --bind {folder}/shadow /etc/shadow\n{mounts}\nexec /usr/sbin/sshd -D -e -f {folder}/sshd_config"
    where = [REPOSITORY / "local/cluster/namespaces.sh", "exec", "unshare", "--mount", "sh", "-euc", script]
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        list(map(str, where)), env=environment(**cluster.environment), stdin=subprocess.DEVNULL, stderr=log
    )
    deadline = time.monotonic() + 10
    while "Server listening" not in (said := (folder / "log").read_text()):
        assert process.poll() is None and time.monotonic() < deadline, f"sshd does not start: {said}"
        time.sleep(0.02)
    return process


@pytest.fixture(scope="module")
def laptop(cluster, tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("laptop")
    clone, home, base = folder / "clone", folder / "home", folder / "the cluster's jobs"
    for path in (home / ".ssh", base / "data", folder / "full"):
        path.mkdir(parents=True)
    (base / ".venv").symlink_to(REPOSITORY / ".venv")
    (base / "data/mnist").symlink_to(tiny)
    files = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=REPOSITORY, capture_output=True)
    for path in filter(None, files.stdout.decode().split("\0")):
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / path, clone / path)
    (clone / "data").symlink_to(base / "data")  # git ignores it, as in the repository
    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x"]):
        host("git", "-C", clone, *command)
    (clone / "sleep.sh").write_text(SLEEP)
    (clone / "Slurmfile.toml").write_text(
        f'[default.cluster]\nbackend = "ssh"\njob_base_dir = "{base}"\n'
        f'[default.packaging]\nlink = [".venv", "data"]\n'
        f'[default.cluster.backend_config]\nhostname = "login"\n'
        "[default.submit]\nnodes = 1\ntime = 10\n"
        '[production.cluster]\nenvironment = ["ALLOWED"]\n'
        '[plain.submit]\ncomment = "it\'s \\"plain\\""\n'
        '[unknown.cluster.backend_config]\nport = 2223\n'
        '[without.cluster.backend_config]\nport = 2223\n'
        f'[full.cluster]\njob_base_dir = "{folder}/full"\n'
        f'[far.cluster.backend_config]\nhostname = "10.7.200.1"\n'
    )
    user_key = folder / "sshd/user_key"
    user_key.parent.mkdir()
    host("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", user_key)
    (home / ".ssh/config").write_text(f"Host login\n  HostName {ADDRESS}\n  Port 2222\n  IdentityFile {user_key}\n")
    passwd = re.sub(r"^(root:.*):[^:]+:[^:]+$", rf"\1:{home}:/bin/bash", Path("/etc/passwd").read_text(), flags=re.M)
    (folder / "passwd").write_text(passwd)  # ssh looks for ~ there, not in HOME
    hide = "".join(
        f"mount --bind /dev/null {path}\n"
        for tool in ("sbatch", "srun", "salloc", "scontrol", "squeue", "scancel", "sacct", "sinfo", "slurmctld", "slurmd")
        if (path := shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin"))
    )
    made = not Path("/run/sshd").exists()
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
    servers = [
        start_sshd(cluster, folder / "sshd/login", 2222, f"mount -t tmpfs -o size=128k tmpfs {folder}/full"),
        start_sshd(cluster, folder / "sshd/without", 2223, hide),
    ]
    script = f"mount --bind {folder}/passwd /etc/passwd\n{hide}\necho ready\nexec sleep infinity"
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-euc", script], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "ready\n"
    state = Path(f"/run/slurm-cluster-{cluster.environment['CLUSTER']}")
    router = f"--target={(state / 'machine.pid').read_text().strip()}"
    cable = "laptop address 02:00:00:00:00:01 type veth peer name eth0 address 02:00:00:00:00:01 netns"
    host("nsenter", router, "--net", "ip", "link", "add", *cable.split(), holder.pid)
    for command in (
        "link set laptop arp off up",
        "route add 10.7.255.254 dev laptop",
        "route add blackhole 10.7.200.1",
    ):
        host("nsenter", router, "--net", "ip", *command.split())
    for command in ("link set lo up", "link set eth0 arp off up", "address add 10.7.255.254/16 dev eth0"):
        host("nsenter", f"--target={holder.pid}", "--net", "ip", *command.split())
    there = Laptop(cluster, holder.pid, home, clone, base)
    key = (folder / "sshd/login/host_key.pub").read_text()
    there.ssh_configuration(f"[{ADDRESS}]:2222 {key}")
    yield there
    for process in (holder, *servers):
        process.terminate()
        process.wait(timeout=10)
    if made:
        Path("/run/sshd").rmdir()


def test_first(laptop):
    done = laptop.submit("--env", "plain", "--follow", "--fetch", "launch_slurm_to_torch.sh", "distributed/train_ddp.py", "--epochs", 1, "--log-every", 1)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
