"""Show how a job stands: why it waits, where its ranks are and which one hangs, or why it ended.

    python aux/watch_job.py JOB          # in the folder the job was submitted from
    python aux/watch_job.py local        # of ranks that were started by hand
    python aux/watch_job.py JOB --json   # for programs: one line, whose fields job_end.py names
    python aux/watch_job.py JOB --wait   # returns when the job has ended for good
    watch -n 5 python aux/watch_job.py JOB

If the job waits or has ended, aux/job_end.py says why, even if Slurm has forgotten the job. If it
runs, this reads the heartbeats of its latest start in log/JOB (distributed/heartbeat.py). If the
script sends none, it looks at the job's nodes whether the ranks have met, and starts py-spy, which
reads the Python stack of each rank. It asks NCCL which collective has not been joined. `pip install
py-spy` once, where all nodes see it.

The status is 0 if all ranks are alive, or the job is COMPLETED. It is 1 if the job waits, or has
ended in another way, or if a rank is silent, keeps the others waiting, or has not begun. Without
heartbeats it is 1 if the ranks have not met, or are at different places, which may be chance, so
look twice. With --json it is then 1, because nobody knows.

JOB is the number in log/JOB, even for a task of an array. The number that sbatch prints for an
array is that of its last task. With it --wait also waits for the other tasks, and the status is 0
if all that Slurm still knows are COMPLETED. JOB/NAME is the program that aux/launch/programs.sh has
started by that name.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from operator import itemgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from heartbeat import HOST, describe, holds_back, holds_up, plain, read_beats, slow_rank
from job_end import ask_scontrol, history, look, sentences, wait_for_end


def main():
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text)
    parser.add_argument("job", metavar="JOB", help="the number in log/JOB, JOB/PROGRAM, or local")
    help = "how long a rank may go without a heartbeat or a step (default: 60)"
    parser.add_argument("--after", type=float, default=60, metavar="SECONDS", help=help)
    parser.add_argument("--json", action="store_true", help="print one line, for programs")
    help = "return when the job has ended for good, with status 0 if it is COMPLETED"
    parser.add_argument("--wait", action="store_true", help=help)
    parser.add_argument("--this-node", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.this_node:
        text = json.dumps(look_into_this_node(args.job))
        # srun would break longer lines, and mix them with those of other nodes.
        for i in range(0, len(text), 900):
            print("seen", HOST, text[i : i + 900])
        return
    job, _, program = args.job.partition("/")
    found = None
    if job != "local":
        if args.wait:
            wait_for_end(job)
        found = look(job, program)
    elif args.wait or args.json:
        parser.error("--wait and --json are for jobs")

    runs = recent_runs(args.job, args.after)
    # Heartbeats may be a few seconds old. They count if Slurm does not answer.
    silent_slurm = found and "scontrol" not in found["known_by"]
    if found and found["state"] != "RUNNING" and not (silent_slurm and runs):
        print(json.dumps(found) if args.json else "\n".join(sentences(found)))
        sys.exit({found["state"], *found["others"].values()} != {"COMPLETED"})
    if args.json:
        late = late_ranks(runs, args.after)
        found |= late
        found["unknown"] += [name for name in late if late[name] is None]
        print(json.dumps(found))
        sys.exit(not runs or any(late.values()))
    status = 0 if runs else look_into(job, program)
    for folder, beats, silent in runs:
        if len(runs) > 1:
            print(f"{folder.relative_to('log')}:")
        status |= report(job, beats, silent, args.after)
    if found and len(found["starts"]) > 1:
        print("\n".join(history(found)))
    sys.exit(status)


def recent_runs(job: str, after: float) -> list[tuple[Path, list[dict], list[dict]]]:
    """Of each program that runs: its folder, its latest heartbeats, and those of silent ranks."""
    runs = []
    for folder in sorted({path.parent for path in Path("log", job).glob("**/ranks-*")}):
        starts = [path for path in folder.glob("ranks-*") if path.is_dir()]
        starts.sort(key=lambda path: path.stat().st_mtime)
        beats = read_beats(starts[-1]) if starts else []
        # In a large job the ranks write less often, and one heartbeat may be late.
        old = [time.time() - max(after, 2 * beat["interval"]) for beat in beats]
        silent = [beat for beat, its in zip(beats, old, strict=True) if beat["time"] < its]
        # Otherwise there are none, or only those of a run that has ended.
        if silent != beats:
            runs.append((folder, beats, silent))
    return runs


def late_ranks(runs: list[tuple[Path, list[dict], list[dict]]], after: float) -> dict:
    """For JSON: the ranks that are silent, that keep the others waiting, or that have not begun.
    Nobody knows of a job without recent heartbeats."""
    if not runs:
        return dict.fromkeys(("silent", "waited_for", "missing"))
    late = {"silent": [], "waited_for": [], "missing": []}
    for _, beats, silent in runs:
        late["missing"] += [{"rank": rank, "node": None} for rank in missing_ranks(beats)]
        for name, ranks in (("silent", silent), ("waited_for", stuck_ranks(beats, after))):
            late[name] += [{"rank": rank["rank"], "node": rank["host"]} for rank in ranks]
    return late


# --- heartbeats ---


def report(job: str, beats: list[dict], silent: list[dict], after: float) -> int:
    """Prints the heartbeats and what they say. Returns the status."""
    now = time.time()
    print("rank  host              step  heartbeat  what it does")
    for beat in beats:
        step = "-" if beat["step"] is None else beat["step"]
        seen = f"{now - beat['time']:>7.0f} s"
        print(f"{beat['rank']:>4}  {beat['host']:<16}  {step:>4}  {seen}  {beat['frame']}")

    if missing := missing_ranks(beats):
        those = f"{len(missing)} of {beats[0]['world_size']} ranks"
        print(f"{those} have sent none, first rank {missing[0]}.", file=sys.stderr)
        return 1

    print_memory(beats)
    seconds, stuck = seconds_without_step(beats), stuck_ranks(beats, after)
    for beat in silent or stuck:
        what = "is silent" if silent else "keeps the others waiting"
        print(f"{beat['host']}: rank {beat['rank']} {what}")
    if silent or stuck:
        if not silent:
            print_more(job, stuck, beats, f"Rank {stuck[0]['rank']} is in")
        hosts = ",".join(sorted({beat["host"] for beat in silent or stuck}))
        print(f"If it is the node, submit again without it:  sbatch --exclude={hosts}")
        return 1
    for beat in holds_back(beats):
        print(slow_rank(beat))
    steps = [beat["step"] for beat in beats if beat["step"] is not None]
    where = f"at step {max(steps)}." if steps else "before the first step."
    line = f"All {len(beats)} ranks are alive, {where}"
    if seconds > after / 4:
        line += f" No step for {seconds:.0f} s."
        line += f" If one hangs, it is named after {after:.0f} s." if seconds <= after else ""
    print(line)
    return 0


def missing_ranks(beats: list[dict]) -> list[int]:
    """Those of which there is none."""
    return sorted({*range(beats[0]["world_size"])} - {beat["rank"] for beat in beats})


def seconds_without_step(beats: list[dict]) -> float:
    return min(beat["seconds_in_step"] + time.time() - beat["time"] for beat in beats)


def stuck_ranks(beats: list[dict], after: float) -> list[dict]:
    """Those for which the others have waited for so many seconds."""
    return holds_up(beats) if seconds_without_step(beats) > after else []


def print_memory(beats: list[dict]):
    """Which ranks' memory grows, the one that grows most first, and which GPUs others hold."""
    for column, what in enumerate(("main memory", "GPU memory"), start=3):
        grows = [(*found, beat) for beat in beats if (found := growth(beat["memory"], column))]
        if grows:
            most, how, beat = max(grows, key=itemgetter(0))
            more = f" (and {len(grows) - 1} more ranks)" if len(grows) > 1 else ""
            amount = f"{most / 1000:.1f} GB" if most >= 1000 else f"{most:.0f} MB"
            where = f"{what} of rank {beat['rank']} on {beat['host']}"
            print(f"{where} grows by {amount} {how}{more}")
    holds = defaultdict(list)
    for beat in beats:
        for number, used in enumerate(beat["gpus"]):
            if used is not None:
                holds[beat["host"], number].append(beat)
    for (host, number), those in holds.items():
        # Ranks that share a GPU on purpose have no other.
        others = [beat for beat in those if len(beat["gpus"]) > beat["gpus"].count(None) + 1]
        if len(those) > 1 and others:
            how = 'set the device before all else, and load with map_location="cpu"'
            print(f"{len(those)} processes hold memory on GPU {number} of {host}: {how}")


