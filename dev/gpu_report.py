"""One page about the GPU of this machine, in ten minutes: `make gpu-report`.

    python dev/gpu_report.py --out gpu.md                  # one GPU, no internet
    python dev/gpu_report.py --out gpu.md --device cpu     # the dry run: small models, and gloo

What is worth most comes first. Each part has a time limit, and the page is written after each part,
so that it is of use if the time is over.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "aux"))

from prepare_data import draw_mnist

PYTHON = sys.executable
RUNNING: list[subprocess.Popen] = []
VOCABULARY = 50257  # GPT-2's, which is no multiple of 64
SMALL = "--size 0.1b --batch-size 32"
SPEED = {
    "0.1b, eager": f"{SMALL} --no-compile",
    "0.1b": SMALL,
    "0.6b": "--size 0.6b --batch-size 4",
    "1.7b, recomputed": "--size 1.7b --batch-size 4 --activation-checkpointing",
    "0.1b, eager, FSDP of one rank": f"{SMALL} --no-compile",
    "0.1b, FSDP of one rank": SMALL,
}
TINY = "--num-hidden-layers 2 --hidden-size 64 --context 32 --batch-size 8"
# Small enough for the dry run on a CPU.
SPEED_OF_CPU = {"eager": TINY, "FSDP of one rank": TINY}
HANG = """
import datetime, torch, torch.distributed as dist
torch.cuda.set_device(0)
store, gpu = dist.HashStore(), torch.device("cuda", 0)
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=gpu)
one = torch.ones(1, device="cuda")
dist.all_reduce(one)
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
set_timeout(datetime.timedelta(seconds=5))
torch.cuda._sleep(int(2e11))  # the all-reduce waits behind a kernel that does not end
dist.all_reduce(one)
one.item()
"""
PROFILE = """
import os, runpy, sys, torch
def leave(status): sys.exit(status)
os._exit = leave
sys.argv.pop(0)
sys.path.insert(0, "distributed")
with torch.profiler.profile() as profile:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit:
        pass
cuda = torch.cuda.is_available()
name = f"self_{'device' if cuda else 'cpu'}_time_total"
# On CUDA the kernels, because their times are their operators' as well.
events = profile.key_averages()
events = [event for event in events if cuda == str(event.device_type).endswith("CUDA")]
events.sort(key=lambda event: -getattr(event, name))
whole = sum(getattr(event, name) for event in events)
for event in events[:10]:
    time = getattr(event, name)
    print(f"PROFILE {time / whole:6.1%} {time / 1000:9.1f} ms {event.count:6} x {event.key[:60]}")
