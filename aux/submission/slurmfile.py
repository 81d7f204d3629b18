"""Slurmfile.toml says where jobs go: the nearest one from the working directory upwards."""

import os
import sys
from pathlib import Path

import tomllib

# The keys of an environment, and the types of their values. [NAME.submit] has options of sbatch,
# which sbatch itself checks.
KEYS = {
    "cluster": {
        "backend": str,
        "job_base_dir": str,
        "environment": list,
        "backend_config": {"hostname": str, "username": str, "port": int, "identity_file": str},
    },
    "packaging": {
        "type": str,
        "link": list,
        "dockerfile": str,
        "build_args": list,
        "image": str,
        "push": bool,
    },
    "submit": {},
}
TYPES = {str: "a string", int: "a whole number", bool: "true or false", list: "a list of strings"}


def fail(sentence: str):
    sys.exit(f"{Path(sys.argv[0]).name}: {sentence}")


def find() -> Path:
    """The Slurmfile. Stops with a sentence if there is none."""
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "Slurmfile.toml").is_file():
            return folder / "Slurmfile.toml"
    fail(f"no Slurmfile.toml in {Path.cwd()} or above it: copy the repository's")


def read(path: Path, name: str) -> dict[str, dict]:
    """The tables cluster, packaging and submit of one environment. What it lacks comes from
    [default]. Stops with a sentence at the first fault."""
    try:
        environments = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        fail(f"{path} is not TOML: {error}")
    default = environments.pop("default", {})
    if name not in environments:
        fail(f"no environment {name!r} in {path}; it has {', '.join(environments) or 'none'}")
    check(path, "default", default, KEYS)
    check(path, name, environments[name], KEYS)

    settings = {"cluster": {"environment": [], "backend_config": {}}, "submit": {}}
    settings["packaging"] = {"type": "none", "link": [], "dockerfile": "Dockerfile"}
    settings = merged(merged(settings, default), environments[name])
    cluster, packaging = settings["cluster"], settings["packaging"]

    def need(holds: bool, table: str, what: str):
        if not holds:
            fail(f"{path}: [{name}.{table}] needs {what}")

    need(cluster.get("backend") in ("ssh", "local"), "cluster", 'backend = "ssh" or "local"')
    need("job_base_dir" in cluster, "cluster", "job_base_dir, the folder for the jobs' folders")
    if cluster["backend"] == "ssh":
        has_host = "hostname" in cluster["backend_config"]
        need(has_host, "cluster.backend_config", "hostname, the login node")
    need(packaging["type"] in ("none", "container"), "packaging", 'type = "none" or "container"')
    if packaging["type"] == "container":
        need("image" in packaging, "packaging", "image, the name of the image to build")
    for variable in cluster["environment"]:
        if variable not in os.environ:
            fail(f"{variable} is listed in {path}, but is not set in this shell")
    return settings


def check(path: Path, where: str, table: object, keys: dict):
    """Stops at a key that does not exist, or whose value has the wrong type."""
    if not isinstance(table, dict):
        fail(f"{path}: {where} must be a table, [{where}]")
    for key, value in table.items() if keys else ():
        if key not in keys:
            fail(f"{path}: [{where}] has no key {key!r}; its keys are {', '.join(keys)}")
        kind = keys[key]
        if isinstance(kind, dict):
            check(path, f"{where}.{key}", value, kind)
            continue
        items = value if kind is list and isinstance(value, list) else []
        if type(value) is not kind or not all(isinstance(item, str) for item in items):
            fail(f"{path}: [{where}] {key} must be {TYPES[kind]}, not {value!r}")


def merged(below: dict, above: dict) -> dict:
    """`above`, with the values of `below` for keys that it lacks."""
    both = below | above
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            both[key] = merged(below[key], above[key])
    return both
