"""What grows with the number of ranks in this repository's own code, on the cluster of network namespaces (root).

    python dev/bench/growth.py --ranks 8 64                  # some six minutes
    python dev/bench/growth.py                               # up to 4,096 ranks on 512 nodes: 25 minutes, 10 GB

Start-up: from srun in launch_slurm_to_torch.sh until the last rank's Python runs, with 8 ranks a node, each a task.
Rendezvous and Step 0, heartbeats: the package's own code, over the cluster's network, from the moment at which all
ranks begin. Thousands of processes with torch need more memory than this machine has, so here ranks are threads of at
most 32 processes, on a node each. Checkpoints: the package's own code over a file of each rank, in one process; what
torch writes and gathers is not in it. All share this machine's CPUs: on real nodes each of these times is shorter.
"""

import os
import sys
import time

if sys.argv[1:3] == ["--task", "start"]:  # before the other imports: 3 MB of its own, and not 9
    os.write(1, f"STARTED {time.time()}\n".encode())  # one write, so that lines of several ranks do not mix
    sys.exit()

import contextlib
import datetime
import json
import math
import re
import resource
import shutil
import signal
import statistics
import subprocess
import threading
from argparse import Namespace
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "distributed"))

from read_scaling import growth_table, machine
from resilience.arguments import ArgumentParser, whole_number
from resilience.job import write_atomically

REPOSITORY = Path(__file__).resolve().parents[2]
RANKS_PER_NODE = 8
MOST_PROCESSES = 32  # with torch at once, 150 MB each

# --- arguments --------------------------------------------------------------------------------------------------------


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    default = [8, 64, 512, 4096]
    help = f"multiples of {RANKS_PER_NODE}, up to 4096 (default: 8 64 512 4096)"
    parser.add_argument("--ranks", type=whole_number(1), nargs="+", default=default, help=help)
    parser.add_argument("--rounds", type=whole_number(1), default=3, help="of which the medians are shown")
    parser.add_argument("--out", type=Path, default="log/growth", help="folder for the jobs' logs, and growth.json")
    parser.add_argument("--task", choices=("rendezvous", "beat"), help="what one of this script's own tasks does")
    args = parser.parse_args()
    for ranks in args.ranks:
        if ranks % RANKS_PER_NODE or ranks > 4096 or (ranks > 256 and ranks % MOST_PROCESSES):
            parser.error(f"--ranks takes multiples of {RANKS_PER_NODE}, beyond 256 of {MOST_PROCESSES}, not {ranks}")
    return args


if __name__ == "__main__":
    args = parse_arguments()

import torch
import torch.distributed as dist

from resilience import heartbeat
from resilience.place import Place, rendezvous, step_zero
from resilience.sharded_checkpoints import ShardedCheckpoints, measure_files

# --- a task -----------------------------------------------------------------------------------------------------------


def play_ranks(ranks: int, beats: bool):
    """One process of a job, with its share of `ranks` as threads. The first prints what all have measured."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    dist.init_process_group("gloo")  # of the processes alone, to begin together and to collect
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) - 1)  # of the ranks' own rendezvous
    share = ranks // dist.get_world_size()
    mine = range(share * dist.get_rank(), share * (dist.get_rank() + 1))
    seconds = start_together(ranks, mine)
    if beats:
        seconds |= beat(ranks, mine)
    if dist.get_rank() == 0:
        seconds |= checkpoint(ranks)
        print(f"MEASURED {json.dumps(seconds)}", flush=True)
    dist.barrier()
    os._exit(0)


def collected(value: object) -> list:
    """Every process's value."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def start_together(ranks: int, mine: range) -> dict[str, float]:
    """Seconds until the last rank has done the rendezvous, and from then until it knows Step 0's verdict."""
    timeout, together, times = datetime.timedelta(seconds=300), threading.Barrier(len(mine) + 1), []

    def run(rank: int):
        together.wait()
        begun = time.time()
        store = rendezvous("environment", rank, rank % RANKS_PER_NODE, ranks, timeout)
        met = time.time()
        place = Place(rank, rank % RANKS_PER_NODE, ranks, torch.device("cpu"), store, "environment")
        columns = {"world size": ranks, "local rank": place.local_rank, "device": "cpu", "launcher": "none"}
        step_zero(place, timeout, columns, None)
        times.append((begun, met, time.time()))
        kept.append(store)  # rank 0's is what the others are connected to

    kept, threads = [], [threading.Thread(target=run, args=(rank,), daemon=True) for rank in mine]
    for thread in threads:
        thread.start()
    dist.barrier()
    together.wait()
    for thread in threads:
        thread.join()
    begun, met, done = zip(*(moments for part in collected(times) for moments in part), strict=True)
    if len(done) < ranks:
        sys.exit(f"growth.py: {ranks - len(done)} of {ranks} ranks have not met")
    return {"rendezvous": max(met) - min(begun), "step_zero": max(done) - max(met)}


