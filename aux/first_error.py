"""Find in a job's log why its last start has ended, and which rank was the first.

    python aux/first_error.py LOG

This does what "Find the first error" in docs/troubleshooting.md does by hand. aux/watch_job.py JOB
knows more, because it also asks Slurm.
"""

import contextlib
import itertools
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from heartbeat import plain

# What may end a start, in words, and what to do
CAUSES = {
    "error": ("{who} had an error", "docs/troubleshooting.md explains most messages"),
    "exit": (
        "{who} ended with status {exit}",
        "look in the script for why it ends there. If it printed nothing about that, see"
        " docs/troubleshooting.md, No error at all",
    ),
    "killed": ("{who} was killed{signal}", "see docs/troubleshooting.md, Find the first error"),
    "memory": ("{who} had no memory left", "see docs/troubleshooting.md, oom_kill event"),
    "gpu_memory": (
        "{who} had no GPU memory left",
        "see docs/troubleshooting.md, CUDA out of memory",
    ),
    "hang": ("its ranks waited for one that took no step", "see docs/06_it_hangs.md"),
    "time_limit": ("its time was up", "ask for more, or let it go on: docs/07_it_is_stopped.md"),
    "cancelled": ("{by} cancelled it", "submit it again if it is still wanted"),
    "preempted": (
        "another job took its nodes",
        "let it save and go on: docs/07_it_is_stopped.md",
    ),
    "node": ("it lost {node}", "submit it again, with --exclude={node}"),
    "terminated": (
        "Slurm or somebody told its ranks to stop",
        "let it save and go on: docs/07_it_is_stopped.md",
    ),
    "stopped": ("it was stopped, and put back into the queue", "wait"),
    "wait_time": (
        "one task had ended, and srun then ended the others",
        "write srun --wait=0: see docs/troubleshooting.md, First task exited",
    ),
    "not_started": (
        "Slurm could not start it",
        "make the folder of --output, or write to another one",
    ),
    "unknown": ("its log does not say why", "read the end of the log"),
}

# What Slurm, heartbeat.py and preemption.py write, in the order in which they are believed
WORDS = {
    "memory": r"oom.kill event|: Out Of Memory$",
    "node": r"Node failure on |DUE TO NODE FAILURE",
    "preempted": r"DUE TO PREEMPTION",
    "time_limit": r"DUE TO TIME LIMIT",
    "stopped": r"^Requeued: |DUE TO JOB REQUEUE",
    "cancelled": r"\*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ (?:\*\*\*|DUE to SIGNAL)",
    "wait_time": r"^srun: First task exited \d+s ago$(?!(\nsrun: StepId.*)*: exited abnormally$)",
    "hang": r"^Ended, because of |Watchdog caught collective operation timeout",
}
GPU_MEMORY = r"OutOfMemoryError|(?:CUDA|HIP|XPU) out of memory"
# Slurm's states that are themselves a cause
STATES = {"TIMEOUT": "time_limit", "DEADLINE": "time_limit", "CANCELLED": "cancelled"}
STATES |= {"PREEMPTED": "preempted", "NODE_FAIL": "node", "BOOT_FAIL": "node"}
STATES |= {"OUT_OF_MEMORY": "memory", "REQUEUED": "stopped"}

