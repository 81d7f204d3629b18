"""How a job stands, or why it has ended: what Slurm, the job's log and log/JOB say together.

    python aux/job_end.py JOB    # in the folder the job was submitted from

Prints a line of JSON, whose fields `look` explains. aux/watch_job.py says the same in sentences.

Slurm forgets a job some minutes after its end, unless the site has accounting. The log and log/JOB
stay. env.sh writes a line into log/JOB/start-N when the launcher begins, and one when it ends. If
Slurm does not know the job, and the second line is missing, the job was killed.
"""

import contextlib
import itertools
import json
import math
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from first_error import STATES, end, end_of, parts_of, read, why
from heartbeat import plain, read_beats

WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")
# Slurm's words if it is busy, and may answer a moment later
BUSY = "contact|timed out|connect|zero bytes|try again"
# Why a job waits, by the beginning of Slurm's reason. docs/troubleshooting.md has it in full.
REASONS = {
    "DependencyNeverSatisfied": "for a job that has failed, so it never starts: scancel {job}",
    "Dependency": "for the job in --dependency",
    "BeginTime": "until --begin, or two minutes after a requeue. To start it now: scontrol update"
    " JobId={job} StartTime=now",
    "JobHeldAdmin": "for an administrator to release it: ask",
    "JobHeld|JobHoldMaxRequeue|.*[_ ]held": "for you to release it: scontrol release {job}",
    "JobArrayTaskLimit": "for another task of its array to end",
    ".*NotAllowed|Invalid|(?:Bad)?Constraints|AccountingPolicy|PartitionConfig|QOSUsage"
    "|Reservation[DI]": "for ever, because its account, QOS, partition or constraint is not for it:"
    " scancel {job}",
    "PartitionNodeLimit": "for ever, if `scontrol show partition` allows fewer or more nodes, and"
    " otherwise for nodes that are down or drained: sinfo --list-reasons",
    "ReqNodeNotAvail|Node|Partition(?!Time)|Reservation": "for nodes that are down, drained or"
    " reserved: sinfo --list-reasons",
    "QOSMin": "for ever, because it asks for less than a job must: scancel {job}",
    ".*Per(Job|Node)|PartitionTime|MaxMem|DeadLine": "for ever, because it asks for more than"
    " a job may: scancel {job}",
    ".*(?<!Run)Minutes|.*WallLimit|.*TimeLimit": "for ever, because the hours are used up: ask"
    " whoever grants them",
    ".*PerUser|AssocMax": "for another of your jobs to end, by a limit for each user",
    "AssocGrp|Association|.*PerAccount": "for a job of your account to end",
    "QOS": "for a job of its QOS to end",
    "Resources|Priority": "for nodes. A smaller or shorter job may start earlier",
    "Licenses": "for somebody to give back a license",
    "None|Cleaning|Prolog|Burst|Fed|Sched|Mpi|MaxPowered|Nvidia": "for Slurm, which has not looked"
    " at it yet, or still prepares or cleans up",
}


