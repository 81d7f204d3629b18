"""Slurmfile.toml says where jobs go: the one that SLURMFILE names, or the nearest one from the
working directory upwards.

A mistake in it is reported in one sentence with its line number, before anything is sent.
"""

import difflib
import os
import re
import sys
from pathlib import Path

import tomllib

KEYS = {
    "cluster": {"backend": str, "job_base_dir": str, "environment": list, "backend_config": dict},
    "cluster.backend_config": {"hostname": str, "username": str, "port": int, "identity_file": str},
    "packaging": {
        "type": str,
        "link": list,
        "dockerfile": str,
        "build_args": list,
        "image": str,
        "push": bool,
        "squashfs": bool,
    },
    "submit": {},  # any option of sbatch
}
KINDS = {
    str: "a string",
    int: "a whole number",
    bool: "true or false",
    list: "a list of strings",
    dict: "a table",
}

# To find misspelt options. One that resembles none of these is left to sbatch, which may be newer
# than this list.
SBATCH_OPTIONS = """
    account acctg-freq batch bb bbf begin chdir cluster-constraint comment constraint container
    contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
    dependency distribution error exclude exclusive export extra-node-info get-user-env gid gpu-bind
    gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs
    input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind
    mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks
    ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output overcommit
    oversubscribe partition power prefer priority profile propagate qos quiet reboot requeue
    reservation signal sockets-per-node spread-job switches thread-spec threads-per-core time
    time-min tmp tres-per-task uid use-min-nodes verbose wait-all-nodes wckey
""".split()  # noqa: SIM905
REFUSED = {
    "array": "an array is many jobs, and submit.py follows one: use sbatch on the cluster",
    "clusters": "name each cluster's own login node in the Slurmfile",
    "parsable": "submit.py always adds it",
    "test-only": "use --dry-run",
    "wait": "use --wait on the command line of submit.py",
    "wrap": "name a launcher or another batch script",
}


def fail(sentence: str):
    sys.exit(f"{Path(sys.argv[0]).name}: {sentence}")


def find() -> Path:
    """SLURMFILE, or the nearest Slurmfile.toml from the working directory upwards."""
    if named := os.environ.get("SLURMFILE"):
        if not Path(named).is_file():
            fail(f"SLURMFILE names {named}, which is missing")
        return Path(named).resolve()
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "Slurmfile.toml").is_file():
            return folder / "Slurmfile.toml"
    fail(
        f"no Slurmfile.toml in {Path.cwd()} or above it: copy the repository's, or name one with "
        "SLURMFILE"
    )


def read(path: Path, environment: str) -> dict[str, dict]:
    """The tables cluster, packaging and submit of one environment; [default] has the values that
    it lacks."""
    text = path.read_text()
    try:
        environments = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        fail(f"{path} is not TOML: {error}")
    for name in environments:
        check(path, text, environments, name)
    if environment not in environments or environment == "default":
        names = ", ".join(name for name in environments if name != "default") or "none"
        fail(f"no environment {environment!r} in {path}; it has {names}")
    settings = merged(
        {table: {} for table in ("cluster", "packaging", "submit")}, environments.get("default", {})
    )
    settings = merged(settings, environments[environment])
    check_whole(path, text, environment, settings)
    return settings


def merged(below: dict, above: dict) -> dict:
    """`above`, with the values of `below` for keys that it lacks."""
    both = below | above
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            both[key] = merged(below[key], above[key])
    return both


def line_of(text: str, *paths: tuple[str, ...]) -> int:
    """The number of the line that goes furthest along one of these paths of keys, because tomllib
    gives no line numbers."""
    table, line, depth = (), 1, 0
    for number, content in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+([^\]]+)\]", content):
            table = here = keys_in(header[1])
        elif key := re.match(r"\s*([\w.'\"\s-]+?)\s*=", content):
            here = table + keys_in(key[1])
        else:
            continue
        for path in paths:
            common = next((i for i, key in enumerate(here) if path[i : i + 1] != (key,)), len(here))
            if common > depth:
                line, depth = number, common
    return line


def keys_in(dotted: str) -> tuple[str, ...]:
    return tuple(key.strip().strip("'\"") for key in dotted.split("."))


