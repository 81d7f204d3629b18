"""Decides for launch_slurm_with_spare.sh which nodes a run gets, and whether it starts again.

    python3 aux/launch/spare.py choose START PROBE...  # prints the nodes of a start, from 0 on
    python3 aux/launch/spare.py blame STATUS SAVES     # after its end: looks for a node to blame
    python3 aux/launch/spare.py watch                  # requeues a job that lost its first node

They run in the job script's shell, after env.sh. PROBE is a command that fails on a bad node, and
SAVES the folder or file in which the run saves. `choose` and `blame` end with status 1 if the run
is not to start (again), and leave each other notes in log/JOB/spare.json.
"""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from requeue_failed import has_saved, is_running, job_id, requeues, say, slurm

NO_STEP = "it does not run a step"
TWICE = "a rank has failed there twice"
SAME_STEP = "a rank has failed there twice, now in a step as before: look at the script first"
BAD_NODES = Path("bad_nodes.txt")
LOG = "/proc/self/fd/2"  # the shell's stderr is the job's log
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError)

# srun's words if slurmctld, and not the node, has not answered
BUSY = r"Unable to (?:confirm|create) .*(?:contact|timed out|connect|[Zz]ero [Bb]ytes|[Tt]ry again)"

# The first and the last step in which a start may have failed, or None if nobody knows
Steps = tuple[int, int] | None


@dataclass
class Notes:
    """What `choose` and `blame` know of a job's starts since Slurm has started it."""

    out: dict[str, str] = field(default_factory=dict)  # the nodes that are left out, and why
    used: list[str] = field(default_factory=list)  # the nodes of the last start
    log_size: int = 0  # in bytes, before that start
    failed: list[tuple[str | None, Steps]] = field(default_factory=list)  # (node to blame, steps)
    without_save: int = 0  # failures since the last save


# --- what Slurm knows ---


def has_lost(first: str) -> bool:
    """Whether the job has lost its first node, and still runs."""
    ask = ("squeue", "--noheader", f"--jobs={job_id()}")
    if slurm(*ask, "--Format=restartcnt:9") != requeues():
        return False
    return slurm(*ask, "--states=all", f"--nodelist={first}") == ""


