"""Where every rank of a running job is: its last step and heartbeat, and which node to suspect
when the job hangs.

    python aux/watch_job.py JOBID                 # in the folder the job was submitted from
    watch -n 5 python aux/watch_job.py JOBID

Reads the heartbeats in log/JOBID/ (distributed/resilience/heartbeat.py). Status 0 when all ranks
are alive, 1 when one is silent or stuck, or has not begun. The stuck rank is the one at the lowest
step, for which all others wait. JOBID is the number in log/JOBID, even for a task of an array.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from resilience.arguments import ArgumentParser, number, whole_number
from resilience.heartbeat import behind, read_beat


def read_beats(job: int) -> list[dict]:
    """The last heartbeat of every rank, by rank; those of the job's latest start."""
    starts = sorted(Path("log", str(job)).glob("ranks-*"), key=lambda folder: int(folder.name[6:]))
    beats = list(filter(None, (read_beat(path) for path in starts[-1].iterdir()))) if starts else []
    if not beats:
        where = f"log/{job}/ranks-* of {Path.cwd()}"
        sys.exit(
            f"watch_job.py: no heartbeats in {where}: a job of several ranks writes them from Step "
            "0 on"
        )
    return sorted(beats, key=lambda beat: beat["rank"])


def main():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("job", type=whole_number(1), metavar="JOBID")
    parser.add_argument(
        "--after",
        type=number(1),
        default=60,
        metavar="SECONDS",
        help="how long a rank may go without a heartbeat or a step",
    )
    args = parser.parse_args()
    beats, now = read_beats(args.job), time.time()
    print("rank  host              step  heartbeat  what it does")
    for beat in beats:
        age = now - beat["time"]
        step = "-" if beat["step"] is None else beat["step"]  # not known yet: the rank is loading
        print(f"{beat['rank']:>4}  {beat['host']:<16}  {step:>4}  {age:>7.0f} s  {beat['frame']}")
    world_size = beats[0]["world_size"]
    missing = sorted(set(range(world_size)) - {beat["rank"] for beat in beats})
    if missing:
        sys.exit(
            f"No heartbeat yet from {len(missing)} of {world_size} ranks, the first of them rank "
            f"{missing[0]}."
        )
    silent = [beat for beat in beats if now - beat["time"] > max(args.after, 2 * beat["interval"])]
    if len(silent) == len(beats):
        sys.exit(
            f"No heartbeat from any rank for {args.after:.0f} s: the job has ended, or the shared "
            "folder hangs."
        )
    suspects = {}  # by host: what is wrong with its first rank
    for beat in silent:
        suspects.setdefault(beat["host"], f"rank {beat['rank']} is silent")
    if not silent and (stuck := find_stuck(beats, now, args.after)):
        suspects = {stuck["host"]: f"rank {stuck['rank']} is stuck here"}
    if not suspects:
        steps = [beat["step"] for beat in beats if beat["step"] is not None]
        where = f"at step {max(steps)}." if steps else "before the first step."
        seconds = min(beat["seconds_in_step"] + now - beat["time"] for beat in beats)
        since = f" No step for {seconds:.0f} s." if seconds > args.after else ""
        print(f"All {len(beats)} ranks are alive, {where}{since}")
        return
    for host, why in suspects.items():
        print(f"{host}: {why}")
    print("If it is the node, submit again without it:  sbatch --exclude=" + ",".join(suspects))
    sys.exit(1)


def find_stuck(beats: list[dict], now: float, after: float) -> dict | None:
    """The heartbeat of the rank that all others wait for; None when none has stood still for
    `after` seconds.

    If all of them wait in collectives of the same step, none is stuck.
    """
    first = min(beats, key=behind)
    alone = not first["in_collective"] or behind(first) < max(behind(beat) for beat in beats)
    return (
        first
        if alone and first["stalled"] and first["seconds_in_step"] + now - first["time"] > after
        else None
    )


if __name__ == "__main__":
    main()
