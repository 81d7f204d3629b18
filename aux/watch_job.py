"""Where every rank of a running job is: its last step and heartbeat, and which node to suspect when the job hangs.

    python aux/watch_job.py JOBID                 # in the folder the job was submitted from
    watch -n 5 python aux/watch_job.py JOBID

Reads the heartbeats in log/JOBID/ (distributed/resilience/heartbeat.py). Status 0 when all ranks are alive, 1 when one
is silent or stuck, or has not begun. Stuck is the rank at the lowest step: all others wait for it. JOBID is the number
in the name log/JOBID, also for a task of an array.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from resilience.arguments import ArgumentParser, number, whole_number
from resilience.heartbeat import behind, read


def read_signs(job: int) -> list[dict]:
    """The last heartbeat of every rank, by rank; those of the job's latest start."""
    starts = sorted(Path("log", str(job)).glob("ranks-*"), key=lambda folder: int(folder.name[6:]))
    signs = list(filter(None, (read(path) for path in starts[-1].iterdir()))) if starts else []
    if not signs:
        where = f"log/{job}/ranks-* of {Path.cwd()}"
        sys.exit(f"watch_job.py: no heartbeats in {where}: a job of several ranks writes them from Step 0 on")
    return sorted(signs, key=lambda sign: sign["rank"])


def main():
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("job", type=whole_number(1), metavar="JOBID")
    parser.add_argument("--after", type=number(1), default=60, metavar="SECONDS", help="without a sign or a step")
    args = parser.parse_args()
    signs, now = read_signs(args.job), time.time()
    print("rank  host              step  last sign  what it does")
    for sign in signs:
        age = now - sign["time"]
        step = "-" if sign["step"] is None else sign["step"]  # not known yet: the rank is loading
        print(f"{sign['rank']:>4}  {sign['host']:<16}  {step:>4}  {age:>7.0f} s  {sign['frame']}")
    missing = sorted(set(range(signs[0]["of"])) - {sign["rank"] for sign in signs})
    if missing:
        sys.exit(f"No sign yet of {len(missing)} of {signs[0]['of']} ranks, the first of them rank {missing[0]}.")
    silent = [sign for sign in signs if now - sign["time"] > max(args.after, 2 * sign["every"])]
    if len(silent) == len(signs):
        sys.exit(f"No rank has given a sign for {args.after:.0f} s: the job has ended, or the shared folder hangs.")
    suspects = {}  # by host: what is wrong with its first rank
    for sign in silent:
        suspects.setdefault(sign["host"], f"rank {sign['rank']} is silent")
    if not silent and (stuck := find_stuck(signs, now, args.after)):
        suspects = {stuck["host"]: f"rank {stuck['rank']} is stuck here"}
    if not suspects:
        steps = [sign["step"] for sign in signs if sign["step"] is not None]
        print(f"All {len(signs)} ranks are alive, " + (f"at step {max(steps)}." if steps else "before the first step."))
        return
    for host, why in suspects.items():
        print(f"{host}: {why}")
    print("If it is the node, submit again without it:  sbatch --exclude=" + ",".join(suspects))
    sys.exit(1)


def find_stuck(signs: list[dict], now: float, after: float) -> dict | None:
    """The heartbeat of the rank that all others wait for; None when none has stood still for `after` seconds.

    When all of them wait in collectives of the same step, none of them is it.
    """
    first = min(signs, key=behind)
    alone = not first["waits"] or behind(first) < max(behind(sign) for sign in signs)
    return first if alone and first["stands"] and first["still"] + now - first["time"] > after else None


if __name__ == "__main__":
    main()