def nodes_of_job() -> list[str]:
    return (slurm("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]) or "").split()


def able(nodes: list[str], probe: list[str], again: bool = True) -> list[str]:
    """Those that can run a step with the probe now. If Slurm was busy, it is asked again."""
    step = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={os.environ['CPUS_PER_NODE']}"]
    step += ["--overlap", "--kill-on-bad-exit=1", "--immediate=30", *probe]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    probes, fit, busy = {}, [], []
    for node in nodes:
        command = ["timeout", "--kill-after=9", "120", "srun", f"--nodelist={node}", *step]
        probes[node] = subprocess.Popen(command, text=True, errors="replace", **pipes)
    for node, process in probes.items():
        _, said = process.communicate()
        if process.returncode == 0:
            fit.append(node)
        elif re.search(BUSY, said):
            busy.append(node)
    if busy and again and is_running():
        fit += able(busy, probe, again=False)
    return fit


# --- what the run has left behind ---


def steps_of(heartbeats: Path) -> Steps:
    """The steps in which a start may have failed, by its heartbeats (distributed/heartbeat.py).
    The newest may be older than the failure by the time between two of them."""
    found = []
    for path in heartbeats.glob("*"):
        # A stranger's FIFO would keep this one waiting.
        if not path.is_file():
            continue
        # Without a step, half written, a stranger's, or of a heartbeat.py that wrote less
        with contextlib.suppress(OSError, ArithmeticError, RecursionError, *UNREADABLE):
            beat = json.loads(path.read_text())
            seconds = max(1, beat["counts"][1] / 10)
            rate = (beat["step"] - beat["first_step"] + 1) / seconds
            found.append((beat["step"], beat["step"] + math.ceil(rate * beat["interval"])))
    return max(found, default=None)


# srun --label and torchrun --tee put a label before a line.
LABEL = r"^(?:\[[^]]*\]: ?|\d+: )?"
# srun names the first task that ends, and heartbeat.py the rank for which all wait.
FIRST = rf"^srun: error: (\S+): task |{LABEL}Ended, because of (?:rank \S+ on (\S+): |no rank )"
# torchrun's report. Only SIGKILL and SIGBUS are signs of a bad node: other signals may follow from
# the end of another rank.
KILLED = r"Root Cause[^=]*? host +: (\S+)\n.*\n.* exitcode +: -[79] "


def node_to_blame(said: str, nodes: list[str]) -> str | None:
    """By a start's part of the log: the node of a rank that was killed, or else the first one that
    srun or heartbeat.py names."""
    hosts = re.findall(KILLED, said)
    if first := re.search(FIRST, said, re.M):
        hosts.append(first[1] or first[2] or "")
    for host in hosts:
        # A host name may have a domain that Slurm's name lacks.
        for name in (host, host.partition(".")[0]):
            if name in nodes:
                return name
    return None


def verdict(failed: list[tuple[str | None, Steps]]) -> str | None:
    """Why the node of the last failure is left out, or None if it is not: once may be chance.

    A second failure in one step, on whatever node, is more likely the script's.
    """
    *before, (node, steps) = failed
    if node is None or node not in [name for name, _ in before]:
        return None
    for _, other in before:
        if steps and other and steps[0] <= other[1] and other[0] <= steps[1]:
            return SAME_STEP
    return TWICE


# --- bad_nodes.txt: a line is a date, a node, and why it is left out ---


def bad_nodes(tells: bool = False) -> set[str]:
    """Their names. It skips what is no such line, which others may have written, and tells so."""
    nodes, skipped = set(), []
    for number, line in enumerate(lines_of_bad_nodes(), 1):
        match line.split():
            case [_, node, *_] if re.fullmatch(r"[\w.-]+", node):
                nodes.add(node)
            case [_, *_]:
                skipped.append(str(number))
    if skipped and tells:
        say(f"{BAD_NODES}: skipped line {', '.join(skipped)}, no date, node and reason")
    return nodes


def lines_of_bad_nodes() -> list[str]:
    """With their ends. Bytes that are not UTF-8 survive in a string that is written back."""
    if BAD_NODES.is_fifo():  # a stranger's, which would keep the job waiting
        return []
    try:
        return BAD_NODES.read_text("utf-8", "surrogateescape").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        say(f"{BAD_NODES} is not read: {error.strerror}")
        return []


def leave_out(notes: Notes, node: str, why: str):
    say(f"Left out: {node}, {why}")
    notes.out[node] = why
    if node not in bad_nodes() and why != SAME_STEP:
        line = f"{time.strftime('%F')} {node} {why} (job {os.environ['SLURM_JOB_ID']})\n"
        # A full disk, or somebody else's file, is no reason to end the job.
        with contextlib.suppress(OSError), BAD_NODES.open("a") as file:
            file.write(line)


def acquit():
    """Takes back what this job has written about nodes on which its ranks failed."""
    mark = f"{TWICE} (job {os.environ['SLURM_JOB_ID']})\n"
    lines = lines_of_bad_nodes()
    kept = [line for line in lines if not line.endswith(mark)]
    if kept != lines:
        BAD_NODES.write_text("".join(kept), "utf-8", "surrogateescape")


# --- the commands ---


def choose(notes: Notes, nodes: list[str], fit: list[str], wanted: int) -> list[str]:
    """The first `wanted` nodes that are not left out. Those that are not fit are left out from now
    on, and one on which a rank has failed twice. The list is shorter if too few remain."""
    for node in nodes:
        if node in notes.out or node in fit:
            continue
        leave_out(notes, node, NO_STEP)
        # A rank that fails when it has lost this node is not to blame.
        if node in notes.used:
            notes.failed[-1] = (None, None)
    if notes.failed and (why := verdict(notes.failed)):
        leave_out(notes, notes.failed[-1][0], why)
    notes.used = [node for node in nodes if node not in notes.out][:wanted]
    return notes.used


def command_choose(folder: Path, start: int, probe: list[str]):
    nodes, notes = nodes_of_job(), Notes()
    if start > 0:
        notes = Notes(**json.loads((folder / "spare.json").read_text()))
    else:
        bad = bad_nodes(tells=True)
        for node in nodes:
            if node in bad:
                leave_out(notes, node, "as bad_nodes.txt says")

    fit = able([node for node in nodes if node not in notes.out], probe)
    if not is_running():
        sys.exit(1)
    if not fit and len(notes.out) < len(nodes):
        sys.exit(f"No node runs a step with the probe, {' '.join(probe)}: the job ends")
    wanted = int(os.environ["NNODES"])
    used = choose(notes, nodes, fit, wanted)
    if len(used) < wanted:
        bad = [node for node, why in notes.out.items() if why != SAME_STEP]
        advice = f". Submit it again with --exclude={','.join(bad)}" if bad else ""
        what = f"the run needs {wanted}, and only {len(used)} can be used"
        sys.exit(f"No spare node is left: {what}{advice}")
    notes.log_size = os.stat(LOG).st_size
    (folder / "spare.json").write_text(json.dumps(asdict(notes)))
    (folder / "started").touch()
    print(",".join(used))


def command_blame(folder: Path, status: int, saves: Path):
    notes = Notes(**json.loads((folder / "spare.json").read_text()))
    with open(LOG, "rb") as log:
        log.seek(notes.log_size)
        said = log.read().decode(errors="replace")
    if status == 0 or re.search(f"{LABEL}(Requeued|Not requeued): ", said, re.M):
        sys.exit(1)
    if not is_running():
        sys.exit(1)

    node = node_to_blame(said, notes.used)
    number = os.environ.get("SLURM_RESTART_COUNT", "0")
    notes.failed.append((node, steps_of(folder / f"ranks-{number}")))
    notes.without_save += 1
    if has_saved(saves, folder / "started"):
        notes.without_save = 0
    ended = f"status {status}, {node or 'no node'} first"
    say(f"Start {len(notes.failed)} has failed: {ended}")
    with (folder / "ends").open("a") as file:
        print(f"start {len(notes.failed)}: {ended}", file=file)
    if notes.without_save == 3:
        # More likely the script's fault than that of the nodes on which it failed.
        acquit()
        sys.exit(f"The run has failed three times without a new file in {saves}: it ends")
    (folder / "spare.json").write_text(json.dumps(asdict(notes)))


def command_watch():
    """Becomes a step on up to three nodes but the first, where the job's shell is."""
    first, *others = nodes_of_job()
    others = others[:3]
    if not others:
        return
    size = [f"--nodes={len(others)}", f"--ntasks={len(others)}", "--cpus-per-task=1", "--overlap"]
    # They watch on if some of them are lost.
    step = [f"--nodelist={','.join(others)}", *size, "--no-kill", "--kill-on-bad-exit=0"]
    os.execvp("srun", ["srun", *step, "python3", __file__, "watch", first])


def main():
    folder = Path("log", os.environ.get("SLURM_JOB_ID", ""))
    match sys.argv[1:]:
        case ["choose", start, *probe]:
            command_choose(folder, int(start), probe)
        case ["blame", status, saves]:
            command_blame(folder, int(status), Path(saves))
        case ["watch"]:
            command_watch()
        case ["watch", first]:
            while True:
                time.sleep(20)
                if has_lost(first):
                    slurm("scontrol", "requeue", job_id())
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
