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
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import LAUNCHERS, NAMESPACES, REPOSITORY, environment, ranks, run, stand_ins
from submission import jobs, remote, slurmfile
from test_launchers import NASTY
from test_readme import CHAPTERS, HOME, assert_shown, copy_of_repository, steps

SUBMIT = [sys.executable, "aux/submit.py"]
TASK = "distributed/train_task.py"
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

    def submit(self, *arguments: object, timeout: float = 120, **variables: object):
        return self.run(*SUBMIT, *arguments, timeout=timeout, **variables)

    def start(self, *arguments: object) -> subprocess.Popen:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = {"env": self.environment(), "cwd": self.clone, "text": True}
        return subprocess.Popen([*SUBMIT, *arguments], start_new_session=True, **pipes, **options)

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
SetEnv SLURM_CONF=/run/slurm-cluster-{1}/inside/slurm.conf
"""
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
    files = {"shadow": shadow, "passwd": passwd, "sshd_config": SSHD.format(folder, name)}
    for file, text in files.items():
        (folder / file).write_text(text)
    script = f"mount --bind {folder}/shadow /etc/shadow; mount --bind {folder}/passwd /etc/passwd; "
    script += f"exec /usr/sbin/sshd -i -E {folder}/log -f {folder}/sshd_config"
    connect = f"CLUSTER={name} SUDO_UID= exec {NAMESPACES} exec unshare --mount sh -euc '{script}'"
    stand_ins(folder / "bin", {"connect": connect})


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
    (clone / "sleep.sh").write_text("#!/bin/bash\nexec sleep 600\n")
    (clone / "Slurmfile.toml").write_text(SLURMFILE.format(base=base))
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
    yield Laptop(cluster, home, clone, base, f"{Path(sys.executable).parent}:{tools}")
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


def test_chapter(laptop):
    """Its blocks as they stand, with the repository's own Slurmfile.toml; the login node is an
    alias of ours. In the last one its key is unknown."""
    known = laptop.clone.parent / "sshd/known_hosts"
    ours = (REPOSITORY / "Slurmfile.toml").read_text()
    with written(laptop.clone / "Slurmfile.toml", ours), written(known, known.read_text()):
        for language, commands, shown in steps(CHAPTERS["laptop"]):
            if language == "console":
                known.write_text("")
            script = f"exec 2>&1; {commands}"
            done = laptop.run("bash", "-euo", "pipefail", "-c", script, timeout=400)
            assert done.returncode == (language == "console"), done.stdout
            assert_shown(shown, as_on_the_page(done.stdout, laptop))


ARRIVED = """
import json, os, sys
given = {"arguments": sys.argv[1:], "environment": dict(os.environ), "files": os.listdir()}
print("ARRIVED", json.dumps(given))
"""


def test_what_arrives(laptop):
    """All that was named, unchanged; nothing else. What the job has written comes back."""
    script = laptop.clone / "a b; touch pwned/it's $HOME.py"
    script.parent.mkdir()
    script.write_text(ARRIVED)
    (laptop.clone / "ignored.out").write_text("")
    (laptop.clone / "line\nbreak").write_text("")
    (laptop.clone / "LICENSE").unlink()
    nasty = [*NASTY, "$(touch pwned)", "; touch pwned", "`touch pwned`", "ä", "--follow", "-"]
    secret = {"ALLOWED": "it's\n$(touch pwned) `touch pwned` \\n \\", "WANDB_API_KEY": "hunter2"}
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
    [folder] = {path.parent for path in laptop.base.glob(f"*/*_{job}.out")}
    assert folder.stat().st_mode & 0o077 == 0
    assert not [*laptop.clone.parent.rglob("pwned"), *laptop.home.rglob("pwned")]
    assert laptop.submit("fetch", job).returncode == 0
    fetched = laptop.clone / f"slurm-jobs/secret-{job}"
    names = sorted(path.name for path in fetched.iterdir())
    assert names == [f"launch_slurm_to_torch.sh_{job}.out", "log"]


def test_from_this_machine(laptop):
    """The repository's own Slurmfile.toml as it is, on a login node; a secret stays here."""
    (laptop.clone / "environment.sh").write_text("#!/bin/bash\nenv; pwd; git --version\n")
    ours = (REPOSITORY / "Slurmfile.toml").read_text()
    variables = laptop.environment(WANDB_API_KEY="hunter2", PATH=environment()["PATH"])
    command = [*SUBMIT, "--env", "local", "--nodes=1", "environment.sh"]
    with written(laptop.clone / "Slurmfile.toml", ours):
        done = laptop.cluster.exec(*command, cwd=laptop.clone, env=variables)
    assert done.returncode == 0, done.stderr
    job = laptop.cluster.wait(job_of(done.stdout))
    assert job.state == "COMPLETED", job.log
    assert f"{laptop.clone}/slurm-jobs/environment-" in job.log and "hunter2" not in job.log