def beat(ranks: int, mine: range) -> dict[str, float]:
    """Heartbeats for some of their intervals: writes, this machine's CPU time, and how long it takes to read all."""
    written, write = [], heartbeat.Files.write
    heartbeat.Files.write = lambda *arguments: (written.append(time.time()), write(*arguments))
    heartbeat.step, heartbeat.timeout = 0, 1200.0
    for rank in mine:
        first = rank - rank % RANKS_PER_NODE
        heartbeat.start(rank, ranks, range(first, first + RANKS_PER_NODE))
    time.sleep(5)  # the first of each is written at once
    interval = math.ceil(max(2, ranks / 30))  # of the files, as heartbeat.py has it; it looks once a second
    window = interval * max(2, 12 // interval)
    dist.barrier()
    begun, cpu = time.time(), time.process_time()
    while time.time() < begun + window:
        time.sleep(1)
        heartbeat.step += 1
    ended, cpu = time.time(), time.process_time() - cpu
    times = [moment for part in collected(written) for moment in part if begun <= moment < ended]
    found = {"window": ended - begun, "writes_per_second": len(times) / (ended - begun)}
    found["most_writes_in_a_second"] = max(Counter(map(int, times)).values())
    found["cpu_per_rank"] = sum(collected(cpu)) / ranks / (ended - begun)
    start = time.perf_counter()
    folder = Path("log", heartbeat.JOB, f"ranks-{heartbeat.RESTART_COUNT}")
    alive = sum(heartbeat.read(folder / str(rank)) is not None for rank in range(ranks)) if 0 in mine else ranks
    found["read"] = time.perf_counter() - start
    if alive < ranks:
        sys.exit(f"growth.py: {ranks - alive} of {ranks} ranks have no heartbeat")
    return found


def checkpoint(ranks: int) -> dict[str, float]:
    """Seconds of a sharded checkpoint with a file of each rank: a rank's check of its own, and rank 0's publishing."""
    folder = Path("log", heartbeat.JOB, "checkpoints")
    written = folder / "written"
    written.mkdir(parents=True)
    for rank in range(ranks):
        (written / f"__{rank}_0.distcp").write_bytes(bytes(4096))
    files = measure_files(written, 0, 1)  # what all ranks would find
    begun = time.perf_counter()
    measure_files(written, 0, ranks)
    checked = time.perf_counter()
    place, args = Namespace(rank=0, world_size=1), Namespace(keep_checkpoints=1)
    rank_0 = Namespace(place=place, args=args, folder=folder, temporary=lambda step: written)
    rank_0.thread = ThreadPoolExecutor(1)  # in which it removes older ones: none waits for that
    ShardedCheckpoints.publish(rank_0, 1, {"step": 1}, lambda: files)
    return {"check": checked - begun, "publish": time.perf_counter() - checked}


# --- the jobs ---------------------------------------------------------------------------------------------------------


def stop(sentence: str):
    sys.exit(f"growth.py: {sentence}")


def namespaces(*command: object, timeout: float = 1800) -> str:
    """local/cluster/namespaces.sh. Returns its output; stops with its error."""
    script = REPOSITORY / "local/cluster/namespaces.sh"
    done = subprocess.run([str(part) for part in (script, *command)], capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        stop(done.stderr.strip() or f"{command[0]} has ended with status {done.returncode}: {done.stdout.strip()}")
    return done.stdout


def run_job(args: Namespace, nodes: int, tasks: int, task: str, ranks: int) -> tuple[str, float]:
    """A job of so many nodes and tasks on each. Returns its log, and when its launcher has called srun."""
    log = args.out / f"{task}-{ranks}.out"
    log.unlink(missing_ok=True)
    size = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", "--gpus-per-node=0", f"--output={log}"]
    script = ["launch_slurm_to_torch.sh", "dev/bench/growth.py", "--task", task, "--ranks", ranks]
    with contextlib.suppress(SystemExit):
        job = namespaces("exec", "env", f"PATH={os.environ['PATH']}", "sbatch", "--wait", "--parsable", *size, *script)
        folder = REPOSITORY / "log" / job.strip()
        called = folder.stat().st_mtime  # the launcher makes it just before srun
        shutil.rmtree(folder)
        return log.read_text(), called
    text = log.read_text().strip() if log.exists() else "it has no log"
    stop(f"the job {task} of {ranks} ranks has failed, see {log}: {text.splitlines()[-1] if text else 'it is empty'}")


def start_up(args: Namespace, ranks: int) -> float:
    """Seconds until the last rank's Python runs."""
    log, called = run_job(args, ranks // RANKS_PER_NODE, RANKS_PER_NODE, "start", ranks)
    times = [float(found) for found in re.findall(r"^STARTED (\S+)$", log, re.M)]
    if len(times) != ranks:
        stop(f"{len(times)} of {ranks} ranks have started, see {args.out / f'start-{ranks}.out'}")
    return max(times) - called


def measure(args: Namespace, ranks: int) -> dict[str, float]:
    """What a number of ranks takes, in seconds where nothing else is said: medians of the rounds."""
    nodes, rounds = ranks // RANKS_PER_NODE, []
    for number in range(1, args.rounds + 1):
        print(f"{ranks} ranks, round {number} of {args.rounds}", flush=True)
        started = start_up(args, ranks)
        task = "beat" if number == args.rounds else "rendezvous"  # heartbeats take minutes: once
        log, _ = run_job(args, min(nodes, MOST_PROCESSES), 1, task, ranks)
        rounds.append({"start": started} | json.loads(re.search(r"^MEASURED (.*)$", log, re.M)[1]))
    values = {name: [row[name] for row in rounds if name in row] for name in rounds[-1]}
    medians = {name: statistics.median(found) for name, found in values.items()}
    return {"ranks": ranks, "nodes": nodes, "processes": min(nodes, MOST_PROCESSES)} | medians


def main(args: Namespace):
    os.chdir(REPOSITORY)
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    command = " ".join(["dev/bench/growth.py", "--ranks", *map(str, args.ranks), "--rounds", str(args.rounds)])
    found = {"date": datetime.date.today().isoformat(), "machine": machine(), "command": command, "sizes": []}
    os.environ.setdefault("CLUSTER", f"growth-{os.getpid()}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as ctrl-C: by way of finally
    try:
        namespaces("up", "--nodes", max(args.ranks) // RANKS_PER_NODE, "--cpus", RANKS_PER_NODE, "--gpus", 0)
        for ranks in sorted(set(args.ranks)):
            found["sizes"].append(measure(args, ranks))
            write_atomically(args.out / "growth.json", json.dumps(found, indent=1) + "\n")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        namespaces("down")
    print(f"{growth_table(found['sizes'])}\nWritten: {args.out / 'growth.json'}")


if __name__ == "__main__":
    if args.task:
        play_ranks(args.ranks[0], beats=args.task == "beat")
    else:
        main(args)
