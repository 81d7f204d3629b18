"""Submit a job to a cluster from a laptop, over SSH, and follow it from here.

    python aux/submit.py --env production launch_slurm_with_torchrun.sh distributed/train_ddp.py
    python aux/submit.py --env production --nodes=4 --follow launch_slurm_to_torch.sh train.py
    python aux/submit.py status JOB        # later, from any shell in this folder or below it
    python aux/submit.py logs JOB --follow
    python aux/submit.py cancel JOB
    python aux/submit.py fetch JOB         # checkpoints and log, into slurm-jobs/

Slurmfile.toml says where and how. Options before the launcher that are not listed below go to
sbatch, as --option=value. The code, committed or not, is copied into a new folder on the cluster,
without the files that git ignores, so later edits do not change the job. Environment variables are
not copied, except those that the Slurmfile names. A broken connection does not affect the job.
--follow, --wait and --fetch return its exit status.
"""

import argparse
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
from pathlib import Path
from typing import BinaryIO

from submission import container, jobs, remote, slurmfile
from submission.slurmfile import fail

USAGE = """submit.py --env NAME [options] [sbatch options] LAUNCHER [ARGUMENT ...]
       submit.py status|logs|cancel|fetch JOB"""
# Options of sbatch with which there is no one job to follow
REFUSED = r"--(array|clusters|test-only|wrap)(=|$)|-[aM]"

# --- arguments ---


class ArgumentParser(argparse.ArgumentParser):
    """argparse, except that an error is one sentence."""

    def __init__(self, **options):
        text = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=text, **options)

    def error(self, message: str):
        # The message may quote control characters, which a terminal would obey.
        shown = "".join(character if character.isprintable() else " " for character in message)
        self.exit(2, f"{self.prog}: {shown} (--help lists the arguments)\n")


def add_options(parser: ArgumentParser):
    add = parser.add_argument
    add("--env", metavar="NAME", help="submit to this environment of Slurmfile.toml")
    add("--follow", action="store_true", help="print the log as it grows, until the job ends")
    add("--wait", action="store_true", help="wait until the job ends")
    add("--fetch", action="store_true", help="wait, then copy the job's files to this machine")
    add("--dry-run", action="store_true", help="print the commands instead of running them")


def parse_submission(arguments: list[str]) -> Namespace:
    """Our options and sbatch's; the command starts at the first word without a dash, and is not
    parsed."""
    parser = ArgumentParser(prog="submit.py", description=__doc__, usage=USAGE)
    add_options(parser)
    start = 0
    while start < len(arguments) and arguments[start].startswith("-"):
        start += 2 if arguments[start] == "--env" else 1
    args, args.sbatch = parser.parse_known_args(arguments[:start])
    args.command = arguments[start:]
    if args.env is None:
        parser.error("--env NAME is missing: one of the names in Slurmfile.toml")
    if not args.command:
        parser.error("which launcher? for example launch_slurm_with_torchrun.sh train.py")
    if args.sbatch and "=" not in args.sbatch[-1] and not Path(args.command[0]).is_file():
        equals = "=" if args.sbatch[-1].startswith("--") else ""  # --nodes=2, but -N2
        how = f"{args.sbatch[-1]}{equals}{args.command[0]}"
        parser.error(f"no launcher {args.command[0]}: write {how}")
    return args


def parse_verb(verb: str, arguments: list[str]) -> Namespace:
    """The arguments of status, logs, cancel or fetch."""
    parser = ArgumentParser(prog=f"submit.py {verb}", description=__doc__)
    parser.add_argument("job", metavar="JOB", help="the job id")
    parser.add_argument("--env", metavar="NAME", help="needed if two environments have this job id")
    if verb == "logs":
        help = "show the log as it grows, until the job ends"
        parser.add_argument("--follow", action="store_true", help=help)
    return parser.parse_args(arguments)


# --- submit ---


def git(*arguments: object) -> str:
    done = subprocess.run(["git", *map(str, arguments)], stdout=subprocess.PIPE)
    if done.returncode != 0:
        fail("git, which lists the files to copy, failed")
    return os.fsdecode(done.stdout)


