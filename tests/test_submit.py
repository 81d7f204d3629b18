"""Submission from a laptop: a network namespace without Slurm. A real sshd on the cluster's
node-1, Slurm behind it."""

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
import tomllib

from conftest import LAUNCHERS, REPOSITORY, cells, environment, read_metrics, run
from test_launchers import NASTY
from test_readme import CHAPTERS, HOME, assert_shown, steps

SUBMIT = [sys.executable, "aux/submit.py"]
ADDRESS = "10.7.0.1"  # node-1's
SLEEP = "#!/bin/bash\necho asleep on $SLURMD_NODENAME\nexec sleep 600\n"


@dataclass
class Laptop:
    """Network and mount namespaces, held by a process; a home folder, a clone of the repository.
    No Slurm.

    `base` is job_base_dir, which the test sees because cluster and laptop are one machine;
    `sshd` is the server's pid.
    """

    cluster: object
    holder: int
    home: Path
    clone: Path
    base: Path
    sshd: int

    def command(self, *command: object) -> list[str]:
        return [
            "nsenter",
            f"--target={self.holder}",
            "--net",
            "--mount",
            f"--wdns={self.clone}",
            *map(str, command),
        ]

    def environment(self, **variables: object) -> dict[str, str]:
        return environment(HOME=self.home, OMP_NUM_THREADS=1, **variables)

    def run(
        self, *command: object, timeout: float = 120, **variables: object
    ) -> subprocess.CompletedProcess:
        return run(*self.command(*command), env=self.environment(**variables), timeout=timeout)

    def submit(
        self, *arguments: object, timeout: float = 120, **variables
    ) -> subprocess.CompletedProcess:
        return self.run(*SUBMIT, *arguments, timeout=timeout, **variables)

    def start(self, *arguments: object, **variables: object) -> subprocess.Popen:
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment(**variables),
            start_new_session=True,
            **pipes,
        )

    def job_folders(self) -> set[str]:
        return {path.name for path in self.base.iterdir()}


def job_of(shown: str) -> int:
    return int(re.search(r"^Submitted batch job (\d+) ", shown, re.M)[1])


def host(*command: object):
    done = run(*command)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def start_sshd(cluster, folder: Path, port: int, mounts: str) -> subprocess.Popen:
    """sshd on node-1, in a mount namespace of its own, with throw-away keys and nothing of this
    machine's settings."""
    folder.mkdir()
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host_key")
    shadow = re.sub(r"^root:[^:]*", "root:*", Path("/etc/shadow").read_text(), flags=re.M)
    (folder / "shadow").write_text(shadow)  # sshd lets no locked account in
    inside = f"/run/slurm-cluster-{cluster.environment['CLUSTER']}/inside"
    (folder / "sshd_config").write_text(
        f"Port {port}\n"
        f"HostKey {folder}/host_key\n"
        f"AuthorizedKeysFile {folder.parent}/user_key.pub\n"
        "PidFile none\n"
        "UsePAM no\n"
        "PermitRootLogin yes\n"
        "PasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\n"
        "StrictModes no\n"
        f"SetEnv SLURM_CONF={inside}/slurm.conf\n"
    )
    mounts = (
        f"mount --bind {folder}/shadow /etc/shadow\n"
        f"mount --bind {folder.parent}/passwd /etc/passwd\n"
        f"{mounts}"
    )
    script = f"{mounts}\nexec /usr/sbin/sshd -D -e -f {folder}/sshd_config"
    where = [
        REPOSITORY / "local/cluster/namespaces.sh",
        "exec",
        "unshare",
        "--mount",
        "sh",
        "-euc",
        script,
    ]
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        list(map(str, where)),
        env=environment(**cluster.environment),
        stdin=subprocess.DEVNULL,
        stderr=log,
    )
    deadline = time.monotonic() + 10
    while "Server listening" not in (said := (folder / "log").read_text()):
        assert process.poll() is None and time.monotonic() < deadline, (
            f"sshd does not start: {said}"
        )
        time.sleep(0.02)
    return process


def write_passwd(path: Path, home: Path):
    """root's home is where ssh looks for ~, whatever HOME says."""
    path.write_text(
        re.sub(
            r"^(root:.*):[^:]+:[^:]+$",
            rf"\1:{home}:/bin/bash",
            Path("/etc/passwd").read_text(),
            flags=re.M,
        )
    )