def look(job: str, program: str = "") -> dict:
    """What is known of a job, or of one program in it (aux/launch/programs.sh), for JSON:

    `job`       its number, and `others`: if that is also the number of an array (or heterogeneous
                job), the states of its other tasks, as far as Slurm knows them, by their numbers
    `state`     Slurm's word, such as FAILED, or null
    `ended`     whether it is over for good, or null if nobody knows
    `known_by`  the witnesses: scontrol (if it answers, knows the job or not), sacct, and files
    `unknown`   the fields that are a guess, or that nobody knows
    `reason`    why it waits, in Slurm's word, and `expected`, when it may start
    `cause`     why it has ended, or null if it has not, or is COMPLETED: `error` (in Python or
                C++), `exit` (it or a rank ended with a status, without an error), `killed`,
                `memory`, `gpu_memory`, `hang`, `time_limit`, `cancelled`, `preempted`, `node` (one
                was lost), `terminated` (by SIGTERM), `stopped` (it was requeued),
                `wait_time` (srun ended the others of a task), `not_started`, `unknown`
    `by`        who has cancelled it; only accounting knows
    `first`     the rank that ended before the others: `rank`, `node`, `exit` (status), `signal`.
                If no rank is known, the job's script, without `rank` and `node`
    `error`     the line of the log with the first error
    `starts`    a list: the number `start`, `began`, `ended`, `status`, `cause`, `first`, and by
                its heartbeats `steps` (the first and the last), `steps_a_second` and `ranks`
    `step`      the last of all starts; `steps_lost`: so many were done twice, and took `hours_lost`
                of ranks; null without heartbeats
    `without_progress`  how many of the last starts got no further than those before them, or
                without heartbeats, how many began after the newest checkpoint and have ended
    `saved`     the newest checkpoint in checkpoints/JOB, or JOB_PROGRAM
    `log`       its path; `known_by` also has that of --error
    `next`      what to do

    Of a job that runs, watch_job.py adds `silent`, `waited_for` and `missing` (not begun):
    lists of `rank` and `node`, or null if no rank has sent a heartbeat of late.
    Times are in seconds since 1970.
    """
    if not job.isdecimal():
        sys.exit(f"{job} is no job's number. For an array: squeue --me --array --format='%i %A'")
    names = "state ended reason expected cause by first error log saved next"
    found = {"job": job, "others": {}, "known_by": [], "unknown": []} | dict.fromkeys(names.split())
    record, states = ask_scontrol(job), []
    if record is not None:
        found["known_by"].append("scontrol")
    if record:
        found |= {"state": record["JobState"], "others": record["others"]}
    if found["state"] in WAITS:
        found |= {"reason": record["Reason"], "expected": seconds(record["StartTime"])}
    # Slurm has forgotten it, or does not say who has cancelled it.
    if record == {} or found["state"] == "CANCELLED":
        states = ask_sacct(job)
    if states:
        found["known_by"].append("sacct")
        found["state"], _, user = states[-1].partition(" by ")
        with contextlib.suppress(ValueError, KeyError):
            found["by"] = pwd.getpwuid(int(user)).pw_name
    if found["state"]:
        found["ended"] = found["state"] not in WAITS + RUNS

    folder = Path("log", job)
    noted, beats = noted_starts(folder), read_starts(folder / program)
    logs = find_logs(job, record or {}, noted)
    # Without env.sh and Slurm heartbeats count the starts.
    last = max(beats, default=0)
    if record:
        last = max(0, int(record["Restarts"]) - (found["state"] in WAITS))
    last = max(noted, default=last)
    # The first start says nothing about an end while it runs.
    ended = last > 0 or found["state"] not in RUNS
    parts = []
    for log in logs if ended else []:
        said = parts_of(read(log), last)
        texts = {part["start"]: part["text"] for part in said}
        for part in parts:
            part["text"] += texts.get(part["start"], "")
        parts = parts or said
    script = end_of_script(record or {}, noted.get(last))
    end = end_of(parts[-1] if parts else {"text": ""}, found["state"] or "", script)
    rows = found["starts"] = rows_of(folder, noted, beats, parts, states, end)
    run = f"{job}_{program}" if program else job
    found |= {"log": str(logs[0]) if logs else None, "saved": newest(Path("checkpoints", run))}
    found |= progress(rows, found["state"] in RUNS, found["saved"])
    if noted:
        found["known_by"].append(str(folder / f"start-{max(noted)}"))
    if parts:
        found["known_by"] += map(str, logs)

    if found["state"] in RUNS and rows:
        rows[-1] |= {"ended": None, "cause": None, "first": None}
    if found["ended"] or not found["state"]:
        if found["state"]:
            found["cause"] = known_cause(end["cause"], record or {})
        else:
            guess(found, end["cause"], silent=record is None)
        explain(found, end)
    found["next"] = what_next(found)
    return found


def end_of_script(record: dict, noted: dict | None) -> dict | None:
    """The status of the job script, or the signal that has ended it, if it is known and not 0."""
    status, number = map(int, record.get("ExitCode", "0:0").split(":"))
    if not record and noted:
        status = noted["status"] or 0
    # So a shell says that ABRT, BUS, KILL, SEGV or TERM has ended its command.
    if status - 128 in (6, 7, 9, 11, 15):
        status, number = 0, status - 128
    if (status, number) in ((0, 0), (0, 53)):  # the second one is Slurm's, of a job not started
        return None
    return end(None, None, status or None, number or None)


def known_cause(cause: str, record: dict) -> str:
    """More exactly than the log says it."""
    if record.get("ExitCode") == "0:53":
        return "not_started"
    if cause == "terminated" and seconds(record.get("PreemptTime", "")):
        return "preempted"
    return cause


