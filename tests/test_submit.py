"""Submission from a laptop: a network namespace without Slurm, and a real sshd on the cluster's
node-1 with Slurm behind it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import (
    LAUNCHERS,
    NAMESPACES,
    REPOSITORY,
    cells,
    environment,
    run,
    wait_for,
)
from submission import jobs, remote, slurmfile
from test_launchers import NASTY
from test_readme import CHAPTERS, HOME, assert_shown, copy_of_repository, steps

SUBMIT = [sys.executable, "aux/submit.py"]
TASK = "distributed/train_task.py"
SUBMIT_TASK = [sys.executable, TASK, "--submit", "--env=plain"]
ADDRESS = "10.7.0.1"  # node-1's
SLURMFILE = """[default.cluster]
backend = "ssh"
job_base_dir = "{base}"

[default.cluster.backend_config]
hostname = "login"

[default.packaging]
link = [".venv", "data"]

[default.submit]
nodes = 1
time = 10

[plain.submit]
comment = "it's plain"

[secret.cluster]
environment = ["ALLOWED"]

[full.cluster]
job_base_dir = "{folder}/full"

[far.cluster.backend_config]
hostname = "10.7.200.1"
"""


@dataclass
class Laptop:
    """Network and mount namespaces, held by a process; a home folder, a clone of the repository.

    `base` is job_base_dir, which the test sees because cluster and laptop are one machine;
    `sshd` is the server's process.
    """

    cluster: object
    holder: int
    home: Path
    clone: Path
    base: Path
    sshd: int

    def command(self, *command: object) -> list[str]:
        inside = ["nsenter", f"--target={self.holder}", "--net", "--mount", f"--wdns={self.clone}"]
        return [*inside, *map(str, command)]

    def environment(self, **variables: object) -> dict[str, str]:
        return environment(HOME=self.home, OMP_NUM_THREADS=1, **variables)

    def run(self, *command: object, timeout: float = 120, **variables: object):
        return run(*self.command(*command), env=self.environment(**variables), timeout=timeout)

    def submit(self, *arguments: object, timeout: float = 120, **variables: object):
        return self.run(*SUBMIT, *arguments, timeout=timeout, **variables)

    def start(self, *command: object) -> subprocess.Popen:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            self.command(*command),
            env=self.environment(),
            text=True,
            start_new_session=True,
            **pipes,
        )

    def complete(self, *command: object, **variables: object) -> int:
        """Runs a command that submits a job, and waits for that. Returns its number."""
        done = self.run(*command, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        job = job_of(done.stdout)
        assert self.cluster.wait(job).state == "COMPLETED", self.log(job)
        return job

    def log(self, job: int) -> str:
        return "".join(path.read_text() for path in self.base.glob(f"*/*_{job}.out"))

    def result(self, job: int) -> dict:
        [path] = self.base.glob(f"*/checkpoints/{job}/result.json")
        return json.loads(path.read_text())

    def job_folders(self) -> set[str]:
        return {path.name for path in self.base.iterdir()}


def job_of(shown: str) -> int:
    return int(re.search(r"^Submitted batch job (\d+) ", shown, re.M)[1])


def host(*command: object):
    done = run(*command)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def make_key(path: Path):
    host("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path)


def start_sshd(cluster, folder: Path) -> subprocess.Popen:
    """sshd on node-1, in a mount namespace of its own, with throw-away keys and nothing of this
    machine's settings. The folder `full` beside it is a small disk."""
    make_key(folder / "host_key")
    shadow = re.sub(r"^root:[^:]*", "root:*", Path("/etc/shadow").read_text(), flags=re.M)
    (folder / "shadow").write_text(shadow)  # sshd lets no locked account in
    inside = f"/run/slurm-cluster-{cluster.environment['CLUSTER']}/inside"
    (folder / "sshd_config").write_text(
        "Port 2222\n"
        f"HostKey {folder}/host_key\n"
        f"AuthorizedKeysFile {folder}/user_key.pub\n"
        "PidFile none\n"
        "UsePAM no\n"
        "PermitRootLogin yes\n"
        "PasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\n"
        "StrictModes no\n"
        f"SetEnv SLURM_CONF={inside}/slurm.conf\n"
    )
    script = (
        f"mount --bind {folder}/shadow /etc/shadow\n"
        f"mount --bind {folder}/passwd /etc/passwd\n"
        f"mount -t tmpfs -o size=128k tmpfs {folder.parent}/full\n"
        f"exec /usr/sbin/sshd -D -e -f {folder}/sshd_config"
    )
    command = [NAMESPACES, "exec", "unshare", "--mount", "sh", "-euc", script]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            env=environment(**cluster.environment),
            stdin=subprocess.DEVNULL,
            stderr=output,
        )
    wait_for(lambda: "Server listening" in log.read_text() or process.poll() is not None, 10)
    assert process.poll() is None, log.read_text()
    return process


