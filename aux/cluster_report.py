"""Accept a cluster by one page: do the ranks meet, train, scale, stop and resume, and who hangs?

    sbatch launch_slurm_with_torchrun.sh aux/cluster_report.py                 # fifteen minutes
    sbatch launch_slurm_with_torchrun.sh aux/cluster_report.py losses stop     # these parts only

It needs two ranks or more, and no data. The job's log ends with the page, in Markdown, without
names of hosts and users, addresses or paths, so that you can paste it. A part that fails is a row
that says so, and the job is FAILED. log/JOB/report/ has the page, and the output of each run.

Every rank of the job starts each script as a process of its own, with this rank's variables and a
MASTER_PORT that rank 0 has chosen. So a script may fail or hang, and the next one still runs.
"""

import argparse
import contextlib
import getpass
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

DIGITS = "--data-dir {}/digits --epochs 1 --batch-size 96 --log-every 10 --precision fp32"
TEXT = "--data-dir {}/text --num-hidden-layers 2 --hidden-size 64 --context 32"
TEXT += " --batch-size 96 --learning-rate 0.01 --warmup-steps 5 --steps 50 --log-every 10"
TEXT += " --precision fp32 --no-compile"
WORDS = "each rank of a job takes its own part of every batch and all of them take the same step "
WORDS += "because their gradients are averaged before any weight is changed"
OPTIONS = {"ddp": DIGITS, "preemptible": DIGITS, "fsdp": TEXT, "tp": TEXT}
# Losses of steps 10 to 50 of one process on a CPU, in float32, with torch 2.13.
EXPECTED = {
    DIGITS: "2.221462 1.449502 1.411333 0.857740 0.801937",
    TEXT: "3.265889 2.309070 1.827689 1.499767 1.285807",
}
# Two ranks on CPUs differ from these by 0.0002 % at most, by rounding. Gradients that are not
# averaged, or another learning rate or momentum, are off by more than 1 %.
NEAR = 0.01

env = os.environ
rank = int(env.get("RANK", env.get("SLURM_PROCID", 0)))
local_rank = int(env.get("LOCAL_RANK", env.get("SLURM_LOCALID", 0)))
world_size = int(env.get("WORLD_SIZE", env.get("SLURM_STEP_NUM_TASKS", 1)))
ranks_of_node = int(env.get("LOCAL_WORLD_SIZE", 1))
on_gpu = torch.accelerator.is_available() and sys.platform != "darwin"
folder = Path("log/local", f"report-{env.get('MASTER_PORT')}")
if "SLURM_JOB_ID" in env:
    folder = Path("log", env["SLURM_JOB_ID"], "report")
HOSTS: list[str] = []  # by their first rank
ROWS: list[str] = []
CHECKS: list[str] = []


def sharers(count: int) -> int:
    """How many of so many ranks can share a batch of 96, in pairs: 48 of 64."""
    return max((n for n in range(2, count + 1, 2) if 96 % n == 0), default=1)


SHARERS = sharers(world_size)


def open_store() -> dist.Store:
    """A dictionary that all ranks share. torchrun has opened it, or rank 0 does."""
    opens = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port, patience = env["MASTER_ADDR"], int(env["MASTER_PORT"]), timedelta(seconds=600)
    store = dist.TCPStore(address, port, world_size, opens, patience, False, multi_tenant=True)
    return dist.PrefixStore("cluster_report", store)


# --- a script on all ranks ---


