"""Each script of docs/labs/ shows its symptom, and its fix does not."""

import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import lint_sbatch
from slurm import REPOSITORY, at_once, cells, environment, run, wait_for

FOLDER = REPOSITORY / "docs/labs"
sys.path.append(str(FOLDER))
import tasks

PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text()
# The command, the lines that it shows, and what lint_sbatch.py says
ROW = re.compile(r"^\| `([^`]+)` \| (`.+`) \| (?:`(.*)`)? *\|$", re.M)
ROWS = {
    command: (lines.strip("`").split("`<br>`"), said)
    for command, lines, said in ROW.findall((FOLDER / "README.md").read_text())
}


def task_of(command: str) -> str:
    return Path(command).stem.removesuffix("_broken")


def symptoms(command: str) -> list[str]:
    """The lines that the command shows as regular expressions, with "..." for what differs."""
    return [r"\S.*?".join(map(re.escape, line.split("..."))) for line in ROWS[command][0]]


def test_every_script_is_in_the_table():
    """A broken script that has no row would never be run."""
    commands = " ".join(ROWS)
    for broken in FOLDER.glob("*_broken.*"):
        assert f"{FOLDER.name}/{broken.name}" in commands, broken.name
        assert broken.with_name(broken.name.replace("_broken", "_fixed")).is_file(), broken.name


# These scripts print their line themselves, because nothing else does, or another's end.
OWN = "docker|one_node|standalone|gpu_per_task|loader|network|set_epoch|padding|signal"


def messages(text: str) -> list[str]:
    """What stands in backticks, single ones or double ones."""
    text = re.sub(r"\s+", " ", text)
    return [double or single for double, single in re.findall(r"``(.+?)``|`([^`]+)`", text)]


@cache
def sections() -> list[tuple[str, list[str], list[list[str]]]]:
    """The page in parts: the text below a heading, its messages and those of its rows. Messages
    stand in the heading, in the line "Also:", and in tables whose head is "it says" or "reason"."""
    found = []
    for section in re.split(r"^(?=##)", PAGE, flags=re.M):
        heading = re.findall(r"\A### (`.*)", section)
        also = re.findall(r"^Also: (.*?)\.$", section, re.M | re.S)
        tables = re.findall(r"^\| (?:it says|reason) \|.*\n\|.*\n((?:\|.*\n)+)", section, re.M)
        rows = [messages(row.split(" | ")[0]) for row in "".join(tables).splitlines()]
        found.append((section, messages(" ".join(heading + also)), rows))
    return found


@cache
def entries() -> list[list[str]]:
    """The messages of each entry: of a heading, or of a row."""
    found = [said for _, of_heading, rows in sections() for said in (of_heading, *rows)]
    return [said for said in found if said]


def explain(line: str) -> list[str]:
    """The first message of each entry that has this line."""
    return [
        said[0]
        for said in entries()
        if any(re.search(".*".join(map(re.escape, part.split("..."))), line) for part in said)
    ]


POSTED = re.findall(
    r"^== *(.*)\n((?:(?!==).*\n)*)", (REPOSITORY / "tests/posted.txt").read_text(), re.M
)
LINES = [(line, name) for name, lines in POSTED for line in lines.split("\n") if line]
WORDS = [(line[2:], name) for line, name in LINES if line.startswith("? ")]
LINES = [(line, name) for line, name in LINES if not line.startswith("? ")]


