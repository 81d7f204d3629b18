"""Submits a script with @task to a cluster, over SSH or by sbatch on this machine, and follows it.

slurm_task.py imports this file only for --submit. No job imports it, so it may need Python 3.11.

1. Slurmfile.toml beside this file says where jobs go.
2. The files that git lists, committed or not, are copied into a new folder on the cluster, and with
   packaging type = "container" an image is built from them.
3. sbatch runs there, and the job's number comes back.
4. --wait follows the job to its end, and --fetch copies what it has written.
"""

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import tomllib

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
SLURMFILE = HERE / "Slurmfile.toml"
# Options of sbatch with which there is no one job to follow
REFUSED = r"--(array|clusters|test-only|wrap)(=|$)"


def fail(sentence: str):
    sys.exit(f"{Path(sys.argv[0]).name}: {sentence}")


# --- arguments ---


class ArgumentParser(argparse.ArgumentParser):
    """argparse, except that an error is one sentence."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str):
        # The message may quote control characters, which a terminal would obey.
        shown = "".join(character if character.isprintable() else " " for character in message)
        self.exit(2, f"{self.prog}: {shown} (--help lists the arguments)\n")


def add_options(parser: ArgumentParser):
    add = parser.add_argument
    add("--env", metavar="NAME", help="submit to this environment of Slurmfile.toml")
    add("--wait", action="store_true", help="print the log as it grows, until the job ends")
    add("--fetch", action="store_true", help="wait, then copy the job's files to this machine")
    add("--dry-run", action="store_true", help="print the commands instead of running them")


# --- Slurmfile.toml ---

# The keys of an environment's tables, and the types of their values. [NAME.submit] has options of
# sbatch, which sbatch itself checks.
KEYS = {
    "cluster": {"backend": str, "job_base_dir": str, "environment": list, "backend_config": dict},
    "backend_config": {"hostname": str, "username": str, "port": int, "identity_file": str},
    "packaging": {"type": str, "link": list, "dockerfile": str, "build_args": list, "image": str},
}
TYPES = {str: "a string", int: "a whole number", list: "a list of strings", dict: "a table"}


def read_slurmfile(name: str) -> dict[str, dict]:
    """The tables cluster, packaging and submit of one environment. Stops with a sentence at the
    first fault."""
    try:
        environments = tomllib.loads(SLURMFILE.read_text())
    except (OSError, ValueError) as error:
        fail(f"{SLURMFILE} is not read: {error}")
    if name not in environments:
        fail(f"no environment {name!r} in {SLURMFILE}; it has {', '.join(environments) or 'none'}")
    given = environments[name]
    if not isinstance(given, dict):
        fail(f"{SLURMFILE}: {name} must be {TYPES[dict]}, not {given!r}")
    check(name, given, dict.fromkeys(("cluster", "packaging", "submit"), dict))
    cluster = {"environment": [], "backend_config": {}} | given.get("cluster", {})
    packaging = {"type": "none", "link": [], "dockerfile": "Dockerfile", "build_args": []}
    packaging |= given.get("packaging", {})
    check(f"{name}.cluster", cluster, KEYS["cluster"])
    check(f"{name}.cluster.backend_config", cluster["backend_config"], KEYS["backend_config"])
    check(f"{name}.packaging", packaging, KEYS["packaging"])

    def need(holds: bool, table: str, what: str):
        if not holds:
            fail(f"{SLURMFILE}: [{name}.{table}] needs {what}")

    need(cluster.get("backend") in ("ssh", "local"), "cluster", 'backend = "ssh" or "local"')
    need("job_base_dir" in cluster, "cluster", "job_base_dir, the folder for the jobs' folders")
    if cluster["backend"] == "ssh":
        has_host = "hostname" in cluster["backend_config"]
        need(has_host, "cluster.backend_config", "hostname, the login node")
    need(packaging["type"] in ("none", "container"), "packaging", 'type = "none" or "container"')
    if packaging["type"] == "container":
        has_host = re.match(r"[^/]*([.:]|^localhost)[^/]*/", packaging.get("image", ""))
        need(has_host, "packaging", 'image, with its registry: "registry.example.org/me/name:1"')
    for variable in cluster["environment"]:
        if variable not in os.environ:
            fail(f"{variable} is listed in {SLURMFILE}, but is not set in this shell")
    submit = {name.replace("-", "_"): value for name, value in given.get("submit", {}).items()}
    return {"cluster": cluster, "packaging": packaging, "submit": submit}


def check(where: str, table: dict, keys: dict[str, type]):
    """Stops at a key that does not exist, or whose value has the wrong type."""
    for key, value in table.items():
        if key not in keys:
            fail(f"{SLURMFILE}: [{where}] has no key {key!r}; its keys are {', '.join(keys)}")
        items = value if isinstance(value, list) else []
        if type(value) is not keys[key] or not all(isinstance(item, str) for item in items):
            fail(f"{SLURMFILE}: [{where}] {key} must be {TYPES[keys[key]]}, not {value!r}")


# --- the code ---


def list_files() -> list[str]:
    """The files that git tracks, and new ones that it does not ignore."""
    command = ["git", "-C", REPOSITORY, "ls-files", "-z", "--cached", "--others"]
    done = subprocess.run([*command, "--exclude-standard"], stdout=subprocess.PIPE)
    if done.returncode != 0:
        fail("git, which lists the files to copy, failed")
    names = dict.fromkeys(os.fsdecode(done.stdout).split("\0")[:-1])
    # A repository in the repository is listed as a folder, and is not copied.
    paths = ((name, REPOSITORY / name) for name in names)
    return [name for name, path in paths if path.is_symlink() or path.is_file()]


def pack(packed: BinaryIO, files: list[str], variables: list[str]):
    """Writes what remote.sh's `submit` reads."""
    for name in variables:
        value = os.environ[name].replace("\\", r"\\").replace("\n", r"\n")
        packed.write(os.fsencode(f"{name}={value}\n"))
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in files:
            archive.add(REPOSITORY / name, arcname=name, recursive=False)
        # The last file, so that an archive that was cut short is noticed
        archive.addfile(tarfile.TarInfo(".submission"))