class Run:
    """A script on the first `ranks` ranks, or on those that can share a batch. All ranks of the job
    call it.

    It is over when its processes have ended, when rank 0 prints a line with the words `enough`, or
    after `limit` seconds. `strike` is (rank, words, seconds, signal): so long after a line with
    these words the process of that rank gets the signal. Afterwards `fault` is "" or a sentence,
    and `text` is rank 0's output. Both are the same on all ranks.
    """

    count = 0

    def __init__(self, command: str, limit=150, ranks=SHARERS, strike=None, enough=None):
        Run.count += 1
        self.key, self.strike, self.enough = f"run-{Run.count}", strike, enough
        self.lines, self.done, begin = [], False, time.monotonic()
        if rank == 0:
            with socket.create_server(("", 0)) as free:
                store.set(f"{self.key}/port", str(free.getsockname()[1]))
        port = store.get(f"{self.key}/port").decode()
        if rank < ranks:
            fault = self.follow(command, limit, ranks, port)
            store.set(f"{self.key}/{rank}", fault)
        if rank == 0:
            fault = self.first_fault(limit, ranks)
            store.set(f"{self.key}/found", json.dumps([fault, "".join(self.lines)]))
            shutil.rmtree(Path("log/local", f"ranks-{port}"), ignore_errors=True)
        self.fault, self.text = json.loads(store.get(f"{self.key}/found"))
        self.seconds = time.monotonic() - begin

    def follow(self, command: str, limit: float, ranks: int, port: str) -> str:
        """Starts this rank's process, and sees to its end. Returns its fault."""
        # Without the job's id a script that is stopped does not requeue this job.
        left_out = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "RUN", "TORCHELASTIC_USE_AGENT_STORE")
        variables = {name: value for name, value in env.items() if name not in left_out}
        place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        place |= {"LOCAL_WORLD_SIZE": min(ranks, ranks_of_node), "PYTHONUNBUFFERED": 1}
        if "fp32" in command:
            place["NVIDIA_TF32_OVERRIDE"] = 0
        variables |= {name: str(value) for name, value in place.items()}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": variables}
        options |= {"text": True, "errors": "replace", "start_new_session": True}
        process = subprocess.Popen([sys.executable, *command.split()], **options)
        # The job may be told to end.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        try:
            reader = threading.Thread(target=self.read, args=[process], daemon=True)
            reader.start()
            self.wait(process, limit)
        finally:
            status = process.poll()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        reader.join(5)
        if status == 0 or self.over() == "enough":
            return ""
        # The first rank that fails ends the others.
        store.compare_set(f"{self.key}/over", "", str(rank))
        if status is None:
            return f"rank {rank} has not ended after {limit} s"
        warning = re.compile(r"\s*$|(\[rank\d+\]:)?\[W")
        said = [line.strip() for line in self.lines if not warning.match(line)]
        return f"rank {rank}: {said[-1] if said else f'status {status}'}"

    def read(self, process: subprocess.Popen):
        who, words, seconds, number = self.strike or (None, "", 0, 0)
        with open(folder / f"{self.key}-rank-{rank}", "w") as log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                self.lines.append(line)
                if rank == who and words in line:
                    who = None
                    threading.Timer(seconds, process.send_signal, [number]).start()
                if rank == 0 and self.enough and self.enough in line:
                    self.done = True

    def wait(self, process: subprocess.Popen, limit: float):
        end = time.monotonic() + limit
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
            if self.done:
                store.set(f"{self.key}/over", "enough")
            if over := self.over():
                # If a rank has failed, the others have five seconds for their last words.
                end = min(end, time.monotonic() + (0 if over == "enough" else 5))

    def over(self) -> str:
        """The rank that has failed first, or "enough"; nothing as long as all goes on."""
        return store.get(f"{self.key}/over").decode() if store.check([f"{self.key}/over"]) else ""

    def first_fault(self, limit: float, ranks: int) -> str:
        keys = [f"{self.key}/{other}" for other in range(ranks)]
        try:
            store.wait(keys, timedelta(seconds=limit + 60))
        except dist.DistError:
            [first, *_] = [other for other, key in enumerate(keys) if not store.check([key])]
            return f"rank {first} does not answer"
        first = self.over() or "enough"
        return "" if first == "enough" else store.get(f"{self.key}/{first}").decode()


def clean(text: str) -> str:
    """Without paths, the names of hosts and the user, and addresses."""
    text = re.sub(r"(?<![\w.])(/[^\s/:'\"]+)+/", "", text)
    for host in sorted(HOSTS, key=len, reverse=True):
        name = rf"\b{re.escape(host)}\b(\.[\w.-]*\w)?"
        text = re.sub(name, f"node {HOSTS.index(host) + 1}", text)
    text = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "USER", text)
    return re.sub(r"\b\d+\.\d+\.\d+\.\d+\b", "ADDRESS", text)


def row(part: str, fault: str, result: str, *runs: Run):
    """A row of the page. Rank 0 also prints it, with the number of the run."""
    result = f"**FAILED**: {clean(fault)[:300]}" if fault else clean(result)
    seconds = sum(run.seconds for run in runs)
    ROWS.append(f"| {part} | {result.replace('|', '/')} | {seconds:.0f} |")
    if rank == 0:
        print(f"{ROWS[-1]} {runs[-1].key}", flush=True)


# --- the parts ---


