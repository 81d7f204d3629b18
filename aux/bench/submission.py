"""What submit.py costs on top of a bare `ssh HOST sbatch`: the quickest of some submissions of a 10 MB folder.

    python aux/bench/submission.py --env production            # an environment of your Slurmfile.toml
    python aux/bench/submission.py --env production --check    # exit code 1 and one sentence from a second on

The two take turns; the quickest counts, because load elsewhere only adds. Each submits a job
that ends at once; the one by submit.py removes its folder on the cluster.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / folder) for folder in ("distributed", "aux")]

from resilience.arguments import ArgumentParser, whole_number
from submission import remote, slurmfile
from submit import sbatch_options

PROMISED = 1.0  # seconds


def parse_arguments() -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--env", required=True, metavar="NAME", help="which environment of Slurmfile.toml")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 if it costs {PROMISED:g} s or more")
    parser.add_argument("--rounds", type=whole_number(1), default=5, help="submissions of each kind")
    return parser.parse_args()


def make_repository(folder: Path):
    """A hundred files of 100 kB that do not compress, and a job that removes them on the cluster."""
    for number in range(100):
        (folder / f"file_{number}").write_bytes(os.urandom(100_000))
    (folder / "job.sh").write_text('#!/bin/bash\n#SBATCH --output=/dev/null\nrm -rf "$SLURM_SUBMIT_DIR"\n')
    subprocess.run(["git", "init", "--quiet", folder], check=True)


def seconds(command: list[str], folder: Path, script: str = "") -> float:
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, input=script, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"submission.py: {shlex.join(command[:2])} ... failed: {done.stderr.strip()}")
    return time.perf_counter() - start


def main(args: Namespace):
    path = slurmfile.find()
    settings = slurmfile.read(path, args.env)
    cluster = settings["cluster"]
    sbatch = ["sbatch", "--parsable", *sbatch_options(settings["submit"]), "--output=/dev/null"]
    bare = sbatch if cluster["backend"] == "local" else ["ssh", *remote.destination(cluster), shlex.join(sbatch)]
    ours = [sys.executable, str(REPOSITORY / "aux/submit.py"), "--env", args.env, "job.sh"]
    times = {"bare": [], "ours": []}
    with tempfile.TemporaryDirectory() as folder:
        make_repository(Path(folder))
        (Path(folder) / "Slurmfile.toml").write_text(path.read_text())
        os.environ["SLURMFILE"] = str(Path(folder) / "Slurmfile.toml")
        for _ in range(args.rounds):
            times["bare"].append(seconds(bare, Path(folder), "#!/bin/bash\n"))
            times["ours"].append(seconds(ours, Path(folder)))
    theirs, ours = (min(values) for values in times.values())
    print(f"bare sbatch on {remote.host_of(cluster)}: {theirs:.2f} s; submit.py with 10 MB: {ours:.2f} s")
    print(f"submission overhead: {ours - theirs:.2f} s")
    if args.check and ours - theirs >= PROMISED:
        sys.exit(f"submission.py: it costs {ours - theirs:.2f} s, and less than {PROMISED:g} s is promised")


if __name__ == "__main__":
    main(parse_arguments())
