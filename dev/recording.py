"""Record the picture at the top of README: a job hangs, is looked at, and goes on.

    python dev/recording.py          # root, Slurm; three minutes; writes docs/figures/recording.svg

It starts a local cluster of its own and types the commands of the picture, in a project whose
train.py is train_preemptible.py. Rank 3 then reads a file that never comes: mnist.py's collate has
two lines more here. Everything below a prompt is what the command has printed, with the project's
folder written as /vision.
"""

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PICTURE = REPOSITORY / "docs/figures/recording.svg"
CLUSTER = [REPOSITORY / "local/cluster/namespaces.sh"]
LAUNCHER = "launch_slurm_with_torchrun.sh"
COPIED = ["env.sh", "torchrun.sh", LAUNCHER]
COPIED += [f"aux/{name}.py" for name in ("watch_job", "job_end", "first_error")]
COPIED += [f"distributed/{name}.py" for name in ("heartbeat", "preemption", "checkpoint", "mnist")]
# Rank 3 of the first start, in its 450th batch.
HANG = """
    batches[0] += 1
    if os.environ["RANK"] == "3" and batches[0] == 450 and "SLURM_RESTART_COUNT" not in os.environ:
        open("never-written").read()
"""
# Width and height of a character and of a line, in px.
WIDTH, HEIGHT, MARGIN = 7.6, 18, 16
STYLE = """
svg { font: 12.6px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #c9d1d9 }
text { white-space: pre }
.page { fill: #0d1117; stroke: #30363d }
.typed { fill: #fff; font-weight: 700 }
.bad { fill: #ff9d5c; font-weight: 700 }
.good { fill: #7ee787; font-weight: 700 }
"""


def make_project(folder: Path):
    """The files that a reader would copy, and a read that hangs."""
    for name in COPIED:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    script = (REPOSITORY / "distributed/train_preemptible.py").read_text()
    (folder / "distributed/train.py").write_text(script)
    data = folder / "distributed/mnist.py"
    text = data.read_text().replace("import hashlib\n", "import hashlib\nimport os\n")
    text = text.replace("\ndef collate", "\nbatches = [0]\n\n\ndef collate")
    text = re.sub(r'(def collate\(.*\n    """.*"""\n)', lambda found: found[1] + HANG, text)
    data.write_text(text)
    os.mkfifo(folder / "never-written")
    (folder / "data").symlink_to(REPOSITORY / "data")
    (folder / ".venv").symlink_to(REPOSITORY / ".venv")


class Recording:
    """Commands that are typed on the cluster's first node, and what they print."""

    def __init__(self, folder: Path):
        self.folder, self.lines = folder, []

    def run(self, command: str) -> str:
        """Without recording it. Returns what it prints."""
        typed = [*CLUSTER, "exec", "bash", "-c", f"source .venv/bin/activate; {command}"]
        done = subprocess.run(typed, cwd=self.folder, capture_output=True, text=True, timeout=120)
        return done.stdout + done.stderr

    def type(self, command: str) -> str:
        printed = self.run(command)
        self.lines.append(("typed", f"$ {command}"))
        for line in printed.replace(str(self.folder), "/vision").splitlines():
            kind = "bad" if re.search("rank 3 keeps|^ +3 .*collate", line) else ""
            self.lines.append(("good" if line.startswith("Resumed") else kind, line))
        self.lines.append(("", ""))
        return printed

    def wait_for(self, pattern: str, command: str):
        limit = time.monotonic() + 300
        while not re.search(pattern, printed := self.run(command), re.M):
            if time.monotonic() > limit:
                sys.exit(f"{command} has not printed {pattern}, but\n{printed}")
            time.sleep(1)


def record(folder: Path) -> list[tuple[str, str]]:
    """(kind, text) of each line of the picture."""
    seen = Recording(folder)
    submitted = seen.type(f"sbatch {LAUNCHER} distributed/train.py --save-every 200")
    job = re.search(r"\d+", submitted)[0]
    log = f"{LAUNCHER}_{job}.out"
    seen.wait_for("keeps the others waiting", f"python aux/watch_job.py {job}")
    seen.type("squeue --me")
    seen.type(f"python aux/watch_job.py {job}")
    seen.type(f"scontrol requeue {job}")
    # A requeued job waits up to two minutes, which nobody wants to look at.
    seen.run(f"scontrol update JobId={job} StartTime=now")
    seen.wait_for("^epoch=1 step=500", f"cat {log}")
    seen.type(f"grep --extended-regexp 'Resumed|step=[45]00' {log}")
    return seen.lines[:-1]


def draw(lines: list[tuple[str, str]]) -> str:
    """An SVG of a terminal with these lines."""
    width = round(2 * MARGIN + WIDTH * max(len(text) for _, text in lines))
    height = 2 * MARGIN + HEIGHT * len(lines)
    label = html.escape(" / ".join(text for _, text in lines if text))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"',
        f' height="{height}" role="img" aria-label="{label}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
    ]
    for i, (kind, text) in enumerate(lines):
        y = MARGIN + HEIGHT * (i + 0.75)
        shown = html.escape(text, quote=False)
        parts.append(
            f'<text class="{kind}" x="{MARGIN}" y="{y}" xml:space="preserve">{shown}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    os.environ["CLUSTER"] = f"recording-{os.getpid()}"
    with tempfile.TemporaryDirectory() as name:
        project = Path(name, "vision")
        project.mkdir()
        make_project(project)
        try:
            subprocess.run([*CLUSTER, "up"], check=True)
            PICTURE.write_text(draw(record(project)))
        finally:
            subprocess.run([*CLUSTER, "down"], check=True)
    print(PICTURE)