def guess(found: dict, cause: str, silent: bool):
    """Adds `state`, `ended` and `cause` of a job that Slurm does not know, or about which it is
    silent."""
    status = found["starts"][-1]["status"] if found["starts"] else None
    found["unknown"].append("state")
    if silent or not found["starts"]:
        found["unknown"].append("ended")
    else:
        found["ended"] = True
    if cause == "stopped":
        cause = "cancelled"  # It was in the queue again, and is not there any more.
    elif status == 0:
        found["state"] = "COMPLETED"
    elif cause == "unknown" and status is None:
        cause = "killed" if found["ended"] else None
        found["unknown"].append("cause")
    if cause in ("time_limit", "cancelled", "preempted", "node"):
        found["state"] = next(state for state in STATES if STATES[state] == cause)
    elif status:
        found["state"] = "FAILED"
    found["cause"] = cause


def explain(found: dict, end: dict):
    """Adds `first` and `error` of an end, if it was a failure, and what is unknown."""
    if found["state"] == "COMPLETED":
        found["cause"] = None
    cause = found["cause"]
    if cause:
        found |= {"first": end["first"], "error": end["error"]}
    if cause == "unknown" or (cause in ("exit", "killed", "terminated") and not found["log"]):
        found["unknown"] += {"cause"} - {*found["unknown"]}
    if end["guessed"] and found["error"]:
        found["unknown"].append("error")
    if cause == "cancelled" and not found["by"]:
        found["unknown"].append("by")
    if found["starts"]:
        found["starts"][-1] |= {"cause": cause, "first": found["first"]}


# --- what Slurm knows ---


def ask(*command: str) -> str | None:
    """What Slurm answers: "" if it does not know the job, None if there is no answer."""
    env = {name: text for name, text in os.environ.items() if name != "SLURM_TIME_FORMAT"}
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "env": env, "timeout": 60}
    for pause in (0, 2, 5, 10):
        time.sleep(pause)
        try:
            done = subprocess.run(command, text=True, errors="replace", **options)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None  # A command that cannot connect has itself tried for a minute.
        if done.returncode == 0:
            return done.stdout
        if "Invalid job id" in done.stderr:
            return ""
        if not re.search(BUSY, done.stderr, re.IGNORECASE):
            return None
    return None


def ask_scontrol(job: str) -> dict | None:
    """The fields of a job's record, and `others`. {} if Slurm does not know the job, None without
    an answer."""
    shown = ask("scontrol", "show", "job", "--oneliner", job)
    if shown is None:
        return None
    # A job's name, which stands before UserId, may have anything in it.
    jobs = {}
    for number, text in re.findall(r"(?ms)^JobId=(\d+) .*? UserId=(.*?)(?=^JobId=\d|\Z)", shown):
        fields = re.findall(r"(\w+)=(.*?)(?= [\w:/]+=|\s*$)", text)
        jobs[number] = dict(reversed(fields))
    record = jobs.pop(job, {})
    # The id of an array's last task stands for the whole array, so there are records of others.
    if record:
        record["others"] = {number: its["JobState"] for number, its in jobs.items()}
    return record


def ask_sacct(job: str) -> list[str]:
    """The state of each start, if the site has accounting: `CANCELLED by 1000`, for example."""
    options = ["--noheader", "--parsable2", "--allocations", "--duplicates"]
    shown = ask("sacct", *options, "--format=JobIDRaw,State", f"--jobs={job}")
    rows = [line.partition("|") for line in (shown or "").splitlines()]
    return [state for number, _, state in rows if number == job]


def seconds(text: str) -> float | None:
    """Of a time as Slurm writes it, if it is one."""
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return None


def wait_for_end(job: str):
    """Returns when the job has ended for good, or Slurm does not know it. It asks once a minute."""
    if not shutil.which("scontrol"):
        sys.exit("there is no scontrol here: wait on a login node")
    for pause in itertools.chain((2, 5, 10, 20, 30), itertools.repeat(60)):
        record = ask_scontrol(job)
        if record is not None and is_over(record):
            return
        time.sleep(pause)


def is_over(record: dict) -> bool:
    """Whether a job has ended for good, or Slurm does not know it. One that is requeued at its time
    limit may be TIMEOUT for a moment, so another end than COMPLETED counts after ten seconds."""
    state, end = record.get("JobState"), seconds(record.get("EndTime", "")) or 0
    if {state, *record.get("others", {}).values()} & {*WAITS, *RUNS}:
        return False
    return state == "COMPLETED" or time.time() > end + 10


# --- what the starts have left behind ---