def check(path: Path, text: str, environments: dict, name: str):
    """Stops at the first key of environment `name` that does not exist or has a value of the
    wrong type."""

    def refuse(where: tuple[str, ...], sentence: str):
        fail(f"{path}, line {line_of(text, where)}: {sentence}")

    def check_table(where: tuple[str, ...], table: object):
        known = KEYS[".".join(where[1:])]
        if not isinstance(table, dict):
            refuse(where, f"{'.'.join(where)} must be a table")
        for key, value in table.items():
            if key == "password":
                reason = (
                    "it does not belong in a repository; make a key with ssh-keygen and ssh-copy-id"
                )
                refuse((*where, key), f"a password is refused: {reason}")
            if key not in known:
                refuse(
                    (*where, key),
                    f"[{'.'.join(where)}] has no key {key!r}; its keys are {', '.join(known)}",
                )
            right = type(value) is known[key] and (
                known[key] is not list or all(isinstance(x, str) for x in value)
            )
            if not right:
                refuse((*where, key), f"{key} must be {KINDS[known[key]]}, not {value!r}")
            if known[key] is dict:
                check_table((*where, key), value)

    if not isinstance(environments[name], dict):
        refuse(
            (name,), f"{name!r} is outside any table: move it below [{name}.cluster] or the like"
        )
    for table, value in environments[name].items():
        if table not in ("cluster", "packaging", "submit"):
            refuse(
                (name, table),
                f"[{name}] has no table {table!r}; its tables are cluster, packaging, submit",
            )
        if table != "submit" or not isinstance(value, dict):
            check_table((name, table), value)
            continue
        for key, option in value.items():
            if type(option) not in (str, int, bool):
                refuse(
                    (name, table, key),
                    f'{key} must be a string, a number or true: write {key} = "{option}"',
                )
            if fault := option_fault(key.replace("_", "-")):
                refuse((name, table, key), fault)


def option_fault(option: str) -> str | None:
    """One sentence on the fault in the name of an sbatch option, or None."""
    if option in REFUSED:
        return f"--{option} cannot be used here: {REFUSED[option]}"
    near = difflib.get_close_matches(option, SBATCH_OPTIONS, n=3, cutoff=0.8)
    if near and option not in SBATCH_OPTIONS:
        return f"sbatch has no option {option!r}, but {', '.join(near)}"
    return None


def check_whole(path: Path, text: str, environment: str, settings: dict[str, dict]):
    """Stops with a sentence at a key that is missing or has an invalid value."""
    cluster, packaging = settings["cluster"], settings["packaging"]

    def refuse(table: str, key: str, sentence: str):
        keys = (*table.split("."), key)
        fail(f"{path}, line {line_of(text, (environment, *keys), ('default', *keys))}: {sentence}")

    def need(table: str, values: dict, key: str, what: str):
        if not values.get(key):
            line = line_of(text, (environment, *table.split(".")))
            fail(f"{path}, line {line}: [{environment}.{table}] needs {key}, {what}")

    def choose(table: str, key: str, choices: tuple[str, ...]):
        if settings[table][key] not in choices:
            known = " or ".join(f'"{choice}"' for choice in choices)
            refuse(table, key, f"{key} must be {known}, not {settings[table][key]!r}")

    need("cluster", cluster, "backend", '"ssh", or "local" for sbatch on this machine')
    choose("cluster", "backend", ("ssh", "local"))
    need(
        "cluster",
        cluster,
        "job_base_dir",
        "the folder on the cluster in which each job gets a new folder",
    )
    if cluster["backend"] == "ssh":
        config = cluster.setdefault("backend_config", {})
        need(
            "cluster.backend_config",
            config,
            "hostname",
            "the login node, or its name in your ~/.ssh/config",
        )
        for key in ("hostname", "username"):
            if not re.fullmatch(r"[\w][\w.:%@\\-]*", config.get(key, "x")):
                refuse("cluster.backend_config", key, f"{config[key]!r} is not a {key}")
    for name in cluster.setdefault("environment", []):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            refuse("cluster", "environment", f"{name!r} is not the name of an environment variable")
        if name not in os.environ:
            refuse("cluster", "environment", f"{name} is listed here, but is not set in this shell")
    packaging.setdefault("type", "none")
    packaging.setdefault("link", [])
    choose("packaging", "type", ("none", "container"))
    if packaging["type"] == "container":
        packaging.setdefault("dockerfile", "Dockerfile")
        need("packaging", packaging, "image", "the name of the image that is built")
        push, squashfs = packaging.get("push"), packaging.get("squashfs")
        # A name without a registry is Docker Hub's: not pushed by default, and so not made public.
        if push is None and squashfs is None:
            push = registry_of(packaging["image"]) != ""
        packaging["push"], packaging["squashfs"] = (
            bool(push),
            bool(squashfs) if squashfs is not None else not push,
        )
        if packaging["push"] == packaging["squashfs"]:
            how = (
                "push = true (the cluster imports it from a registry) or squashfs = true (it is "
                "copied)"
            )
            refuse("packaging", "image", f"say how the image gets to the cluster: {how}")


def registry_of(image: str) -> str:
    """The host in front of an image's name, registry.example.org or localhost:5000; empty if
    there is none."""
    host, slash, _ = image.partition("/")
    return host if slash and (host == "localhost" or "." in host or ":" in host) else ""