# The reasons of a waiting job in Slurm 26.05's src/common/job_state_reason.c, without
# ReqNodeNotAvail and those for burst buffers, energy and unknown resources.
REASONS = """AccountNotAllowed AccountingPolicy AssocGrpBilling AssocGrpBillingMinutes
AssocGrpBillingRunMinutes AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit AssocGrpCpuLimit
AssocGrpGRES AssocGrpGRESMinutes AssocGrpGRESRunMinutes AssocGrpJobsLimit AssocGrpLicense
AssocGrpLicenseMinutes AssocGrpLicenseRunMinutes AssocGrpMemLimit AssocGrpMemMinutes
AssocGrpMemRunMinutes AssocGrpNodeLimit AssocGrpNodeMinutes AssocGrpNodeRunMinutes
AssocGrpSubmitJobsLimit AssocGrpWallLimit AssocMaxBillingMinutesPerJob AssocMaxBillingPerJob
AssocMaxBillingPerNode AssocMaxCpuMinutesPerJobLimit AssocMaxCpuPerJobLimit AssocMaxCpuPerNode
AssocMaxGRESMinutesPerJob AssocMaxGRESPerJob AssocMaxGRESPerNode AssocMaxJobsLimit
AssocMaxLicenseMinutesPerJob AssocMaxLicensePerJob AssocMaxMemMinutesPerJob AssocMaxMemPerJob
AssocMaxMemPerNode AssocMaxNodeMinutesPerJob AssocMaxNodePerJobLimit AssocMaxSubmitJobLimit
AssocMaxWallDurationPerJobLimit AssociationJobLimit AssociationResourceLimit AssociationTimeLimit
BadConstraints BeginTime Cleaning Constraints DeadLine Dependency DependencyNeverSatisfied
FedJobLock InvalidAccount InvalidQOS JobArrayTaskLimit JobHeldAdmin JobHeldUser JobHoldMaxRequeue
Licenses MaxBillingPerAccount MaxBillingRunMinsPerAccount MaxBillingRunMinsPerUser MaxCpuPerAccount
MaxCpuRunMinsPerAccount MaxCpuRunMinsPerUser MaxGRESPerAccount MaxGRESRunMinsPerAccount
MaxGRESRunMinsPerUser MaxJobsPerAccount MaxLicensePerAccount MaxLicenseRunMinsPerAccount
MaxLicenseRunMinsPerUser MaxMemPerLimit MaxMemoryPerAccount MaxMemoryRunMinsPerAccount
MaxMemoryRunMinsPerUser MaxNodePerAccount MaxNodeRunMinsPerAccount MaxNodeRunMinsPerUser
MaxPoweredUpNodes MaxSubmitJobsPerAccount MpiPortsBusy NodeDown None NvidiaImexChannels
PartitionConfig PartitionDown PartitionInactive PartitionNodeLimit PartitionTimeLimit Priority
Prolog QOSGrpBilling QOSGrpBillingMinutes QOSGrpBillingRunMinutes QOSGrpCPUMinutesLimit
QOSGrpCPURunMinutesLimit QOSGrpCpuLimit QOSGrpGRES QOSGrpGRESMinutes QOSGrpGRESRunMinutes
QOSGrpJobsLimit QOSGrpLicense QOSGrpLicenseMinutes QOSGrpLicenseRunMinutes QOSGrpMemLimit
QOSGrpMemoryMinutes QOSGrpMemoryRunMinutes QOSGrpNodeLimit QOSGrpNodeMinutes QOSGrpNodeRunMinutes
QOSGrpSubmitJobsLimit QOSGrpWallLimit QOSJobLimit QOSMaxBillingMinutesPerJob QOSMaxBillingPerJob
QOSMaxBillingPerNode QOSMaxBillingPerUser QOSMaxCpuMinutesPerJobLimit QOSMaxCpuPerJobLimit
QOSMaxCpuPerNode QOSMaxCpuPerUserLimit QOSMaxGRESMinutesPerJob QOSMaxGRESPerJob QOSMaxGRESPerNode
QOSMaxGRESPerUser QOSMaxJobsPerUserLimit QOSMaxLicenseMinutesPerJob QOSMaxLicensePerJob
QOSMaxLicensePerUser QOSMaxMemoryMinutesPerJob QOSMaxMemoryPerJob QOSMaxMemoryPerNode
QOSMaxMemoryPerUser QOSMaxNodeMinutesPerJob QOSMaxNodePerJobLimit QOSMaxNodePerUserLimit
QOSMaxSubmitJobPerUserLimit QOSMaxWallDurationPerJobLimit QOSMinBilling QOSMinCpuNotSatisfied
QOSMinGRES QOSMinLicense QOSMinMemory QOSMinNode QOSNotAllowed QOSResourceLimit QOSTimeLimit
QOSUsageThreshold Reservation ReservationDeleted ReservationInvalid Resources SchedDefer"""


