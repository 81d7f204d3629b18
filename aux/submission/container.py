"""Container images for jobs: built by docker or podman from the files that would be copied, then
pushed, or written as a squashfs file."""

import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from .slurmfile import fail

SQUASHFS = "pytorch.sqsh"  # its name in the job's folder, as in run_script.sh


def engine() -> str:
    """docker or podman. Stops with a sentence if there is neither."""
    for name in ("docker", "podman"):
        if shutil.which(name):
            return name
    fail("packaging by container needs docker or podman, and neither is installed on this machine")


def check_launcher(launcher: str):
    """Stops, before anything is built, if this launcher would not run the job in the image."""
    if f"CONTAINER_IMAGE=$PWD/{SQUASHFS}\n" not in Path(launcher).read_text(errors="replace"):
        image = f"CONTAINER_IMAGE=$PWD/{SQUASHFS}, which will be built"
        fail(f'{launcher} does not run {image}: name run_script.sh, or write type = "none"')


def uri(packaging: dict) -> str:
    """The name by which Enroot imports the image once it is pushed, with a # after the registry;
    empty if the image is copied as a file.

    A name without a registry is Docker Hub's: not pushed by default, and so not made public.
    """
    image = packaging["image"]
    registry, slash, name = image.partition("/")
    if not slash or not re.search(r"[.:]|^localhost$", registry):
        return f"docker://{image}" if packaging.get("push") else ""
    return f"docker://{registry}#{name}" if packaging.get("push", True) else ""


def commands(packaging: dict, folder: Path) -> list[list[str]]:
    """The commands that build the image from the files in `folder`, and push it."""
    build = [engine(), "build", "--force-rm", "--tag", packaging["image"]]
    # Most clusters are x86, and on an Arm Mac the engine would otherwise build for Arm. On Linux
    # (aarch64) this may be the login node of an Arm cluster.
    if platform.machine() == "arm64":
        build += ["--platform", "linux/amd64"]
    for argument in packaging.get("build_args", []):
        build += ["--build-arg", argument]
    build += ["--file", str(folder / packaging["dockerfile"]), str(folder)]
    push = [engine(), "push", packaging["image"]]
    return [build, push] if uri(packaging) else [build]


def make(packaging: dict, root: Path, files: list[str], scratch: Path) -> dict[str, Path]:
    """Builds the image, with its log on stderr. Returns the files to copy besides the code."""
    # Copied without .dockerignore, so that the image gets every file that git lists, and no other.
    for name in set(files) - {".dockerignore"}:
        (scratch / "context" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, scratch / "context" / name, follow_symlinks=False)
    for command in commands(packaging, scratch / "context"):
        print(f"+ {shlex.join(command)}", file=sys.stderr, flush=True)
        status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode
        if status != 0:
            fail(f"no container image: {command[0]} {command[1]} ended with exit status {status}")
    if uri(packaging):
        return {}
    write_squashfs(packaging["image"], scratch / SQUASHFS)
    return {SQUASHFS: scratch / SQUASHFS}


def write_squashfs(image: str, path: Path):
    """Writes the image's files as a squashfs, which Enroot takes."""
    create = [engine(), "create", image, "true"]
    container = subprocess.run(create, stdout=subprocess.PIPE, text=True).stdout.strip()
    export = [engine(), "export", container]
    try:
        with subprocess.Popen(export, stdout=subprocess.PIPE) as exported:
            squash = ["sqfstar", path]
            packed = subprocess.run(squash, stdin=exported.stdout, stdout=subprocess.DEVNULL)
    finally:
        subprocess.run([engine(), "rm", container], stdout=subprocess.DEVNULL)
    if exported.returncode != 0 or packed.returncode != 0:
        fail(f"no squashfs file from {image}, see above")