def list_files() -> tuple[Path, list[str]]:
    """The root of the repository that we are in, and its files: those that git tracks, and new
    ones not ignored."""
    root = Path(git("rev-parse", "--show-toplevel")[:-1]).resolve()
    listed = git("-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    files = []
    for name in dict.fromkeys(listed.split("\0")[:-1]):
        if os.path.isdir(root / name) and not os.path.islink(root / name):
            print(f"note: {name} is a git repository of its own: not copied", file=sys.stderr)
        elif os.path.lexists(root / name):
            files.append(name)
    return root, files


def check_command(root: Path, files: list[str], command: list[str]):
    """Stops if the launcher or the script is not one of the copied files."""
    scripts = [word for word in command[1:2] if word.endswith(".py")]
    for name in [command[0], *scripts]:
        if os.path.relpath(Path(name).resolve(), root) not in files:
            fail(f"{name} would not be copied: it is missing, ignored by git, or outside {root}")
    launcher = Path(command[0]).read_text(errors="replace")
    if "source ./env.sh" in launcher and not Path("env.sh").is_file():
        fail(f"no env.sh in {Path.cwd()}: cd to the repository")


def pack(packed: BinaryIO, files: dict[str, Path], variables: list[str]):
    """Writes what remote.sh's `submit` reads."""
    for name in variables:
        value = os.environ[name].replace("\\", r"\\").replace("\n", r"\n")
        packed.write(os.fsencode(f"{name}={value}\n"))
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, path in files.items():
            archive.add(path, arcname=name, recursive=False)
        # The last file, so that an archive that was cut short is noticed
        archive.addfile(tarfile.TarInfo(".submission"))


def sbatch_options(options: dict[str, object]) -> list[str]:
    """The options of a Slurmfile or a task as sbatch's; true is an option without a value, false
    is left out."""
    words = []
    for key, value in options.items():
        option = f"--{key.replace('_', '-')}"
        if value is not False:
            words.append(option if value is True else f"{option}={value}")
    return words


def submit(args: Namespace) -> int:
    """Copies the code and submits it. Returns the exit status: the job's own, with --follow,
    --wait or --fetch."""
    path = slurmfile.find()
    settings = slurmfile.read(path, args.env)
    cluster, packaging = settings["cluster"], settings["packaging"]
    options = [*sbatch_options(settings["submit"]), *args.sbatch]
    for option in options:
        if re.match(REFUSED, option):
            fail(f"{option} cannot be used here, because there would not be one job to follow")
    root, files = list_files()
    check_command(root, files, args.command)
    sbatch = ["sbatch", "--parsable", *options, os.path.relpath(args.command[0]), *args.command[1:]]
    base = cluster["job_base_dir"]
    if cluster["backend"] == "local":
        base = path.parent / Path(base).expanduser()
    in_container, image = packaging["type"] == "container", ""
    if in_container:
        container.check_launcher(args.command[0])
        image = container.uri(packaging)

    copied = {name: root / name for name in files}
    host = cluster["backend_config"].get("hostname", "this machine")
    if args.dry_run:
        if in_container:
            for command in container.commands(packaging, root):
                print(shlex.join(command))
        print(f"# {len(copied)} files into a new folder in {base} on {host}. There:")
        if image:
            print(shlex.join(["./aux/import_image.sh", image, container.SQUASHFS]))
        print(shlex.join(sbatch))
        return 0

    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as packed:
        if in_container:
            copied |= container.make(packaging, root, files, Path(scratch))
        pack(packed, copied, cluster["environment"])
        size = packed.tell() / 1e6
        packed.seek(0)
        print(f"Copying {len(copied)} files, {size:.1f} MB, to {host}", flush=True)
        links = packaging["link"]
        command = ["submit", base, name_of(args.command), os.path.relpath(Path.cwd(), root), image]
        command += [len(cluster["environment"]), len(links), *links, *sbatch]
        job, folder, log = send(cluster, command, packed)
    record = {"env": args.env, "job": job, "cluster": cluster, "folder": folder, "log": log}
    jobs.save(path.parent / "slurm-jobs", record)
    print(f"Submitted batch job {job} to {args.env}, in {folder}. Next:")
    for verb in ("status", "logs --follow", "fetch", "cancel"):
        print(f"  python {os.path.relpath(__file__)} {verb} {job}", flush=True)

    status = 0
    if args.follow or args.wait or args.fetch:
        status = jobs.watch(record, show_log=args.follow)
    if args.fetch:
        jobs.fetch(record)
    return status


def name_of(command: list[str]) -> str:
    """The name of the job's folder, without its random suffix."""
    script = command[1] if command[1:] and command[1].endswith(".py") else command[0]
    return re.sub(r"[^A-Za-z0-9_.-]", "_", Path(script).stem) + time.strftime("-%Y-%m-%d_%H-%M-%S")


def send(cluster: dict, command: list[object], packed: BinaryIO) -> tuple[int, str, str]:
    """Submits. Returns the job's id, its folder and its log."""
    try:
        with remote.run(cluster, *command, stdin=packed) as stream:
            lines = stream.read().decode().splitlines()
    except remote.RemoteFailed as error:
        if not (error.is_connection and error.started):
            raise
        fail("the job may have been submitted: check with squeue --me on the cluster")
    job, folder, log = [*lines, ""][:3]
    return int(job), folder, log


# --- main ---


def main(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else ""
    if verb not in ("status", "logs", "cancel", "fetch"):
        return submit(parse_submission(arguments))
    args = parse_verb(verb, arguments[1:])
    record = jobs.find_record(args.job, args.env)
    if verb == "status":
        return jobs.show(record, "state", record["job"])
    if verb == "logs" and args.follow:
        return jobs.watch(record, show_log=True)
    if verb == "logs":
        return jobs.show(record, "cat", record["log"])
    if verb == "cancel":
        return jobs.show(record, "scancel", record["job"])
    return jobs.fetch(record)


def without_traceback(function: Callable[..., int], argument: object) -> int:
    """The function's exit status; one sentence for what can happen to anybody."""
    try:
        return function(argument)
    except remote.RemoteFailed as error:
        if error.is_connection:
            fail("no connection to the cluster; a submitted job is not affected")
        if not error.started:
            fail("aux/submission/remote.sh did not start there: is the login shell csh?")
        return error.status
    except OSError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("interrupted; a submitted job continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(without_traceback(main, sys.argv[1:]))