def test_every_reason_is_written_out():
    """So that a search for it finds its row, and no other one explains it."""
    for reason in REASONS.split():
        assert PAGE.count(f"`({reason})`") == 1, reason
        assert len(explain(f"7 train wrap me PD 0:00 1 ({reason})")) == 1, reason


def test_no_message_is_broken_over_two_lines():
    """And no command: a search looks at one line."""
    prose = re.sub(r"^```.*?^```$", "", PAGE, flags=re.M | re.S)
    assert [line for line in prose.splitlines() if line.count("`") % 2] == []


MOMENTS = [
    "at the start",
    "when weights are read",
    "at a resume",
    "in the first step",
    "in each evaluation",
    "at each save",
    "slowly",
    "in the last minute",
]


def test_when_memory_runs_out():
    """Each moment has a row, for the GPU or the node, and a lab that it names is a pair."""
    [table] = re.findall(r"^\| when \|.*\n\|.*\n((?:\|.*\n)+)", PAGE, re.M)
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    assert list(dict.fromkeys(row[0] for row in rows)) == MOMENTS
    assert all(re.match("GPU|node", row[1]) for row in rows)
    labs = [row[4].strip("`") for row in rows if len(row) == 5]
    pairs = {task_of(command) for command in ROWS}
    assert len(labs) >= 4 and pairs.issuperset(labs), set(labs) - pairs


@pytest.mark.parametrize("command", [row for row in ROWS if not re.search(OWN, row)])
def test_the_page_has_the_line(command):
    for line in ROWS[command][0]:
        assert len(explain(line)) == 1, line


@pytest.mark.parametrize(("line", "name"), LINES)
def test_one_entry_explains_a_line(line, name):
    """And none a line of a job that has nothing wrong."""
    assert explain(line) == [name] * bool(name)


def first_hit(words: str) -> str:
    """The first message of the entry to which the page's first line with these words belongs, or
    the heading of a part that has no message."""
    for section, of_heading, rows in sections():
        for line in section.splitlines():
            if words in line:
                row = messages(line.split(" | ")[0])
                if line.startswith("|") and row in rows:
                    return row[0]
                return (of_heading or [section.splitlines()[0].lstrip("# ")])[0]
    raise AssertionError(f"no line of the page has: {words}")


@pytest.mark.parametrize(("words", "name"), WORDS)
def test_a_search_finds_the_entry(words, name):
    """Words that people search for stand in one line of the page, and not before their entry."""
    assert first_hit(words) == name


@pytest.mark.parametrize("said", entries(), ids=lambda said: said[0])
def test_the_messages_of_an_entry_are_found_in_it(said):
    """For a message with "..." that is its longest part."""
    for message in said:
        words = max(message.split("..."), key=len).strip()
        assert first_hit(words) == said[0], message


STARTS = "launch_slurm_with_torchrun.sh: 4 ranks on node-[1-2], rank 0 at node-1:61089. Each"


def find_the_first_error(log: str, folder: Path) -> tuple[list[str], list[str]]:
    """What the page's commands print: lines of errors, and how ranks and tasks ended."""
    [commands] = re.findall(r"^```sh\n(tac LOG .*?)^```", PAGE, re.M | re.S)
    first, second = re.match(r"(.*head -n 3\n)(.*)", commands, re.S).groups()
    (folder / "log").write_text(log)
    errors = run("bash", "-c", first.replace("LOG", "log"), cwd=folder)
    return errors.stdout.splitlines(), run("bash", "-c", second, cwd=folder).stdout.splitlines()


