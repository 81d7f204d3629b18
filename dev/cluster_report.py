"""Accept a cluster or a GPU by one page: do ranks meet, train, scale, stop and resume, how fast?

    sbatch launch_slurm_with_torchrun.sh dev/cluster_report.py                 # fifteen minutes
    sbatch launch_slurm_with_torchrun.sh dev/cluster_report.py losses stop     # these parts only
    python dev/cluster_report.py                                               # on one GPU
    python dev/cluster_report.py checks 0.6b 8b                                # three of its rows

--help names the parts, and the tables below have their commands. It needs no data, and without a
GPU it rehearses with tiny models. The log ends with the page, in Markdown, without names of hosts
and users, addresses or paths, so that you can paste it. A part that fails is a row that says so,
and the job is FAILED. log/JOB/report/ has the page, and the output of each run.

Every rank of the job starts each script as a process of its own, with this rank's variables and a
MASTER_PORT that rank 0 has chosen. So a script may fail or hang, and the next one still runs.
"""

import argparse
import contextlib
import functools
import getpass
import itertools
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist

sys.path += ["aux", "distributed"]
import sizes
from check_ranks import HOST, env, local_rank, open_store, rank, ranks_per_node, world_size

on_gpu = torch.accelerator.is_available() and sys.platform != "darwin"
folder = Path("log/local", f"report-{env.get('MASTER_PORT', os.getpid())}")
if "SLURM_JOB_ID" in env:
    folder = Path("log", env["SLURM_JOB_ID"], "report")
HOSTS: list[str] = []  # by their first rank
ROWS: list[str] = []
CHECKS: list[str] = []
REACHED: list[str] = []  # TFLOP/s of a matmul, if one rank has measured it
PROJECT: list[str] = []  # rows of docs/05_a_second_node.md


def sharers(count: int) -> int:
    """How many of so many ranks can share a batch of 96, in pairs: 48 of 64."""
    return max((n for n in range(2, count + 1, 2) if 96 % n == 0), default=1)


SHARERS = sharers(world_size)
WORDS = "each rank of a job takes its own part of every batch and all of them take the same step "
WORDS += "because their gradients are averaged before any weight is changed"

# --- the rows: commands, and the patterns of their figures ---

# Trained in float32, and compared with one process.
DIGITS = f"--data-dir {folder}/digits --epochs 1 --batch-size 96 --log-every 10 --precision fp32"
# At 0.02, the default, rounding grows tenfold every eight steps: to 0.3 % in fifty.
DIGITS += " --learning-rate 0.005"
TEXT = f"--data-dir {folder}/text --num-hidden-layers 2 --hidden-size 64 --context 32"
TEXT += " --batch-size 96 --learning-rate 0.01 --warmup-steps 5 --steps 50 --log-every 10"
TEXT += " --precision fp32 --no-compile"
OPTIONS = {"ddp": DIGITS, "preemptible": DIGITS, "fsdp": TEXT}
LOSSES = [*OPTIONS, f"fsdp --tensor-parallel {min(2, SHARERS)}"]
# Losses of steps 10 to 50 of one process, of the digits in float64, which rounds on no CPU or GPU
# enough to be seen, and of the text in float32, with torch 2.13.
EXPECTED = {
    DIGITS: "2.284264 2.182833 1.889403 1.272503 0.848632",
    TEXT: "3.265889 2.309070 1.827689 1.499767 1.285807",
}
# In float32 the digits are within 0.03 % of these with oneDNN's kernels for SSE4.1, AVX2 and
# AVX-512, and without oneDNN. With a learning rate 1 % higher they are 1.1 % away, and 19 % with
# gradients that are not averaged.
NEAR = 0.01