@pytest.fixture(scope="module")
def laptop(cluster, tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("laptop")
    clone, home, base = folder / "clone", folder / "home", folder / "the cluster's jobs"
    for path in (home / ".ssh", base / "data", folder / "full", folder / "there"):
        path.mkdir(parents=True)
    (folder / "there/jobs").symlink_to(base)
    (folder / "there/.bashrc").write_text("echo Welcome; echo Mind the step >&2\n")
    (base / ".venv").symlink_to(REPOSITORY / ".venv")
    (base / "data/mnist").symlink_to(tiny)
    files = subprocess.run(
        ["git", "ls-files", "-zco", "--exclude-standard"], cwd=REPOSITORY, capture_output=True
    )
    for path in filter(None, files.stdout.decode().split("\0")):
        (clone / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / path, clone / path)
    (clone / "data").symlink_to(base / "data")  # git ignores it, as in the repository
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qm", "x"],
    ):
        host("git", "-C", clone, *command)
    (clone / "sleep.sh").write_text(SLEEP)
    (clone / "Slurmfile.toml").write_text(
        f'[default.cluster]\nbackend = "ssh"\njob_base_dir = "{base}"\n'
        f'[default.packaging]\nlink = [".venv", "data"]\n'
        f'[default.cluster.backend_config]\nhostname = "login"\n'
        "[default.submit]\nnodes = 1\ntime = 10\n"
        '[production.cluster]\nenvironment = ["ALLOWED"]\n'
        '[plain.submit]\ncomment = "it\'s \\"plain\\""\n'
        "[unknown.cluster.backend_config]\nport = 2223\n"
        "[without.cluster.backend_config]\nport = 2223\n"
        f'[full.cluster]\njob_base_dir = "{folder}/full"\n'
        f'[far.cluster.backend_config]\nhostname = "10.7.200.1"\n'
    )
    user_key = folder / "sshd/user_key"
    user_key.parent.mkdir()
    host("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", user_key)
    (home / ".ssh/config").write_text(
        f"Host login login.example.org\n  HostName {ADDRESS}\n  Port 2222\n  IdentityFile "
        f"{user_key}\n"
    )
    write_passwd(folder / "passwd", home)
    write_passwd(folder / "sshd/passwd", folder / "there")
    hide = "".join(
        f"mount --bind /dev/null {path}\n"
        for tool in (
            "sbatch",
            "srun",
            "salloc",
            "scontrol",
            "squeue",
            "scancel",
            "sacct",
            "sinfo",
            "slurmctld",
            "slurmd",
        )
        if (path := shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin"))
    )
    made = not Path("/run/sshd").exists()
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
    servers = [
        start_sshd(
            cluster, folder / "sshd/login", 2222, f"mount -t tmpfs -o size=128k tmpfs {folder}/full"
        ),
        start_sshd(cluster, folder / "sshd/without", 2223, hide),
    ]
    script = f"mount --bind {folder}/passwd /etc/passwd\n{hide}\necho ready\nexec sleep infinity"
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-euc", script], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "ready\n"
    state = Path(f"/run/slurm-cluster-{cluster.environment['CLUSTER']}")
    router = f"--target={(state / 'machine.pid').read_text().strip()}"
    cable = (
        "laptop address 02:00:00:00:00:01 type veth peer name eth0 address 02:00:00:00:00:01 netns"
    )
    host("nsenter", router, "--net", "ip", "link", "add", *cable.split(), holder.pid)
    for command in (
        "link set laptop arp off up",
        "route add 10.7.255.254 dev laptop",
        "route add blackhole 10.7.200.1",
    ):
        host("nsenter", router, "--net", "ip", *command.split())
    for command in (
        "link set lo up",
        "link set eth0 arp off up",
        "address add 10.7.255.254/16 dev eth0",
    ):
        host("nsenter", f"--target={holder.pid}", "--net", "ip", *command.split())
    there = Laptop(cluster, holder.pid, home, clone, base, servers[0].pid)
    key = (folder / "sshd/login/host_key.pub").read_text()
    (home / ".ssh/known_hosts").write_text(f"[{ADDRESS}]:2222 {key}")
    yield there
    host("nsenter", router, "--net", "ip", "route", "delete", "blackhole", "10.7.200.1")
    for process in (holder, *servers):
        process.terminate()
        process.wait(timeout=10)
    if made:
        Path("/run/sshd").rmdir()


def sessions(laptop: Laptop) -> list[int]:
    """The server's processes that hold a connection each."""
    found = subprocess.run(
        ["pgrep", "--full", "sshd: root@notty"], capture_output=True, text=True
    ).stdout.split()
    return [int(pid) for pid in found if laptop.sshd in ancestors(int(pid))]


def ancestors(pid: int) -> list[int]:
    parent = subprocess.run(
        ["ps", "--no-headers", "-o", "ppid", str(pid)], capture_output=True, text=True
    ).stdout
    return [int(parent), *ancestors(int(parent))] if parent.strip() not in ("", "0") else []


def one_sentence(done: subprocess.CompletedProcess, *parts: str, status: int = 1) -> str:
    """The last line on stderr, which must have these parts; there is no traceback, and nothing
    was submitted."""
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "Submitted" not in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("submit.py: ") and all(part in last for part in parts), done.stderr
    return last


SCRIPT = "distributed/train_preemptible.py"
TRAIN = [SCRIPT, "--epochs", 2, "--log-every", 1]
TASK = "distributed/train_task.py"


@pytest.fixture(scope="module")
def by_hand(laptop) -> list[dict]:
    """The same training on the laptop itself."""
    arguments = ["--epochs", 2, "--log-every", 1, "--checkpoint-dir", "checkpoints/by-hand"]
    done = laptop.run("./torchrun.sh", SCRIPT, *arguments, NPROC_PER_NODE=2)
    assert done.returncode == 0, done.stderr
    return read_metrics(laptop.clone / "checkpoints/by-hand")


@pytest.fixture(scope="module")
def task_by_hand(laptop) -> str:
    """The output of the task on two ranks of the laptop itself."""
    done = laptop.run("./torchrun.sh", TASK, *TRAIN[1:], NPROC_PER_NODE=2)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def over_time(laptop) -> int:
    """A job that its time limit of a minute will end, submitted early and looked at last."""
    return job_of(laptop.submit("--env", "plain", "--time=1", "sleep.sh").stdout)


def losses(events: list[dict]) -> list[float]:
    return [event.get("loss", event.get("test_loss")) for event in events]


def printed_losses(log: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"\b(?:test_|average_)?loss=(\S+)", log)]


def test_the_laptop_has_no_slurm(laptop, over_time):
    for tool in ("sbatch", "scontrol", "squeue"):
        assert laptop.run("bash", "-c", f"{tool} --version").returncode == 126
    assert laptop.run("ssh", "login", "sbatch", "--version").returncode == 0


