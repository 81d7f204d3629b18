"""Submission from a laptop: an environment without Slurm, and a real sshd on the cluster's node-1
with Slurm behind it."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mnist
import slurm_task
import submission
from copies import NASTY
from pages import HOME, assert_shown, copy_of_repository, steps
from slurm import NAMESPACES, REPOSITORY, environment, ranks, run, stand_ins

ROOM = REPOSITORY / "local/laptop"
TASK = "local/laptop/train.py"
ADDRESS = "10.7.0.1"  # node-1's
SLURMFILE = """[{name}.cluster]
backend = "ssh"
job_base_dir = "{base}"
environment = [{environment}]

[{name}.cluster.backend_config]
hostname = "login"

[{name}.packaging]
link = [".venv", "data"]

[{name}.submit]
time = 10
gpus_per_node = 0
comment = "it's {name}"

"""
# A script with a task: what the job does stands in the middle.
SCRIPT = """import json, os, sys, time
sys.path.append("local/laptop")
from slurm_task import task


@task(nodes=1)
def run(job=None):
    {}


run()
"""


@dataclass
class Laptop:
    """Without Slurm. `base` is job_base_dir: cluster and laptop are one machine here."""

    cluster: object
    home: Path
    clone: Path
    base: Path
    path: str

    def environment(self, **variables: object) -> dict[str, str]:
        return environment(OMP_NUM_THREADS=1, **{"HOME": self.home, "PATH": self.path} | variables)

    def run(self, *command: object, timeout: float = 120, **variables: object):
        return run(*command, cwd=self.clone, env=self.environment(**variables), timeout=timeout)

    def submit(self, script: str, *arguments: object, **variables: object):
        return self.run("python", script, "--submit", "--env", *arguments, **variables)

    def start(self, script: str, *arguments: object) -> subprocess.Popen:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = {"env": self.environment(), "cwd": self.clone, "text": True}
        command = ["python", script, "--submit", "--env", *arguments]
        return subprocess.Popen(command, start_new_session=True, **pipes, **options)

    def script(self, name: str, does: str) -> str:
        """A new script in the clone, whose task does this."""
        (self.clone / name).write_text(SCRIPT.format(does))
        return name

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


SSHD = """HostKey {0}/host_key
AuthorizedKeysFile {0}/user_key.pub
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
SetEnv SLURM_CONF=/run/slurm-cluster-{1}/inside/slurm.conf PATH={0}/quick:{2}
"""
# What sshd gives to root
PATH_OF_ROOT = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SSH = """Host login login.example.org
  HostName {0}
  Port 2222
  ProxyCommand {1}/bin/connect
  UserKnownHostsFile {1}/known_hosts
  IdentityFile {1}/user_key