def noted_starts(folder: Path) -> dict[int, dict]:
    """What env.sh has noted of each of Slurm's starts. An older one has only written code-N."""
    starts = {}
    for path in [*folder.glob("code-*"), *folder.glob("start-*")]:
        kind, _, number = path.name.partition("-")
        if not re.fullmatch(r"\d{1,5}", number):
            continue
        start = starts[int(number)] = {"began": None, "ended": None, "status": None, "log": None}
        # In salloc each launch adds two lines.
        for line in read(path).splitlines() if kind == "start" else []:
            if began := re.fullmatch(r"began (\d{1,11}) \S+ (.*)", line):
                start |= {"began": int(began[1]), "log": began[2], "ended": None, "status": None}
            elif ended := re.fullmatch(r"ended (\d{1,11}) (\d{1,3})", line):
                start |= {"ended": int(ended[1]), "status": int(ended[2])}
    return starts


def read_starts(folder: Path) -> dict[int, list[dict]]:
    """The last heartbeats of each start."""
    starts = {}
    for path in folder.glob("ranks-*"):
        number = path.name.partition("-")[2]
        if re.fullmatch(r"\d{1,9}", number) and (found := read_beats(path)):
            starts[int(number)] = found
    return starts


def find_logs(job: str, record: dict, noted: dict[int, dict]) -> list[Path]:
    """The job's log, as Slurm knows it, as env.sh has noted it, or by its name. If the job has
    --error, that file as well."""
    found, more = [], [noted[number]["log"] or "" for number in sorted(noted)[::-1]]
    for field, ending in (("StdOut", "out"), ("StdErr", "err")):
        # Slurm 22.05 leaves a %N in the name to the node.
        paths = [record.get(field, "").replace("%N", record.get("BatchHost", "")), *more]
        paths += sorted(Path().glob(f"*[_-]{job}.{ending}"))
        # A folder of another user's may be closed.
        found += [Path(path) for path in paths if os.path.isfile(path)][:1]
        more = []
    return list(dict.fromkeys(found))