# Timed, each row with the pattern of its figures. Weights, gradients and AdamW's moments are in
# float32, and matmuls in bfloat16. The first ten steps are those of the compilation.
UNITS = {"tokens": "{:,.0f} tokens/s", "images": "{:,.0f} images/s", "busy": "GPU busy {:.0%}"}
UNITS |= {"mfu": "MFU {:.1%}", "gib": "{:.1f} GiB"}
TOKENS = r"step=30/.* tokens_per_second=(?P<tokens>\d+)( mfu=(?P<mfu>\S+))?"
TOKENS += r"( peak_memory_gib=(?P<gib>\S+))?"
IMAGES = r"epoch=3 step=(\d+)/\1 .* images_per_second=(?P<images>\d+)"
JPEGS = r"images_per_second=(?P<images>\S+)( gpu_busy=(?P<busy>\S+) peak_memory_gib=(?P<gib>\S+))?"
TRAIN, ONE_RANK = "distributed/train_fsdp.py", "dev/variants.py one_rank"
ENDLESS = "--steps 100000 --log-every 10"
QWEN = f"--data-dir {folder}/qwen {ENDLESS} --size"
GPT2 = f"--data-dir {folder}/gpt2 {ENDLESS} --size 0.1b"  # as many weights, and its tokens
SINGLE = f"local/train_single.py --data-dir {folder}/digits --epochs 3 --log-every 25"
CHANGES = ("workers", "tf32", "bf16", "channels_last", "fused", "compile")
TINY = " --num-hidden-layers 2 --hidden-size 64 --context 32"  # the rehearsal on a CPU
ALONE = {
    "0.6b": (f"{TRAIN} {QWEN} 0.6b --batch-size 4", TOKENS),
    "0.6b-fsdp": (f"{ONE_RANK} {QWEN} 0.6b --batch-size 4", TOKENS),
    "1.7b": (f"{TRAIN} {QWEN} 1.7b --batch-size 4", TOKENS),
    "1.7b-float8": (f"dev/variants.py float8 {QWEN} 1.7b --batch-size 4", TOKENS),
    "8b": (f"{TRAIN} {QWEN} 8b --batch-size 2 --activation-checkpointing", TOKENS),
    "0.1b-eager": (f"{TRAIN} {GPT2} --batch-size 32 --no-compile", TOKENS),
    "0.1b": (f"{TRAIN} {GPT2} --batch-size 32", TOKENS),
    "0.1b-fsdp": (f"{ONE_RANK} {GPT2} --batch-size 32", TOKENS),
    "digits-fp32": (f"{SINGLE} --precision fp32", IMAGES),
    "digits-bf16": (f"{SINGLE} --precision bf16", IMAGES),
    "digits-1000": (f"{SINGLE} --precision bf16 --batch-size 1000", IMAGES),
    "jpegs": (f"examples/jpeg_speed.py {folder}/jpegs", JPEGS),
}
for number, change in enumerate(CHANGES, start=1):  # each beside those before it
    ALONE[f"jpegs-{change}"] = (" ".join([*ALONE["jpegs"][:1], *CHANGES[:number]]), JPEGS)
# No fault of a small GPU, or of a machine without torchao
LEFT_OUT = r"No module named 'torchao'|Memory of a rank: [^(]*(?= \(.*\nwarning: this may not fit)"


# --- a script on all ranks ---