"""


def sshd_on_node_1(cluster, folder: Path, home: Path):
    """Throw-away keys, and a program for ssh's ProxyCommand: it becomes a connection's sshd, in a
    mount namespace of its own, with nothing of this machine's settings."""
    for name in ("host_key", "user_key"):
        host("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name)
    # sshd lets no locked account in.
    shadow = re.sub(r"^root:[^:]*", "root:*", Path("/etc/shadow").read_text(), flags=re.M)
    users, home_of_root = Path("/etc/passwd").read_text(), rf"\1:{home}:/bin/bash"
    passwd = re.sub(r"^(root:.*):[^:]+:[^:]+$", home_of_root, users, flags=re.M)
    name = cluster.environment["CLUSTER"]
    settings = SSHD.format(folder, name, PATH_OF_ROOT)
    files = {"shadow": shadow, "passwd": passwd, "sshd_config": settings}
    for file, text in files.items():
        (folder / file).write_text(text)
    script = f"mount --bind {folder}/shadow /etc/shadow; mount --bind {folder}/passwd /etc/passwd; "
    script += f"exec /usr/sbin/sshd -i -E {folder}/log -f {folder}/sshd_config"
    connect = f"CLUSTER={name} SUDO_UID= exec {NAMESPACES} exec unshare --mount sh -euc '{script}'"
    stand_ins(folder / "bin", {"connect": connect})
    # remote.sh asks Slurm after every 15 of these.
    stand_ins(folder / "quick", {"sleep": "exec /usr/bin/sleep 0.1"})


@pytest.fixture(scope="module")
def laptop(cluster, tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("laptop")
    clone, home, base = folder / "clone", folder / "home", folder / "the cluster's jobs"
    sshd, there = folder / "sshd", folder / "there"  # `there` is the home folder on the cluster
    for path in (home / ".ssh", base / "data", sshd, there):
        path.mkdir(parents=True)
    (there / "jobs").symlink_to(base)
    (there / ".bashrc").write_text("echo Welcome\nprintf title\n")
    (base / ".venv").symlink_to(REPOSITORY / ".venv")
    (base / "data/mnist").symlink_to(tiny)
    copy_of_repository(clone)
    (clone / "data").symlink_to(base / "data")  # git ignores it, as in the repository
    for command in ("init -q", "add -A", "-c user.name=x -c user.email=x@y commit -qm x"):
        host("git", "-C", clone, *command.split())
    names = {"plain": "", "secret": '"ALLOWED"'}
    tables = [SLURMFILE.format(name=x, base=base, environment=names[x]) for x in names]
    (clone / "local/laptop/Slurmfile.toml").write_text("".join(tables))
    sshd_on_node_1(cluster, sshd, there)
    (home / ".ssh/config").write_text(SSH.format(ADDRESS, sshd))
    host_key = (sshd / "host_key.pub").read_text()
    (sshd / "known_hosts").write_text(f"[{ADDRESS}]:2222 {host_key}")
    # Root's ssh looks for ~/.ssh in /etc/passwd, whatever HOME says.
    ssh = f'exec {shutil.which("ssh")} -F ~/.ssh/config "$@"'
    tools = stand_ins(folder / "tools", {"ssh": ssh})
    slurm = run("dpkg-query", "--listfiles", "slurm-client").stdout.split()
    for program in Path("/usr/bin").iterdir():
        if str(program) not in slurm and not (tools / program.name).exists():
            (tools / program.name).symlink_to(program)
    made = not Path("/run/sshd").exists()
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
    laptop = Laptop(cluster, home, clone, base, f"{Path(sys.executable).parent}:{tools}")
    laptop.script("sleeps.py", "time.sleep(600)")
    yield laptop
    if made:
        Path("/run/sshd").rmdir()


@contextlib.contextmanager
def written(path: Path, text: str):
    """Another text in a file, until the with block ends."""
    kept = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(kept)


def one_sentence(done: subprocess.CompletedProcess, *parts: str, status: int = 1) -> str:
    """The last line on stderr, which must have these parts. Nothing was submitted."""
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "Submitted" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert all(part in last for part in parts), done.stderr
    return last


def read_until(word: str, process: subprocess.Popen) -> str:
    shown = ""
    while word not in shown:
        shown += (line := process.stdout.readline())
        assert line, f"{shown}{process.stderr.read()}"
    return shown


# --- a job from its submission to its end ---


def as_on_the_page(text: str, laptop: Laptop) -> str:
    """With its folders, and its name of the login node."""
    text = text.replace(str(laptop.clone), HOME).replace(f"{laptop.clone.parent}/there", "/home/me")
    return re.sub(rf"\[{ADDRESS}\]:2222", "login.example.org", text).replace("\r", "")


def test_readme(laptop):
    """Its blocks as they stand, with the repository's own Slurmfile.toml; the login node is an
    alias of ours. In the last one its key is unknown."""
    known = laptop.clone.parent / "sshd/known_hosts"
    ours = (ROOM / "Slurmfile.toml").read_text()
    slurmfile = laptop.clone / "local/laptop/Slurmfile.toml"
    with written(slurmfile, ours), written(known, known.read_text()):
        for language, commands, shown in steps(ROOM / "README.md"):
            if language == "console":
                known.write_text("")
            script = f"exec 2>&1; {commands}"
            done = laptop.run("bash", "-euo", "pipefail", "-c", script, timeout=400)
            assert done.returncode == (language == "console"), done.stdout
            assert_shown(shown, as_on_the_page(done.stdout, laptop))


ARRIVED = """given = {"arguments": sys.argv[1:], "environment": dict(os.environ)}
    print("ARRIVED", json.dumps(given | {"files": os.listdir()}))"""


def test_what_arrives(laptop):
    """All that was named, unchanged; nothing else. What the job has written comes back."""
    folder = laptop.clone / "a b; touch pwned"
    folder.mkdir()
    script = laptop.script("a b; touch pwned/it's $HOME.py", ARRIVED)
    (laptop.clone / "ignored.out").write_text("")
    (laptop.clone / "line\nbreak").write_text("")
    (laptop.clone / "LICENSE").unlink()
    nasty = [*NASTY, "$(touch pwned)", "; touch pwned", "`touch pwned`", "ä", "-"]
    secret = {"ALLOWED": "it's\n$(touch pwned) `touch pwned` \\n \\", "WANDB_API_KEY": "hunter2"}
    sent = laptop.submit(script, "secret", "--fetch", *nasty, **secret)
    assert sent.returncode == 0, sent.stdout + sent.stderr
    job = job_of(sent.stdout)
    arrived = json.loads(re.search("^ARRIVED (.*)$", laptop.log(job), re.M)[1])
    assert arrived["arguments"] == nasty
    assert arrived["environment"]["ALLOWED"] == secret["ALLOWED"]
    assert {"line\nbreak", "README.md", ".venv", "data"} < set(arrived["files"])
    assert not {"ignored.out", "LICENSE", ".git"} & set(arrived["files"])
    shown = laptop.cluster.exec("scontrol", "show", "job", job).stdout
    assert "Comment=it's secret" in shown
    assert "hunter2" not in laptop.log(job)
    [folder] = {path.parent for path in laptop.base.glob(f"*/*_{job}.out")}
    assert folder.stat().st_mode & 0o077 == 0
    assert not [*laptop.clone.parent.rglob("pwned"), *laptop.home.rglob("pwned")]
    fetched = laptop.clone / f"local/laptop/slurm-jobs/secret-{job}"
    names = sorted(path.name for path in fetched.iterdir())
    assert names == ["checkpoints", f"launch_slurm_to_torch.sh_{job}.out", "log"]


def test_from_this_machine(laptop):
    """The repository's own Slurmfile.toml as it is, on a login node; a secret stays here."""
    script = laptop.script("environment.py", "print(dict(os.environ), os.getcwd())")
    ours = (ROOM / "Slurmfile.toml").read_text()
    variables = laptop.environment(WANDB_API_KEY="hunter2", PATH=environment()["PATH"])
    command = [sys.executable, script, "--submit", "--env", "local", "--gpus-per-node=0"]
    with written(laptop.clone / "local/laptop/Slurmfile.toml", ours):
        done = laptop.cluster.exec(*command, cwd=laptop.clone, env=variables)
    assert done.returncode == 0, done.stderr
    job = laptop.cluster.wait(job_of(done.stdout))
    assert job.state == "COMPLETED", job.log
    folder = f"{laptop.clone}/local/laptop/slurm-jobs/environment-"
    assert folder in job.log and "hunter2" not in job.log


def test_failed_cancelled_and_refused(laptop):
    """The status of a job is that of --wait."""
    fails = laptop.script("fails.py", 'print("no luck"), sys.exit(3)')
    waits = laptop.start("sleeps.py", "plain", "--wait")
    job = job_of(read_until("Submitted", waits))
    laptop.cluster.exec("scancel", job)
    failed = laptop.submit(fails, "plain", "--wait")
    assert failed.returncode == 3 and "no luck\n" in failed.stdout and "FAILED" in failed.stderr
    assert "Welcome" not in failed.stdout
    said = waits.communicate(timeout=120)[1]
    assert waits.returncode != 0 and f"job {job}: CANCELLED" in said
    before = laptop.job_folders()
    slurmfile = laptop.clone / "local/laptop/Slurmfile.toml"
    with written(slurmfile, slurmfile.read_text().replace("time = 10", 'partition = "nope"')):
        refused = laptop.submit("sleeps.py", "plain")
    one_sentence(refused, "sbatch: error: ", "nvalid partition")
    assert laptop.job_folders() == before


# --- connections ---


def test_a_connection_that_breaks(laptop):
    """The job is not affected, and every line of its log comes once."""
    lines = "".join(f"line {i}\n" for i in range(1, 13))
    count = "for i in range(1, 13): print(f'line {i}', flush=True), time.sleep(0.5)"
    follows = laptop.start(laptop.script("counts.py", count), "plain", "--fetch")
    try:
        shown = read_until("line 3\n", follows)
        connection = f"nsenter .* -f {laptop.clone.parent}/sshd/sshd_config"
        [pid] = run("pgrep", "--full", connection).stdout.split()
        os.kill(int(pid), signal.SIGKILL)
        # communicate() would lose what readline has buffered.
        shown += follows.stdout.read()
        said = follows.stderr.read()
        assert follows.wait(timeout=60) == 0, shown + said
    finally:
        follows.kill()
        follows.wait()
    assert "trying again" in said and "COMPLETED" in said
    job = job_of(shown)
    assert f"\n{lines}Fetched " in shown
    [log] = (laptop.clone / f"local/laptop/slurm-jobs/plain-{job}").glob("*.out")
    assert log.read_text().endswith(lines)


def test_a_changed_host_key_is_refused(laptop):
    known, before = laptop.clone.parent / "sshd/known_hosts", laptop.job_folders()
    other = known.with_name("user_key.pub").read_text().split()[1]
    with written(known, changed := known.read_text().replace(known.read_text().split()[2], other)):
        refused = laptop.submit("sleeps.py", "plain")
        one_sentence(refused, "no connection to the cluster")
        assert "Host key verification failed" in refused.stderr and known.read_text() == changed
    assert laptop.job_folders() == before


def test_what_cannot_be_submitted_leaves_nothing(laptop):
    """No sbatch there, and an archive that is cut short, or that lacks its last file."""
    tools = stand_ins(laptop.clone.parent / "without", {"sh": f'exec {shutil.which("sh")} "$@"'})
    with written(laptop.clone.parent / "there/.bashrc", f"PATH={tools}\n"):
        one_sentence(laptop.submit("sleeps.py", "plain"), "no sbatch in the PATH")

    before = laptop.job_folders()
    whole = subprocess.run(["git", "archive", "HEAD"], cwd=laptop.clone, capture_output=True).stdout
    submit = ["submit", laptop.base, "cut-short", "", 0, 0, "sbatch", "env.sh"]
    for sent in (whole[: len(whole) // 2], whole):
        (laptop.home / "sent").write_bytes(sent)
        with (laptop.home / "sent").open() as stdin:
            done = laptop.cluster.exec("sh", ROOM / "remote.sh", *submit, stdin=stdin)
        assert done.returncode == 1 and "it is removed" in done.stderr, done.stderr
    assert laptop.job_folders() == before


SBATCH = """echo "Welcome to the cluster"
until echo weights >best.pt; [[ best.pt -nt .submission ]]; do :; done
touch --date=2001-01-01 best.pt
echo "7;theirs\""""


def test_what_a_job_has_written(tmp_path, monkeypatch):
    """Is fetched, also if it has an old date, as after cp -p or tar -x. The code is not. And sbatch
    is a site's own, which prints a banner."""
    path = stand_ins(tmp_path / "tools", {"sbatch": SBATCH, "scontrol": 'echo "   StdOut=/log"'})
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    cluster = {"backend": "local"}
    with (tmp_path / "sent").open("w+b") as sent:
        submission.pack(sent, ["env.sh"], [])
        sent.seek(0)
        command = ["submit", tmp_path / "jobs", "x", "", 0, 0, "sbatch", "env.sh"]
        job, folder, log = submission.send(cluster, command, sent)
    assert (job, log) == (7, "/log") and (Path(folder) / "env.sh").exists()
    submission.fetch(cluster, folder, tmp_path / "ours-7")
    assert [path.name for path in (tmp_path / "ours-7").iterdir()] == ["best.pt"]


def test_fetch_of_a_job_that_still_runs(tmp_path, monkeypatch):
    """Its log grows while tar reads it. What tar cannot read is an error."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / ".submission").touch()
    time.sleep(0.05)  # the clock of a file system has ticks
    (folder / "log").write_bytes(bytes(1 << 20))
    (folder / "best.pt").write_text("weights")
    os.link(folder / "best.pt", folder / "last.pt")
    extract = tarfile.TarFile.extract

    def while_it_grows(*arguments, **options):
        with (folder / "log").open("ab") as log:
            log.write(b"more")
        extract(*arguments, **options)

    monkeypatch.setattr(tarfile.TarFile, "extract", while_it_grows)
    cluster = {"backend": "local"}
    submission.fetch(cluster, folder, tmp_path / "ours-7")
    names = sorted(path.name for path in (tmp_path / "ours-7").iterdir())
    assert names == ["best.pt", "last.pt", "log"]
    assert (tmp_path / "ours-7/last.pt").read_text() == "weights"

    tools = stand_ins(tmp_path / "tools", {"tar": f'{shutil.which("tar")} "$@"; exit 2'})
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    with pytest.raises(submission.RemoteFailed):
        submission.fetch(cluster, folder, tmp_path / "ours-7")


def test_the_command_line_of_ssh():
    """Each key of the Slurmfile has its option, and the login node gets words as they are."""
    given = {"hostname": "login", "username": "me", "port": 2222, "identity_file": "~/.ssh/k"}
    assert given.keys() == submission.KEYS["backend_config"].keys()
    cluster = {"backend": "ssh", "backend_config": given}
    ssh, *options, host, command = submission.command_line(cluster, "wait_for", 7, "it's $HOME")
    assert ssh == "ssh" and host == "login"
    silent = {"-oServerAliveInterval=5", "-oServerAliveCountMax=3", "-oBatchMode=yes"}
    assert silent < set(options), "a connection that is gone ends"
    assert options[-7:] == ["-l", "me", "-p", "2222", "-i", "~/.ssh/k", "--"]
    assert shlex.split(command)[-4:] == ["remote.sh", "wait_for", "7", "it's $HOME"]


def test_a_log_that_becomes_shorter(tmp_path):
    """As a requeued job's can. Slurm is asked after 15 calls of sleep."""
    (tmp_path / "log").write_text("a long line of the first start\n")
    ended = "echo >>asked; [[ ! -e slept-14 ]] && echo RUNNING"
    ended += ' || echo "COMPLETED (None) on n1, run time 9"'
    sleep = "n=$(ls slept-* | wc -l); touch slept-$n; if ((n == 0)); then echo second >log; fi"
    path = stand_ins(tmp_path / "tools", {"squeue": ended, "sleep": sleep})
    env = environment(PATH=f"{path}:/usr/bin:/bin")
    command = ["sh", ROOM / "remote.sh", "wait_for", 7, "log", 0]
    done = run(*command, cwd=tmp_path, env=env)
    lines = ["remote.sh is ready", "a long line of the first start", "second"]
    assert done.returncode == 0 and done.stdout.splitlines() == lines, done
    assert (tmp_path / "asked").read_text() == "\n\n"


LOST = "no connection to the cluster; a submitted job is not affected"
ENDS = [
    (submission.RemoteFailed(255, True), LOST),
    (submission.RemoteFailed(-9, True), LOST),
    (submission.RemoteFailed(1, False), "remote.sh did not start there: is the login shell csh?"),
    (submission.RemoteFailed(3, True), 3),
    (OSError("no ssh here"), "no ssh here"),
    (KeyboardInterrupt(), 130),
]


@pytest.mark.parametrize(("error", "end"), ENDS, ids=[repr(error) for error, _ in ENDS])
def test_what_can_happen_to_anybody(error, end, capsys):
    def fails():
        raise error

    try:
        assert submission.without_traceback(fails) == end
        said = "interrupted; a submitted job continues\n" if end == 130 else ""
        assert capsys.readouterr().err == said
    except SystemExit as ended:
        assert str(ended.code).endswith(str(end))


@pytest.mark.parametrize(("exit_code", "status"), [("3:0", 3), ("0:9", 1), ("255:0", 1)])
def test_the_status_of_a_job(exit_code, status, tmp_path):
    """255 would be that of a lost connection, which is tried again."""
    said = {"squeue": 'echo "FAILED (None) on n1, run time 9"'}
    said["scontrol"] = f'echo "   Requeue=0 Restarts=0 ExitCode={exit_code}"'
    path = stand_ins(tmp_path / "tools", said)
    command = ["sh", ROOM / "remote.sh", "wait_for", 7, "log", 0]
    done = run(*command, cwd=tmp_path, env=environment(PATH=f"{path}:/usr/bin:/bin"))
    assert done.returncode == status, done


OVER = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED"


@pytest.mark.parametrize("state", [*OVER.split(), "TIMEOUT", "slurm: Invalid job id specified"])
def test_each_state_in_which_a_wait_ends(state, tmp_path):
    """And not when the state is a part of a reason."""
    reason = f"Dependency{state.partition(':')[0]}"
    waits = f'echo "PENDING ({reason}) on , run time 0"; touch looked'
    said = {"squeue": f'[ -e looked ] && echo "{state}" || {{ {waits}; }}'}
    said |= {"scontrol": "true", "sleep": "true"}
    path = stand_ins(tmp_path / "tools", said)
    command = ["sh", ROOM / "remote.sh", "wait_for", 7, "log", 0]
    done = run(*command, cwd=tmp_path, env=environment(PATH=f"{path}:/usr/bin:/bin"), timeout=30)
    assert done.returncode == (state != "COMPLETED"), done
    shown = [f"job 7: PENDING ({reason}), run time 0", f"job 7: {state}"]
    assert done.stderr.splitlines()[-2:] == shown


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/tmp/out", "link"])
def test_a_cluster_writes_nowhere_else(name, tmp_path, monkeypatch):
    """Whatever its archive holds."""
    made = tarfile.TarInfo(name)
    made.type = tarfile.SYMTYPE if name == "link" else tarfile.REGTYPE
    sent = io.BytesIO()
    with tarfile.open(fileobj=sent, mode="w") as archive:
        archive.addfile(made)
    sent.seek(0)
    monkeypatch.setattr(submission, "remote", lambda *_: contextlib.nullcontext(sent))
    with pytest.raises(SystemExit, match="which is not a file of the job"):
        submission.fetch({}, "f", tmp_path / "plain-7")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("started", [True, False])
def test_a_job_of_hours(started, monkeypatch):
    """Each connection that was there gives the next one 300 s. The first one has to come about."""
    begun = []

    @contextlib.contextmanager
    def connection(cluster, verb, job, log, position):
        begun.append(position)
        yield io.BytesIO(b"line\n" * started)
        if len(begun) <= 3:
            raise submission.RemoteFailed(255, started)

    monkeypatch.setattr(submission, "remote", connection)
    monkeypatch.setattr(submission.time, "monotonic", lambda: 3000 * len(begun))
    monkeypatch.setattr(submission.time, "sleep", lambda seconds: None)
    with contextlib.nullcontext() if started else pytest.raises(submission.RemoteFailed):
        assert submission.wait({}, 7, "log") == 0
    assert begun == ([0, 5, 10, 15] if started else [0])


# --- tasks ---


@pytest.fixture(scope="module")
def own(laptop) -> str:
    """A task in a folder of its own."""
    (laptop.clone / "mine/deep").mkdir(parents=True)
    shutil.copy(REPOSITORY / "tests/scripts/context.py", laptop.clone / "mine/deep/own.py")
    return "mine/deep/own.py"


def test_a_task_that_is_no_job(laptop, own):
    here = laptop.run("python", own)
    assert here.returncode == 0 and here.stdout == "returned None\n", here.stderr


OTHERS = ["--nodes=1", "--ntasks-per-node=3"]


@pytest.mark.parametrize(("options", "nodes", "size"), [([], 2, 4), (OTHERS, 1, 3)])
def test_context_of_a_task(laptop, own, options, nodes, size):
    """With its resources and with others, from a folder of its own."""
    command = f"cd {Path(own).parent}; python {Path(own).name} --submit --env plain --wait"
    command = ["bash", "-c", f'{command} "$@"', "-", *options, *NASTY]
    done = laptop.run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    job = job_of(done.stdout)
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


def trained_plainly(folder: Path) -> tuple[dict[tuple[int, int], float], float, float]:
    """Of two epochs of five steps, in a loop as one writes it: the losses that the task logs by
    epoch and step, and of the test images the loss and the accuracy."""
    train_set, test_set = mnist.load(folder)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), {}
    for epoch in (1, 2):
        order = torch.randperm(300, generator=torch.Generator().manual_seed(epoch))
        for step, batch in enumerate(order.split(60), start=1):
            images, labels = train_set[batch]
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[epoch, step] = loss.item()
    images, labels = test_set[:]
    logits = model(images)
    right = (logits.argmax(1) == labels).float().mean().item()
    logged = {place: loss for place, loss in losses.items() if place[1] in (2, 4, 5)}
    return logged, cross_entropy(logits, labels).item(), right


@pytest.mark.long
def test_ranks_of_the_task_train_together(tiny):
    """One rank, and two, train the model of a plain loop, up to rounding."""
    command = [TASK, "--data-dir", tiny, "--batch-size", 60, "--epochs", 2, "--device", "cpu"]
    losses, test_loss, accuracy = trained_plainly(tiny)
    for count in (0, 2):
        log = ranks(count, *command, "--log-every", 2).stdout
        found = re.findall(r"^epoch=(\d) step=(\d)/5 loss=(\S+)$", log, re.M)
        logged = {(int(epoch), int(step)): float(loss) for epoch, step, loss in found}
        assert logged == pytest.approx(losses, rel=1e-4), log
        end = re.search(r"^Finished: test_loss=(\S+) test_accuracy=(\S+)$", log, re.M)
        assert float(end[1]) == pytest.approx(test_loss, rel=1e-4) and end[2] == f"{accuracy:.4f}"


def test_what_json_lacks_in_a_result(tmp_path):
    """Is text, and no error at the end of a training."""
    result = {(0, 1): float("nan"), "a": (1, None, True, 0.5), 2: [Path("x"), float("inf")]}
    slurm_task.write_result(result, tmp_path)

    def refuse(word: str):
        raise ValueError(f"{word} is no JSON")

    written = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert written == {"(0, 1)": "nan", "a": [1, None, True, 0.5], "2": ["x", "inf"]}


def test_tasks_without_a_launcher():
    four = environment(SLURM_JOB_ID=7, SLURM_STEP_NUM_TASKS=4)
    one_sentence(run(sys.executable, TASK, env=four), "srun started 4 tasks, and each would")


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Without a cluster."""
    folder = copy_of_repository(tmp_path_factory.mktemp("tasks") / "clone")
    host("git", "-C", folder, "init", "-q")
    return folder


# What a task asks for, the Slurmfile and the command line; what sbatch gets, or why nothing.
ASKED = [
    ("ntasks_per_node=2", "", [], "-per-node=2 --gpus-per-node=2 launch_slurm_to_torch.sh "),
    ("nodes='2', exclusive=True", "", ["--nodes=3"], " --nodes=3 --ntasks-per-node=1 --exclusive "),
    ("ntasks_per_node=3", "gpus_per_node = 3", [], " --gpus-per-node=3 "),
    ("nodes=1", "gpus-per-node = 0", [], " --gpus-per-node=0 "),
    ("nodes=1", "gpus_per_node = 3", ["--gpus-per-node=0"], " --gpus-per-node=0 "),
    ("ntasks_per_node=4, gpus_per_node='a100:4'", "", [], " --gpus-per-node=a100:4 "),
    ("nodes=1", "gpus_per_node = 3", [], "3 GPUs on a node.*: write gpus_per_node=1 or"),
    ("nodes='1-2'", "", [], "--nodes: '1-2' is not a whole number"),
    ("nodes=1, array='1-3'", "", [], "--array=1-3 cannot be used here"),
]


@pytest.mark.parametrize(("numbers", "settings", "options", "expected"), ASKED)
def test_what_a_task_asks_for(numbers, settings, options, expected, clone):
    cluster = 'backend = "local"\njob_base_dir = "x"'
    text = f"[ours.cluster]\n{cluster}\n[ours.submit]\n{settings}\n"
    (clone / "local/laptop/Slurmfile.toml").write_text(text)
    (clone / "mine.py").write_text(SCRIPT.format("...").replace("nodes=1", numbers))
    command = ["mine.py", "--submit", "--env=ours", "--dry-run", *options]
    done = run(sys.executable, *command, cwd=clone)
    assert re.search(expected, done.stdout + done.stderr), done.stdout + done.stderr
    assert "Traceback" not in done.stderr and not (clone / "local/laptop/x").exists(), "a dry run"


# --- mistakes ---


def test_mistakes_before_anything_is_sent(laptop, tmp_path):
    (laptop.clone / "lab.py").write_text(SCRIPT.format("..."))
    for status, command, sentence in (
        (2, ["sleeps.py", "--submit"], "--submit needs --env NAME"),
        (1, ["sleeps.py", "--submit", "--env", "nope"], "it has plain, secret"),
        (1, ["lab.py", "--submit", "--env", "plain"], "lab.py would not be copied"),
        (1, ["sleeps.py", "--submit", "--env", "secret"], "ALLOWED is listed in "),
    ):
        one_sentence(laptop.run("python", *command), sentence, status=status)


ONE = SLURMFILE.format(name="plain", base="/jobs", environment="")
HOST = 'hostname = "login"'


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (HOST, 'hostnam = "login"', "has no key 'hostnam'; its keys are hostname, username, "),
        ("[plain.", 'plain = "x"\n[other.', "x.toml: plain must be a table, not 'x'"),
        (HOST, 'port = "22"', "port must be a whole number, not '22'"),
        (HOST, "", "[plain.cluster.backend_config] needs hostname, the login node"),
        ("job_base_dir", "#", "[plain.cluster] needs job_base_dir, the folder for the jobs' fold"),
        ("[plain.", "[other.", "no environment 'plain' in {path}; it has other"),
        (ONE, "", "no environment 'plain' in {path}; it has none"),
        ("[plain.submit]", "[plain.submti]", "[plain] has no key 'submti'"),
        ('backend = "ssh"', 'backend = "shh"', 'needs backend = "ssh" or "local"'),
        ("environment = []", 'environment = "X"', "environment must be a list of strings"),
        ("[plain.cluster]", "# für uns\n[plain.cluster]", "x.toml is not read: 'utf-8' codec"),
        ("[plain.cluster]", "[plain", "is not read: Expected ']' at the end of a table"),
        ("link =", 'type = "container"\nimage = "me/x"\nlink =', "needs image, with its registry"),
    ],
)
def test_faults_of_a_slurmfile(old, new, sentence, tmp_path, monkeypatch):
    assert old in ONE
    monkeypatch.setattr(submission, "SLURMFILE", tmp_path / "x.toml")
    (tmp_path / "x.toml").write_text(ONE.replace(old, new), "latin-1")
    with pytest.raises(SystemExit) as ended:
        submission.read_slurmfile("plain")
    sentence = sentence.format(path=tmp_path / "x.toml")
    assert sentence in ended.value.code and "\n" not in ended.value.code, ended.value.code


# --- an image ---

CANNOT_BUILD = """[ "$1" = build ] || exit 0
echo what went wrong
exit 7"""
BOXED = """
[boxed.cluster]
backend = "local"
job_base_dir = "jobs"
environment = ["ENROOT_STAND_IN"]
[boxed.packaging]
type = "container"
image = "registry.example.org/me/torch:1"
build_args = ["BASE=debian:bookworm"]
[boxed.submit]
gpus_per_node = 0
"""


@pytest.fixture
def packed(clone, tmp_path):
    """train.py in a copy of the repository, with an image to build."""
    (clone / "local/laptop/Slurmfile.toml").write_text(BOXED)

    def submit(*options: object, **programs: str):
        tools = stand_ins(tmp_path / "tools", programs)
        (tools / "enroot").symlink_to(REPOSITORY / "tests/scripts/stand-ins/bin/enroot")
        path = f"{tools}:/usr/bin:/bin"
        env = environment(PATH=path, ENROOT_STAND_IN=tmp_path)
        command = [sys.executable, TASK, "--submit", "--env=boxed", *options]
        return run(*command, cwd=clone, env=env)

    return submit


def test_an_image_is_built_pushed_and_imported(packed, clone, tmp_path):
    """And the launcher is the one that runs in it."""
    shown = packed("--dry-run", "--epochs", 2, docker="").stdout.splitlines()
    build = "docker build --force-rm --tag registry.example.org/me/torch:1 --build-arg BASE="
    assert shown[0].startswith(build) and shown[1] == "docker push registry.example.org/me/torch:1"
    uri = "docker://registry.example.org#me/torch:1"
    assert shown[3] == f"./aux/import_image.sh '{uri}' pytorch.sqsh"
    assert shown[4].endswith(f" run_script.sh {TASK} --epochs 2")
    shutil.rmtree(tmp_path / "tools")
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry/registry.example.org+me+torch:1").write_text("an image")
    done = packed(docker="", sbatch="echo 7", scontrol="")
    assert done.returncode == 0, done.stderr
    [file] = (clone / "local/laptop/jobs").glob("*/pytorch.sqsh")
    assert file.read_text() == "an image"
    shutil.rmtree(clone / "local/laptop/jobs")


def test_a_build_that_fails(packed, clone, tmp_path):
    failed = packed(docker=CANNOT_BUILD)
    one_sentence(failed, "no container image: docker build ended with 7")
    assert "what went wrong" in failed.stderr and not (clone / "local/laptop/jobs").exists()