# What torchrun --tee, srun --label, Ray, DeepSpeed or a bar of tqdm puts before a line, and colours
LABEL = r"(?m)^(?:\[(?!rank\d)[\w.-]+\]: ?|\d+: |\(\w+ pid=[^)\n]*\) |[\w.-]+: (?=\[rank\d)"
LABEL += r"|[^|\n]*\|[^|\n]*\| *\d+/\d+ \[[\d:]+<[^]\n]*\])+"
COLOUR = r"\x1b\[[\d;]*m"
# The last lines of a start before a later one, in the log of a launcher without env.sh
REQUEUED = r"(?m)^.*[*] JOB \d+ ON .* DUE TO (?:JOB REQUEUE|PREEMPTION|NODE FAILURE).*\n"
REQUEUED += r"(?:(?:srun: |slurmstepd).*\n)*"
# The first line of a start: env.sh's, or launch_slurm_with_spare.sh's
BEGINS = r"^(?:.*: \d+ ranks on (\S+), rank 0 at .* Each node: ranks (\d+),.*"
BEGINS += r"|Start ([1-9]\d*) on ([\w.,-]+))$"
AGAIN = r" has ended with status \d+, and starts again in [\d.]+ seconds\n"
# As the second command of the page has it
ERROR = r"(?:Error|Exception)\b|error:|fatal:|not found|NCCL WARN|\[E[0-9 ]|exitcode +: -|DUE TO"
ERROR += r"|terminate called|with signal SIG"
# What torch says in every rank that has lost another one
PEER = r"onnection (?:closed|reset)|remote process|ncclRemote|was likely closed|got 0 bytes"
PEER += r"|with error: Broken pipe|from (?:recv|send)Bytes"
NO_ERROR = rf'ChildFailed|  raise |File "|SIGTERM|Terminated|Exited with|{PEER}'
NO_ERROR += r"|SignalException|[Ww]arning|WARNING"
# Of a group of exceptions, and of a loader worker, the error itself follows.
NO_ERROR += r"|Traceback|in DataLoader worker process"
NO_ERROR += r"|CANCELLED AT \S+ (?:[*]|DUE to)"
NO_ERROR += r"|error: *[-+]?[0-9]*[.][0-9]"  # a metric
# A line of Python, C++ or NCCL. Another one, such as "config not found", may be harmless.
RAISED = r"^[\s|]*[\w.]*(?:Error|Exception)(?::|\s*$)"
SURE = rf"^\[rank\d|{RAISED}|Fatal Python error|NCCL WARN|\[E[0-9 ]|^slurmstepd"
SURE += r"|terminate called|with signal SIG"
# What srun, Slurm and torchrun report, and the beginning of a line that may be a sentence
REPORT = r"srun: |slurmstepd|[EW]\d{4} "
SENTENCE = r"(?!\[rank\d+\]|\s|Traceback|=|-)."
# How ranks and tasks ended, as its third command has it: by torchrun, spawn_ranks.py and srun
ENDS = r"^srun: error: \S+: tasks? |^spawn_ranks.py: rank |^ +exitcode +: "
TORCHRUN = r"(Root Cause.*\n(?:\S*\n)?)?^ +time +: (\S+)\n +host +: (\S+)\n +rank +: (\d+) .*\n"
TORCHRUN += r" +exitcode +: (-?\d+) \(pid: (\d+)"
# Then they end the others, also by SIGKILL, if those ignore SIGTERM.
FORCED = r"process (\d+) via (?:15|Signals[.]SIGTERM), forcefully"
STOPS = r"srun: .*Terminating StepId"
SPAWN = r"^spawn_ranks.py: rank (\d+) on (\S+): .* (?:exit code (\d+)|signal (\w+))$"
SRUN = r"^srun: error: (\S+): tasks? (\d+).*?: (?:Exited with exit code (\d+)|([\w ]+\w))"
SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
SIGNALS |= {number.name: int(number) for number in signal.Signals} | {"Out Of Memory": 9}


def read(path: Path, limit: int = 2**24) -> str:
    """The end of a regular file. Nothing else is read, because a FIFO would keep this waiting."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(file, "rb") as opened:
            status = os.fstat(file)
            if stat.S_ISREG(status.st_mode):
                opened.seek(max(0, status.st_size - limit))
                return opened.read(limit).decode(errors="replace").replace("\r", "\n")
    return ""


def parts_of(log: str, last: int = 0) -> list[dict]:
    """What each start has written: its number `start`, the `text`, its `nodes`, and its `ranks` on
    each of them. `last` is the number of Slurm's last start; a log may lack the earlier ones."""
    log = re.sub(LABEL, "", re.sub(COLOUR, "", log))
    begins = list(re.finditer(BEGINS, log, re.MULTILINE))
    if not begins and log:
        cuts = [0, *[end.end() for end in re.finditer(REQUEUED, log)][:last], None]
        texts = [log[begin:end] for begin, end in itertools.pairwise(cuts)]
        first, nodes = last - len(texts) + 1, {"nodes": "", "ranks": 0}
        return [nodes | {"start": first + i, "text": text} for i, text in enumerate(texts)]
    parts, ranks = [], 0
    number = max(-1, last - sum(begin[1] is not None for begin in begins))
    for begin, after in itertools.zip_longest(begins, begins[1:]):
        part = {"text": log[begin.end() : after.start() if after else len(log)]}
        if begin[1]:
            number, ranks = number + 1, int(begin[2])
            part |= {"start": number, "nodes": begin[1], "ranks": ranks}
        else:
            # The spare launcher starts the ranks again within the job, and numbers them like this.
            part |= {"start": 10000 * number + int(begin[3]) - 1}
            part |= {"nodes": begin[4], "ranks": ranks}
            if begin[3] == "1" and parts:
                parts.pop()
        parts.append(part)
    return parts