class Run:
    """A script on the first `ranks` ranks, or on those that can share a batch. All ranks of the job
    call it.

    It is over when its processes have ended, when rank 0 prints a line with the pattern `enough`,
    or after `limit` seconds. `strike` is (rank, words, seconds, signal): so long after a line with
    these words the process of that rank gets the signal. Afterwards `fault` is "" or a sentence,
    `text` is rank 0's output, and `times` are the seconds from the start to each of its lines. All
    are the same on all ranks.
    """

    count = 0

    def __init__(self, command: str, limit=150, ranks=SHARERS, strike=None, enough=None):
        Run.count += 1
        self.key, self.strike, self.enough = f"run-{Run.count}", strike, enough
        self.lines, self.times, self.done, self.begin = [], [], False, time.monotonic()
        if rank == 0:
            with socket.create_server(("", 0)) as free:
                store.set(f"{self.key}/port", str(free.getsockname()[1]))
        port = store.get(f"{self.key}/port").decode()
        if rank < ranks:
            fault = self.follow(command, limit, ranks, port)
            store.set(f"{self.key}/{rank}", fault)
        if rank == 0:
            fault = self.first_fault(limit, ranks)
            store.set(f"{self.key}/found", json.dumps([fault, "".join(self.lines), self.times]))
            shutil.rmtree(Path("log/local", f"ranks-{port}"), ignore_errors=True)
        self.fault, self.text, self.times = json.loads(store.get(f"{self.key}/found"))
        self.seconds = time.monotonic() - self.begin

    def follow(self, command: str, limit: float, ranks: int, port: str) -> str:
        """Starts this rank's process, and sees to its end. Returns its fault."""
        # Without the job's id a script that is stopped does not requeue this job.
        left_out = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "RUN", "TORCHELASTIC_USE_AGENT_STORE")
        variables = {name: value for name, value in env.items() if name not in left_out}
        variables.setdefault("MASTER_ADDR", "localhost")
        place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        place |= {"LOCAL_WORLD_SIZE": min(ranks, ranks_per_node), "PYTHONUNBUFFERED": 1}
        # A run on one rank has no more CPUs for its loader workers than each rank of a whole node.
        place["NPROC_PER_NODE"] = ranks_per_node
        place["TORCH_FR_DUMP_TEMP_FILE"] = folder / "nccl_rank_"
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
                self.times.append(time.monotonic() - self.begin)
                if rank == who and words in line:
                    who = None
                    threading.Timer(seconds, process.send_signal, [number]).start()
                if rank == 0 and self.enough and re.search(self.enough, line):
                    self.done = True
        self.times.append(time.monotonic() - self.begin)

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

    def when(self, words: str) -> float:
        """The seconds from the start to rank 0's first line with these words; 0 without one."""
        lines = zip(self.text.splitlines(), self.times, strict=False)
        return next((seconds for line, seconds in lines if words in line), 0)


def clean(text: str) -> str:
    """Without paths, the names of hosts and the user, and addresses."""
    text = re.sub(r"(?<![\w.])(/[^\s/:'\"]+)+/", "", text)
    for host in sorted(HOSTS, key=len, reverse=True):
        # Also as a network adapter's name: n1i, n1-hsn0.cluster.org
        name = rf"\b{re.escape(host)}(?!\d)[\w.-]*"
        text = re.sub(name, f"node {HOSTS.index(host) + 1}", text)
    text = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "USER", text)
    text = re.sub(r"\b\d+\.\d+\.\d+\.\d+\b", "ADDRESS", text)
    group = "[0-9a-f]{1,4}"  # of IPv6, with :: for zeros or whole
    six = rf"(?:{group}:){{1,7}}(?::{group}){{1,6}}|(?:{group}:){{7}}{group}"
    return re.sub(rf"(?<!\w)(?:{six})\b", "ADDRESS", text)


def row(part: str, fault: str, result: str, *runs: Run):
    """A row of the page. Rank 0 also prints it, with the number of the run."""
    result = f"**FAILED**: {clean(fault)[:300]}" if fault else clean(result)
    seconds = sum(run.seconds for run in runs)
    ROWS.append(f"| {part} | {result.replace('|', '/')} | {seconds:.0f} |")
    if rank == 0:
        print(f"{ROWS[-1]} {runs[-1].key}", flush=True)


# --- the parts ---