@pytest.mark.matrix
def test_training_over_connections_that_break(laptop, by_hand, task_by_hand):
    """The three launchers and the task, submitted in the same second; all connections are cut,
    no job is affected."""
    commands = {
        name: [*SUBMIT, "--env", "plain", "--gpus-per-node=2", LAUNCHERS[name], *TRAIN]
        for name in LAUNCHERS
    }
    commands["task"] = [sys.executable, TASK, "--submit", "--env=plain", *TRAIN[1:]]
    looks = {
        "srun": ["--follow", "--fetch"],
        "torchrun": ["--wait"],
        "spawn": ["--follow"],
        "task": ["--fetch", "--follow"],
    }
    started = {}
    try:
        for name, command in commands.items():
            started[name] = laptop.start(*command[:2], *looks[name], *command[2:])
        shown = {
            name: read_until("Submitted" if name == "torchrun" else " ranks on ", started[name])
            for name in commands
        }
        read_until("job ", started["torchrun"], "stderr")  # it looks after its job by now
        connections = sessions(laptop)
        assert len(connections) >= 4
        for pid in connections:
            os.kill(pid, signal.SIGKILL)
        for name, process in started.items():
            out, said = rest(process)
            assert process.returncode == 0, out + said
            assert "trying again" in said and "COMPLETED" in said
            shown[name] += out
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    ids = {name: job_of(out) for name, out in shown.items()}
    assert len(set(ids.values())) == 4

    assert "COMPLETED" in laptop.submit("status", ids["spawn"]).stdout
    assert laptop.submit("logs", ids["spawn"]).stdout in shown["spawn"]
    for name in ("spawn", "torchrun"):
        assert laptop.submit("fetch", ids[name]).returncode == 0
    for name, job in ids.items():
        fetched = laptop.clone / f"slurm-jobs/plain-{job}"
        (log,) = fetched.glob(f"*_{job}.out")
        assert log.read_text() in shown[name] or name == "torchrun", (
            "every line once, whatever has broken between"
        )
        results = fetched / f"checkpoints/{job}"
        if name == "task":
            assert printed_losses(log.read_text()) == pytest.approx(
                printed_losses(task_by_hand), abs=2e-4
            )
            result = json.loads((results / "result.json").read_text())
            assert result["test_loss"] == pytest.approx(printed_losses(task_by_hand)[-1], abs=2e-4)
            assert result["world_size"] == 2
            assert {path.name for path in results.glob("*.pt")} == {
                "checkpoint_epoch_1.pt",
                "checkpoint_epoch_2.pt",
            }
        else:
            assert f"accuracy={by_hand[-1]['test_accuracy']:.4f}" in log.read_text()
            assert losses(read_metrics(results)) == pytest.approx(losses(by_hand))
            assert list(results.glob("checkpoint_step_*.pt"))
    asked = laptop.cluster.show(ids["task"])
    assert "gpu:2" in asked["TresPerNode"], "@task asks for one GPU per task"


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


def read_until(word: str, process: subprocess.Popen, stream: str = "stdout") -> str:
    shown = ""
    while word not in shown:
        shown += (line := getattr(process, stream).readline())
        assert line, f"{shown}{process.stderr.read()}"
    return shown


def test_task_here(laptop, task_by_hand):
    """One process has nearly the losses of two ranks (their dropout differs), and makes no
    checkpoints."""
    alone = laptop.run("python", TASK, *TRAIN[1:])
    assert alone.returncode == 0 and re.search(
        r"^Finished: average_loss=\S+ accuracy=\S+$", alone.stdout, re.M
    )
    assert len(printed_losses(alone.stdout)) == len(printed_losses(task_by_hand)) == 2 * (4 + 1) + 1
    assert printed_losses(alone.stdout)[0] == pytest.approx(
        printed_losses(task_by_hand)[0], rel=0.05
    )
    assert not list((laptop.clone / "checkpoints").rglob("checkpoint_epoch_*"))
    options = [*TRAIN[1:], "--learning-rate", 0.001, "--seed", 7, "--precision", "bf16"]
    other = laptop.run("python", TASK, *options)
    assert (
        other.returncode == 0
        and printed_losses(other.stdout)[-1] > printed_losses(alone.stdout)[-1]
    ), other.stderr
    first = [printed_losses(done.stdout)[0] for done in (alone, other)]
    assert first[0] != pytest.approx(first[1], rel=1e-3), "of other weights"