def end_of(part: dict, state: str = "", script: dict | None = None) -> dict:
    """Why a start has ended, by Slurm's state if that says it, by its part of the log, or else by
    the end of the job's script:

    `cause`, a key of CAUSES; `first`, the rank that ended before the others, as `rank`, `node`,
    `exit` (its status) and `signal`; `error`, the line with its error; and whether that is a guess.
    """
    # A program that aux/launch/programs.sh has started again did not end the job.
    *before, tail = re.split(AGAIN, part["text"])
    # A job that is requeued does not fail. So its next start has, before env.sh's line.
    if state == "FAILED" and "DUE TO JOB REQUEUE" in tail:
        tail = re.split(REQUEUED, tail)[-1]
    part = part | {"text": tail}
    text, nobody = part["text"], {"first": None, "error": None, "guessed": False}
    said = (name for name, words in WORDS.items() if re.search(words, text, re.MULTILINE))
    cause = STATES.get(state.partition(" ")[0]) or next(said, None)
    if cause in ("time_limit", "cancelled", "preempted", "stopped", "wait_time"):
        return {"cause": cause} | nobody  # Many ranks print errors then, and none is to blame.
    if cause == "node":
        lost = re.search(r"Node failure on (\S+)", text)
        return {"cause": cause} | nobody | {"first": lost and end(None, lost[1])}

    first, error, guessed = first_error(part, script)
    # But a trainer may have failed because its server did, and just before that was said.
    if before and not error:
        _, error, guessed = first_error(part | {"text": before[-1]})
        guessed = guessed or error is not None
    # The ranks may have waited for one that had failed before.
    if cause == "hang" and not guessed and not error.startswith("[E"):
        early = re.split(f"(?m){WORDS['hang']}", text)[0]
        raised = re.search(rf"(?m)^\[rank\d+\]:[ |]*{re.escape(error)}$", early)
        cause = None if raised else cause
    if cause:
        pass
    elif error and re.search(GPU_MEMORY, error):
        cause = "gpu_memory"
    elif error and not guessed and (first or {}).get("signal") in (None, 6, 15):
        cause = "error"  # After an error in C++ a rank ends itself by SIGABRT.
    elif first and first["signal"] not in (None, signal.SIGTERM):
        cause = "killed"
    elif first and first["exit"] and first["rank"] is not None:
        cause = "exit"
    elif "Received 15 death signal" in text or (first and first["signal"]):
        return {"cause": "terminated"} | nobody
    else:
        cause = "exit" if first and first["exit"] else "unknown"
    # A message may have the whole of a sample in it.
    return {"cause": cause, "first": first, "error": error and error[:500], "guessed": guessed}


def first_error(part: dict, script: dict | None = None) -> tuple[dict | None, str | None, bool]:
    """`first`, `error`, and whether that is a guess, for `end_of`."""
    ends, lines = ends_of(part["text"]), part["text"].splitlines()
    raised = ends_of_tracebacks(lines)
    # A log may have millions of lines, so few of them are looked at twice.
    errors = [line for line in lines if line in raised or (re.search(ERROR, line) and is_own(line))]
    errors = [line for line in errors if re.search(SURE, line)] or errors
    # If torch has put a rank before one, the script has caught those without.
    if any(line.startswith("[rank") for line in errors):
        errors = [line for line in errors if not re.search(RAISED, line)]

    label = re.match(r"\[rank(\d+)\]:?[ |]*", errors[0]) if errors else None
    if label:
        rank = int(label[1])
        named = [its for its in ends if its["rank"] == rank]
        first = named[0] if named else end(rank, node_of(rank, part), 1)
        return first, plain(errors[0][label.end() :]), False
    killed = [its for its in ends if its["signal"] in (signal.SIGKILL, signal.SIGBUS)]
    first = next(iter(killed or ends), script)
    if errors and re.search(SURE, errors[0]):
        return first, plain(errors[0].strip(" |")), False
    error = errors[0].strip() if errors else None
    if first and first["exit"]:
        # If a script ended with a sentence, it is the last line before others report the end.
        reports = (i for i, line in enumerate(lines) if re.match(REPORT, line) and is_own(line))
        before = reversed(lines[: next(reports, None)])
        said = (line for line in before if re.match(SENTENCE, line) and is_own(line))
        error = next(said, error)
    return first, error and plain(error), True