# --- an image ---


def image_uri(packaging: dict) -> str:
    """The name by which Enroot imports the image, with a # after the registry, or ""."""
    if packaging["type"] != "container":
        return ""
    registry, name = packaging["image"].split("/", 1)
    return f"docker://{registry}#{name}"


def image_commands(packaging: dict, folder: Path) -> list[list[str]]:
    """The commands that build an image from the files in `folder`, and push it."""
    engine = next(filter(shutil.which, ("docker", "podman")), None)
    if engine is None:
        fail("packaging by container needs docker or podman, and neither is on this machine")
    build = [engine, "build", "--force-rm", "--tag", packaging["image"]]
    # Most clusters are x86, and on an Arm Mac the engine would otherwise build for Arm. On Linux
    # (aarch64) this may be the login node of an Arm cluster.
    if platform.machine() == "arm64":
        build += ["--platform", "linux/amd64"]
    for argument in packaging["build_args"]:
        build += ["--build-arg", argument]
    build += ["--file", str(folder / packaging["dockerfile"]), str(folder)]
    return [build, [engine, "push", packaging["image"]]]


def make_image(packaging: dict, files: list[str]):
    """Builds and pushes the image, with its log on stderr."""
    with tempfile.TemporaryDirectory() as scratch:
        # Copied without .dockerignore, so that the image gets every file that git lists, no other.
        for name in set(files) - {".dockerignore"}:
            Path(scratch, name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, Path(scratch, name), follow_symlinks=False)
        for command in image_commands(packaging, Path(scratch)):
            print(f"+ {shlex.join(command)}", file=sys.stderr, flush=True)
            options = {"stdin": subprocess.DEVNULL, "stdout": sys.stderr}
            status = subprocess.run(command, **options).returncode
            if status != 0:
                fail(f"no container image: {command[0]} {command[1]} ended with {status}")


# --- the cluster ---