def test_failed_cancelled_and_refused(laptop):
    """The status of a job is that of --follow or --wait."""
    (laptop.clone / "fail.sh").write_text("#!/bin/bash\necho no luck\nexit 3\n")
    waits = laptop.start("--env", "plain", "--wait", "sleep.sh")
    job = job_of(read_until("Submitted", waits))
    cancelled = laptop.submit("cancel", job)
    assert cancelled.returncode == 0, cancelled.stderr
    failed = laptop.submit("--env", "plain", "--follow", "fail.sh")
    assert failed.returncode == 3 and "no luck\n" in failed.stdout and "FAILED" in failed.stderr
    assert "Welcome" not in failed.stdout
    said = waits.communicate(timeout=120)[1]
    assert waits.returncode == 1 and f"job {job}: CANCELLED" in said
    assert "CANCELLED" in laptop.submit("status", job).stdout
    before = laptop.job_folders()
    refused = laptop.submit("--env", "plain", "--partition=nope", "sleep.sh")
    one_sentence(refused, "sbatch: error: ", "nvalid partition")
    assert laptop.job_folders() == before


# --- connections ---


def test_a_connection_that_breaks(laptop):
    """The job is not affected, and every line of its log comes once."""
    count = "for i in {1..12}; do echo line $i; sleep 0.5; done"
    lines = "".join(f"line {i}\n" for i in range(1, 13))
    (laptop.clone / "count.sh").write_text(f"#!/bin/bash\n{count}\n")
    follows = laptop.start("--env=plain", "--follow", "--fetch", "count.sh")
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
    assert f"\n{lines}Fetched 1 files of job {job} " in shown
    assert laptop.submit("logs", job).stdout == lines
    fetched = laptop.clone / f"slurm-jobs/plain-{job}"
    assert [path.read_text() for path in fetched.iterdir()] == [lines]


def test_a_changed_host_key_is_refused(laptop):
    known, before = laptop.clone.parent / "sshd/known_hosts", laptop.job_folders()
    other = known.with_name("user_key.pub").read_text().split()[1]
    with written(known, changed := known.read_text().replace(known.read_text().split()[2], other)):
        refused = laptop.submit("--env", "plain", "sleep.sh")
        one_sentence(refused, "no connection to the cluster")
        assert "Host key verification failed" in refused.stderr and known.read_text() == changed
    assert laptop.job_folders() == before