def ends_of_tracebacks(lines: list[str]) -> set[str]:
    """The lines after the tracebacks that have a rank in front, whatever the exception's name and
    words, but not those of ranks that have lost another one."""
    inside, found = set(), set()
    for line in lines:
        if line.startswith("[rank") and (label := re.match(r"\[rank\d+\]: ", line)):
            if line.startswith('  File "', label.end()):
                inside.add(label[0])
            elif label[0] in inside and not line.startswith(" ", label.end()):
                inside.remove(label[0])
                if not re.search(f"{PEER}|in DataLoader worker process", line):
                    found.add(line)
    return found


def is_own(line: str) -> bool:
    """Whether a line is of the script, and not about the end of other ranks."""
    return not re.search(NO_ERROR, line) and not re.search(ENDS, line)


def end(rank: int | None, node: str | None, status: int | None = None, number: int | None = None):
    return {"rank": rank, "node": node, "exit": status, "signal": number}


def ends_of(text: str) -> list[dict]:
    """How each rank has ended that torchrun, spawn_ranks.py or srun reports, the earliest first."""
    ends = []
    # It ends a node's other ranks in the second in which one has failed.
    by_time = sorted(re.findall(TORCHRUN, text, re.MULTILINE), key=lambda its: (not its[0], its))
    forced = re.findall(FORCED, text)
    for _, _, node, rank, code, process in by_time:
        status = (int(code), None) if int(code) >= 0 else (None, -int(code))
        if process not in forced:
            ends.append(end(int(rank), node, *status))
    for rank, node, code, name in re.findall(SPAWN, text, re.MULTILINE):
        ends.append(end(int(rank), node, int(code) if code else None, SIGNALS.get(name)))
    if ends:
        return ends
    # Under torchrun a task is no rank.
    ranks = "torch/distributed/elastic" not in text
    # A rank that was killed may be reported after those that have lost it.
    early = text if re.search(PEER, text) else re.split(STOPS, text)[0]
    found = re.findall(SRUN, early, re.MULTILINE) or re.findall(SRUN, text, re.MULTILINE)
    for node, task, code, words in found:
        status = (int(code), None) if code else (None, SIGNALS.get(words))
        ends.append(end(int(task) if ranks else None, node, *status))
    return ends


def node_of(rank: int, part: dict) -> str | None:
    """All nodes have equally many ranks."""
    command = ["scontrol", "show", "hostnames", part["nodes"]]
    names = []
    with contextlib.suppress(OSError):
        names = subprocess.run(command, capture_output=True, text=True).stdout.split()
    place = rank // max(1, part["ranks"])
    return names[place] if place < len(names) else None


def why(cause: str, first: dict | None, by: str | None = None) -> tuple[str, str]:
    """A cause in words, and what to do."""
    first = first or end(None, None)
    who = "it" if first["node"] is None else f"a rank on {first['node']}"
    if first["rank"] is not None:
        who = f"rank {first['rank']} on {first['node'] or 'some node'}"
    words = {"who": who, "exit": first["exit"], "signal": "", "by": by or "somebody"}
    words["node"] = first["node"] or "a node"
    if first["signal"]:
        names = {int(number): number.name for number in signal.Signals}
        words["signal"] = f" by {names.get(first['signal'], 'signal ' + str(first['signal']))}"
    what, do = (text.format(**words) for text in CAUSES[cause])
    if cause == "node" and not first["node"]:
        do = "submit it again"
    return what, do


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (log := read(Path(sys.argv[1]))):
        sys.exit(__doc__)
    found = end_of(parts_of(log)[-1])
    what, do = why(found["cause"], found["first"])
    print(f"The last start ended{', but' if found['cause'] == 'unknown' else ', because'} {what}.")
    if found["error"]:
        print(f"    {found['error']}")
    print(f"Next: {do}.")