def checks():
    """Step 0: aux/check_ranks.py. One rank's speed is what a matmul reaches."""
    run = Run("aux/check_ranks.py --timeout 60", 200, world_size)
    [said] = re.findall(r"^VERDICT: (.*?)(?: started by.*)?$", run.text, re.M) or [""]
    row("`check_ranks.py`", run.fault and (said or run.fault), said, run)
    CHECKS.extend(clean(run.text).splitlines()[:-1])
    if on_gpu and world_size == 1:
        REACHED.extend(re.findall(r"^0 +0 +\S+ +\S+ +\d+ +([\d.]+)", run.text, re.M))


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
    for number, case in enumerate(LOSSES):
        name, _, split = case.partition(" ")
        options, script = OPTIONS[name], f"train_{name}.py {split}".strip()
        run = Run(f"distributed/{script} {options} --checkpoint-dir {folder}/losses-{number}")
        found = losses_of(run.text)
        expected = dict(zip(("10", "20", "30", "40", "50"), EXPECTED[options].split(), strict=True))
        share, fault = apart(found, expected), run.fault
        if not fault and share > NEAR:
            pairs = " ".join(f"{found.get(step)} ({expected[step]})" for step in expected)
            fault = f"losses, and in parentheses those of one CPU: {pairs}"
        result = f"within {share:.4%} of one CPU's"
        if world_size > SHARERS:
            result += f", on {SHARERS} of {world_size} ranks"
        row(f"losses of `{script}`", fault, result, run)


def measure(name: str, command: str, pattern: str, ranks: int = 1, one: float = 0) -> float:
    """A row of what is timed. Returns its first figure; `one` is that of one rank."""
    if not on_gpu:  # most CPUs take ten times as long in bfloat16
        command = command.replace("--precision bf16", "--precision fp32").replace(" bf16", "")
    shown = re.sub(f" --data-dir [^ ]+| {ENDLESS}|{folder}/", "", command)
    if "jpeg" not in command:
        command += f" --checkpoint-dir {folder}/{name}"
    if pattern == TOKENS and not on_gpu:
        command += TINY
    run = Run(command, 300, ranks, enough=pattern)
    found = re.search(pattern, run.text)
    if not found:
        left_out = re.search(LEFT_OUT, run.text)
        fault = "" if left_out else run.fault or f"it has not printed {pattern}"
        row(f"{name}: `{shown}`", fault, f"left out: {left_out and left_out[0]}", run)
        return 0
    values = {unit: float(value) for unit, value in found.groupdict().items() if value}
    said = [UNITS[unit].format(value) for unit, value in values.items()]
    [rate, *_] = values.values()
    if one and ranks > 1:
        said.append(f"{rate / one / ranks:.0%} of {ranks} times one rank's")
    if "mfu" in values and REACHED:
        peak = sizes.peak_flops(torch.accelerator.current_accelerator()) / 1e12
        share = values["mfu"] * peak / float(REACHED[0])
        said.append(f"{share:.0%} of a matmul's {REACHED[0]} TFLOP/s")
    if seconds := run.when("step=10/"):
        said.append(f"{seconds:.0f} s to the first line")
    row(f"{name}: `{shown}`", run.fault, ", ".join(said), run)
    return rate


def speed():
    """train_fsdp.py on one GPU, one node and all nodes, with as many sequences for each rank."""
    one, cases = 0.0, [(ranks, 1) for ranks in (1, ranks_per_node, world_size)]
    for ranks, shard in dict.fromkeys([*cases, (world_size, world_size)]):
        command = f"{TRAIN} {GPT2} --batch-size {16 * ranks} --shard {shard}"
        rate = measure(f"speed-{ranks}-{shard}", command, TOKENS, ranks, one)
        one = one or rate