def test_the_first_error_is_found(tmp_path):
    """Among the lines of ranks that only lost a peer, before it and after it."""
    lost = """[rank1]: torch.distributed.DistBackendError: ncclRemoteError: Connection reset by peer
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"""
    ended = "srun: error: node-1: task 0: Exited with exit code 1"
    errors = [line for line, name in LINES if name not in ("", "Connection closed by peer")]
    errors = [line for line in errors if re.search(r"Error: |error: |NCCL WARN", line)]
    assert len(errors) > 90
    for line in errors:
        shown, ends = find_the_first_error(f"{lost}\n{line}\n{lost}\n{ended}\n", tmp_path)
        assert shown[0] == f"3:{line}", line
        assert ends[-1] == ended


# Rank 2 on node-2 was killed, and node-1 ended first.
KILLED = {
    "torchrun": """  time      : 2026-11-29_11:36:13
  host      : node-1
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 567)
srun: error: node-1: task 0: Exited with exit code 1
  time      : 2026-11-29_11:36:13
  host      : node-2
  rank      : 2 (local_rank: 0)
  exitcode  : -9 (pid: 194)
srun: error: node-2: task 1: Exited with exit code 1""",
    "srun": """srun: error: node-1: task 1: Exited with exit code 1
srun: error: node-2: task 2: Killed""",
    "spawn": """spawn_ranks.py: rank 1 on node-1: process 1 terminated with exit code 1
spawn_ranks.py: rank 2 on node-2: process 0 terminated with signal SIGKILL""",
}


@pytest.mark.parametrize("way", KILLED)
@pytest.mark.parametrize("begins", [STARTS, "Start 2 on node-1,node-2", ""])
def test_how_the_ranks_of_the_last_start_ended(begins, way, tmp_path):
    """With every launcher, and in a log to which requeues and restarts have appended."""
    earlier = f"{STARTS}\n[rank0]: ValueError: earlier\nsrun: error: node-3: task 0: Killed\n"
    log = f"{earlier if begins else ''}{begins}\n[rank2]: ValueError: late\n{KILLED[way]}\n"
    shown, ends = find_the_first_error(log, tmp_path)
    assert shown[0] == "2:[rank2]: ValueError: late"
    assert way != "spawn" or shown[1].endswith("terminated with signal SIGKILL"), shown
    assert ends == KILLED[way].splitlines()


def lint(path: Path, capsys) -> str:
    lint_sbatch.main([str(path)])
    return capsys.readouterr().out


def test_lint_finds_what_the_table_says(monkeypatch, capsys):
    """And nothing else, and nothing in the fixed scripts."""
    monkeypatch.chdir(REPOSITORY)
    said = {Path(command.split()[-1]).name: words for command, (_, words) in ROWS.items() if words}
    assert len(said) > 5
    for path in FOLDER.glob("*.sh"):
        found = lint(path.relative_to(REPOSITORY), capsys)
        expected = said.get(path.name)
        assert found.count("\n") == bool(expected) and (expected or "") in found, path.name


def start(command: str, request, folder: Path) -> tuple[bool, str]:
    """Runs a command of the page, with a limit. Returns its success, and all that it says."""
    words = command.split()
    if words[0] == "docker":
        variables = environment(**request.getfixturevalue("engine"), DOCKER_BUILDKIT=0)
        done = run(*words, env=variables)
        if built := re.search(r"^Successfully built (\w+)$", done.stdout, re.M):
            run("docker", "image", "rm", built[1], env=variables)
    elif words[0] == "sbatch":
        cluster = request.getfixturevalue("cluster")
        log = [] if "log_folder_broken" in command else [f"--output={folder}/log"]
        job = cluster.sbatch(*log, *words[2:])
        shown = cluster.exec("scontrol", "show", "job", job.id).stdout
        return job.state == "COMPLETED", job.log + shown
    elif words[-1].endswith(".sh"):
        done = request.getfixturevalue("cluster").exec(*words, timeout=300)
    else:
        done = run(*words, timeout=200)
    return done.returncode == 0, done.stdout + done.stderr