CANNOT_TRAIN = [
    (["--batch-size", 33], "--batch-size 33 does not divide by 2 ranks"),
    (["--batch-size", 3000], "--batch-size 3000 is more than the 300 training images"),
    (["--data-dir", "nowhere"], "no MNIST data in nowhere"),
    (["--learning-rate", 1e6, "--log-every", 1], "the loss is "),
    (["--device", "cuda"], "sees none: look at nvidia-smi"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    cells(CANNOT_TRAIN, CANNOT_TRAIN[0], *CANNOT_TRAIN[3:]),
    ids=lambda value: None if isinstance(value, list) else value,
)
def test_a_task_that_cannot_train(laptop, arguments, sentence):
    done = laptop.run("./torchrun.sh", TASK, *arguments, NPROC_PER_NODE=2)
    assert done.returncode == 1
    said = re.findall(r"^train_task.py: rank \d: (.*)$", done.stderr, re.M)
    assert said and all(sentence in one for one in said), done.stderr
    assert "File " + '"' + "distributed" not in done.stderr


def test_granted_gpus_that_torch_does_not_see(laptop):
    done = laptop.run("python", TASK, SLURM_GPUS_ON_NODE=2)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert (
        "Slurm granted 2 GPUs on this node, but torch " in done.stderr
        and "--device cpu" in done.stderr
    )
    assert (
        laptop.run(
            "python", TASK, "--epochs", 1, SLURM_GPUS_ON_NODE=2, TRAIN_DEVICE="cpu"
        ).returncode
        == 0
    )


def test_tasks_without_a_launcher(cluster, tiny):
    """Several are refused, by a sentence; one alone trains."""
    done = cluster.exec("srun", "--ntasks=4", "--time=2", sys.executable, TASK, "--data-dir", tiny)
    said = {line for line in done.stderr.splitlines() if line.startswith("train_task.py: ")}
    assert done.returncode == 1 and len(said) == 1, done.stderr
    assert "srun started 4 tasks without a launcher" in said.pop() and "Finished" not in done.stdout
    alone = cluster.exec(
        "srun", "--ntasks=1", "--time=2", sys.executable, TASK, "--data-dir", tiny, "--epochs", 1
    )
    assert alone.returncode == 0 and "Finished: " in alone.stdout, alone.stderr


def read_log(laptop: Laptop, job: int) -> str:
    return "".join(path.read_text() for path in laptop.base.glob(f"*/*_{job}.out"))


@pytest.mark.matrix
def test_a_requeued_task_resumes(laptop):
    """Its result is that of a job that was not requeued."""
    epochs = ["--epochs", 8, "--log-every", 1]
    submit = [sys.executable, TASK, "--submit", "--env=plain"]
    other = laptop.start(*submit, "--wait", "--fetch", *epochs)
    try:
        done = laptop.run(*submit, *epochs)
        assert done.returncode == 0, done.stderr
        job = job_of(done.stdout)
        deadline = time.monotonic() + 90
        while "epoch=3 step=1/" not in read_log(laptop, job):  # by then epoch 2 is saved
            assert time.monotonic() < deadline, read_log(laptop, job)
            time.sleep(0.05)
        assert laptop.cluster.exec("scontrol", "requeue", job).returncode == 0
        while laptop.cluster.show(job)["JobState"] != "PENDING":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        laptop.cluster.exec("scontrol", "update", f"JobId={job}", "StartTime=now")
        assert laptop.cluster.wait(job).state == "COMPLETED", read_log(laptop, job)
        first, second = read_log(laptop, job).split("Resumed after epoch ")
        resumed = int(second.split()[0])
        assert f"epoch={resumed} test_loss=" in first and 2 <= resumed < 8
        assert (
            "\nepoch=1 " in first
            and "\nepoch=1 " not in second
            and f"\nepoch={resumed + 1} step=1/4 " in second
        )
        out, error = other.communicate(timeout=120)
    finally:
        other.kill()
        other.wait()
    assert other.returncode == 0, out + error
    whole = laptop.clone / f"slurm-jobs/plain-{job_of(out)}/checkpoints/{job_of(out)}/result.json"
    (result,) = laptop.base.glob(f"train_task*/checkpoints/{job}/result.json")
    assert json.loads(result.read_text()) == pytest.approx(json.loads(whole.read_text()), rel=1e-3)
    assert len(list(result.parent.glob("*.pt"))) == 8 and not list(result.parent.glob("*.tmp"))


STAND_IN = """#!/bin/sh
case ${0##*/} in
sbatch) echo "$SBATCH_GPUS_PER_NODE $*" >"$HOME/sbatch"; echo 7 ;;
sinfo) echo "$PARTITIONS" ;;
esac
"""


@pytest.mark.parametrize(
    ("gres", "environment_name", "options", "gpus"),
    [
        ("gpu:8", "small", [], "2 "),
        ("gpu:a100:4(S:0-1)", "small", ["--ntasks-per-node=4"], "4 "),
        ("(null)", "small", [], "0 "),
        ("gpu:8", "small", ["--gpus-per-node=a100:2"], "--gpus-per-node=a100:2 "),
        ("gpu:8", "set", ["--ntasks-per-node=3"], "--gpus-per-node=3 "),
        ("gpu:8", "set", ["--gpus-per-node=0"], "--gpus-per-node=0 "),
        ("gpu:8", "set", ["--ntasks-per-node=1"], "launch_slurm_with_torchrun.sh "),
        ("gpu:8", "small", ["--ntasks-per-node=1"], "launch_slurm_to_torch.sh "),
    ],
)
def test_default_gpus_of_a_task(gres, environment_name, options, gpus, tmp_path):
    """One for each task where the cluster has some; the Slurmfile wins over that, the command
    line over both."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sbatch", "sinfo", "scontrol"):
        (tools / tool).write_text(STAND_IN.replace("$PARTITIONS", gres))
        (tools / tool).chmod(0o755)
    cluster = f'[default.cluster]\nbackend = "local"\njob_base_dir = "{tmp_path}/jobs"\n'
    (tmp_path / "x.toml").write_text(
        f"{cluster}[small.submit]\ntime = 1\n[set.submit]\ngpus_per_node = 3\n"
    )
    variables = environment(SLURMFILE=tmp_path / "x.toml", HOME=tmp_path)
    command = [sys.executable, TASK, "--submit", "--env", environment_name, *options, "--epochs", 1]
    done = run(*command, env=variables | {"PATH": f"{tools}:{variables['PATH']}"})
    assert done.returncode == 0, done.stdout + done.stderr
    default, _, sbatch = (tmp_path / "sbatch").read_text().partition(" ")
    assert f"{default} " == gpus if gpus[0].isdigit() else gpus in sbatch
    assert not gpus[0].isdigit() or "--gpus-per-node" not in sbatch


def test_slurmctld_is_asked_rarely_and_the_log_every_second(tmp_path):
    """In 17 seconds, which pass at once here, after 0 and 15; each second's line arrives."""
    asked, log = tmp_path / "asked", tmp_path / "log"
    second = (
        f'[ "$*" = 1 ] && echo "a line" >>{log} && [ "$(wc -l <{log})" -le 17 ] || kill "$PPID"'
    )
    for program, lines in {
        "scontrol": f"echo >>{asked}\necho '   JobState=RUNNING Reason=None'",
        "sleep": second,
    }.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / program).chmod(0o755)
    variables = environment()
    variables["PATH"] = f"{tmp_path}:{variables['PATH']}"
    done = run(
        "sh", "aux/submission/remote.sh", "watch", 7, log, 0, "yes", env=variables, timeout=30
    )
    assert len(asked.read_text()) == 2
    assert (
        done.stdout.count("a line\n")
        == len(re.findall(r"^running \d+ 7$", done.stdout, re.M))
        == 17
    )


