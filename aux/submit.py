"""Submit a job to a cluster from a laptop, over SSH, and follow it from here.

    python aux/submit.py --env production launch_slurm_with_torchrun.sh distributed/train_ddp.py
    python aux/submit.py --env production --nodes=4 --follow launch_slurm_to_torch.sh train.py
    python aux/submit.py status JOB        # later, from any shell in this folder or below it
    python aux/submit.py logs JOB --follow
    python aux/submit.py cancel JOB
    python aux/submit.py fetch JOB         # checkpoints, metrics and log, into slurm-jobs/

Slurmfile.toml says where and how. Options before the launcher that are not listed below go to
sbatch, as --option=value. The code, committed or not, is copied into a new folder on the cluster,
without the files that git ignores, so later edits do not change the job. Environment variables are
not copied, except those that the Slurmfile names. A broken connection does not affect the job.
--follow, --wait and --fetch return its exit status.
"""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "distributed"))

from resilience.arguments import ArgumentParser
from submission import container, jobs, remote, slurmfile
from submission.remote import ConnectionFailed, explain, host_of
from submission.slurmfile import fail

# --- arguments ---


def parse_submission(arguments: list[str]) -> Namespace:
    """Our options and sbatch's; the command starts at the first word without a dash, and is not
    parsed."""
    parser = ArgumentParser(prog="submit.py", description=__doc__, usage=USAGE)
    add_options(parser)
    start = 0
    while start < len(arguments) and arguments[start].startswith("-"):
        start += 2 if arguments[start] == "--env" else 1
    args, args.sbatch = parser.parse_known_args(arguments[:start])
    args.command, args.default_gpus = arguments[start:], ""
    if args.env is None:
        parser.error("--env NAME is missing: one of the names in Slurmfile.toml")
    if not args.command:
        parser.error(
            "which launcher? for example launch_slurm_with_torchrun.sh distributed/train_ddp.py"
        )
    for option in args.sbatch:
        if fault := slurmfile.option_fault(option.removeprefix("--").split("=")[0]):
            parser.error(fault)
    if not Path(args.command[0]).is_file():
        hint = (
            f": write {args.sbatch[-1]}={args.command[0]}"
            if args.sbatch and "=" not in args.sbatch[-1]
            else ""
        )
        parser.error(f"no launcher {args.command[0]!r} in {Path.cwd()}{hint}")
    if (
        "source ./env.sh" in Path(args.command[0]).read_text(errors="replace")
        and not Path("env.sh").is_file()
    ):
        parser.error(f"no env.sh in {Path.cwd()}: cd to the repository")
    if args.command[1:] and args.command[1].endswith(".py") and not Path(args.command[1]).is_file():
        parser.error(f"no train script {args.command[1]!r} in {Path.cwd()}")
    return args


VERBS = ("status", "logs", "cancel", "fetch")
USAGE = (
    "submit.py --env NAME [options] [sbatch options] LAUNCHER [ARGUMENT ...]\n       submit.py "
    "VERB JOB"
)


