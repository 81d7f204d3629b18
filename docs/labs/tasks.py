#!/usr/bin/env python3
"""Tasks for a program, or a person, that works on a cluster, with graders that ask Slurm.

    python3 docs/labs/tasks.py                       # the tasks
    python3 docs/labs/tasks.py localhost mine.sh     # grade an answer, a repaired copy
    python3 docs/labs/tasks.py hang                  # start a job that hangs
    python3 docs/labs/tasks.py hang JOB RANK NODE    # grade who it is

A grader submits the answer, waits for the job's end, and looks at its state, its nodes and its log.
It does not read the answer. tests/test_labs.py grades each broken script and each fixed one.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

SUM = r"^rank \d of {0} on \S+, all ranks together are {0}$"
# The script's name, on how many nodes it runs, what its log must have, how often, and in words
TASKS = {
    "one_node": (2, r"^ *1 node-", 2, "one task on each of two nodes"),
    "no_srun": (2, SUM.format(2), 2, "two ranks on two nodes, which meet"),
    "localhost": (2, SUM.format(2), 2, "two ranks on two nodes, which meet"),
    "port": (1, SUM.format(2), 2, "two ranks meet, although another program has port 29500"),
    "rank_variable": (1, SUM.format(2), 2, "two ranks on one node, which meet"),
    "standalone": (2, SUM.format(4), 4, "four ranks on two nodes, which meet"),
    "interface": (2, SUM.format(2), 2, "two ranks on two nodes, which meet"),
    "restart": (2, r"^rank \d of 4 has finished$", 4, "it ends well, although a rank dies once"),
    "signal": (1, r"SIGTERM has come, saved after step \d+$", 2, "both ranks save at SIGTERM"),
    "gpu_per_task": (1, r"^task (\d) takes cuda:\1 of 2$", 2, "each task takes a GPU of its own"),
    "slurm_memory": (1, r"^Finished$", 1, "it ends well"),
    "no_torch": (1, r"^torch \d", 1, "it prints torch's version"),
    "long_wait": (2, r"^rank \d: the data are ready$", 2, "the ranks wait for rank 0's data"),
    "rank_zero_collective": (2, r"^rank \d: \[\d", 2, "both ranks print the order"),
    "uneven_batches": (2, r"^rank \d: finished$", 2, "both ranks finish"),
    "batch_memory": (2, r"^One step of 200000 images$", 2, "one step, in 1 GiB for each rank"),
    "activation_memory": (2, r"^One step of 20 blocks$", 2, "one step, in 1 GiB for each rank"),
    "model_memory": (2, r"^rank \d: one step of 64 m", 2, "one step, in 1.25 GiB for each rank"),
    "set_epoch": (2, r"^epoch 1 begins (.*)\nepoch 2 begins (?!\1$)", 1, "each epoch has an order"),
    "padding": (2, r"^test_accuracy=0.8000 of 5 images$", 1, "each test image counts once"),
}
# Which rank enters an endless loop depends on the job's number.
HANG = ["--time=30", "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=2"]
HANG += ["--export=ALL,PYTHONPATH=distributed", "launch_slurm_with_torchrun.sh"]
HANG += ["docs/labs/endless_loop.py"]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"}
LAUNCHER = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=2", "launch_slurm_with_torchrun.sh"]


def slurm(*command: object) -> str:
    return subprocess.run(list(map(str, command)), check=True, text=True, stdout=-1).stdout


def submit(answer: Path) -> str:
    """A job script, or a Python script with a launcher. Its log, and what Slurm says at its end."""
    log = answer.resolve().with_suffix(".log")
    launcher = LAUNCHER if answer.suffix == ".py" else []
    job = slurm("sbatch", "--parsable", f"--output={log}", *launcher, answer).split(";")[0].strip()
    while True:
        time.sleep(2)
        shown = slurm("scontrol", "show", "job", job)
        if re.search(r"JobState=(\w+)", shown)[1] in ENDED:
            return f"{log.read_text() if log.exists() else ''}\n{shown}"


def missing(name: str, said: str) -> str:
    """What a job's log and Slurm's words lack, or nothing."""
    nodes, line, times, _ = TASKS[name]
    [state], [had] = re.findall(r"JobState=(\w+)", said), re.findall(r"NumNodes=(\d+)", said)
    if state != "COMPLETED" or had != str(nodes):
        return f"the job is {state}, on {had} nodes"
    found = len(re.findall(line, said, re.M))
    return "" if found == times else f"{found} lines, and not {times}, match {line}"


def hang(answer: list[str]) -> int:
    """Starts the job, or ends it and grades the answer: its number, a rank, and a node."""
    if not answer:
        print("job", slurm("sbatch", "--parsable", *HANG).split(";")[0].strip())
        return 0
    if len(answer) != 3:
        sys.exit("the answer is JOB RANK NODE")
    job, rank, node = answer
    shown = slurm("scontrol", "show", "job", job)
    found = re.search(r" NodeList=(\S+)", shown)
    if not found:
        sys.exit(f"job {job} has no nodes yet")
    nodes = slurm("scontrol", "show", "hostnames", found[1]).split()
    slurm("scancel", job)
    stuck = int(job) % 4
    right = (rank, node) == (str(stuck), nodes[stuck // 2])
    print("PASSED" if right else f"FAILED: the others do not wait for rank {rank} on {node}")
    return not right


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["hang"]:
        return hang(arguments[1:])
    if len(arguments) != 2:
        print("hang: name the rank that the others wait for, and its node")
        for name, (nodes, _, _, what) in TASKS.items():
            [script] = Path("docs/labs").glob(f"{name}_broken.*")
            print(f"{name}: repair {script}, on {nodes} node{'s' * (nodes > 1)}: {what}")
        return 0
    lacks = missing(arguments[0], submit(Path(arguments[1])))
    print(f"FAILED: {lacks}" if lacks else "PASSED")
    return bool(lacks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
