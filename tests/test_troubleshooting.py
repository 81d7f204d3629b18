"""docs/troubleshooting.md: one entry explains a message, and a search for it finds that entry."""

import re
from functools import cache
from pathlib import Path

import pytest

from lab_table import ROWS, task_of
from slurm import REPOSITORY, run

PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text()
# These scripts print their line themselves, because nothing else does, or another's end.
OWN = "docker|one_node|standalone|gpu_per_task|loader|network|set_epoch|padding|signal"
OWN += "|kept_weights|copied_list|one_rank_evaluates"


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
