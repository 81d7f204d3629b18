"""Where a job's hours went: in steps, in steps that were lost, or in neither. What a restart cost.

    python aux/ledger.py JOB            # in the folder the job was submitted from
    python aux/ledger.py JOB/PROGRAM    # of a job with aux/launch/programs.sh

Reads the heartbeats of all starts of the job in log/JOB (distributed/heartbeat.py), so any script
that sends them has a ledger. Prints a sentence, one for each start, and the same numbers as JSON in
the last line. An hour of a rank is a GPU-hour. launch_slurm_with_spare.sh prints them at the end of
its log. Without accounting Slurm knows only when it started the job for the last time.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from heartbeat import read_beats


def ledger(starts: list[list[dict]], ends: list[str]) -> dict:
    """The numbers, from the last heartbeats of the ranks of each start, and why starts ended."""
    everyone = [beat for beats in starts for beat in beats]
    looked, in_steps, _ = map(sum, zip(*(beat["counts"] for beat in everyone), strict=True))
    found = {"starts": len(starts), "ranks": starts[-1][0]["world_size"]}
    found["rank_hours"] = round(sum(b["time"] - b["began"] for b in everyone) / 3600, 3)
    found["share_in_steps"] = round(in_steps / max(1, looked), 3)

    # (first step, last step) of the starts that took any, as far as heartbeats have seen them
    taken = [
        (beats[0]["first_step"], beats[0]["step"])
        for beats in starts
        if None not in (beats[0]["first_step"], beats[0]["step"])
    ]
    found["steps"] = taken[-1][1] - taken[0][0] + 1 if taken else 0
    pairs = itertools.pairwise(taken)
    found["steps_lost"] = sum(max(0, last - first + 1) for (_, last), (first, _) in pairs)
    found["ends"] = ends

    # Of the last start. The slowest rank waits least for the others.
    waited = [(beat["counts"][2] / max(1, beat["counts"][1]), beat) for beat in starts[-1]]
    share, beat = min(waited, key=lambda pair: pair[0])
    found["slowest"] = {"rank": beat["rank"], "host": beat["host"], "waits": round(share, 3)}
    found["others_wait"] = round(
        sum(s for s, b in waited if b is not beat) / max(1, len(waited) - 1), 3
    )
    return found


def phases(starts: list[list[dict]], slurm: list[float]) -> list[dict]:
    """The seconds of each start: `queue` from the last heartbeat of the one before until Slurm
    started the job, `meet` until all ranks had met, and `first_step` until all had done their first
    step. `slurm` has the times at which Slurm started the job. What is unknown is left out."""
    found, end = [], 0.0
    for beats in starts:
        met = max(beat["began"] for beat in beats)
        started = max((time for time in slurm if end <= time <= met), default=None)
        row = {}
        if started and end:
            row["queue"] = started - end
        if started or end:
            # A spare node's launcher starts the ranks again within the job.
            row["meet"] = met - (started or end)
        first = [beat.get("first_time") for beat in beats]
        if None not in first:
            row["first_step"] = max(first) - met
        found.append({name: round(seconds, 1) for name, seconds in row.items()})
        end = max(beat["time"] for beat in beats)
    return found


def slurm_starts(job: str) -> list[float]:
    """When Slurm started the job: each time, if the site has accounting, or the last time."""
    env = {name: text for name, text in os.environ.items() if name != "SLURM_TIME_FORMAT"}
    options = ["--noheader", "--parsable2", "--allocations", "--duplicates", "--format=Start"]
    pipes = {"capture_output": True, "text": True}
    for command in (["sacct", *options, f"--jobs={job}"], ["scontrol", "show", "job", job]):
        try:
            shown = subprocess.run(command, **pipes, env=env, timeout=60).stdout
        except (FileNotFoundError, subprocess.TimeoutExpired):
            continue
        times = re.findall(r"(?:^|StartTime=)(\d{4}-\d\d-\d\dT[\d:]+)", shown, re.M)
        if times:
            return [datetime.fromisoformat(time).timestamp() for time in times]
    return []


SAYS = {"queue": "until Slurm started it", "meet": "until all ranks had met"}
SAYS |= {"first_step": "until the first step was done"}


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python aux/ledger.py JOB, or JOB/PROGRAM")
    folder = Path("log", sys.argv[1])
    paths = [path for path in folder.glob("ranks-*") if path.name.partition("-")[2].isdecimal()]
    paths.sort(key=lambda path: int(path.name.partition("-")[2]))
    starts = [beats for path in paths if (beats := read_beats(path))]
    if not starts:
        programs = sorted({path.parent.name for path in folder.glob("*/ranks-*")})
        of_these = f", but of its programs {', '.join(programs)}" if programs else ""
        sys.exit(f"ledger.py: no heartbeats in {folder}{of_these}")
    why = folder / "ends"
    found = ledger(starts, why.read_text().splitlines() if why.exists() else [])
    hours, slowest = found["rank_hours"], found["slowest"]
    print(
        f"Ledger: {hours} hours of ranks, {found['share_in_steps']:.0%} in steps; "
        f"{found['steps']} steps, {found['steps_lost']} more were lost; {found['starts']} starts; "
        f"the slowest is rank {slowest['rank']} on {slowest['host']}, "
        f"it waits {slowest['waits']:.0%}, others {found['others_wait']:.0%} of their steps"
    )
    job = sys.argv[1].partition("/")[0]
    found["phases"] = phases(starts, slurm_starts(job))
    for number, row in enumerate(found["phases"], 1):
        said = ", ".join(f"{seconds:.0f} s {SAYS[name]}" for name, seconds in row.items())
        print(f"Start {number}: {said or 'no times'}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
