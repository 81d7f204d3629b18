"""Container images for jobs: built by docker or podman from the files that would be copied, then
pushed, or written as a squashfs file."""

import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from .slurmfile import fail, registry_of

SQUASHFS = "pytorch.sqsh"  # its name in the job's folder, as in run_script.sh


def engine() -> str:
    """docker, or podman if there is no docker."""
    path = shutil.which("docker") or shutil.which("podman")
    if not path:
        fail(
            "packaging by container needs docker or podman, and neither is installed on this "
            "machine"
        )
    return Path(path).name


def build_commands(packaging: dict, folder: Path) -> list[list[str]]:
    """The commands that build the image from the files in `folder`, and push it if asked to."""
    # Clusters are x86; on an Arm Mac the engine would otherwise build for Arm.
    where = ["--platform", "linux/amd64"] if platform.machine() in ("arm64", "aarch64") else []
    arguments = [
        word for argument in packaging.get("build_args", []) for word in ("--build-arg", argument)
    ]
    build = [
        "build",
        "--force-rm",
        *where,
        *arguments,
        "--file",
        str(folder / packaging["dockerfile"]),
        "--tag",
        packaging["image"],
    ]
    commands = [[engine(), *build, str(folder)]]
    return (
        [*commands, [engine(), "push", packaging["image"]]] if packaging.get("push") else commands
    )


def check_launcher(launcher: str):
    """Stops, before anything is built, if this launcher would not run the job in the image."""
    text = Path(launcher).read_text(errors="replace")
    if "CONTAINER_" not in text:
        fail(
            f'{launcher} runs nothing in a container, and the Slurmfile says type = "container": '
            "name run_script.sh"
        )
    image = re.search(r"^export CONTAINER_IMAGE=(\S+)", text, re.M)
    if image and image[1] != f"$PWD/{SQUASHFS}":
        ours = f"the image that is built will be $PWD/{SQUASHFS}"
        fail(
            f'{launcher} says CONTAINER_IMAGE={image[1]}, but {ours}: write that, or type = "none" '
            "in the Slurmfile"
        )


def make(packaging: dict, root: Path, files: list[str], scratch: Path) -> dict[str, Path]:
    """Builds the image, with its log on stderr. Returns the files to copy besides the code."""
    if packaging["dockerfile"] not in files:
        fail(
            f"there is no {packaging['dockerfile']} among the files of {root} to build a container "
            "from"
        )
    if packaging.get("squashfs") and not shutil.which("sqfstar"):
        fail(
            "squashfs = true needs sqfstar (squashfs-tools 4.5 or newer), which is not installed "
            "on this machine"
        )
    # Copied without .dockerignore, so that the image gets every file that git lists, and no other.
    for name in set(files) - {".dockerignore"}:
        (scratch / "context" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, scratch / "context" / name, follow_symlinks=False)
    for command in build_commands(packaging, scratch / "context"):
        print(f"+ {shlex.join(command)}", file=sys.stderr, flush=True)
        status, foreign = run(command)
        if foreign:
            what = f"its programs are for a different CPU than this machine's, {platform.machine()}"
            how = (
                "docker run --privileged --rm tonistiigi/binfmt --install all, or the package "
                "qemu-user-static"
            )
            fail(f"no container image: {what}, and there is no emulation of it: {how}")
        if status != 0:
            fail(
                f"no container image: {command[0]} {command[1]} ended with exit status {status}, "
                "see its log above"
            )
    return (
        {SQUASHFS: squash(packaging["image"], scratch / SQUASHFS)}
        if packaging.get("squashfs")
        else {}
    )


def run(command: list[str]) -> tuple[int, bool]:
    """Runs a command, with its output on stderr. Returns its exit status, and whether it failed for
    lack of emulation."""
    foreign = False
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            foreign |= "exec format error" in line.lower()
    return process.returncode, foreign and process.returncode != 0


def squash(image: str, path: Path) -> Path:
    """Writes the image's files as a squashfs, which Enroot takes."""
    made = subprocess.run([engine(), "create", image, "true"], capture_output=True, text=True)
    if made.returncode != 0:
        fail(f"{engine()} create {image} failed: {made.stderr.strip()}")
    container = made.stdout.strip()
    try:
        with subprocess.Popen([engine(), "export", container], stdout=subprocess.PIPE) as export:
            packed = subprocess.run(
                ["sqfstar", path], stdin=export.stdout, capture_output=True, text=True
            )
    finally:
        subprocess.run([engine(), "rm", container], capture_output=True)
    if export.returncode != 0 or packed.returncode != 0:
        fail(f"no squashfs from {image}: {packed.stderr.strip() or 'the export failed'}")
    return path


def uri(image: str) -> str:
    """The name by which Enroot imports a pushed image, with a # after the registry."""
    registry = registry_of(image)
    return (
        f"docker://{registry}#{image.removeprefix(registry + '/')}"
        if registry
        else f"docker://{image}"
    )