def write_passwd(path: Path, home: Path):
    """root's home is where ssh looks for ~, whatever HOME says."""
    text = Path("/etc/passwd").read_text()
    path.write_text(re.sub(r"^(root:.*):[^:]+:[^:]+$", rf"\1:{home}:/bin/bash", text, flags=re.M))


def start_laptop(cluster, passwd: Path) -> subprocess.Popen:
    """Namespaces in which there is no Slurm, and a cable to the cluster's switch."""
    tools = [shutil.which(tool) for tool in ("sbatch", "scontrol", "sinfo")]
    hide = "".join(f"mount --bind /dev/null {tool}\n" for tool in tools)
    script = f"mount --bind {passwd} /etc/passwd\n{hide}\necho ready\nexec sleep infinity"
    command = ["unshare", "--net", "--mount", "sh", "-euc", script]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "ready\n"
    address = "address 02:00:00:00:00:01"
    for target, words in (
        (
            switch(cluster),
            f"link add laptop {address} type veth peer name eth0 {address} netns {holder.pid}",
        ),
        (switch(cluster), "link set laptop arp off up"),
        (switch(cluster), "route add 10.7.255.254 dev laptop"),
        (switch(cluster), "route add blackhole 10.7.200.1"),
        (holder.pid, "link set lo up"),
        (holder.pid, "link set eth0 arp off up"),
        (holder.pid, "address add 10.7.255.254/16 dev eth0"),
    ):
        host("nsenter", f"--target={target}", "--net", "ip", *words.split())
    return holder


def switch(cluster) -> str:
    """The process that holds the network of the cluster's switch."""
    return (
        Path(f"/run/slurm-cluster-{cluster.environment['CLUSTER']}/machine.pid").read_text().strip()
    )