def project():
    """Chapter 5's rows: chapter 4's script with all changes, on one GPU, one node and all nodes."""
    command, pattern = ALONE["jpegs-compile"]
    one, said = 0.0, "\n".join(CHECKS)
    bus = dict.fromkeys((ranks_per_node, world_size), "")
    # `checks` measures inside a node as well if there are several.
    for ranks, where in ((ranks_per_node, "inside a node"), (world_size, "all-reduce of .*")):
        if speed := re.search(rf"^{where}: ([\d.]+) .*GB/s on the bus", said, re.M):
            bus[ranks] = speed[1]
    for ranks in dict.fromkeys((1, ranks_per_node, world_size)):
        if rate := measure(f"project-{ranks}", command, pattern, ranks, one):
            one, nodes = one or rate, -(-ranks // ranks_per_node)
            where = f"{'two' if nodes == 2 else nodes} nodes, {ranks}"
            if ranks <= ranks_per_node:
                where = f"one node of {ranks}" if ranks > 1 else f"one {device_name()}"
            hours = 90 * 1.28e6 / rate / 3600 * ranks
            PROJECT.append(f"| {where} | {rate:,.0f} | {hours:.1f} | {bus.get(ranks, '')} | |")


def save():
    """How long two saves hold the training up, and the steps while they are written."""
    command = f"{TRAIN} {GPT2} --batch-size 32 --log-every 1 --save-every 50"
    command += f" --checkpoint-dir {folder}/saved{'' if on_gpu else TINY}"
    run = Run(command, 200, 1, enough="step=105/")
    ends = [run.when(f"step={step}/") for step in range(1, 105)]
    took = [0.0, *(later - sooner for sooner, later in itertools.pairwise(ends))]  # by step - 1
    usual = statistics.median(took[10:]) or math.nan
    stalls = [took[step - 1] - usual for step in (51, 101)]
    after = [took[step - 1] / usual for step in (52, 53, 54, 102, 103, 104)]
    result = f"they hold the training up for {stalls[0]:.2f} and {stalls[1]:.2f} s, and the three"
    result += f" steps after take {min(after):.2f} to {max(after):.2f} of the usual {usual:.3f} s"
    row("two saves of 0.1b", run.fault, result, run)


def resume(name: str, command: str, whole: Run, first: int):
    """SIGTERM to rank 0 of the `first` ranks; then all go on, with the losses of a whole run."""
    command += f"-stopped-{first}"
    part = Run(command, strike=(0, "step=5/", 0, signal.SIGTERM), ranks=first)
    rest = Run(f"{command} --resume")
    [after] = re.findall(r"^Stopped after step (\d+), saved$", part.text, re.M) or [""]
    share = apart(losses_of(part.text) | losses_of(rest.text), losses_of(whole.text))
    fault = whole.fault or part.fault or rest.fault
    # DDP sums the gradients of a process's first step in another order.
    exact = name == "fsdp" and first == SHARERS
    if not fault and not after:
        fault = "SIGTERM after step 5 did not stop it"
    elif not fault and f"Resumed after step {after}\n" not in rest.text:
        fault = f"stopped after step {after}, and did not resume there"
    elif not fault and share > (0 if exact else NEAR):
        fault = f"resumed, its losses differ by {share:.4%} from those of a whole run"
    result = f"stopped after step {after}, and resumed with the losses of a whole run"
    result += f", up to {share:.4%}" if share else ", digit for digit"
    on = f", on {first} and then on {SHARERS} ranks" if first < SHARERS else ""
    row(f"stop and resume of `train_{name}.py`{on}", fault, result, part, rest)


def stop():
    """On as many ranks as before, and train_fsdp.py also on twice as many."""
    for name, more in (("preemptible", ""), ("fsdp", " --deterministic")):
        # A line for each step, because a run may stop after any of them.
        options = OPTIONS[name].replace("--log-every 10", "--log-every 1") + more
        command = f"distributed/train_{name}.py {options} --checkpoint-dir {folder}/{name}"
        whole = Run(f"{command}-whole")
        resume(name, command, whole, SHARERS)
    if SHARERS > 1:
        resume(name, command, whole, SHARERS // 2)


def quote(what: str, pattern: str, run: Run, more: str = ""):
    """A row of what rank 0 says."""
    said, [*_, last] = re.search(pattern, run.text), ["nothing", *run.text.strip().splitlines()]
    fault = "" if said else run.fault or f"rank 0 said: {last}"
    row(what, fault, f"{said and said[0]}{more}", run)


def hang():
    """The last rank is frozen while it trains, and heartbeat.py names it after a minute."""
    last = SHARERS - 1
    options = OPTIONS["ddp"].replace("--epochs 1", "--epochs 1000")
    command = f"distributed/train_ddp.py {options} --checkpoint-dir {folder}/hang"
    run = Run(command, strike=(last, "[Rank: ", 5, signal.SIGSTOP), enough="no step for")
    named = rf"no step for .* First to look at: rank {last} on [^,\n]*"
    quote(f"rank {last} is frozen", named, run)


GROUPS = {"alone": [*ALONE]}
PARTS = {part.__name__: part for part in (checks, losses, speed, project, stop, hang, save)}
PARTS |= {name: functools.partial(measure, name, *row) for name, row in ALONE.items()}


# --- the page ---


def prepare():
    """Digits, a text of words drawn at random, and tokens drawn at random."""
    from prepare_data import draw_mnist, write_tokens

    raw = folder / "digits/MNIST/raw"
    raw.mkdir(parents=True)
    for name, content in draw_mnist(4800, 96).items():
        (raw / name).write_bytes(content)
    # The same text everywhere, because Python never changes the numbers of Random.random.
    draw, words, text = Random(0).random, WORDS.split(), folder / "digits/words"
    text.write_text(" ".join(words[int(len(words) * draw())] for _ in range(50_000)))
    write_tokens(folder / "text", "words drawn at random", [text], "characters", "words")
    for name, kinds in (("gpt2", 50_257), ("qwen", 151_936)):
        (folder / name).mkdir()
        kinds = kinds if on_gpu else 1000
        count, said = 1_000_000, {"tokenizer": {"name": "tokenizer.json", "size": kinds}}
        for split in ("train", "val"):
            tokens = torch.randint(kinds, (count,), dtype=torch.int32)
            tokens.numpy().tofile(folder / name / f"{split}.bin")
            said[f"{split}_tokens"] = count
        said |= {"dtype": "uint32", "source": "tokens drawn at random", "id": name}
        (folder / name / "vocabulary.json").write_text(json.dumps(said))


def asked(command: str) -> str:
    """The first line of a command's output; nothing if there is no such command."""
    if not shutil.which(command.split()[0]):
        return ""
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=60)
    return done.stdout.partition("\n")[0]


def device_name() -> str:
    return torch.get_device_module().get_device_name() if on_gpu else "CPU"


def page() -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    if on_gpu and torch.cuda.is_available():
        versions += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    if driver := asked("nvidia-smi --query-gpu=driver_version --format=csv,noheader"):
        versions += f", driver {driver}"
    ports = Path("/sys/class/infiniband").glob("*/ports/*/rate")
    links = [path.read_text().strip() for path in ports]
    cgroup = 2 if Path("/sys/fs/cgroup/cgroup.controllers").exists() else 1
    facts = {
        "nodes": f"{len(HOSTS)}. On each: ranks {ranks_per_node}, CPUs {os.cpu_count()}",
        "each rank's device": device_name(),
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
    if PROJECT:
        lines += ["| GPUs | images/s | GPU-hours | GB/s on the bus | measured by |"]
        lines += ["|---|---|---|---|---|", *PROJECT, ""]
    if CHECKS:
        lines += ["```", *CHECKS[:40], "```", ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    usual = "checks losses speed stop hang" if world_size > 1 else "checks losses stop save alone"
    help = f"of {', '.join([*GROUPS, *PARTS])}; default: {usual}"
    parser.add_argument("parts", nargs="*", metavar="PART", default=usual.split(), help=help)
    parts = [name for part in parser.parse_args().parts for name in GROUPS.get(part, [part])]
    if not PARTS.keys() >= {*parts}:
        parser.error(f"PART is one {help}")
    if world_size == 1 and "hang" in parts:
        parser.error("hang needs two ranks: sbatch a launcher, or ./torchrun.sh")
    store.set(f"host/{rank}", HOST)
    names = [store.get(f"host/{other}").decode() for other in range(world_size)]
    HOSTS.extend(dict.fromkeys(names))
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a job that was requeued
        folder.mkdir(parents=True)
        prepare()
    for part in parts:
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
    store = open_store(timeout=600)
    main()