READY = b"remote.sh is ready\n"  # printed first; anything before it is from ~/.bashrc
SSH_OPTIONS = ["BatchMode=yes", "StrictHostKeyChecking=yes", "ClearAllForwardings=yes"]
# A silent connection counts as broken after 15 seconds.
SSH_OPTIONS += ["ConnectTimeout=6", "ServerAliveInterval=5", "ServerAliveCountMax=3"]
SSH_OPTIONS += ["LogLevel=ERROR"]
RETRY_SECONDS = 300  # how long a job is followed without a connection to the cluster
# As over SSH, a job gets no other variables of a shell on this machine.
LOCAL_VARIABLES = re.compile(
    "HOME|LANG|LANGUAGE|LC_.*|LD_LIBRARY_PATH|LOGNAME|PATH|SBATCH_.*|SHELL|SLURM_CONF|TERM|TMPDIR"
    "|TZ|USER"
)


class RemoteFailed(Exception):
    """A function of remote.sh, or ssh, has ended with this exit status, and has said why.
    `started` is whether remote.sh was running."""

    def __init__(self, status: int, started: bool):
        self.status, self.started = status, started
        # 255 is the status of ssh itself; a negative one means that it was killed.
        self.is_connection = status == 255 or status < 0


def command_line(cluster: dict, *command: object) -> list[str]:
    """The command line that runs a function of remote.sh on the cluster.

    ssh joins its arguments with blanks, and the remote shell splits them again, so they are quoted
    here, and only here.
    """
    shell = ["sh", "-c", (HERE / "remote.sh").read_text(), "remote.sh", *map(str, command)]
    if cluster["backend"] == "local":
        return shell
    config = cluster["backend_config"]
    ssh = ["ssh", "-T", *(f"-o{option}" for option in SSH_OPTIONS)]
    for key, flag in (("username", "-l"), ("port", "-p"), ("identity_file", "-i")):
        if key in config:
            ssh += [flag, str(config[key])]
    return [*ssh, "--", config["hostname"], f"exec {shlex.join(shell)}"]


@contextmanager
def remote(cluster: dict, *command: object, stdin=subprocess.DEVNULL) -> Iterator[BinaryIO]:
    """Yields the output of a function of remote.sh. Raises RemoteFailed at its end if it failed."""
    variables = dict(os.environ)
    if cluster["backend"] == "local":
        variables = {x: variables[x] for x in variables if LOCAL_VARIABLES.fullmatch(x)}
    words = command_line(cluster, *command)
    process = subprocess.Popen(words, stdin=stdin, stdout=subprocess.PIPE, env=variables)
    started = False
    try:
        while not started and (line := process.stdout.readline()):
            # ~/.bashrc may print something without a line break before it.
            started = line.endswith(READY)
        if started:
            yield process.stdout
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    if status != 0 or not started:
        raise RemoteFailed(status or 1, started)


# --- submit, wait, fetch ---


def sbatch_options(options: dict[str, object]) -> list[str]:
    """The options of a Slurmfile or a task as sbatch's; true is an option without a value, false
    is left out."""
    words = []
    for key, value in options.items():
        option = f"--{key.replace('_', '-')}"
        if value is not False:
            words.append(option if value is True else f"{option}={value}")
    return words