def reason_to_skip(command: str, request) -> str | None:
    """Two scripts show what a torch without CUDA says, and one an older Slurm."""
    import torch

    if "cuda_" in command and torch.version.cuda is not None:
        return "this torch is built for CUDA"
    if "log_folder_" in command:
        version = request.getfixturevalue("cluster").exec("sbatch", "--version").stdout.split()[-1]
        if [int(part) for part in version.split(".")[:2]] >= [23, 11]:
            return "this Slurm creates the folder of a log"
    return None


# Those without torch.
QUICK = [(command,) for command in ROWS if re.search("one_node|log_folder", command)]
TASKS = [command for command in ROWS if task_of(command) in tasks.TASKS]


@pytest.mark.parametrize("command", cells([(command,) for command in ROWS], *QUICK))
def test_the_symptom_is_shown_and_then_gone(command, request, tmp_path):
    if reason := reason_to_skip(command, request):
        pytest.skip(reason)
    succeeded, said = start(command, request, tmp_path)
    for symptom, times in Counter(symptoms(command)).items():
        found = re.findall(rf"{symptom}\s*$", said, re.M)
        assert len(found) >= times, f"no line {symptom}:\n{said}"
    if "_broken" not in command:  # queue.sh shows the symptoms and repairs them in one go
        assert succeeded, said
        return

    succeeded, says = start(command.replace("_broken", "_fixed"), request, tmp_path)
    if "usr1" in command:  # torchrun fails when it is told to stop, although its ranks have saved
        saved = r"^rank \d: SIGTERM has come, saved after step \d+$"
        assert len(re.findall(saved, says, re.M)) == 2, says
    else:
        assert succeeded, says
    if "loader" in command:
        broken, fixed = (int(re.search(r"for data: (\d+) %", x)[1]) for x in (said, says))
        assert broken > 50 and fixed < broken / 2, (broken, fixed)
    else:
        left = [
            symptom for symptom in symptoms(command) if re.search(rf"{symptom}\s*$", says, re.M)
        ]
        assert not left, says
    if command in TASKS and command.startswith("sbatch"):
        name = task_of(command)
        assert tasks.missing(name, said) and not tasks.missing(name, says), (said, says)


def test_twenty_tasks():
    assert len(TASKS) == len(tasks.TASKS) == 20


# Those that sbatch starts are graded above.
GRADED = [("one_node",), *((task_of(row),) for row in TASKS if not row.startswith("sbatch"))]


@pytest.mark.parametrize("name", cells(GRADED, ("one_node",)))
def test_a_grader_fails_on_the_fault_and_passes_on_the_repair(name, cluster, tmp_path):
    def scenario(what: str, verdict: str):
        [script] = FOLDER.glob(f"{name}_{what}.*")
        answer = tmp_path / script.name
        answer.write_bytes(script.read_bytes())
        graded = cluster.exec("python3", FOLDER / "tasks.py", name, answer, timeout=280)
        assert graded.stdout.startswith(verdict), graded

    at_once(scenario, [("broken", "FAILED: "), ("fixed", "PASSED\n")])


@pytest.mark.matrix
def test_the_grader_of_a_hang(cluster):
    """The answer in the job's log is right, that with another node is not."""
    hang = ("python3", FOLDER / "tasks.py", "hang")
    job = cluster.exec(*hang).stdout.split()[-1]
    cluster.jobs.append(int(job))
    log = REPOSITORY / f"launch_slurm_with_torchrun.sh_{job}.out"
    found = re.compile(r"First to look at: rank (\d) on (\S+) ")
    try:
        wait_for(lambda: log.exists() and found.search(log.read_text()), 180)
        rank, node = found.search(log.read_text()).groups()
        assert cluster.exec(*hang, job, rank, node).stdout == "PASSED\n"
        assert cluster.exec(*hang, job, rank, f"{node}0").stdout.startswith("FAILED: ")
    finally:
        cluster.exec("scancel", job)
        log.unlink(missing_ok=True)