def checks():
    """Step 0: aux/check_ranks.py."""
    run = Run("aux/check_ranks.py --timeout 60", 200, world_size)
    [said] = re.findall(r"^VERDICT: (.*?)(?: started by.*)?$", run.text, re.M) or [""]
    row("`check_ranks.py`", run.fault and (said or run.fault), said, run)
    CHECKS.extend(clean(run.text).splitlines()[:-1])


def losses_of(text: str) -> dict[str, str]:
    """The losses by step, as they are printed."""
    return dict(re.findall(r"^(?:epoch=\d+ )?step=(\d+)/\d+ loss=(\S+)", text, re.M))


def apart(some: dict, others: dict) -> float:
    """The largest difference, as a share; infinite if the losses are not of the same steps."""
    if some.keys() != others.keys():
        return math.inf
    return max((abs(float(some[step]) / float(others[step]) - 1) for step in some), default=0)


def losses():
    """Each script's losses beside those of one process on a CPU."""
    for name, options in OPTIONS.items():
        place = f"--checkpoint-dir {folder}/{name}"
        run = Run(f"distributed/train_{name}.py {options.format(folder)} {place}")
        found = losses_of(run.text)
        expected = dict(zip(("10", "20", "30", "40", "50"), EXPECTED[options].split(), strict=True))
        share, fault = apart(found, expected), run.fault
        if not fault and share > NEAR:
            pairs = " ".join(f"{found.get(step)} ({expected[step]})" for step in expected)
            fault = f"losses, and in parentheses those of one CPU: {pairs}"
        result = f"within {share:.4%} of one CPU's"
        if world_size > SHARERS:
            result += f", on {SHARERS} of {world_size} ranks"
        row(f"losses of `train_{name}.py`", fault, result, run)


def speed():
    """train_fsdp.py on one GPU, one node and all nodes, with as many sequences for each rank."""
    size, batch = "0.1b", 16
    if not on_gpu:
        size, batch = "cpu --num-hidden-layers 2 --hidden-size 64", 12
    script = f"distributed/train_fsdp.py --size {size} --data-dir {folder}/text"
    script += " --steps 100000 --log-every 20"
    cases = [(ranks, 1) for ranks in dict.fromkeys((1, ranks_of_node, world_size))]
    one = 0.0
    for ranks, shard in (*cases, (world_size, world_size)):
        place = f"--checkpoint-dir {folder}/speed-{ranks}-{shard}"
        command = f"{script} --batch-size {batch * ranks} --shard {shard} {place}"
        # The first lines are of the compilation.
        run = Run(command, 180, ranks, enough="step=60/")
        [line] = re.findall("^step=60/.*", run.text, re.M) or [""]
        [rate] = re.findall(r"tokens_per_second=(\d+)", line) or ["0"]
        one = one or float(rate)
        result = f"{int(rate):,} tokens/s"
        if ranks > 1 and one:
            result += f", {float(rate) / one / ranks:.0%} of {ranks} times the first rate"
        if mfu := re.findall(r"mfu=(\S+)", line):
            result += f", MFU {float(mfu[0]):.1%}"
        what = f"{ranks} {'rank' if ranks == 1 else 'ranks'}, `--shard {shard}`"
        fault = run.fault or ("" if line else "it does not come to step 60")
        row(f"speed of `train_fsdp.py --size {size.split()[0]}`, {what}", fault, result, run)


def stop():
    """SIGTERM to rank 0. Then the run goes on, with the losses of one that was not stopped."""
    for name, more in (("preemptible", ""), ("fsdp", " --deterministic")):
        options = OPTIONS[name].format(folder).replace("--log-every 10", "--log-every 5") + more
        command = f"distributed/train_{name}.py {options} --checkpoint-dir {folder}/{name}"
        whole = Run(f"{command}-whole")
        part = Run(f"{command}-stopped", strike=(0, "step=5/", 0, signal.SIGTERM))
        rest = Run(f"{command}-stopped --resume")
        [after] = re.findall(r"^Stopped after step (\d+), saved$", part.text, re.M) or [""]
        share = apart(losses_of(part.text) | losses_of(rest.text), losses_of(whole.text))
        fault = whole.fault or part.fault or rest.fault
        if not fault and not after:
            fault = "SIGTERM after step 5 did not stop it"
        elif not fault and f"Resumed after step {after}\n" not in rest.text:
            fault = f"stopped after step {after}, and did not resume there"
        # DDP sums the gradients of a process's first step in another order.
        elif not fault and share > (NEAR if name == "preemptible" else 0):
            fault = f"resumed, its losses differ by {share:.4%} from those of a whole run"
        result = f"stopped after step {after}, and resumed with the losses of a whole run"
        result += f", up to {share:.4%}" if share else ", digit for digit"
        row(f"stop and resume of `train_{name}.py`", fault, result, whole, part, rest)