def growth(marks: list[list], column: int) -> tuple[float, str] | None:
    """By how many MB the memory of a column grows, and when; None if it does not, or not yet.

    The first half is the start of the run, in which it always grows.
    """
    marks = marks[len(marks) // 2 :]
    if len(marks) < 4:
        return None
    had = [mark[column] for mark in marks]
    grown = had[-1] - had[0]
    # By a tenth, not all at once, and never much less than before.
    even = grown / 5 < had[len(had) // 2] - had[0] < grown * 4 / 5
    falls = any(later < earlier - grown / 10 for earlier, later in itertools.pairwise(had))
    if grown < max(100, had[0] / 10) or not even or falls:
        return None
    saves, steps = marks[-1][0] - marks[0][0], marks[-1][2] - marks[0][2]
    # The least after a save tells what the save itself has left behind.
    left = [mark[column + 2] - mark[column] for mark in marks[:-1] if mark[1]]
    if saves and left and sum(left) / len(left) > grown / saves / 2:
        return grown / saves, "each save or evaluation"
    return grown * 1000 / max(1, steps), "in 1000 steps"


def print_more(job: str, apart: list[dict], ranks: list[dict], heading: str = ""):
    """What the table does not show of the ranks apart from the others. With a heading the stack of
    the first one as well, if the others are in the same line."""
    first = apart[0]
    others = Counter(tuple(rank["stack"]) for rank in ranks if rank not in apart)
    [(most, _)] = others.most_common(1)
    # Under a framework all ranks are in one line of the script.
    if first["frame"] in most:
        if heading:
            print(heading, *first["stack"], sep="\n    ")
        print("Most of the others are in", *most, sep="\n    ")
    # Without workers, a line of the Dataset would be the script's last one.
    below = "\n".join(first["stack"]).rpartition(first["frame"])[2]
    if "/torch/utils/data/dataloader.py:" in below and first["pid"]:
        command = f"py-spy dump --subprocesses --pid={first['pid']:.0f}"
        if job != "local":
            where = f"srun --jobid={job} --overlap --nodes=1 --ntasks=1 --nodelist={first['host']}"
            command = f"{where} {command}"
        print(f"It waits for its loader workers. Their lines:\n    {command}")


# --- the ranks' processes, for a script without heartbeats ---


def look_into(job: str, program: str) -> int:
    """Prints what the ranks of each program do. Returns the status."""
    nodes = [look_into_this_node(job)] if job == "local" else ask_the_nodes(job)
    if program:
        nodes = [node for node in nodes if node["program"] == program]
    programs = sorted({node["program"] for node in nodes if node["ranks"]})
    if len(programs) < 2:
        return show(job, nodes)
    status = 0
    for program in programs:
        print(f"{job}/{program}:")
        status |= show(job, [node for node in nodes if node["program"] == program])
    return status


def show(job: str, nodes: list[dict]) -> int:
    """Prints each rank's line, whether the ranks have met, and which are at a different place."""
    found = sorted((rank for node in nodes for rank in node["ranks"]), key=itemgetter("rank"))
    ranks = [rank for rank in found if rank["stack"]]
    faults = [node["fault"] for node in nodes if node["fault"]]
    for node in nodes:
        if node["nccl"]:
            print(f"NCCL on {node['host']} reports:\n{node['nccl']}\n")
    if ranks:
        print("rank  host              process  what it does")
        for rank in ranks:
            print(f"{rank['rank']:>4}  {rank['host']:<16}  {rank['pid']:>7}  {rank['frame']}")
        for fault in faults:
            print(fault)
    no_group = say_who_has_met(found)
    if not ranks:
        why = faults[0] if faults else "no process of such a job was found"
        print(no_heartbeats(job, why), file=sys.stderr)
        return 1
    if missing := missing_ranks(ranks):
        those = f"{len(missing)} of {ranks[0]['world_size']} ranks"
        print(f"{those} were not found, first rank {missing[0]}.", file=sys.stderr)
        return 1
    if no_group:
        return 1
    apart = holds_up(ranks)
    if not apart:
        print(f"All {len(ranks)} ranks are in the same line.")
        return 0
    print(f"First to look at: {names_of(apart)}, in", *apart[0]["stack"], sep="\n    ")
    print_more(job, apart, ranks)
    print("If the same ranks are there a minute later, the others wait for them.")
    return 1


def say_who_has_met(ranks: list[dict]) -> bool:
    """Says which ranks are in torch's process group. Returns whether none is in one."""
    alone = [rank for rank in ranks if rank["met"] is False]
    if not ranks or ranks[0]["world_size"] == 1:
        return False
    if len(alone) == len(ranks):
        print(
            f"No process group: none of {len(ranks)} ranks is connected to MASTER_PORT, where ranks"
        )
        print("meet. If they take steps, each trains by itself: look under which `if` your script")
        print("calls init_process_group. (Ranks that share a list need no process group.) If they")
        print("take none, look whether the script starts ranks itself, by mp.spawn.")
        return True
    if alone:
        print(f"Not in the process group: {names_of(alone)}")
    elif None not in [rank["met"] for rank in ranks]:
        print(f"All {len(ranks)} ranks have met.")
    return False


def names_of(ranks: list[dict]) -> str:
    names = [f"rank {rank['rank']} on {rank['host']}" for rank in ranks[:4]]
    return ", ".join(names) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def no_heartbeats(job: str, why: str) -> str:
    """The sentence for a job of which nothing can be seen."""
    return f"watch_job.py: no recent heartbeats in log/{job} of {Path.cwd()}, and {why}"


def ask_the_nodes(job: str) -> list[dict]:
    """What look_into_this_node returns on each of the job's nodes that answers."""
    record = ask_scontrol(job)
    if not record:
        sys.exit(no_heartbeats(job, "no such job runs"))
    # It starts one task on each node, because the job's own number of tasks is for its ranks.
    nodes = record["NumNodes"]
    # Because a node may hang, srun ends 60 seconds after the first answer.
    command = ["srun", f"--jobid={job}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}"]
    command += ["--wait=60", sys.executable, os.path.abspath(__file__), job, "--this-node"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    try:
        shown = subprocess.run(command, timeout=300, **pipes).stdout
    except subprocess.TimeoutExpired as error:
        shown = error.stdout or b""
    texts = defaultdict(str)
    for line in shown.decode(errors="replace").splitlines():
        if line.startswith("seen "):
            _, host, text = line.split(" ", 2)
            texts[host] += text
    answers = []
    for text in texts.values():
        with contextlib.suppress(ValueError):  # it was cut off
            answers.append(json.loads(text))
    return answers


def look_into_this_node(job: str) -> dict:
    """What each of the job's ranks here does, by py-spy, and NCCL's report of the whole job."""
    found = ranks_here(job)
    node = {"ranks": [], "fault": None, "nccl": None, "host": HOST, "program": ""}
    if any(number == 0 for number, _, _ in found):
        node["nccl"] = nccl_status()
    spy = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    for number, world_size, pid in found:
        rank = {"rank": number, "host": HOST, "world_size": world_size, "pid": pid}
        rank |= {"step": None, "stack": [], "frame": "-", "waits": False, "met": None}
        node["ranks"].append(rank)
        with contextlib.suppress(OSError):  # it has ended
            variables = variables_of(pid)
            # A program of aux/launch/programs.sh has nodes of its own.
            node["program"] = variables.get("HEARTBEAT_PROGRAM", "")
            if variables.get("MASTER_PORT", "").isdecimal():
                rank["met"] = has_met(pid, int(variables["MASTER_PORT"]))
        try:
            command = [spy, "dump", "--json", f"--pid={pid}"]
            dump = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        except FileNotFoundError:
            node["fault"] = f"there is no py-spy on {HOST}: pip install py-spy"
            continue
        except subprocess.SubprocessError as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
            node["fault"] = f"py-spy cannot read rank {number} on {HOST}: {said}"
            continue
        # The first thread of a process has the process's number.
        threads = {thread["os_thread_id"]: thread["frames"] for thread in json.loads(dump.stdout)}
        calls = [(call["name"], call["filename"], call["line"]) for call in threads.get(pid, [])]
        if calls:
            rank["stack"], rank["frame"], rank["waits"] = describe(calls)
    return node


def has_met(process: int, port: int) -> bool:
    """Whether the process, or a child, is connected to MASTER_PORT: a rank is as long as it has a
    process group, whose store is there."""
    connected = set()
    for table in Path(f"/proc/{process}/net").glob("tcp*"):
        for line in table.read_text().splitlines()[1:]:
            _, _, its_peer, state, *_, inode = line.split()[:10]
            # 0100007F:EE48 is an address and a port, and 01 an open connection.
            if state == "01" and int(its_peer.rpartition(":")[2], 16) == port:
                connected.add(f"socket:[{inode}]")
    for file in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(file) in connected:
                return True
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent, _ = parent_and_start(folder)
            if parent == process and has_met(int(folder.name), port):
                return True
    return False


def parent_and_start(folder: Path) -> tuple[int, int]:
    """Of a process by its folder in /proc: its parent, and when it started."""
    # After the name in parentheses come its state, its parent, and as the 20th its start.
    stat = (folder / "stat").read_text().rpartition(")")[2].split()
    return int(stat[1]), int(stat[19])


def variables_of(process: int) -> dict[str, str]:
    """Those with which it was started."""
    pairs = Path(f"/proc/{process}/environ").read_text(errors="replace").split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def ranks_here(job: str) -> list[tuple[int, int, int]]:
    """Rank, world size and process of each of the job's ranks on this node."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            variables = variables_of(int(folder.name))
            command = (folder / "cmdline").read_text(errors="replace").split("\0")
            parent, start = parent_and_start(folder)
            python = "python" in Path(os.readlink(folder / "exe")).name
            if python and variables.get("SLURM_JOB_ID", "local") == job:
                processes.append((start, int(folder.name), parent, command, variables))
    processes.sort()

    # /proc shows the variables with which a process was started. spawn_ranks.py sets RANK in its
    # ranks only after that, but starts them in order.
    for _, spawner, _, command, variables in processes:
        if any(word.endswith("spawn_ranks.py") for word in command):
            children = []
            for _, pid, parent, words, _ in processes:
                # Python starts its resource tracker beside the ranks.
                if parent == spawner and not any("resource_tracker" in word for word in words):
                    children.append(pid)
            first = int(variables.get("SLURM_NODEID", 0)) * len(children)
            world_size = int(variables.get("NNODES", 1)) * len(children)
            return [(first + i, world_size, pid) for i, pid in enumerate(children)]

    # A launcher sets the first pair of variables, a bare srun only the second: then a rank is what
    # scripts take it for. torchrun also has only the second, and so has this program, in a step of
    # its own. A rank's loader workers have its variables, but are younger.
    here = os.environ.get("SLURM_STEP_ID", "none")
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        found = {}
        for _, pid, _, _, variables in processes:
            if {rank, size} <= variables.keys() and variables.get("SLURM_STEP_ID") != here:
                found.setdefault(int(variables[rank]), (int(variables[size]), pid))
        if found:
            return [(number, *found[number]) for number in found]
    return []


def nccl_status() -> str | None:
    """NCCL's report of the whole job, which each node's first rank gives (RAS, NCCL 2.24)."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", "localhost:28028").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"verbose status\n")
            said = connection.makefile(errors="replace").read().strip()
            # Another user of the node may listen there.
            return "\n".join(map(plain, said.splitlines()))
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    main()