"""


def run(command: str, limit: float, **variables: object) -> tuple[int, str, float]:
    """A command line of bash, told to end after `limit` seconds: its status (124 for the limit),
    its output, and its seconds."""
    env = os.environ | {name: str(value) for name, value in variables.items()}
    env["PATH"] = f"{Path(PYTHON).parent}:{env['PATH']}"
    start = time.monotonic()
    # A file, because a pipe would wait for all that the command has started.
    with tempfile.TemporaryFile("w+") as output:
        options = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(["bash", "-c", command], cwd=REPOSITORY, env=env, **options)
        RUNNING.append(process)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = 124
        # torchrun passes SIGTERM on to its ranks, and kills them after 30 seconds.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(40)
        RUNNING.remove(process)
        output.seek(0)
        return status, output.read(), time.monotonic() - start


def end(*_: object):
    """Ends what is running, and then this program."""
    for process in RUNNING:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    os._exit(1)


def block(text: str, lines: int = 30) -> str:
    """The last lines as a block of Markdown."""
    return "\n".join(["```", *text.strip().splitlines()[-lines:], "```"])


class Report:
    """The page's parts: each method after `prepare` runs commands, and returns Markdown."""

    def __init__(self, device: str, folder: Path):
        self.cpu = device == "cpu"
        self.folder = folder
        self.device = "--device cpu" if self.cpu else ""
        script = f"distributed/train_fsdp.py --data-dir {folder}/tokens {self.device}"
        self.script = f"{script} --eval-windows 8 --eval-every 100000 --save-every 100000"
        self.fsdp = f"{PYTHON} {self.script}"
        self.size = TINY if self.cpu else SMALL

    def prepare(self):
        """Random tokens, and MNIST's digits, drawn here."""
        (self.folder / "tokens").mkdir()
        for split, count in (("train", 2_000_000), ("val", 200_000)):
            tokens = torch.randint(VOCABULARY, (count,), dtype=torch.int32).to(torch.uint16)
            tokens.numpy().tofile(self.folder / "tokens" / f"{split}.bin")
        described = {"tokenizer": {"name": "tokenizer.json", "size": VOCABULARY}, "dtype": "uint16"}
        described |= {"source": "random tokens", "id": "", "train_tokens": 2_000_000}
        described |= {"val_tokens": 200_000}
        (self.folder / "tokens/vocabulary.json").write_text(json.dumps(described))
        raw = self.folder / "mnist/MNIST/raw"
        raw.mkdir(parents=True)
        for name, content in draw_mnist(6000, 1000).items():
            (raw / name).write_bytes(content)

    def machine(self) -> str:
        query = "nvidia-smi --query-gpu=name,memory.total,driver_version,power.limit --format=csv"
        commands = f"{query}; nvidia-smi topo -m; gcc --version | head -1"
        shown = "" if self.cpu else run(commands, 20)[1]
        header = Path(sysconfig.get_path("include"), "Python.h").exists()
        nccl = "no NCCL" if self.cpu else f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
        versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}, {nccl}"
        return block(f"{shown}\n{versions}, {os.cpu_count()} CPUs, Python.h: {header}")

    def speed(self) -> str:
        """The rates of steps 61 to 70, and the seconds until the first line of the log."""
        rows = ["| train_fsdp.py | tokens/s | MFU | peak memory, GiB | s to the first line |"]
        rows.append("|---|---|---|---|---|")
        for name, options in (SPEED_OF_CPU if self.cpu else SPEED).items():
            command = f"{self.script} {options} --log-every 10 --steps 100000"
            command += f" --checkpoint-dir {self.folder}/{re.sub('[^a-z0-9]', '-', name)}"
            start = PYTHON
            if "one rank" in name:  # otherwise the script does not split for one
                start = "NPROC_PER_NODE=1 ./torchrun.sh tests/scripts/one_rank.py"
            # The first line is behind the compilation.
            read = "while read -r line && [[ $line != step=70/* ]]; do echo $SECONDS $line; done"
            _, output, _ = run(f"{start} {command} | {read}", 110)
            lines = re.findall(r"^(\d+) step=.*tokens_per_second=.*$", output, re.M)
            values = ("tokens_per_second", "mfu", "peak_memory_gib")
            found = [re.findall(rf"{value}=(\S+)", output) for value in values]
            cells = [values[-1] if values else "-" for values in (*found, lines[:1])]
            rows.append(f"| {name} | {' | '.join(cells)} |")
            if not lines:
                rows.append(f"\n{block(output, 8)}\n")
        return "\n".join(rows)

    def digits(self) -> str:
        """Images/s of the last line, whose steps wait for nothing but the loader and the GPU."""
        rows = ["| train_single.py | images/s |", "|---|---|"]
        for options in ("--precision fp32", "--precision bf16", "--batch-size 1000"):
            command = f"{PYTHON} local/train_single.py {self.device} --data-dir {self.folder}/mnist"
            command += f" --epochs 2 --log-every 5 {options}"
            command += f" --checkpoint-dir {self.folder}/digits{len(rows)}"
            output = run(command, 60)[1]
            found = re.findall(r"images_per_second=(\S+)", output) or [output[-200:]]
            rows.append(f"| {options} | {found[-1]} |")
        return "\n".join(rows)

    def losses(self) -> str:
        """In float32, of five steps; TF32 off."""
        found = {}
        for device in ["cpu"] if self.cpu else ["cpu", "cuda"]:
            options = f"{TINY} --precision fp32 --no-compile --steps 5 --log-every 1"
            folder = f"--checkpoint-dir {self.folder}/losses-{device}"
            where = "--device cpu" if device == "cpu" else ""
            command = f"{self.fsdp} {options} {folder} {where}"
            _, output, _ = run(command, 60, NVIDIA_TF32_OVERRIDE=0)
            found[device] = re.findall(r"^step=.* loss=(\S+)", output, re.M) or [output[-500:]]
        return block("\n".join(f"{device:5}{' '.join(losses)}" for device, losses in found.items()))

    def hang(self) -> str:
        if self.cpu:
            return "Only with NCCL."
        status, output, seconds = run(f"{PYTHON} -c '{HANG}'", 120)
        output = re.sub(r"^frame #.*\n", "", output, flags=re.M)
        return f"Status {status} after {seconds:.0f} s.\n\n{block(output)}"

    def changed(self, script: str, old: str, new: str) -> Path:
        """A copy of a train script with a change."""
        text = (REPOSITORY / script).read_text()
        if old not in text:
            sys.exit(f"gpu_report.py: {script} has no {old!r}")
        copy = Path(tempfile.mkdtemp(dir=self.folder), Path(script).name)
        copy.write_text(text.replace(old, new))
        return copy

    def never_comes(self) -> str:
        """A second rank that comes to the meeting point, but not to the first collective."""
        script = self.changed("distributed/train_ddp.py", "later(300,", "later(20,")
        store = "TCPStore('127.0.0.1', 29577, 2, False); time.sleep(50)"
        imports = "import time; from torch.distributed import TCPStore"
        command = f'RANK=1 {PYTHON} -c "{imports}; {store}" &'
        command += f" RANK=0 {PYTHON} {script} {self.device} --data-dir {self.folder}/mnist"
        command += "; echo status $?; kill %1"
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29577, "WORLD_SIZE": 2}
        _, output, seconds = run(command, 70, PYTHONPATH="distributed", **variables)
        return f"{seconds:.0f} s.\n\n{block(output)}"

    def two_ranks(self) -> str:
        """Two ranks on one GPU: with NCCL they are refused, with gloo they train."""
        ddp = f"{self.device} --data-dir {self.folder}/mnist --epochs 1 --log-every 50"
        fsdp = f"{self.script} {TINY} --steps 5"
        gloo = self.changed(
            "distributed/train_ddp.py", "dist.get_default_backend_for_device(device)", '"gloo"'
        )
        commands = {
            "train_ddp.py": f"distributed/train_ddp.py {ddp}",
            "train_fsdp.py": fsdp,
            "train_ddp.py with gloo": f"{gloo} {ddp}",
        }
        told = []
        for name, command in commands.items():
            folder = f"--checkpoint-dir {self.folder}/two-{len(told)}"
            variables = {"NPROC_PER_NODE": 2, "PYTHONPATH": "distributed"}
            status, output, seconds = run(f"./torchrun.sh {command} {folder}", 60, **variables)
            # Without torchrun's report.
            report = re.search(r"^[EW]\d{4} .*elastic", output, re.M)
            shown = block(output[: report and report.start()], 8)
            told.append(f"{name}: status {status} after {seconds:.0f} s.\n\n{shown}")
        return "\n\n".join(told)

    def out_of_memory(self) -> str:
        if self.cpu:
            return "Only on a GPU."
        command = f"{self.fsdp} --size 1b --batch-size 256 --checkpoint-dir {self.folder}/full"
        status, output, seconds = run(command, 90)
        return f"Status {status} after {seconds:.0f} s.\n\n{block(output, 6)}"

    def checkpoints(self) -> str:
        """What a save costs the steps beside it, and the resume after it."""
        saves = self.fsdp.replace("--save-every 100000", "--save-every 10")
        command = f"{saves} {self.size} --log-every 1 --steps 30"
        command += f" --checkpoint-dir {self.folder}/saved"
        _, output, _ = run(command, 80)
        rates = [float(rate) for rate in re.findall(r"tokens_per_second=(\S+)", output)]
        if len(rates) < 30:
            return block(output, 12)
        plain = sorted(rates)[15]
        slow = [f"{step}: {plain / rates[step - 1]:.2f}" for step in (10, 11, 12, 20, 21, 22)]
        _, again, _ = run(f"rm -r {self.folder}/saved/step_30; {command} --resume", 60)
        losses = [re.findall(r"^step=30/.* loss=(\S+)", text, re.M) for text in (output, again)]
        sentence = "Times of steps beside a save, as multiples of the median step's"
        sentence += f": {', '.join(slow)}."
        return f"{sentence} Loss of step 30, and of the resumed run's: {losses}."

    def profile(self) -> str:
        command = f"{self.script} {self.size} --steps 8 --log-every 8"
        command += f" --checkpoint-dir {self.folder}/profiled"
        _, output, _ = run(f"{PYTHON} - {command} <<'END'{PROFILE}END", 90)
        lines = re.findall(r"^PROFILE (.*)$", output, re.M)
        return block("\n".join(lines or [output]), 10)


# The parts of one dictionary run at once, because they mostly wait.
PARTS = [
    {"Machine": Report.machine},
    {"Speed and memory": Report.speed},
    {
        "Losses beside the CPU's": Report.losses,
        "A rank that hangs": Report.hang,
        "A rank that never comes": Report.never_comes,
        "Two ranks on one GPU": Report.two_ranks,
    },
    {"Checkpoints": Report.checkpoints},
    {"Profile": Report.profile},
    {"Out of memory": Report.out_of_memory},
    {"Handwritten digits": Report.digits},
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the page, in Markdown")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_report.py: torch sees no GPU here (the dry run: --device cpu)")
    signal.signal(signal.SIGTERM, end)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Report(args.device, Path(folder))
        report.prepare()
        page = f"# One GPU, {time.strftime('%Y-%m-%d')}\n"
        with ThreadPoolExecutor() as pool:
            for parts in PARTS:
                start = time.monotonic()
                texts = pool.map(lambda part: part(report), parts.values())
                for title, text in zip(parts, texts, strict=True):
                    page += f"\n## {title}\n\n{text}\n"
                    args.out.write_text(page)
                    print(f"{title}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"{args.out}: {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
