"""All benchmarks with a promise, in one table: what `make bench` runs.

    python dev/bench/all.py                     # some 40 minutes on two quiet cores: leave the machine alone meanwhile
    python dev/bench/all.py --only launch       # one of them
    python dev/bench/all.py --check             # status 1 when a row is missed
    python dev/bench/all.py --publish           # ... and its table and raw data into docs/
    python dev/bench/all.py --table FILE        # the table of such raw data, without measuring

Each runs in a process of its own and prints its rows as it goes; rows.py says what the columns are. The raw data, every
round of every row, go to log/benchmarks.json: date, commit, machine, versions and load with them.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "distributed")]

import rows
from resilience.arguments import ArgumentParser

# --- arguments --------------------------------------------------------------------------------------------------------

BENCHES = {  # name: what follows dev/bench/; MNIST and TEXT are the two folders
    "language_model": "language_model.py --data-dir TEXT --rounds 7 --seconds 1.5 --skip-compile",
    "mnist": "mnist.py --data-dir MNIST",
    "overhead": "overhead.py",
    "ranks": "ranks.py --data-dir TEXT",
    "launch": "launch.py",
    "checkpoint": "checkpoint.py --data-dir TEXT --skip-training",
    "gpu": "gpu.py",
}
BEGIN, END = "<!-- written by make bench ARGS=--publish -->", "<!-- end -->"
MNIST_DIR, TEXT_DIR = "data/mnist", "data/shakespeare"
PAGE, RAW = REPOSITORY / "docs/benchmarks.md", REPOSITORY / "docs/benchmarks.json"


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=BENCHES, help="which of them (default: all)")
    parser.add_argument("--check", action="store_true", help="status 1 when a row is missed, or a benchmark fails")
    parser.add_argument("--publish", action="store_true", help="and write docs/benchmarks.json and .md")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of raw data measured before")
    parser.add_argument("--mnist-dir", type=Path, default=MNIST_DIR, help="of aux/prepare_data.py")
    parser.add_argument("--text-dir", type=Path, default=TEXT_DIR, help="of aux/prepare_data.py")
    args = parser.parse_args()
    if args.only and args.publish:
        parser.error("--publish is for a run of all benchmarks: leave out --only")
    return args


# --- what is measured -------------------------------------------------------------------------------------------------


def machine() -> dict:
    """Where and with what a run was measured."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"^model name\s*: (.*)$", info, re.M)
    extensions = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    packages = ("torch", "accelerate", "lightning", "transformers")
    installed = {found.metadata["Name"]: found.version for found in metadata.distributions()}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "extensions": [name for name in extensions if re.search(rf"\b{name}\b", info)],
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in packages if name in installed},
        "load_before": round(os.getloadavg()[0], 1),
    }


def commit() -> str:
    """That of this repository, and whether its files have changed since; "unknown" without git or its history."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty= + changes"]
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def measure(args: Namespace) -> dict:
    """Runs the benchmarks. Returns the raw data; "failed" are those that ended without success, "rows" all others'."""
    run, found, folders = machine(), [], {"MNIST": str(args.mnist_dir), "TEXT": str(args.text_dir)}
    typed = ["DATA_DIR=..."] * (str(args.mnist_dir) != MNIST_DIR) + ["TEXT_DIR=..."] * (str(args.text_dir) != TEXT_DIR)
    typed += [f"ARGS='--only {args.only}'"] * bool(args.only)
    run |= {"command": " ".join(["make bench", *typed]), "failed": []}
    run["data"] = {name: checksums(Path(folder)) for name, folder in folders.items()}
    start = time.monotonic()
    for name, words in BENCHES.items():
        if args.only in (None, name):
            script, *arguments = words.split()
            print(f"\n{script}, load average {os.getloadavg()[0]:.1f}", flush=True)
            command = [sys.executable, str(Path("dev/bench", script)), *(folders.get(word, word) for word in arguments)]
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "rows.jsonl")
                file.touch()
                done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"BENCH_ROWS": str(file)})
                new = [json.loads(text) for text in file.read_text().splitlines()]
            found += new
            if done.returncode and not any(row["missing"] == "no GPU" for row in new):
                run["failed"].append(name)
    run["load_after"], run["minutes"] = round(os.getloadavg()[0], 1), round((time.monotonic() - start) / 60, 1)
    return run | {"rows": found}


def checksums(folder: Path) -> str:
    """Of the files in it, as sha256sum prints them; "" where there are none."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "SHA256SUMS"]
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder)}\n" for file in files)


# --- the table --------------------------------------------------------------------------------------------------------


def rows_of(run: dict) -> list[rows.Row]:
    return [rows.Row(**{name: value for name, value in row.items() if name != "load"}) for row in run["rows"]]


def table(run: dict) -> str:
    """The rows of a run as Markdown, under a line on where it was measured, and over one that counts the verdicts."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    loads = f"load average {run['load_before']} before, {run['load_after']} after, {run['minutes']} minutes"
    what = f"{run['cpus']} CPUs of {run['cpu']} with {', '.join(run['extensions'])}"
    found = rows_of(run)
    verdicts = [row.verdict() for row in found]
    passed, missed = verdicts.count("passed"), verdicts.count("missed")
    count = f"{passed} passed, {missed} missed, {len(found) - passed - missed} not judged."
    count += f" Failed: {', '.join(run['failed'])}." if run["failed"] else ""
    heads = [rows.line(rows.HEADS), rows.line(["---"] * len(rows.HEADS))]
    return "\n".join(
        [f"{run['date']}, commit {run['commit']}, `{run['command']}`: {what}; {versions}; {loads}.", "", *heads]
        + [rows.line(row.cells()) for row in found]
        + ["", count]
    )


def page_with(page: str, text: str) -> str:
    """The document, with `text` in the place of what stands between its two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def main(args: Namespace):
    if args.table:
        try:
            print(table(json.loads(args.table.read_text())))
        except (OSError, ValueError, KeyError) as error:
            sys.exit(f"all.py: {args.table} is not raw data of this program ({error!r})")
        return
    run = measure(args)
    file = REPOSITORY / "log/benchmarks.json"
    file.parent.mkdir(exist_ok=True)
    for path in (file, RAW) if args.publish else (file,):
        path.write_text(json.dumps(run, indent=1) + "\n")
    if args.publish:
        PAGE.write_text(page_with(PAGE.read_text(), table(run)))
    print(f"\n{table(run)}\nRaw data: {file}", flush=True)
    missed = [row.sentence() for row in rows_of(run) if row.verdict() == "missed"]
    if args.check and (missed or run["failed"]):
        sys.exit("all.py: " + "; ".join([*missed, *(f"{name} has failed" for name in run["failed"])]))


if __name__ == "__main__":
    main(parse_arguments())