def rows_of(
    folder: Path,
    noted: dict[int, dict],
    beats: dict[int, list[dict]],
    parts: list[dict],
    states: list[str],
    last_end: dict,
) -> list[dict]:
    """What is known of each start, in order. `states` are Slurm's, of its own starts, and
    `last_end` is that of the last one."""
    written = {part["start"]: part for part in parts}
    # launch_slurm_with_spare.sh starts the ranks again, and after a requeue numbers them
    # 10000, 10001 and so on.
    every = 10000 if os.path.exists(folder / "spare.json") else 1

    rows = []
    numbers = sorted({*beats, *written, *(number * every for number in noted)})
    for number in numbers:
        state = states[number // every] if number // every < len(states) else ""
        end = last_end
        if number != numbers[-1]:
            end = end_of(written.get(number, {"text": ""}), state)
        row = {"start": number, "cause": end["cause"], "first": end["first"], "status": None}
        rows.append(row | steps_of(beats.get(number)))
    for number, note in noted.items():
        its = [row for row in rows if row["start"] // every == number]
        its[0]["began"] = note["began"] or its[0]["began"]
        if note["ended"]:
            its[-1] |= {"ended": note["ended"], "status": note["status"]}
        if note["status"] == 0 and its[-1]["cause"] != "stopped":
            its[-1] |= {"cause": None, "first": None}
    return rows


def steps_of(beats: list[dict] | None) -> dict:
    """What the heartbeats of a start say."""
    found = dict.fromkeys(("began", "ended", "steps", "steps_a_second", "ranks"))
    if not beats:
        return found
    ended = max(beat["time"] for beat in beats)
    found |= {"began": min(beat["began"] for beat in beats), "ended": ended}
    found["ranks"] = beats[0]["world_size"]
    first, last, since = (beats[0][name] for name in ("first_step", "step", "first_time"))
    if None not in (first, last):
        found["steps"] = [first, last]
        if since and last > first and ended > since:
            found["steps_a_second"] = round((last - first) / (ended - since), 4)
    return found


def progress(rows: list[dict], runs: bool, saved: str | None) -> dict:
    """The steps of all starts, of which the last may still run, and those that were in vain."""
    taken, ended = [row for row in rows if row["steps"]], rows[:-1] if runs else rows
    if not taken:
        found = dict.fromkeys(("step", "steps_lost", "hours_lost", "without_progress"))
        if saved:
            with contextlib.suppress(OSError):
                moment = os.stat(saved).st_mtime
                found["without_progress"] = sum((row["began"] or 0) > moment for row in ended)
        return found
    lost, hours = 0, 0.0
    for row, after in itertools.pairwise(taken):
        again = max(0, row["steps"][1] - after["steps"][0] + 1)
        lost += again
        hours += again / (row["steps_a_second"] or math.inf) * row["ranks"] / 3600
    best, idle = -math.inf, 0
    for row in ended:
        last = row["steps"][1] if row["steps"] else -math.inf
        idle = 0 if last > best else idle + 1
        best = max(best, last)
    found = {"step": max(row["steps"][1] for row in taken), "steps_lost": lost}
    return found | {"hours_lost": round(hours, 3), "without_progress": idle}


def newest(folder: Path) -> str | None:
    """The newest checkpoint there. Unfinished ones begin with a dot, or end in part."""
    found = {}
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name.startswith(".") or path.name.endswith(("part", ".log", "owner")):
                continue
            with contextlib.suppress(OSError):  # a link that leads nowhere
                found[path.stat().st_mtime] = str(path)
    return found[max(found)] if found else None


# --- in words ---


def what_next(found: dict) -> str | None:
    """What to do, or None if it is nothing."""
    idle = found["without_progress"] or 0
    if idle > 1 and found["state"] != "COMPLETED":
        if found["step"] is None:
            return f"the last {idle} starts have saved nothing: look why"
        stuck = f"the last {idle} starts got no further than step {found['step']}"
        return f"{stuck}: look at that step before it starts again"
    if found["ended"] is None:
        unknown = "scontrol" in found["known_by"] and not found["starts"]
        return "check the number, and the folder" if unknown else "ask again, on a login node"
    return why(found["cause"], found["first"])[1] if found["cause"] else None


def sentences(found: dict) -> list[str]:
    """The same for people."""
    job, state, reason, cause = (found[name] for name in ("job", "state", "reason", "cause"))
    lines = [f"Job {job} is {state or 'over'}."]
    if reason:
        words = (words for start, words in REASONS.items() if re.match(start, reason))
        text = next(words, "as docs/troubleshooting.md says").format(job=job)
        lines = [f"Job {job} is {state} ({reason}). It waits {text}."]
        if found["expected"]:
            lines.append(f"Slurm expects to start it at {at(found['expected'])}.")
    elif found["ended"] is None:
        says = "does not know it" if "scontrol" in found["known_by"] else "does not answer"
        left = "" if found["starts"] else f", and there is no log/{job} in {Path.cwd()}"
        lines = [f"Nobody knows whether job {job} has ended. Slurm {says}{left}."]
    elif cause:
        what = why(cause, found["first"], found["by"])[0]
        link = "but" if cause == "unknown" else "because"
        lines = [f"Job {job} is {state or 'over'}, {link} {what}."]
    if found["error"]:
        perhaps = "Perhaps: " if "error" in found["unknown"] else ""
        lines.append(f"    {perhaps}{found['error']}")
    if others := [f"{number} {state}" for number, state in found["others"].items()]:
        more = f" and {len(others) - 8} more" if len(others) > 8 else ""
        lines.append(f"Of the same array or job: {', '.join(others[:8])}{more}.")
    if found["ended"] and "state" in found["unknown"]:
        lines.append(
            f"Slurm has forgotten it, so this is by {' and '.join(found['known_by'][1:])}."
        )
    if cause == "killed" and not found["first"]:
        lines.append("Its launcher has noted no end, as if its node was lost, or its shell killed.")
        lines.append("Nor is one noted after exec, or by a trap for EXIT without note_end.")
    return [*map(plain, lines), *history(found)]


def history(found: dict) -> list[str]:
    """A line for each start, the steps of all, and what to do."""
    lines = []
    for row in found["starts"]:
        words = [f"Start {row['start']}"]
        if row["began"]:
            words.append(at(row["began"]))
        if row["began"] and row["ended"]:
            words.append(f"{row['ended'] - row['began']:.0f} s")
        if row["steps"]:
            words.append("steps {} to {}".format(*row["steps"]))
        if row["steps_a_second"]:
            words.append(f"{row['steps_a_second']:.3g} steps a second")
        if row["cause"]:
            words.append(why(row["cause"], row["first"])[0])
        lines.append(", ".join(words))
    if found["steps_lost"]:
        hours = f"which cost {found['hours_lost']} rank-hours"
        lines.append(f"It did {found['steps_lost']} steps twice, {hours}.")
    if found["saved"]:
        lines.append(f"The newest checkpoint is {plain(found['saved'])}.")
    if found["next"]:
        lines.append(f"Next: {found['next']}.")
    return lines


def at(moment: float) -> str:
    return datetime.fromtimestamp(moment).strftime("%F %T")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    print(json.dumps(look(*sys.argv[1].split("/", 1))))