def hang():
    """The last rank is frozen while it trains, and heartbeat.py names it after a minute."""
    last = SHARERS - 1
    options = OPTIONS["ddp"].format(folder).replace("--epochs 1", "--epochs 1000")
    command = f"distributed/train_ddp.py {options} --checkpoint-dir {folder}/hang"
    run = Run(command, strike=(last, "[Rank: ", 5, signal.SIGSTOP), enough="no step for")
    [said] = re.findall(r"no step for .*", run.text)[:1] or ["nothing"]
    fault = run.fault
    if f"First to look at: rank {last} on" not in said:
        fault = fault or f"heartbeat.py said: {said}"
    said = re.sub(r", (which is|last seen) in$", "", said)
    row(f"rank {last} is frozen", fault, f"heartbeat.py: {said}", run)


PARTS = {part.__name__: part for part in (checks, losses, speed, stop, hang)}


# --- the page ---


def prepare():
    """Digits, and a text of words drawn at random."""
    from prepare_data import draw_mnist, write_tokens

    raw = folder / "digits/MNIST/raw"
    raw.mkdir(parents=True)
    for name, content in draw_mnist(4800, 96).items():
        (raw / name).write_bytes(content)
    # The same text everywhere, because Python never changes the numbers of Random.random.
    draw, words, text = Random(0).random, WORDS.split(), folder / "digits/words"
    text.write_text(" ".join(words[int(len(words) * draw())] for _ in range(50_000)))
    write_tokens(folder / "text", "words drawn at random", [text], "characters", "words")


def asked(command: str) -> str:
    """The first line of a command's output; nothing if there is no such command."""
    if not shutil.which(command.split()[0]):
        return ""
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=60)
    return done.stdout.partition("\n")[0]


def page() -> str:
    device = torch.get_device_module().get_device_name() if on_gpu else "CPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if on_gpu and torch.cuda.is_available():
        versions += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    if driver := asked("nvidia-smi --query-gpu=driver_version --format=csv,noheader"):
        versions += f", driver {driver}"
    links = [
        path.read_text().strip() for path in Path("/sys/class/infiniband").glob("*/ports/*/rate")
    ]
    cgroup = 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1
    facts = {
        "nodes": f"{len(HOSTS)}. On each: ranks {ranks_of_node}, CPUs {os.cpu_count()}",
        "each rank's device": device,
        "network": ", ".join(f"{links.count(link)} x {link}" for link in set(links))
        or "no InfiniBand",
        "Slurm": f"{asked('scontrol --version') or 'none'}, cgroup v{cgroup}",
        "versions": versions,
    }
    failed = sum("**FAILED**" in row for row in ROWS)
    verdict = f"{failed} of {len(ROWS)} rows FAILED" if failed else "All is well"
    lines = [f"# Cluster report, {time.strftime('%Y-%m-%d')}: {verdict}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {fact} |" for name, fact in facts.items()]
    lines += ["", "| what | result | seconds |", "|---|---|---|", *ROWS, ""]
    if CHECKS:
        lines += ["```", *CHECKS[:40], "```", ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    help = f"of {', '.join(PARTS)}; default: all"
    parser.add_argument("parts", nargs="*", metavar="PART", default=[*PARTS], help=help)
    args = parser.parse_args()
    if not PARTS.keys() >= {*args.parts}:
        parser.error(f"PART is one {help}")
    store.set(f"host/{rank}", env.get("SLURMD_NODENAME") or socket.gethostname())
    names = [store.get(f"host/{other}").decode() for other in range(world_size)]
    HOSTS.extend(dict.fromkeys(names))
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a job that was requeued
        folder.mkdir(parents=True)
        prepare()
    for part in args.parts:
        PARTS[part]()
    store.set(f"done/{rank}", "")
    if rank > 0:
        return
    store.wait([f"done/{other}" for other in range(world_size)])
    for data in filter(Path.is_dir, folder.iterdir()):
        shutil.rmtree(data)
    text = page()
    (folder / "page.md").write_text(text)
    print(f"\n{text}", flush=True)
    sys.exit("FAILED" in text)


if __name__ == "__main__":
    if world_size < 2:
        sys.exit("the report is about two ranks or more: sbatch a launcher, or ./torchrun.sh")
    store = open_store()
    main()
