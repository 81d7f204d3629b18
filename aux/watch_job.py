"""Where every rank of a running job is, and which one to look at when it hangs.

    python aux/watch_job.py JOB          # in the folder the job was submitted from
    python aux/watch_job.py local        # of ranks that were started by hand
    watch -n 5 python aux/watch_job.py JOB

Reads the heartbeats of the job's latest start in log/JOB (distributed/heartbeat.py). The status is
0 if all ranks are alive, and 1 if one is silent, keeps the others waiting, or has not begun. JOB is
the number in log/JOB, even for a task of an array.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from heartbeat import holds_up, read_beats


def main():
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("job", metavar="JOB")
    help = "how long a rank may go without a heartbeat or a step (default: 60)"
    parser.add_argument("--after", type=float, default=60, metavar="SECONDS", help=help)
    args = parser.parse_args()

    starts = sorted(Path("log", args.job).glob("ranks-*"), key=lambda path: path.stat().st_mtime)
    beats, now = read_beats(starts[-1]) if starts else [], time.time()
    if not beats:
        where = f"log/{args.job} of {Path.cwd()}"
        sys.exit(f"watch_job.py: no heartbeats in {where}: does the script call heartbeat.start()?")

    print("rank  host              step  heartbeat  what it does")
    for beat in beats:
        step = "-" if beat["step"] is None else beat["step"]
        seen = f"{now - beat['time']:>7.0f} s"
        print(f"{beat['rank']:>4}  {beat['host']:<16}  {step:>4}  {seen}  {beat['frame']}")

    world_size = beats[0]["world_size"]
    missing = sorted(set(range(world_size)) - {beat["rank"] for beat in beats})
    if missing:
        sys.exit(f"{len(missing)} of {world_size} ranks have sent none, first rank {missing[0]}.")
    silent = [beat for beat in beats if now - beat["time"] > max(args.after, 2 * beat["interval"])]
    if len(silent) == len(beats):
        sys.exit("No rank sends heartbeats: the job has ended, or the shared folder hangs.")

    seconds = min(beat["seconds_in_step"] + now - beat["time"] for beat in beats)
    stuck = holds_up(beats) if seconds > args.after else []
    for beat in silent or stuck:
        what = "is silent" if silent else "keeps the others waiting"
        print(f"{beat['host']}: rank {beat['rank']} {what}")
    if silent or stuck:
        hosts = ",".join(sorted({beat["host"] for beat in silent or stuck}))
        print(f"If it is the node, submit again without it:  sbatch --exclude={hosts}")
        sys.exit(1)
    steps = [beat["step"] for beat in beats if beat["step"] is not None]
    where = f"at step {max(steps)}." if steps else "before the first step."
    since = f" No step for {seconds:.0f} s." if seconds > args.after else ""
    print(f"All {len(beats)} ranks are alive, {where}{since}")


if __name__ == "__main__":
    main()