def submit(args: argparse.Namespace) -> int:
    """Copies the code and submits `args.command`, a launcher with its arguments, in the
    repository's folder. Returns the exit status: the job's own, with --wait or --fetch."""
    settings = read_slurmfile(args.env)
    cluster, packaging = settings["cluster"], settings["packaging"]
    options = sbatch_options(settings["submit"] | args.options)
    for option in options:
        if re.match(REFUSED, option):
            fail(f"{option} cannot be used here, because there would not be one job to follow")
    files = list_files()
    if args.command[1] not in files:
        fail(f"{args.command[1]} would not be copied: git ignores it, or it is in another folder")
    sbatch = ["sbatch", "--parsable", *options, *args.command]
    base = cluster["job_base_dir"]
    if cluster["backend"] == "local":
        base = HERE / Path(base).expanduser()
    host = cluster["backend_config"].get("hostname", "this machine")
    image = image_uri(packaging)

    if args.dry_run:
        for command in image_commands(packaging, REPOSITORY) if image else ():
            print(shlex.join(command))
        print(f"# {len(files)} files into a new folder in {base} on {host}. There:")
        if image:
            print(shlex.join(["./aux/import_image.sh", image, "pytorch.sqsh"]))
        print(shlex.join(sbatch))
        return 0

    if image:
        make_image(packaging, files)
    with tempfile.TemporaryFile() as packed:
        pack(packed, files, cluster["environment"])
        size = packed.tell() / 1e6
        packed.seek(0)
        print(f"Copying {len(files)} files, {size:.1f} MB, to {host}", flush=True)
        links = packaging["link"]
        name = Path(args.command[1]).stem + time.strftime("-%Y-%m-%d_%H-%M-%S")
        command = ["submit", base, name, image, len(cluster["environment"]), len(links), *links]
        job, folder, log = send(cluster, [*command, *sbatch], packed)
    print(f"Submitted batch job {job} to {args.env}, in {folder}", flush=True)

    status = 0
    if args.wait or args.fetch:
        status = wait(cluster, job, log)
    if args.fetch:
        fetch(cluster, folder, HERE / "slurm-jobs" / f"{args.env}-{job}")
    return status


def send(cluster: dict, command: list[object], packed: BinaryIO) -> tuple[int, str, str]:
    """Submits. Returns the job's id, its folder and its log."""
    try:
        with remote(cluster, *command, stdin=packed) as stream:
            lines = stream.read().decode().splitlines()
    except RemoteFailed as error:
        if not (error.is_connection and error.started):
            raise
        fail("the job may have been submitted: check with squeue --me on the cluster")
    job, folder, log = [*lines, ""][:3]
    return int(job), folder, log


def wait(cluster: dict, job: int, log: str) -> int:
    """Prints the log until the job ends, over as many connections as it takes. Returns the job's
    exit status."""
    position, connected = 0, time.monotonic()
    while True:
        try:
            with remote(cluster, "wait_for", job, log, position) as stream:
                while part := stream.read1(1 << 16):
                    position += len(part)
                    sys.stdout.buffer.write(part)
                    sys.stdout.flush()
            return 0
        except RemoteFailed as error:
            if not error.is_connection:
                return error.status
            if error.started:
                connected = time.monotonic()
            if time.monotonic() - connected > RETRY_SECONDS:
                raise
        print(f"job {job} is not affected, trying again", file=sys.stderr, flush=True)
        time.sleep(2)


def fetch(cluster: dict, folder: str, to: Path):
    """Copies every file that the job wrote, and prints what its task has returned. If that fails,
    an earlier copy stays as it was."""
    count = 0
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as scratch:
        new = Path(scratch, to.name)
        new.mkdir()
        try:
            with (
                remote(cluster, "fetch", folder) as stream,
                tarfile.open(fileobj=stream, mode="r|") as archive,
            ):
                for member in archive:
                    path = Path(member.name)
                    if not member.isreg() or path.is_absolute() or ".." in path.parts:
                        fail(f"the cluster sends {member.name!r}, which is not a file of the job")
                    archive.extract(member, new, set_attrs=False)
                    count += 1
        except tarfile.TarError:
            fail("nothing was fetched, because the archive is incomplete: try again")
        shutil.rmtree(to, ignore_errors=True)
        new.rename(to)
    print(f"Fetched {count} files into {os.path.relpath(to)}")
    for path in to.glob("checkpoints/*/result.json"):
        print(f"{os.path.relpath(path)}: {json.loads(path.read_text())}")


def without_traceback(function: Callable[..., int], *arguments: object) -> int:
    """The function's exit status; one sentence for what can happen to anybody."""
    try:
        return function(*arguments)
    except RemoteFailed as error:
        if error.is_connection:
            fail("no connection to the cluster; a submitted job is not affected")
        if not error.started:
            fail("remote.sh did not start there: is the login shell csh?")
        return error.status
    except OSError as error:
        fail(str(error))
    except KeyboardInterrupt:
        print("interrupted; a submitted job continues", file=sys.stderr)
        return 130