def test_what_cannot_be_submitted_leaves_nothing(laptop):
    """No sbatch there, and an archive that is cut short, or that lacks its last file."""
    tools = stand_ins(laptop.clone.parent / "without", {"sh": f'exec {shutil.which("sh")} "$@"'})
    with written(laptop.clone.parent / "there/.bashrc", f"PATH={tools}\n"):
        one_sentence(laptop.submit("--env", "plain", "sleep.sh"), "no sbatch in the PATH")

    before = laptop.job_folders()
    whole = subprocess.run(["git", "archive", "HEAD"], cwd=laptop.clone, capture_output=True).stdout
    submit = ["submit", laptop.base, "cut-short", ".", "", 0, 0, "sbatch", "sleep.sh"]
    for sent in (whole[: len(whole) // 2], whole):
        (laptop.home / "sent").write_bytes(sent)
        with (laptop.home / "sent").open() as stdin:
            done = laptop.cluster.exec("sh", "aux/submission/remote.sh", *submit, stdin=stdin)
        assert done.returncode == 1 and "it is removed" in done.stderr, done.stderr
    assert laptop.job_folders() == before


def test_fetch_of_a_job_that_still_runs(tmp_path, monkeypatch):
    """Its log grows while tar reads it. What tar cannot read is an error."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / ".submission").touch()
    os.utime(folder / ".submission", (0, 0))
    (folder / "log").write_bytes(bytes(1 << 20))
    (folder / "best.pt").write_text("weights")
    os.link(folder / "best.pt", folder / "last.pt")
    extract = tarfile.TarFile.extract

    def while_it_grows(*arguments, **options):
        with (folder / "log").open("ab") as log:
            log.write(b"more")
        extract(*arguments, **options)

    monkeypatch.setattr(tarfile.TarFile, "extract", while_it_grows)
    record = {"job": 7, "cluster": {"backend": "local"}, "folder": folder}
    record["file"] = tmp_path / "ours-7.json"
    jobs.fetch(record)
    names = sorted(path.name for path in (tmp_path / "ours-7").iterdir())
    assert names == ["best.pt", "last.pt", "log"]
    assert (tmp_path / "ours-7/last.pt").read_text() == "weights"

    tools = stand_ins(tmp_path / "tools", {"tar": f'{shutil.which("tar")} "$@"; exit 2'})
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    with pytest.raises(remote.RemoteFailed):
        jobs.fetch(record)


def test_the_command_line_of_ssh():
    """Each key of the Slurmfile has its option, and the login node gets words as they are."""
    given = {"hostname": "login", "username": "me", "port": 2222, "identity_file": "~/.ssh/k"}
    assert given.keys() == slurmfile.KEYS["cluster"]["backend_config"].keys()
    cluster = {"backend": "ssh", "backend_config": given}
    ssh, *options, host, command = remote.command_line(cluster, "watch", 7, "it's $HOME")
    assert ssh == "ssh" and host == "login"
    silent = {"-oServerAliveInterval=5", "-oServerAliveCountMax=3", "-oBatchMode=yes"}
    assert silent < set(options), "a connection that is gone ends"
    assert options[-7:] == ["-l", "me", "-p", "2222", "-i", "~/.ssh/k", "--"]
    assert shlex.split(command)[-4:] == ["remote.sh", "watch", "7", "it's $HOME"]


def test_a_log_that_becomes_shorter(tmp_path):
    """As a requeued job's can. Slurm is asked after 15 calls of sleep."""
    (tmp_path / "log").write_text("a long line of the first start\n")
    ended = "echo >>asked; [[ ! -e slept-14 ]] && echo RUNNING"
    ended += ' || echo "COMPLETED (None) on n1, run time 9"'
    sleep = "n=$(ls slept-* | wc -l); touch slept-$n; if ((n == 0)); then echo second >log; fi"
    path = stand_ins(tmp_path / "tools", {"squeue": ended, "sleep": sleep})
    env = environment(PATH=f"{path}:/usr/bin:/bin")
    command = ["sh", REPOSITORY / "aux/submission/remote.sh", "watch", 7, "log", 0]
    done = run(*command, cwd=tmp_path, env=env)
    lines = ["remote.sh is ready", "a long line of the first start", "second"]
    assert done.returncode == 0 and done.stdout.splitlines() == lines, done
    assert (tmp_path / "asked").read_text() == "\n\n"


@pytest.mark.parametrize("name", ["../out", "a/../../out", "/tmp/out", "link"])
def test_a_cluster_writes_nowhere_else(name, tmp_path, monkeypatch):
    """Whatever its archive holds."""
    made = tarfile.TarInfo(name)
    made.type = tarfile.SYMTYPE if name == "link" else tarfile.REGTYPE
    sent = io.BytesIO()
    with tarfile.open(fileobj=sent, mode="w") as archive:
        archive.addfile(made)
    sent.seek(0)
    monkeypatch.setattr(jobs.remote, "run", lambda *_: contextlib.nullcontext(sent))
    record = {"file": str(tmp_path / "plain-7.json"), "cluster": {}, "folder": "f", "job": 7}
    with pytest.raises(SystemExit, match="which is not a file of the job"):
        jobs.fetch(record)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("started", [True, False])
def test_a_job_of_hours(started, monkeypatch):
    """Each connection that was there gives the next one 300 s. The first one has to come about."""
    begun, record = [], {"cluster": {}, "job": 7, "log": "log"}

    @contextlib.contextmanager
    def connection(cluster, verb, job, log, position):
        begun.append(position)
        yield io.BytesIO(b"line\n" * started)
        if len(begun) <= 3:
            raise remote.RemoteFailed(255, started)

    monkeypatch.setattr(remote, "run", connection)
    monkeypatch.setattr(jobs.time, "monotonic", lambda: 3000 * len(begun))
    monkeypatch.setattr(jobs.time, "sleep", lambda seconds: None)
    with contextlib.nullcontext() if started else pytest.raises(remote.RemoteFailed):
        assert jobs.watch(record, show_log=True) == 0
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
    elsewhere = "cd mine/deep && python own.py --submit --env plain"
    one_sentence(laptop.run("bash", "-c", elsewhere), "no env.sh in ", "/mine/deep: cd to the repo")


WITHOUT_GPUS = ["--nodes=1", "--ntasks-per-node=3", "--gpus-per-node=0"]


@pytest.mark.parametrize(("options", "nodes", "size"), [([], 2, 4), (WITHOUT_GPUS, 1, 3)])
def test_context_of_a_task(laptop, own, options, nodes, size):
    """Under both launchers a task can get, with its resources and with others."""
    job = laptop.complete("python", own, "--submit", "--env=plain", *options, *NASTY)
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


def test_ranks_of_the_task_train_together(tiny):
    """The model of one rank, up to rounding."""
    command = [TASK, "--data-dir", tiny, "--batch-size", 60, "--epochs", 2, "--device", "cpu"]
    done = [ranks(count, *command) for count in (0, 2)]
    one, two = (re.search("Finished: test_loss=(.*) test", each.stdout)[1] for each in done)
    assert float(two) == pytest.approx(float(one), rel=1e-4)


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
    ("nodes=2, ntasks=4", "", [], " --ntasks-per-node=2 "),
    ("nodes='2', exclusive=True", "", ["--nodes=3"], " --nodes=3 --exclusive "),
    ("nodes=1", "gpus_per_node = 3", [], " --gpus-per-node=3 "),
    ("nodes=1", "gpus_per_node = 3", [], " launch_slurm_with_torchrun.sh "),
    ("nodes=1", "gpus_per_node = 3", ["--gpus-per-node=0"], " --gpus-per-node=0 "),
    ("gpus_per_node='a100:4'", "", [], " launch_slurm_with_torchrun.sh "),
    ("nodes=2, ntasks=4, gpus_per_node=1", "", [], "1 GPUs on a node.*: write gpus_per_node=2 or"),
    ("nodes=2, ntasks=3", "", [], "3 tasks on 2 nodes, .*: write ntasks=4 or "),
    ("nodes='1-2'", "", [], "--nodes: '1-2' is not a whole number"),
    ("nodes=1, gres='gpu:2'", "", [], " --gres=gpu:2 --ntasks-per-node=1 launch_slurm_"),
]


@pytest.mark.parametrize(("numbers", "settings", "options", "expected"), ASKED)
def test_what_a_task_asks_for(numbers, settings, options, expected, clone):
    cluster = 'backend = "local"\njob_base_dir = "x"'
    text = f"[ours.cluster]\n{cluster}\n[ours.submit]\n{settings}\n"
    (clone / "Slurmfile.toml").write_text(text)
    code = f"from slurm_task import task\n@task({numbers})\ndef f(job=None): ...\nf()\n"
    (clone / "task.py").write_text(f"import sys\nsys.path.insert(0, 'aux')\n{code}")
    command = ["task.py", "--submit", "--env=ours", "--dry-run", *options]
    done = run(sys.executable, *command, cwd=clone)
    assert re.search(expected, done.stdout + done.stderr), done.stdout + done.stderr
    assert "Traceback" not in done.stderr and not (clone / "x").exists(), "a dry run"


# --- mistakes ---


def test_mistakes_before_anything_is_sent(laptop, tmp_path):
    (laptop.clone / "ignored.out").write_text("#!/bin/bash\n")
    plain = ["--env", "plain"]
    for status, command, sentence in (
        (2, ["sleep.sh"], "--env NAME is missing"),
        (2, plain, "which launcher?"),
        (1, [*plain, LAUNCHERS["spawn"], "nope.py"], "nope.py would not be copied: it is missing"),
        (2, [*plain, "--nodes", "2", "sleep.sh"], "no launcher 2: write --nodes=2"),
        (2, [*plain, "-N", "2", "sleep.sh"], "no launcher 2: write -N2"),
        (1, [*plain, "--array=1-3", "sleep.sh"], "--array=1-3 cannot be used here"),
        (1, [*plain, "-Mother", "sleep.sh"], "-Mother cannot be used here"),
        (1, ["--env", "nope", "sleep.sh"], "it has plain, secret"),
        (1, [*plain, "ignored.out"], "ignored.out would not be copied"),
        (1, ["--env", "secret", "sleep.sh"], "ALLOWED is listed in "),
        (1, ["status", 999999], "no job 999999"),
    ):
        one_sentence(laptop.submit(*command), "submit.py: ", sentence, status=status)
    shutil.copy(laptop.clone / "Slurmfile.toml", tmp_path)
    submit = [sys.executable, REPOSITORY / "aux/submit.py", *plain, "sleep.sh"]
    away = run(*submit, cwd=tmp_path, env=environment())
    one_sentence(away, "git, which lists the files to copy, failed")


HOST = 'hostname = "login"'


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (HOST, 'hostnam = "login"', "has no key 'hostnam'; its keys are hostname, username, "),
        (HOST, 'port = "22"', "port must be a whole number, not '22'"),
        (HOST, "", "[plain.cluster.backend_config] needs hostname"),
        ("[plain.submit]", "[plain.submti]", "[plain] has no key 'submti'"),
        ('backend = "ssh"', 'backend = "shh"', 'needs backend = "ssh" or "local"'),
        ('"{base}"', '"/jobs"\nenvironment = "X"', "environment must be a list of strings"),
        ("[default.cluster]", "[default", "is not TOML: Expected ']' at the end of a table"),
    ],
)
def test_faults_of_a_slurmfile(old, new, sentence, tmp_path):
    assert SLURMFILE.count(old) == 1
    (tmp_path / "x.toml").write_text(SLURMFILE.replace(old, new))
    with pytest.raises(SystemExit) as ended:
        slurmfile.read(tmp_path / "x.toml", "plain")
    assert sentence in ended.value.code and "\n" not in ended.value.code, ended.value.code