def add_options(parser: ArgumentParser):
    parser.add_argument("--env", metavar="NAME", help="which environment of Slurmfile.toml")
    parser.add_argument(
        "--follow", action="store_true", help="print the log as it grows, until the job ends"
    )
    parser.add_argument("--wait", action="store_true", help="wait until the job ends")
    parser.add_argument(
        "--fetch", action="store_true", help="wait, then copy the job's files to this machine"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")


def parse_verb(verb: str, arguments: list[str]) -> Namespace:
    parser = ArgumentParser(prog=f"submit.py {verb}", description=__doc__)
    parser.add_argument("job", metavar="JOB", help="the job id")
    parser.add_argument(
        "--env", metavar="NAME", help="which environment, if two have a job of this id"
    )
    if verb == "logs":
        parser.add_argument(
            "--follow", action="store_true", help="show the log as it grows, until the job ends"
        )
    return parser.parse_args(arguments)


# --- submit ---


def list_files() -> tuple[Path, list[str]]:
    """The root of the repository that we are in, and its files: those that git tracks, and new
    ones not ignored."""
    try:
        root = Path(git("rev-parse", "--show-toplevel")[:-1]).resolve()
        listed = git("-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except FileNotFoundError:
        fail("git is not installed on this machine: it lists the files to copy")
    except subprocess.CalledProcessError as error:
        fail(
            f"{Path.cwd()} is not in a git repository, whose files are copied "
            f"({error.stderr.decode().strip()})"
        )
    files = []
    for name in dict.fromkeys(filter(None, listed.split("\0"))):
        if os.path.isdir(root / name) and not os.path.islink(root / name):
            print(f"note: {name} is a git repository of its own: not copied", file=sys.stderr)
        elif os.path.lexists(root / name):
            files.append(name)
    return root, files


def git(*arguments: object) -> str:
    return os.fsdecode(
        subprocess.run(["git", *map(str, arguments)], check=True, capture_output=True).stdout
    )


def pack(packed: BinaryIO, files: dict[str, Path], mark: dict, variables: list[str]) -> int:
    """Writes what remote.sh's `submit` reads. Returns the bytes of the archive."""
    for name in variables:
        value = os.environ[name].replace("\\", r"\\").replace("\n", r"\n")
        packed.write(os.fsencode(f"{name}={value}\n"))
    start = packed.tell()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, path in files.items():
            info = archive.gettarinfo(path, arcname=name)
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            with path.open("rb") if info.isreg() else nullcontext() as file:
                archive.addfile(info, file)
        last = tarfile.TarInfo(jobs.MARK)
        last.size = len(text := json.dumps(mark).encode())
        archive.addfile(last, io.BytesIO(text))
    size = packed.tell() - start
    packed.seek(0)
    return size


def sbatch_options(options: dict[str, str | int | bool]) -> list[str]:
    """The options of a Slurmfile or a task as sbatch's; true is an option without a value, false
    is left out."""
    words = []
    for key, value in options.items():
        if value is not False:
            words.append(f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}"))
    return words


def submit(args: Namespace) -> int:
    """Copies the code and submits it. Returns the exit status: the job's own, with --follow,
    --wait or --fetch."""
    path = slurmfile.find()
    settings = slurmfile.read(path, args.env)
    cluster, packaging = settings["cluster"], settings["packaging"]
    links, extra = packaging["link"], {}
    if packaging["type"] == "none" and not links:
        missing = "the job will have neither your .venv nor your data"
        print(f"note: no `link` in {path}: {missing}", file=sys.stderr)
    if packaging["type"] == "container":
        container.check_launcher(args.command[0])
    root, files = list_files()
    sbatch = ["sbatch", "--parsable", *sbatch_options(settings["submit"]), *args.sbatch]
    sbatch += [launcher_in(root, files, args.command[0]), *args.command[1:]]
    base = cluster["job_base_dir"]
    if cluster["backend"] == "local":
        base = path.parent / Path(base).expanduser()
    image = container.uri(packaging["image"]) if packaging.get("push") else ""
    command = [
        "submit",
        base,
        name_of(args.command),
        os.path.relpath(Path.cwd(), root),
        jobs.MARK,
        image,
    ]
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as packed:
        if packaging["type"] == "container" and args.dry_run:
            for build in container.build_commands(packaging, root):
                print(shlex.join(build))
        elif packaging["type"] == "container":
            extra = container.make(packaging, root, files, Path(scratch))
        try:
            copied = {name: root / name for name in files} | extra
            size = pack(packed, copied, {"env": args.env, "sbatch": sbatch}, cluster["environment"])
        except OSError as error:
            fail(f"cannot read {error.filename}: {error.strerror}")
        command += [args.default_gpus, len(cluster["environment"]), len(links), *links, *sbatch]
        if args.dry_run:
            where = f"a new folder in {base} on {host_of(cluster)}"
            print(f"# {len(copied)} files, {size / 1e6:.1f} MB, into {where}. There:")
            if image:
                print(shlex.join(["./aux/import_image.sh", image, "pytorch.sqsh"]))
            print(shlex.join(sbatch))
            return 0
        print(
            f"Copying {len(copied)} files, {size / 1e6:.1f} MB, to {host_of(cluster)}", flush=True
        )
        job, folder, log = send(cluster, command, packed)
    record = {
        "env": args.env,
        "job": int(job),
        "cluster": cluster,
        "folder": folder,
        "log": log,
        "sbatch": sbatch,
    }
    jobs.save(path.parent / "slurm-jobs", record)
    print(f"Submitted batch job {job} to {args.env}, in {folder}. Type next:")
    for verb in ("status", "logs --follow", "fetch", "cancel"):
        print(f"  {jobs.command_for(verb, job)}", flush=True)
    return follow(record, args)


def follow(record: dict, args: Namespace) -> int:
    if not (args.follow or args.wait or args.fetch):
        return 0
    status = jobs.watch(record, show_log=args.follow)
    if args.fetch:
        jobs.fetch(record)
    return status


def launcher_in(root: Path, files: list[str], launcher: str) -> str:
    """The launcher's path from the working directory, which is also the job's. It must be one of
    the copied files."""
    path = Path(launcher).resolve()
    if not path.is_relative_to(root) or str(path.relative_to(root)) not in files:
        fail(
            f"{launcher} would not be copied to the cluster: git ignores it, or it is outside "
            f"{root}"
        )
    return os.path.relpath(path)


def name_of(command: list[str]) -> str:
    """The name of the job's folder, without its random suffix."""
    script = command[1] if command[1:] and command[1].endswith(".py") else command[0]
    return re.sub(r"[^A-Za-z0-9_.-]", "_", Path(script).stem) + time.strftime("-%Y-%m-%d_%H-%M-%S")


def send(cluster: dict, command: list[object], packed: BinaryIO) -> tuple[str, str, str]:
    """Submits; returns the job's id, its folder and its log."""
    try:
        with remote.run(cluster, *command, stdin=packed) as lines:
            output = lines.read().decode()
    except ConnectionFailed as error:
        unsure = (
            "; the job may have been submitted: check with squeue --me on the cluster"
            if error.started
            else ""
        )
        fail(explain(cluster, error.message)[0] + unsure)
    job, folder, log = [*output.splitlines(), ""][:3]
    return job, folder, log


# --- main ---


def main(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else ""
    if verb not in VERBS:
        return submit(parse_submission(arguments))
    args = parse_verb(verb, arguments[1:])
    record = jobs.find_record(args)
    if verb in ("status", "logs"):
        return jobs.watch(record, show_log=verb == "logs", follow=verb == "logs" and args.follow)
    return jobs.fetch(record) if verb == "fetch" else jobs.cancel(record)


def interruptible(function: Callable[..., int], argument: object) -> int:
    """The function's exit status, or what ctrl-C gives, without a traceback."""
    try:
        return function(argument)
    except KeyboardInterrupt:
        print("interrupted; a submitted job continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(interruptible(main, sys.argv[1:]))