WITHOUT_GPUS = ["--nodes=1", "--ntasks-per-node=3", "--gpus-per-node=0"]
SIXTEEN = ["--nodes=4", "--ntasks-per-node=4", "--gpus-per-node=4"]


@pytest.mark.parametrize(
    ("options", "nodes", "size"),
    cells([([], 2, 4), (WITHOUT_GPUS, 1, 3), (SIXTEEN, 4, 16)], ([], 2, 4), (SIXTEEN, 4, 16)),
)
def test_context_of_a_task(laptop, options, nodes, size):
    """Under both launchers a task can get, with its resources and with others; and None without
    a job."""
    script = ["python", "tests/scripts/context.py"]
    assert laptop.run(*script, "--submitted").stdout == "returned None\n"
    done = laptop.run(
        *script, "--submit", "--env", "plain", "--follow", "--fetch", *options, *NASTY
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job = job_of(done.stdout)
    places = sorted(
        map(json.loads, re.findall(r"^CONTEXT (.*)$", done.stdout, re.M)), key=lambda x: x["rank"]
    )
    assert [place["rank"] for place in places] == list(range(size))
    assert [place["local_rank"] for place in places] == [*range(size // nodes)] * nodes
    assert [place["node_rank"] for place in places] == sorted([*range(nodes)] * (size // nodes))
    assert {place["job_id"] for place in places} == {job} and places[0]["restart_count"] == 0
    for place in places:
        five = place["five"]
        assert five["RANK"] == str(place["rank"]) and five["WORLD_SIZE"] == str(size)
        assert five["LOCAL_RANK"] == str(place["local_rank"]) and five["MASTER_ADDR"].startswith(
            "node-"
        )
        assert five["MASTER_PORT"] == str(61000 + job % 4536)
    result = json.loads(
        (laptop.clone / f"slurm-jobs/plain-{job}/checkpoints/{job}/result.json").read_text()
    )
    assert result == {"rank": 0, "world_size": size, "arguments": NASTY}


def test_a_task_of_ones_own(laptop):
    """The file that chapter 15 shows, in a folder of its own; here, as a job, and without the
    argument job."""
    page = CHAPTERS[15].read_text()
    script = laptop.clone / "mine/deep/hello.py"
    script.parent.mkdir(parents=True)
    script.write_text(re.search(r"^```python\n(.*?)^```$", page, re.M | re.S)[1])
    here = laptop.run("python", "mine/deep/hello.py")
    assert here.returncode == 0, here.stderr
    outside = laptop.run("bash", "-c", "cd mine/deep && python hello.py --submit --env plain")
    assert outside.returncode != 0 and re.search(
        r"no env.sh in \S+/mine/deep: cd to the repo", outside.stderr
    ), outside
    submit = ["python", "mine/deep/hello.py", "--submit", "--env", "plain", "--wait", "--fetch"]
    done = laptop.run(*submit)
    assert done.returncode == 0, done.stdout + done.stderr
    job = job_of(done.stdout)
    result = json.loads(
        (laptop.clone / f"slurm-jobs/plain-{job}/checkpoints/{job}/result.json").read_text()
    )
    five = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node-1"}
    assert result["where"].items() >= five.items() and len(result["where"]) == 5
    script.write_text(
        script.read_text()
        .replace("job=None", "")
        .replace('job.torch_distributed_env() if job else "here"', "7")
    )
    alone = laptop.run(*submit, "--nodes=1", "--ntasks-per-node=1")
    assert alone.returncode == 0, alone.stdout + alone.stderr


ARRIVED = """
import json, os, sys
given = {"arguments": sys.argv[1:], "environment": dict(os.environ), "files": sorted(os.listdir())}
print("ARRIVED", json.dumps(given))
"""


def test_what_arrives(laptop):
    """Arguments, paths, options and named variables, unchanged; new files; nothing else."""
    script = laptop.clone / "a b; touch pwned/it's $HOME.py"
    script.parent.mkdir(exist_ok=True)
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
    options = [
        "--ntasks-per-node=1",
        "--gpus-per-node=0",
        "--comment=it's $(touch pwned)",
        "--wait",
        "--fetch",
    ]
    command = [*options, LAUNCHERS["srun"], script.relative_to(laptop.clone), *nasty]
    done = laptop.submit("--env=production", *command, **secret)
    assert done.returncode == 0, done.stderr
    job = job_of(done.stdout)
    fetched = laptop.clone / f"slurm-jobs/production-{job}"
    log = (fetched / f"launch_slurm_to_torch.sh_{job}.out").read_text()
    arrived = json.loads(re.search("^ARRIVED (.*)$", log, re.M)[1])
    assert arrived["arguments"] == nasty
    assert arrived["environment"]["ALLOWED"] == secret["ALLOWED"]
    assert "hunter2" not in log + (laptop.clone / f"slurm-jobs/production-{job}.json").read_text()
    assert {"line\nbreak", "README.md", ".venv", "data"} < set(arrived["files"])
    assert not {"ignored.out", "LICENSE", ".git"} & set(arrived["files"])
    assert (
        "Comment=it's $(touch pwned)" in laptop.cluster.exec("scontrol", "show", "job", job).stdout
    )
    assert (
        not [*laptop.clone.parent.rglob("pwned"), *laptop.home.rglob("pwned")]
        and not Path("/root/pwned").exists()
    )
    assert [path.name for path in fetched.iterdir()] == [f"launch_slurm_to_torch.sh_{job}.out"]


def test_from_this_machine(laptop):
    """The repository's own Slurmfile.toml as it is, on a login node; a folder below; a secret
    stays here, too."""
    (laptop.clone / "environment.sh").write_text("#!/bin/bash\nenv; pwd; git --version\n")
    command = [*SUBMIT, "--env", "local", "--nodes=1", "--follow", "environment.sh"]
    variables = laptop.environment(SLURMFILE=REPOSITORY / "Slurmfile.toml", WANDB_API_KEY="hunter2")
    copied = laptop.clone / "own.toml"
    copied.write_text((REPOSITORY / "Slurmfile.toml").read_text())
    done = laptop.cluster.exec(
        *command, cwd=laptop.clone, env=variables | {"SLURMFILE": str(copied)}
    )
    assert done.returncode == 0 and "COMPLETED" in done.stderr, done.stdout + done.stderr
    assert "hunter2" not in done.stdout and f"{laptop.clone}/slurm-jobs/environment-" in done.stdout
    assert (laptop.clone / f"slurm-jobs/local-{job_of(done.stdout)}.json").exists()


def as_on_any_machine(text: str, laptop: Laptop) -> str:
    """Without what differs from run to run: folders, keys, and states of a job that may have
    passed before a look."""
    text = text.replace(str(laptop.clone), HOME).replace(f"{laptop.clone.parent}/there", "/home/me")
    text = re.sub(r"^job \d+: (PENDING|CONFIGURING|RUNNING|COMPLETING)\b.*\n", "", text, flags=re.M)
    return re.sub(r"(_\d\d-\d\d-\d\d)\.\w{6}\b", r"\1.X", re.sub(r"SHA256:[\w+/]+", "KEY", text))


def test_chapter(laptop):
    """Its blocks as they stand, with the repository's own Slurmfile.toml; its login node is an
    alias of ours."""
    *blocks, unknown = steps(CHAPTERS[15])
    slurmfile, known = laptop.clone / "Slurmfile.toml", laptop.home / ".ssh/known_hosts"
    kept = slurmfile.read_text(), known.read_text()
    shutil.copy(REPOSITORY / "Slurmfile.toml", slurmfile)
    try:
        printed = ""
        for _, commands, shown in blocks:
            done = laptop.run("bash", "-euo", "pipefail", "-c", f"exec 2>&1; {commands}")
            assert shown and done.returncode == 0, done.stdout
            assert_shown(as_on_any_machine(shown, laptop), as_on_any_machine(done.stdout, laptop))
            printed += done.stdout
        fetched = re.findall(
            r"^Fetched (\d) files of job \d+ into slurm-jobs/production-\d+$", printed, re.M
        )
        assert fetched == ["2", "3"]
        known.write_text("")
        done = laptop.run("bash", "-c", f"exec 2>&1; {unknown[1]}")
        assert done.returncode == 1
        assert_shown(as_on_any_machine(unknown[2], laptop), as_on_any_machine(done.stdout, laptop))
    finally:
        slurmfile.write_text(kept[0])
        known.write_text(kept[1])


def test_dry_run_is_exact_and_runs_nothing(laptop):
    command = [
        "--env",
        "plain",
        "--dry-run",
        LAUNCHERS["srun"],
        "tests/scripts/variables.py",
        "a b",
        "it's",
    ]
    before = laptop.job_folders()
    done = laptop.submit(*command)
    assert done.returncode == 0 and laptop.job_folders() == before
    lines = done.stdout.splitlines()
    assert shlex.split(lines[-1])[-4:] == [
        LAUNCHERS["srun"],
        "tests/scripts/variables.py",
        "a b",
        "it's",
    ]
    ssh = shlex.split("\n".join(lines[1:-2]))
    assert ssh[0] == "ssh" and "-oStrictHostKeyChecking=yes" in ssh
    archive = subprocess.run(
        ["git", "archive", "HEAD"], cwd=laptop.clone, capture_output=True
    ).stdout
    for sent, sentence in (
        (archive[: len(archive) // 2], b"copying to "),
        (archive, b" was interrupted, "),
    ):
        options = {
            "input": sent,
            "capture_output": True,
            "env": laptop.environment(),
            "timeout": 30,
        }
        done = subprocess.run(laptop.command(*ssh), **options)
        assert done.returncode == 1 and sentence in done.stderr.splitlines()[-1], done.stderr
    assert laptop.job_folders() == before


def test_failed_cancelled_and_partition(laptop):
    (laptop.clone / "fail.sh").write_text("#!/bin/bash\necho no luck\nexit 3\n")
    waits = laptop.start(*SUBMIT, "--env", "plain", "--wait", "sleep.sh")
    failed = laptop.submit("--env", "plain", "--follow", "fail.sh")
    assert "Welcome" not in failed.stdout and "Mind the step" not in failed.stderr
    assert failed.returncode == 3 and "no luck\n" in failed.stdout
    assert re.search(r"^submit.py: job \d+ failed with exit status 3; ", failed.stderr, re.M)
    shown = read_until("Submitted", waits)
    cancelled = laptop.submit("cancel", job_of(shown))
    assert cancelled.returncode == 0, cancelled.stderr
    _, said = rest(waits, timeout=30)
    assert waits.returncode == 1 and f"submit.py: job {job_of(shown)} was cancelled" in said
    assert "CANCELLED" in laptop.submit("status", job_of(shown)).stdout

    before = laptop.job_folders()
    refused = laptop.submit("--env", "plain", "--partition=nope", "sleep.sh")
    one_sentence(refused, "login: ", "nvalid partition")
    assert laptop.job_folders() == before
    one_sentence(laptop.submit("status", 999999), "no job 999999")


def test_unknown_and_changed_host_key(laptop):
    known = laptop.home / ".ssh/known_hosts"
    kept = known.read_text()
    before = laptop.job_folders()
    try:
        unknown = one_sentence(laptop.submit("--env", "without", "sleep.sh"), "is unknown")
        key = laptop.clone.parent / "sshd/without/host_key.pub"
        fingerprint = run("ssh-keygen", "-lf", key).stdout.split()[1]
        assert fingerprint in unknown and known.read_text() == kept
        accept = shlex.split(unknown.split("accept it with: ")[1])
        # For ssh that is a yes.
        (laptop.clone / "yes.out").write_text(f"#!/bin/sh\necho {fingerprint}\n")
        (laptop.clone / "yes.out").chmod(0o755)
        asked = laptop.run(
            *accept, SSH_ASKPASS=laptop.clone / "yes.out", SSH_ASKPASS_REQUIRE="force"
        )
        assert asked.returncode == 0, asked.stderr
        one_sentence(laptop.submit("--env", "without", "sleep.sh"), "no sbatch in the PATH")

        login = run(
            "ssh-keygen", "-lf", laptop.clone.parent / "sshd/login/host_key.pub"
        ).stdout.split()[1]
        known.write_text(kept.replace(kept.split()[2], key.read_text().split()[1]))
        one_sentence(laptop.submit("--env", "plain", "sleep.sh"), "refused", login, "line 1 of ")
        known.write_text("")
        one_sentence(laptop.submit("--env", "plain", "sleep.sh"), "is unknown", login)
    finally:
        known.write_text(kept)
    assert laptop.job_folders() == before


def test_no_route_no_key_and_full_disk(laptop):
    start = time.monotonic()
    one_sentence(laptop.submit("--env", "far", "sleep.sh"), "no connection to 10.7.200.1")
    assert time.monotonic() - start < 10
    full = laptop.clone.parent / "full"
    one_sentence(
        laptop.submit("--env", "full", "sleep.sh"), "No space left on device", "it is removed"
    )
    seen = laptop.run("ssh", "login", "ls", "-A", full)
    assert seen.returncode == 0 and seen.stdout == "Welcome\n"
    config = laptop.home / ".ssh/config"
    kept = config.read_text()
    config.write_text(kept.replace("user_key", "no_key"))
    one_sentence(laptop.submit("--env", "plain", "sleep.sh"), "refuses the login", "ssh-copy-id")
    config.write_text(kept)


def test_time_limit(laptop, over_time):
    done = laptop.submit("logs", "--follow", over_time)
    assert (
        done.returncode == 1 and f"submit.py: job {over_time} reached its time limit" in done.stderr
    ), done.stderr
    assert "asleep on node-" in done.stdout


def test_mistakes_before_anything_is_sent(laptop, tmp_path):
    (laptop.clone / "ignored.out").write_text("#!/bin/bash\n")
    size = ["--env", "plain", "--nodes", "2", LAUNCHERS["spawn"]]
    for status, command, sentence in (
        (2, ["sleep.sh"], "--env NAME is missing"),
        (2, ["--env", "plain"], "which launcher?"),
        (2, size, "write --nodes=2"),
        (2, ["--env", "plain", LAUNCHERS["spawn"], "nope.py"], "no train script 'nope.py'"),
        (2, ["--env", "plain", "--array=1-3", "sleep.sh"], "--array cannot be used here"),
        (1, ["--env", "nope", "sleep.sh"], "it has production, plain, "),
        (1, ["--env", "plain", "ignored.out"], "git ignores it"),
        (
            1,
            ["--env", "production", "sleep.sh"],
            "ALLOWED is listed here, but is not set in this shell",
        ),
    ):
        one_sentence(laptop.submit(*command), sentence, status=status)
    one_sentence(
        laptop.submit("--env", "plain", "sleep.sh", SLURMFILE="nope.toml"),
        "SLURMFILE names nope.toml",
    )
    (tmp_path / "sleep.sh").write_text(SLEEP)
    away = {"cwd": tmp_path, "env": environment(SLURMFILE=laptop.clone / "Slurmfile.toml")}
    submit = [sys.executable, REPOSITORY / "aux/submit.py", "--env", "plain", "sleep.sh"]
    one_sentence(run(*submit, **away), "is not in a git repository")


def test_mistakes_of_a_task(tmp_path):
    missing = run(sys.executable, "distributed/train_task.py", "--submit")
    assert missing.returncode == 2 and missing.stderr.startswith(
        "train_task.py: --submit needs --env NAME"
    )
    wrong = run(
        sys.executable, "distributed/train_task.py", "--submit", "--env", "local", "--epochs", "x"
    )
    assert (
        wrong.returncode == 2 and "--epochs" in wrong.stderr and len(wrong.stderr.splitlines()) == 1
    )
    script = tmp_path / "wrong.py"
    script.write_text(
        "from slurm_task import task\n\n\n@task(ntaks=2)\ndef f(job=None): ...\n\n\nf()\n"
    )
    named = run(
        sys.executable,
        script,
        "--submit",
        "--env=local",
        env=environment(PYTHONPATH=REPOSITORY / "aux"),
    )
    assert named.returncode == 1 and "has no option 'ntaks', but ntasks" in named.stderr
    settings = (
        '[default.cluster]\nbackend = "local"\njob_base_dir = "x"\n[plain.submit]\ntime = 1\n'
    )
    settings += '[boxed.packaging]\ntype = "container"\nimage = "x"\n'
    (tmp_path / "Slurmfile.toml").write_text(settings)
    variables = environment(PYTHONPATH=REPOSITORY / "aux", SLURMFILE=tmp_path / "Slurmfile.toml")

    def submit(numbers: str, *options: str):
        script.write_text(
            f"from slurm_task import task\n\n\n@task({numbers})\ndef f(job=None): ...\n\n\nf()\n"
        )
        return run(sys.executable, script, "--submit", *options, env=variables)

    for numbers, sentence in {
        "nodes=2, ntasks=4, gpus_per_node=1": "1 GPUs on each of 2 nodes.*: write gpus_per_node=2",
        "nodes=2, ntasks=3": "3 tasks on 2 nodes, but run_script.sh .*: write ntasks=4",
        "nodes='1-2'": "nodes is '1-2': write a whole number",
    }.items():
        refused = submit(numbers, "--env=boxed")
        assert refused.returncode == 1 and len(refused.stderr.splitlines()) == 1, refused.stderr
        assert re.search(sentence, refused.stderr), refused.stderr
    for numbers in ("nodes=2, ntasks=4, gpus_per_node=2", "nodes='2', ntasks_per_node='2'"):
        shown = submit(numbers, "--env=plain", "--dry-run")
        assert (
            "--ntasks-per-node=2" in shown.stdout and " launch_slurm_to_torch.sh " in shown.stdout
        ), shown.stderr


def test_result_that_is_no_json():
    script = (
        "import pathlib, slurm_task; slurm_task.write_result('train', {1, 2}, "
        "pathlib.Path('never'))"
    )
    done = run(sys.executable, "-c", script, cwd=REPOSITORY / "aux")
    assert (
        done.returncode == 1
        and done.stderr.startswith("the result of train is not JSON")
        and "\n" not in done.stderr[:-1]
    )


SLURMFILE = """[default.submit]
time = "01:00:00"

[ours.cluster]
backend = "ssh"
job_base_dir = "/jobs"

[ours.cluster.backend_config]
hostname = "login"
"""
FAULTS = [
    (
        'hostname = "login"',
        'hostnam = "login"',
        9,
        "'hostnam'; its keys are hostname, username, port, identity_file",
    ),
    (
        'hostname = "login"',
        'hostname = "login"\nport = "22"',
        10,
        "port must be a whole number, not '22'",
    ),
    ('hostname = "login"', 'password = "x"', 9, "a password is refused"),
    ('hostname = "login"', 'username = "me"', 8, "needs hostname"),
    ('hostname = "login"', 'hostname = "-oProxyCommand=x"', 9, "is not a hostname"),
    (
        "[ours.cluster.backend_config]",
        "[ours.clutser]",
        8,
        "has no table 'clutser'; its tables are cluster, packaging, submit",
    ),
    ('backend = "ssh"', 'backend = "shh"', 5, 'backend must be "ssh" or "local"'),
    ('job_base_dir = "/jobs"', "", 4, "needs job_base_dir"),
    (
        'job_base_dir = "/jobs"',
        'job_base_dir = "/jobs"\nenvironment = ["NOT_SET"]',
        7,
        "not set in this shell",
    ),
    (
        'time = "01:00:00"',
        'partitoin = "gpu"',
        2,
        "sbatch has no option 'partitoin', but partition",
    ),
    ('time = "01:00:00"', "time = 01:00:00", 2, 'write time = "01:00:00"'),
    ('time = "01:00:00"', 'array = "1-3"', 2, "--array cannot be used here"),
    ("[default.submit]", "[default.submit", 1, "is not TOML"),
]


@pytest.mark.parametrize(
    ("old", "new", "line", "sentence"), FAULTS, ids=[fault[3][:40] for fault in FAULTS]
)
def test_slurmfile_faults_are_named_with_their_line(old, new, line, sentence, tmp_path):
    assert SLURMFILE.count(old) == 1
    (tmp_path / "x.toml").write_text(SLURMFILE.replace(old, new))
    command = [*SUBMIT, "--env", "ours", "--dry-run", LAUNCHERS["srun"]]
    done = run(*command, env=environment(SLURMFILE=tmp_path / "x.toml"))
    assert len(done.stderr.splitlines()) == 1
    one_sentence(done, f"line {line}", sentence)


def test_one_list_of_dependencies():
    """pyproject.toml is the list; requirements.txt says the same for plain pip, and uv takes the
    former as it is."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == (REPOSITORY / "requirements.txt").read_text().split()


def test_uv(laptop):
    """`uv sync` would install torch and build nothing; `uv run` starts a script, in an
    environment that is there."""
    where = {
        "UV_CACHE_DIR": laptop.home / "uv",
        "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS") or str(laptop.home),
    }
    options = {"cwd": laptop.clone, "env": laptop.environment(**where)}
    sync = run("uv", "sync", "--dry-run", **options)
    assert sync.returncode == 0 and re.search(r"^ \+ torch==2", sync.stderr, re.M), sync.stderr
    assert "pytorch-on-slurm" not in sync.stderr
    (laptop.clone / ".venv").symlink_to(REPOSITORY / ".venv")
    script = [SCRIPT, "--max-steps", 1, "--checkpoint-dir", "checkpoints/uv"]
    trained = run("uv", "run", "--no-sync", *script, **options)
    assert trained.returncode == 0 and "step=1/1" in trained.stdout, trained.stderr
    task = run("uv", "run", "--no-sync", TASK, "--epochs", 1, **options)
    assert task.returncode == 0 and "Finished: " in task.stdout, task.stderr