@pytest.fixture(scope="module")
def laptop(cluster, tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("laptop")
    clone, home, base = folder / "clone", folder / "home", folder / "the cluster's jobs"
    sshd, there = folder / "sshd", folder / "there"  # `there` is the home folder on the cluster
    for path in (home / ".ssh", base / "data", folder / "full", sshd, there):
        path.mkdir(parents=True)
    (there / "jobs").symlink_to(base)
    (there / ".bashrc").write_text("echo Welcome; echo Mind the step >&2\n")
    (base / ".venv").symlink_to(REPOSITORY / ".venv")
    (base / "data/mnist").symlink_to(tiny)
    copy_of_repository(clone)
    (clone / "data").symlink_to(base / "data")  # git ignores it, as in the repository
    for command in ("init -q", "add -A", "-c user.name=x -c user.email=x@y commit -qm x"):
        host("git", "-C", clone, *command.split())
    (clone / "sleep.sh").write_text(
        "#!/bin/bash\necho asleep on $SLURMD_NODENAME\nexec sleep 600\n"
    )
    (clone / "Slurmfile.toml").write_text(SLURMFILE.format(base=base, folder=folder))
    make_key(sshd / "user_key")
    (home / ".ssh/config").write_text(
        "Host login login.example.org\n"
        f"  HostName {ADDRESS}\n"
        "  Port 2222\n"
        f"  IdentityFile {sshd}/user_key\n"
    )
    write_passwd(folder / "passwd", home)
    write_passwd(sshd / "passwd", there)
    made = not Path("/run/sshd").exists()
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
    server = start_sshd(cluster, sshd)
    holder = start_laptop(cluster, folder / "passwd")
    host_key = (sshd / "host_key.pub").read_text()
    (home / ".ssh/known_hosts").write_text(f"[{ADDRESS}]:2222 {host_key}")
    yield Laptop(cluster, holder.pid, home, clone, base, server.pid)
    route = ["ip", "route", "delete", "blackhole", "10.7.200.1"]
    host("nsenter", f"--target={switch(cluster)}", "--net", *route)
    for process in (holder, server):
        process.terminate()
        process.wait(timeout=10)
    if made:
        Path("/run/sshd").rmdir()


def one_sentence(done: subprocess.CompletedProcess, *parts: str, status: int = 1) -> str:
    """The last line on stderr, which must have these parts; there is no traceback, and nothing
    was submitted."""
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "Submitted" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("submit.py: ") and all(part in last for part in parts), done.stderr
    return last


def read_until(word: str, process: subprocess.Popen, stream: str = "stdout") -> str:
    shown = ""
    while word not in shown:
        shown += (line := getattr(process, stream).readline())
        assert line, f"{shown}{process.stderr.read()}"
    return shown


def rest(process: subprocess.Popen, timeout: float = 120) -> tuple[str, str]:
    """The rest of its output and of its errors, once it has ended; communicate() loses what
    readline has buffered."""
    with ThreadPoolExecutor(2) as pool:
        parts = [pool.submit(stream.read) for stream in (process.stdout, process.stderr)]
        try:
            process.wait(timeout=timeout)
        finally:
            process.kill()
    return parts[0].result(), parts[1].result()


# --- a job from its submission to its end ---


def as_on_any_machine(text: str, laptop: Laptop) -> str:
    """Without what differs from run to run: folders, keys, and states of a job that may have
    passed before a look."""
    text = text.replace(str(laptop.clone), HOME).replace(f"{laptop.clone.parent}/there", "/home/me")
    text = re.sub(r"^job \d+: (PENDING|CONFIGURING|RUNNING|COMPLETING)\b.*\n", "", text, flags=re.M)
    return re.sub(r"(_\d\d-\d\d-\d\d)\.\w{6}\b", r"\1.X", re.sub(r"SHA256:[\w+/]+", "KEY", text))


def test_chapter(laptop):
    """Its blocks as they stand, with the repository's own Slurmfile.toml; the login node is an
    alias of ours. In the last one its key is unknown."""
    slurmfile, known = laptop.clone / "Slurmfile.toml", laptop.home / ".ssh/known_hosts"
    kept = slurmfile.read_text(), known.read_text()
    shutil.copy(REPOSITORY / "Slurmfile.toml", slurmfile)
    try:
        for language, commands, shown in steps(CHAPTERS["laptop"]):
            if language == "console":
                known.write_text("")
            done = laptop.run("bash", "-euo", "pipefail", "-c", f"exec 2>&1; {commands}")
            assert done.returncode == (language == "console"), done.stdout
            assert_shown(as_on_any_machine(shown, laptop), as_on_any_machine(done.stdout, laptop))
    finally:
        slurmfile.write_text(kept[0])
        known.write_text(kept[1])


ARRIVED = """
import json, os, sys
given = {"arguments": sys.argv[1:], "environment": dict(os.environ), "files": os.listdir()}
print("ARRIVED", json.dumps(given))
"""


def test_what_arrives(laptop):
    """Arguments, paths, options and named variables, unchanged; new files; nothing else. Only
    what the job has written comes back."""
    script = laptop.clone / "a b; touch pwned/it's $HOME.py"
    script.parent.mkdir()
    script.write_text(ARRIVED)
    (laptop.clone / "ignored.out").write_text("")
    (laptop.clone / "line\nbreak").write_text("")
    (laptop.clone / "LICENSE").unlink()
    nasty = [
        *NASTY,
        "$(touch pwned)",
        "; touch pwned",
        "`touch pwned`",
        "ä",
        "\\n",
        "--follow",
        "-",
    ]
    secret = {"ALLOWED": "it's\n$(touch pwned) `touch pwned`", "WANDB_API_KEY": "hunter2"}
    options = ["--ntasks-per-node=1", "--gpus-per-node=0", "--comment=it's $(touch pwned)"]
    command = [*options, LAUNCHERS["srun"], script.relative_to(laptop.clone), *nasty]
    job = laptop.complete(*SUBMIT, "--env=secret", *command, **secret)
    arrived = json.loads(re.search("^ARRIVED (.*)$", laptop.log(job), re.M)[1])
    assert arrived["arguments"] == nasty
    assert arrived["environment"]["ALLOWED"] == secret["ALLOWED"]
    assert {"line\nbreak", "README.md", ".venv", "data"} < set(arrived["files"])
    assert not {"ignored.out", "LICENSE", ".git"} & set(arrived["files"])
    shown = laptop.cluster.exec("scontrol", "show", "job", job).stdout
    assert "Comment=it's $(touch pwned)" in shown
    assert "hunter2" not in laptop.log(job)
    assert "hunter2" not in (laptop.clone / f"slurm-jobs/secret-{job}.json").read_text()
    assert not [*laptop.clone.parent.rglob("pwned"), *laptop.home.rglob("pwned")]
    assert laptop.submit("fetch", job).returncode == 0
    fetched = laptop.clone / f"slurm-jobs/secret-{job}"
    assert [path.name for path in fetched.iterdir()] == [f"launch_slurm_to_torch.sh_{job}.out"]


def test_from_this_machine(laptop):
    """The repository's own Slurmfile.toml as it is, on a login node; a secret stays here."""
    (laptop.clone / "environment.sh").write_text("#!/bin/bash\nenv; pwd; git --version\n")
    shutil.copy(REPOSITORY / "Slurmfile.toml", laptop.clone / "own.toml")
    variables = laptop.environment(SLURMFILE=laptop.clone / "own.toml", WANDB_API_KEY="hunter2")
    command = [*SUBMIT, "--env", "local", "--nodes=1", "environment.sh"]
    done = laptop.cluster.exec(*command, cwd=laptop.clone, env=variables)
    assert done.returncode == 0, done.stderr
    job = laptop.cluster.wait(job_of(done.stdout))
    assert job.state == "COMPLETED" and f"{laptop.clone}/slurm-jobs/environment-" in job.log, (
        job.log
    )
    assert "hunter2" not in job.log
    assert (laptop.clone / f"slurm-jobs/local-{job.id}.json").exists()


def test_dry_run_shows_the_line_and_runs_nothing(laptop):
    script = [LAUNCHERS["srun"], "tests/scripts/variables.py", "a b", "it's"]
    before = laptop.job_folders()
    done = laptop.submit("--env", "plain", "--dry-run", *script)
    assert done.returncode == 0
    first, line = done.stdout.splitlines()
    assert first.startswith("# ") and f"into a new folder in {laptop.base} on " in first
    words = shlex.split(line)
    assert words[:2] == ["sbatch", "--parsable"] and words[-4:] == script
    assert laptop.job_folders() == before


def test_without_link_there_is_no_data(laptop, tmp_path):
    (tmp_path / "Slurmfile.toml").write_text(OURS)
    command = ["aux/submit.py", "--env=ours", "--dry-run", LAUNCHERS["srun"]]
    env = environment(SLURMFILE=tmp_path / "Slurmfile.toml")
    done = run(sys.executable, *command, cwd=laptop.clone, env=env)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"note: no `link` in \S+: the job will have neither .*\n", done.stderr)


def test_a_copy_cut_short_leaves_nothing(laptop, monkeypatch):
    """An archive that breaks off, and one without its last file."""
    monkeypatch.chdir(laptop.clone)
    cluster = slurmfile.read(slurmfile.find(), "plain")["cluster"]
    submission = ["submit", laptop.base, "cut-short", ".", jobs.MARK, "", "", 0, 0]
    ssh = remote.command_line(cluster, *submission, "sbatch", LAUNCHERS["srun"])
    make = ["git", "archive", "HEAD"]
    archive = subprocess.run(make, cwd=laptop.clone, capture_output=True).stdout
    before = laptop.job_folders()
    for sent, sentence in (
        (archive[: len(archive) // 2], b"copying to "),
        (archive, b" was interrupted, "),
    ):
        options = {"input": sent, "capture_output": True, "env": laptop.environment()}
        done = subprocess.run(laptop.command(*ssh), timeout=30, **options)
        assert done.returncode == 1 and sentence in done.stderr.splitlines()[-1], done.stderr
    assert laptop.job_folders() == before


def test_failed_cancelled_and_refused(laptop):
    """The status of a job is that of --follow or --wait."""
    (laptop.clone / "fail.sh").write_text("#!/bin/bash\necho no luck\nexit 3\n")
    waits = laptop.start(*SUBMIT, "--env", "plain", "--wait", "sleep.sh")
    job = job_of(read_until("Submitted", waits))
    cancelled = laptop.submit("cancel", job)
    assert cancelled.returncode == 0, cancelled.stderr
    failed = laptop.submit("--env", "plain", "--follow", "fail.sh")
    assert failed.returncode == 3 and "no luck\n" in failed.stdout
    assert re.search(r"^submit.py: job \d+ failed with exit status 3; ", failed.stderr, re.M)
    assert "Welcome" not in failed.stdout and "Mind the step" not in failed.stderr
    _, said = rest(waits)
    assert waits.returncode == 1 and f"submit.py: job {job} was cancelled" in said
    assert "CANCELLED" in laptop.submit("status", job).stdout
    before = laptop.job_folders()
    refused = laptop.submit("--env", "plain", "--partition=nope", "sleep.sh")
    one_sentence(refused, "login: ", "nvalid partition")
    assert laptop.job_folders() == before


def test_slurmctld_is_asked_rarely_and_the_log_every_second(tmp_path):
    """In 17 seconds, which pass at once here, after 0 and 15; each second's line arrives."""
    asked, log = tmp_path / "asked", tmp_path / "log"
    grow = f'[ "$*" = 1 ] && echo "a line" >>{log} && [ "$(wc -l <{log})" -le 17 ] || kill "$PPID"'
    tools = {"scontrol": f"echo >>{asked}\necho '   JobState=RUNNING Reason=None'", "sleep": grow}
    variables = environment(PATH=f"{write_tools(tmp_path / 'tools', tools)}:{os.environ['PATH']}")
    watch = ["sh", "aux/submission/remote.sh", "watch", 7, log, 0, "yes"]
    done = run(*watch, env=variables, timeout=30)
    assert len(asked.read_text()) == 2
    running = re.findall(r"^running \d+ 7$", done.stdout, re.M)
    assert done.stdout.count("a line\n") == len(running) == 17


def write_tools(folder: Path, tools: dict[str, str]) -> Path:
    """Shell scripts by name."""
    folder.mkdir()
    for name, lines in tools.items():
        (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / name).chmod(0o755)
    return folder


# --- connections ---


def printed_losses(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\b(?:test_|average_)?loss=(\S+)", log)]


@pytest.mark.matrix
def test_training_over_connections_that_break(laptop):
    """The three launchers and the task, submitted in the same second; all connections are cut,
    no job is affected: each has the losses of two ranks of the laptop itself."""
    script, options = "distributed/train_ddp.py", ["--epochs", 2, "--log-every", 1]
    by_hand = laptop.run("./torchrun.sh", script, *options, NPROC_PER_NODE=2).stdout
    task_by_hand = laptop.run("./torchrun.sh", TASK, *options, NPROC_PER_NODE=2).stdout
    looks = ["--env=plain", "--follow", "--fetch"]
    commands = {
        name: [*SUBMIT, *looks, "--gpus-per-node=2", launcher, script, *options]
        for name, launcher in LAUNCHERS.items()
    }
    commands["task"] = [sys.executable, TASK, "--submit", *looks, *options]
    started = {name: laptop.start(*command) for name, command in commands.items()}
    try:
        shown = {name: read_until(" ranks on ", started[name]) for name in commands}
        # nsenter has one child, sshd, and that one a child for each connection.
        [sshd] = run("pgrep", "--parent", laptop.sshd).stdout.split()
        connections = run("pgrep", "--parent", sshd).stdout.split()
        assert len(connections) >= 4
        for pid in connections:
            os.kill(int(pid), signal.SIGKILL)
        for name, process in started.items():
            out, said = rest(process)
            assert process.returncode == 0, out + said
            assert "trying again" in said and "COMPLETED" in said
            shown[name] += out
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    for name, out in shown.items():
        job = job_of(out)
        assert laptop.log(job) in out, "every line once, whatever has broken between"
        assert laptop.submit("logs", job).stdout in out
        results = laptop.clone / f"slurm-jobs/plain-{job}/checkpoints/{job}"
        assert list(results.glob("*.pt"))
        expected = printed_losses(task_by_hand if name == "task" else by_hand)
        assert len(expected) > 5
        assert printed_losses(laptop.log(job)) == pytest.approx(expected, abs=2e-4)
        if name == "task":
            assert laptop.result(job)["world_size"] == 2


def test_host_keys(laptop):
    """Unknown, accepted by the command that the sentence names, and changed."""
    known = laptop.home / ".ssh/known_hosts"
    sshd = laptop.clone.parent / "sshd"
    kept, before = known.read_text(), laptop.job_folders()
    fingerprint = run("ssh-keygen", "-lf", sshd / "host_key.pub").stdout.split()[1]
    try:
        known.write_text("")
        unknown = laptop.submit("--env", "plain", "sleep.sh")
        sentence = one_sentence(unknown, "is unknown", fingerprint)
        assert known.read_text() == ""
        # For ssh the fingerprint is a yes.
        tools = write_tools(laptop.clone.parent / "askpass", {"yes": f"echo {fingerprint}"})
        askpass = {"SSH_ASKPASS": tools / "yes", "SSH_ASKPASS_REQUIRE": "force"}
        asked = laptop.run(*shlex.split(sentence.split("accept it with: ")[1]), **askpass)
        assert asked.returncode == 0, asked.stderr
        assert known.read_text().split()[2] == kept.split()[2]
        other = (sshd / "user_key.pub").read_text().split()[1]
        known.write_text(kept.replace(kept.split()[2], other))
        changed = laptop.submit("--env", "plain", "sleep.sh")
        one_sentence(changed, "refused", fingerprint, "line 1 of ")
    finally:
        known.write_text(kept)
    assert laptop.job_folders() == before


def test_no_route_no_key_no_sbatch_and_full_disk(laptop):
    start = time.monotonic()
    one_sentence(laptop.submit("--env", "far", "sleep.sh"), "no connection to 10.7.200.1")
    assert time.monotonic() - start < 20
    full = laptop.submit("--env", "full", "sleep.sh")
    one_sentence(full, "No space left on device", "it is removed")
    seen = laptop.run("ssh", "login", "ls", "-A", laptop.clone.parent / "full")
    assert seen.returncode == 0 and seen.stdout == "Welcome\n"

    config, profile = laptop.home / ".ssh/config", laptop.clone.parent / "there/.bashrc"
    kept = config.read_text(), profile.read_text()
    config.write_text(kept[0].replace("user_key", "no_key"))
    one_sentence(laptop.submit("--env", "plain", "sleep.sh"), "refuses the login", "ssh-copy-id")
    config.write_text(kept[0])
    programs = {tool: f'exec {shutil.which(tool)} "$@"' for tool in ("sh", "head")}
    tools = write_tools(laptop.clone.parent / "without", programs)
    profile.write_text(f"PATH={tools}\n")
    one_sentence(laptop.submit("--env", "plain", "sleep.sh"), "no sbatch in the PATH")
    profile.write_text(kept[1])


# --- tasks ---


def test_a_task_of_ones_own(laptop):
    """The file that the appendix shows, in a folder of its own: here, and as a job."""
    script = laptop.clone / "mine/deep/hello.py"
    script.parent.mkdir(parents=True)
    code = re.search(r"^```python\n(.*?)^```$", CHAPTERS["laptop"].read_text(), re.M | re.S)[1]
    script.write_text(code)
    here = laptop.run("python", "mine/deep/hello.py")
    assert here.returncode == 0 and "here" in here.stdout, here.stderr
    elsewhere = "cd mine/deep && PYTHONPATH=../../aux python hello.py --submit --env plain"
    outside = laptop.run("bash", "-c", elsewhere)
    assert outside.returncode != 0, outside.stdout
    assert re.search(r"no env.sh in \S+/mine/deep: cd to the repo", outside.stderr), outside.stderr
    job = laptop.complete("python", "mine/deep/hello.py", "--submit", "--env", "plain")
    five = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node-1"}
    assert laptop.result(job)["where"].items() >= five.items()


WITHOUT_GPUS = ["--nodes=1", "--ntasks-per-node=3", "--gpus-per-node=0"]
SIXTEEN = ["--nodes=4", "--ntasks-per-node=4", "--gpus-per-node=4"]


@pytest.mark.parametrize(
    ("options", "nodes", "size"),
    cells([([], 2, 4), (WITHOUT_GPUS, 1, 3), (SIXTEEN, 4, 16)], ([], 2, 4)),
)
def test_context_of_a_task(laptop, options, nodes, size):
    """Under both launchers a task can get, with its resources and with others."""
    command = ["python", "tests/scripts/context.py", "--submit", "--env=plain", *options, *NASTY]
    job = laptop.complete(*command)
    places = [json.loads(line) for line in re.findall(r"^CONTEXT (.*)$", laptop.log(job), re.M)]
    places.sort(key=lambda place: place["rank"])
    assert [place["rank"] for place in places] == list(range(size))
    assert [place["local_rank"] for place in places] == [*range(size // nodes)] * nodes
    assert [place["node_rank"] for place in places] == sorted([*range(nodes)] * (size // nodes))
    assert {place["job_id"] for place in places} == {job} and places[0]["restart_count"] == 0
    for place in places:
        five = place["five"]
        assert five["RANK"] == str(place["rank"]) and five["WORLD_SIZE"] == str(size)
        assert five["LOCAL_RANK"] == str(place["local_rank"])
        assert five["MASTER_ADDR"].startswith("node-")
        assert five["MASTER_PORT"] == str(61000 + job % 4536)
    assert laptop.result(job) == {"rank": 0, "world_size": size, "arguments": NASTY}


@pytest.mark.matrix
def test_a_requeued_task_resumes(laptop):
    """Its losses are those of two ranks that were not stopped."""
    epochs = ["--epochs", 8, "--log-every", 1]
    whole = printed_losses(laptop.run("./torchrun.sh", TASK, *epochs, NPROC_PER_NODE=2).stdout)
    done = laptop.run(*SUBMIT_TASK, *epochs)
    assert done.returncode == 0, done.stderr
    job = job_of(done.stdout)
    wait_for(lambda: "epoch=3 step=1/" in laptop.log(job))  # by then epoch 2 is saved
    assert laptop.cluster.exec("scontrol", "requeue", job).returncode == 0
    wait_for(lambda: laptop.cluster.show(job)["JobState"] == "PENDING")
    laptop.cluster.exec("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert laptop.cluster.wait(job).state == "COMPLETED", laptop.log(job)
    first, second = laptop.log(job).split("Resumed after epoch ")
    resumed = int(second.split()[0])
    assert 2 <= resumed < 8 and f"epoch={resumed} test_loss=" in first
    found = printed_losses(second)
    assert len(found) == 5 * (8 - resumed) + 1
    assert found == pytest.approx(whole[-len(found) :], rel=1e-3)


CANNOT_TRAIN = [
    (["--batch-size", 33], "--batch-size 33 is not divisible by 2 ranks"),
    (["--batch-size", 3000], "--batch-size 3000 is more than the 300 training images"),
    (["--data-dir", "nowhere"], "no MNIST data in nowhere"),
    (["--learning-rate", 1e6, "--log-every", 1], "the loss is "),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("arguments", "sentence"), CANNOT_TRAIN)
def test_a_task_that_cannot_train(arguments, sentence, tiny):
    data = [] if "--data-dir" in arguments else ["--data-dir", tiny]
    done = run("./torchrun.sh", TASK, *data, *arguments, env=environment(NPROC_PER_NODE=2))
    assert done.returncode == 1
    said = re.findall(rf"^(?:train_task.py: rank \d: )?{sentence}.*$", done.stderr, re.M)
    assert said, done.stderr
    assert 'File "distributed' not in done.stderr


@pytest.mark.matrix
def test_granted_gpus_that_torch_does_not_see(tiny):
    command = [sys.executable, TASK, "--data-dir", tiny, "--epochs", 1]
    done = run(*command, env=environment(SLURM_GPUS_ON_NODE=2))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "Slurm granted GPUs, but torch sees none: " in done.stderr
    command += ["--device", "cpu"]
    assert run(*command, env=environment(SLURM_GPUS_ON_NODE=2)).returncode == 0


@pytest.mark.matrix
def test_tasks_without_a_launcher(cluster, tiny):
    """Several are refused, by a sentence; one alone trains."""
    train = ["--time=2", sys.executable, TASK, "--data-dir", tiny, "--epochs", 1]
    done = cluster.exec("srun", "--ntasks=4", *train)
    said = {line for line in done.stderr.splitlines() if line.startswith("train_task.py: ")}
    assert done.returncode == 1 and len(said) == 1, done.stderr
    assert "srun started 4 tasks without a launcher" in said.pop() and "Finished" not in done.stdout
    alone = cluster.exec("srun", "--ntasks=1", *train)
    assert alone.returncode == 0 and "Finished: " in alone.stdout, alone.stderr


@pytest.mark.parametrize(
    ("gres", "name", "options", "gpus"),
    [
        ("gpu:8", "small", [], "2 "),
        ("gpu:a100:4(S:0-1)", "small", ["--ntasks-per-node=4"], "4 "),
        ("(null)", "small", [], "0 "),
        ("gpu:8", "set", ["--ntasks-per-node=3"], "--gpus-per-node=3 "),
        ("gpu:8", "set", ["--gpus-per-node=0"], "--gpus-per-node=0 "),
        ("gpu:8", "set", ["--ntasks-per-node=1"], " launch_slurm_with_torchrun.sh "),
        ("gpu:8", "small", ["--ntasks-per-node=1"], " launch_slurm_to_torch.sh "),
        ("gpu:8", "typed", [], " --gres=gpu:1 "),
    ],
)
def test_default_gpus_of_a_task(gres, name, options, gpus, tmp_path):
    """One for each task if the cluster has some; the Slurmfile wins over that, the command line
    over both. What sbatch is given: SBATCH_GPUS_PER_NODE and its words."""
    given = tmp_path / "given"
    tools = {
        "sbatch": f'echo "$SBATCH_GPUS_PER_NODE $*" >{given}; echo 7',
        "sinfo": f"echo '{gres}'",
        "scontrol": "",
    }
    (tmp_path / "x.toml").write_text(
        f'[default.cluster]\nbackend = "local"\njob_base_dir = "{tmp_path}/jobs"\n'
        "[small.submit]\ntime = 1\n"
        "[set.submit]\ngpus_per_node = 3\n"
        '[typed.submit]\ngres = "gpu:1"\n'
    )
    path = f"{write_tools(tmp_path / 'tools', tools)}:{environment()['PATH']}"
    command = [sys.executable, TASK, "--submit", "--env", name, *options, "--epochs", 1]
    done = run(*command, env=environment(SLURMFILE=tmp_path / "x.toml", PATH=path))
    assert done.returncode == 0, done.stdout + done.stderr
    shown = given.read_text()
    assert shown.startswith(gpus) if gpus[0].isdigit() else gpus in shown
    assert shown.startswith(" ") or "--gres" not in shown
    assert not gpus[0].isdigit() or "--gpus-per-node" not in shown


def test_a_result_that_is_no_json():
    write = "import pathlib, slurm_task; slurm_task.write_result('train', {1}, pathlib.Path('no'))"
    done = run(sys.executable, "-c", write, cwd=REPOSITORY / "aux")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("the result of train is not JSON")


# --- mistakes ---


def test_mistakes_before_anything_is_sent(laptop, tmp_path):
    (laptop.clone / "ignored.out").write_text("#!/bin/bash\n")
    plain = ["--env", "plain"]
    for status, command, sentence in (
        (2, ["sleep.sh"], "--env NAME is missing"),
        (2, plain, "which launcher?"),
        (2, [*plain, "--nodes", "2", LAUNCHERS["spawn"]], "write --nodes=2"),
        (2, [*plain, LAUNCHERS["spawn"], "nope.py"], "no train script 'nope.py'"),
        (2, [*plain, "--array=1-3", "sleep.sh"], "--array cannot be used here"),
        (1, ["--env", "nope", "sleep.sh"], "it has plain, secret, "),
        (1, [*plain, "ignored.out"], "git ignores it"),
        (1, ["--env", "secret", "sleep.sh"], "ALLOWED is listed here, but is not set"),
        (1, ["status", 999999], "no job 999999"),
    ):
        one_sentence(laptop.submit(*command), sentence, status=status)
    missing = laptop.submit(*plain, "sleep.sh", SLURMFILE="nope.toml")
    one_sentence(missing, "SLURMFILE names nope.toml")
    (tmp_path / "sleep.sh").write_text("")
    submit = [sys.executable, REPOSITORY / "aux/submit.py", *plain, "sleep.sh"]
    away = run(*submit, cwd=tmp_path, env=environment(SLURMFILE=laptop.clone / "Slurmfile.toml"))
    one_sentence(away, "is not in a git repository")


def test_mistakes_of_a_task(tmp_path):
    (tmp_path / "Slurmfile.toml").write_text(
        '[default.cluster]\nbackend = "local"\njob_base_dir = "x"\n'
        "[plain.submit]\ntime = 1\n"
        '[boxed.packaging]\ntype = "container"\nimage = "x"\n'
    )
    script = tmp_path / "task.py"
    variables = environment(PYTHONPATH=REPOSITORY / "aux", SLURMFILE=tmp_path / "Slurmfile.toml")

    def submit(numbers: str, *options: str):
        code = f"from slurm_task import task\n@task({numbers})\ndef f(job=None): ...\nf()\n"
        script.write_text(code)
        return run(sys.executable, script, "--submit", *options, env=variables)

    for numbers, options, sentence in (
        ("nodes=2", [], r"^task.py: --submit needs --env NAME"),
        ("ntaks=2", ["--env=plain"], "has no option 'ntaks', but ntasks"),
        (
            "nodes=2, ntasks=4, gpus_per_node=1",
            ["--env=boxed"],
            "1 GPUs on each of 2 nodes.*: write gpus_per_node=2",
        ),
        ("nodes=2, ntasks=3", ["--env=boxed"], "3 tasks on 2 nodes, .*: write ntasks=4"),
        ("nodes='1-2'", ["--env=boxed"], "nodes is '1-2': write a whole number"),
    ):
        refused = submit(numbers, *options)
        assert refused.returncode in (1, 2) and len(refused.stderr.splitlines()) == 1, (
            refused.stderr
        )
        assert re.search(sentence, refused.stderr), refused.stderr
    for numbers in ("nodes=2, ntasks=4, gpus_per_node=2", "nodes='2', ntasks_per_node='2'"):
        shown = submit(numbers, "--env=plain", "--dry-run")
        assert "--ntasks-per-node=2" in shown.stdout, shown.stderr
        assert " launch_slurm_to_torch.sh " in shown.stdout


OURS = """[default.submit]
time = "01:00:00"

[ours.cluster]
backend = "ssh"
job_base_dir = "/jobs"

[ours.cluster.backend_config]
hostname = "login"
"""
HOST = 'hostname = "login"'
FAULTS = [
    (HOST, 'hostnam = "login"', 9, "'hostnam'; its keys are hostname, username, "),
    (HOST, f'{HOST}\nport = "22"', 10, "port must be a whole number, not '22'"),
    (HOST, 'password = "x"', 9, "a password is refused"),
    (HOST, 'username = "me"', 8, "needs hostname"),
    (HOST, 'hostname = "-oProxyCommand=x"', 9, "is not a hostname"),
    ("[ours.cluster.backend_config]", "[ours.clutser]", 8, "has no table 'clutser'; its tables "),
    ('backend = "ssh"', 'backend = "shh"', 5, 'backend must be "ssh" or "local"'),
    ('job_base_dir = "/jobs"', "", 4, "needs job_base_dir"),
    ('"/jobs"', '"/jobs"\nenvironment = ["NOT_SET"]', 7, "not set in this shell"),
    ('time = "01:00:00"', 'partitoin = "gpu"', 2, "has no option 'partitoin', but partition"),
    ('time = "01:00:00"', "time = 01:00:00", 2, 'write time = "01:00:00"'),
    ('time = "01:00:00"', 'array = "1-3"', 2, "--array cannot be used here"),
    ("[default.submit]", "[default.submit", 1, "is not TOML"),
]


@pytest.mark.parametrize(("old", "new", "line", "sentence"), FAULTS)
def test_slurmfile_faults_are_named_with_their_line(old, new, line, sentence, tmp_path):
    assert OURS.count(old) == 1
    (tmp_path / "x.toml").write_text(OURS.replace(old, new))
    with pytest.raises(SystemExit) as ended:
        slurmfile.read(tmp_path / "x.toml", "ours")
    said = ended.value.code
    assert f"line {line}" in said and sentence in said and "\n" not in said, said
