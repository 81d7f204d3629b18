#!/usr/bin/env python3
"""Find out what this cluster wants, on a login node, before your first job.

    python aux/check_site.py                           # partitions, and lines for a launcher
    python aux/check_site.py --partition gpu           # for that one
    python aux/check_site.py --write LAUNCHER          # puts the lines into the launcher's header

--write also makes site.sh beside the launcher, if there is none: the modules and the environment of
this shell, which jobs then use. It only asks Slurm, and starts nothing. It needs Python 3.9, and
can be copied by itself. MB are Slurm's, of 1024 x 1024 bytes.
"""

from __future__ import annotations  # for Python 3.9

import argparse
import contextlib
import difflib
import getpass
import grp
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

# MB that a rank on a GPU can need, for torch and CUDA, loader workers, and a checkpoint on its way
# to the disk.
MEMORY_OF_A_RANK = 16_000
# What --gpus-per-node asks for, and GRES that are surely no GPUs. Any other may be one.
NOT_GPUS = ("gpu", "shard", "mps", "nic", "bandwidth", "craynetwork", "lscratch", "tmpdisk")
# Words in a node's state with which it runs no new job.
NOT_USABLE = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE"}
NOT_USABLE |= {"INVALID_REG", "MAINT", "NOT_RESPONDING", "UNKNOWN"}
PLAIN_TOPOLOGY = ("", "topology/none", "topology/default", "topology/flat")
# File systems that several machines can mount.
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "panfs", "wekafs", "9p")


def ask(*command: str) -> str:
    """The output of one of Slurm's commands, or an empty text if the command fails."""
    try:
        # Somebody's words on a node may be in any encoding.
        options = {"capture_output": True, "text": True, "errors": "replace", "timeout": 60}
        done = subprocess.run(command, **options)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def records(text: str, key: str) -> list[dict]:
    """The lines of `scontrol --oneliner show ...` that begin with `key`, as dictionaries:
    `NodeName=a Gres=gpu:4 ...` is {"NodeName": "a", "Gres": "gpu:4", ...}."""
    lines = [line for line in text.splitlines() if line.startswith(f"{key}=")]
    return [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]


def gres(text: str) -> list[tuple[str, str, int]]:
    """(name, type, count) of each resource: "gpu:a100:4(S:0-1),nic:2" is [("gpu", "a100", 4),
    ("nic", "", 2)]."""
    found = []
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *more = part.split(":")
        count = more.pop() if more and re.match(r"\d+[KMG]?$", more[-1]) else "1"
        if name:
            found.append((name, ":".join(more), int(re.sub(r"\D", "", count))))
    return found


def number(text: str) -> float:
    """The value of one of Slurm's limits, which is infinite for UNLIMITED."""
    return float(text) if text.isdigit() else math.inf


class Shape:
    """A kind of node: GPUs by their type, and the CPUs and MB of memory that jobs may have."""

    def __init__(self, node: dict):
        resources = gres(node.get("Gres", ""))
        self.types = Counter()
        for name, kind, count in resources:
            if name == "gpu":
                self.types[kind] += count
        self.others = [name for name, _, _ in resources if name not in NOT_GPUS]
        self.gpus = sum(self.types.values())
        self.cpus = int(node.get("CPUEfctv", node.get("CPUTot", 1)))
        self.threads = int(node.get("ThreadsPerCore", 1))
        self.memory = int(node.get("RealMemory", 0)) - int(node.get("MemSpecLimit", 0))
        # Nodes of one kind have one key, and those with the most GPUs the lowest.
        self.key = (-self.gpus, tuple(sorted(self.types.items())), self.cpus, self.memory)

    def named_gpus(self) -> str:
        """For the table: "4 a100", or "none"."""
        named = [f"{count} {kind or 'GPUs'}" for kind, count in self.types.items()]
        return ", ".join(named) or "none"


class Site:
    """What Slurm's commands say. The tests' `ask` answers from a record of another cluster."""

    def __init__(self, ask: Callable = ask):
        lines = re.findall(r"^(\w+) *= (.*?) *$", ask("scontrol", "show", "config"), re.M)
        known = {name: value for name, value in lines if value != "(null)"}
        self.config = defaultdict(str, known)  # no version has all settings
        if not self.config:
            sys.exit("check_site.py: Slurm does not answer here: run it on a login node")
        show = ["scontrol", "--oneliner", "show"]
        self.partitions = records(ask(*show, "partition"), "PartitionName")
        self.nodes = records(ask(*show, "node"), "NodeName")
        self.has_accounts = self.config["AccountingStorageType"].endswith("slurmdbd")
        self.accounts = []
        if self.has_accounts:
            where = [f"user={getpass.getuser()}", f"cluster={self.config['ClusterName']}"]
            show = ["sacctmgr", "--noheader", "--parsable2", "show", "assoc"]
            self.accounts = sorted({*ask(*show, *where, "format=account").split()})

    def shapes(self, partition: dict) -> list[tuple[Shape, int, int]]:
        """(shape, its nodes, those of them that are up). Shapes with nodes that are up come first,
        and of these the one with the most GPUs."""
        shapes, all_of, up = {}, Counter(), Counter()
        for node in self.nodes:
            if partition["PartitionName"] in node.get("Partitions", "").split(","):
                shape = Shape(node)
                shapes[shape.key] = shape
                all_of[shape.key] += 1
                # "IDLE*+DRAIN": the star stands for a node that does not respond.
                words = re.split(r"[^A-Z_]+", node.get("State", "").replace("*", "+NOT_RESPONDING"))
                up[shape.key] += NOT_USABLE.isdisjoint(words)
        order = sorted(shapes, key=lambda key: (not up[key], key))
        return [(shapes[key], all_of[key], up[key]) for key in order]

    def shape(self, partition: dict) -> Shape:
        """The one for which the options are."""
        return self.shapes(partition)[0][0]

    def refusal(self, partition: dict) -> str:
        """Why this user cannot use the partition; empty if nothing speaks against it."""
        if partition["State"] != "UP":
            return f"its state is {partition['State']}"
        if not self.shapes(partition):
            return "it has no nodes"
        groups = set()
        for group in {os.getgid(), *os.getgroups()}:
            with contextlib.suppress(KeyError):
                groups.add(grp.getgrgid(group).gr_name)
        allowed = partition.get("AllowGroups", "ALL")
        if allowed != "ALL" and groups.isdisjoint(allowed.split(",")):
            return f"AllowGroups is {allowed}"
        return ""

    def choose(self, wanted: str | None) -> dict:
        """The partition of that name, or the default one if it has GPUs, or the first that has."""
        by_name = {partition["PartitionName"]: partition for partition in self.partitions}
        if wanted:
            if wanted not in by_name:
                sys.exit(f"check_site.py: no partition {wanted}, but {', '.join(by_name)}")
            if why := self.refusal(by_name[wanted]):
                sys.exit(f"check_site.py: not {wanted}: {why}")
            return by_name[wanted]
        usable = [partition for partition in self.partitions if not self.refusal(partition)]
        if not usable:
            sys.exit("check_site.py: Slurm shows you no partition and nodes that you may use")
        default_first = sorted(usable, key=lambda p: p.get("Default") != "YES")
        return min(default_first, key=lambda p: not self.shape(p).gpus)

    def counts_memory(self) -> bool:
        return "MEMORY" in self.config["SelectTypeParameters"]

    def options(self, partition: dict, whole: bool, by_rank: bool) -> dict[str, str]:
        """sbatch's options for all of a node, or for one GPU of it. With `by_rank` srun starts each
        rank; otherwise torchrun or spawn_ranks.py starts the ranks of a node."""
        shape = self.shape(partition)
        # Without GPUs there is a rank for every two CPUs.
        ranks = shape.gpus or max(1, shape.cpus // 2)
        share = 1 if whole else ranks
        cpus = min(shape.cpus, number(partition.get("MaxCPUsPerNode", "UNLIMITED"))) // share
        ranks //= share
        options = {}
        if partition.get("Default") != "YES":
            options["partition"] = partition["PartitionName"]
        tasks = ranks if by_rank or not shape.gpus else 1
        options["ntasks-per-node"] = str(tasks)
        options["gpus-per-node"] = str(ranks if shape.gpus else 0)
        options["cpus-per-task"] = str(max(1, int(cpus // tasks)))
        if self.counts_memory():
            options["mem"] = "0" if whole else f"{shape.memory // share}M"
        limit = partition.get("MaxTime", "UNLIMITED")
        if limit.startswith("00:"):  # days-hours:minutes:seconds
            options["time"] = limit
        return options


def sbatch_says(options: dict[str, str]) -> str:
    """Why sbatch refuses these options, without a job; empty if it takes them."""
    words = [f"--{name}={value}" for name, value in options.items()]
    command = ["sbatch", "--test-only", "--nodes=1", *words, "--wrap=true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not tried: {error}"
    said = done.stderr.strip().splitlines() or ["without a word"]
    return f"refused: {said[-1]}" if done.returncode else ""


def tried(site: Site, partition: dict, whole: bool, by_rank: bool) -> tuple[dict[str, str], str]:
    """The options that sbatch takes, and an empty text; or why it refuses them."""
    threads = site.shape(partition).threads

    def by_core(options: dict[str, str]) -> dict[str, str]:
        return options | {"cpus-per-task": str(max(1, int(options["cpus-per-task"]) // threads))}

    options, node = site.options(partition, whole, by_rank), site.options(partition, True, by_rank)
    # Some sites have --hint=nomultithread by default, and then a CPU is a core: sbatch takes a node
    # with a CPU for each core, and refuses one with a CPU for each thread.
    if threads > 1 and sbatch_says(node) and not sbatch_says(by_core(node)):
        options = by_core(options)
    return options, sbatch_says(options)


def write(path: Path, site: Site, partition: dict) -> str:
    """Puts the options for whole nodes into a launcher's header. Returns the diff and, if sbatch
    refuses the options (for example without an account), why."""
    try:
        old = new = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"check_site.py: cannot read {path}: {error}")
    if "#SBATCH --gpus-per-node=" not in old:
        what = "has no line '#SBATCH --gpus-per-node=', so it is no launcher"
        sys.exit(f"check_site.py: {path} {what}")
    # A number of tasks that is the user's to edit: srun starts each rank.
    by_rank = re.search(r"^#SBATCH --ntasks-per-node=\S+ +# EDIT", old, re.M) is not None
    options, refused = tried(site, partition, True, by_rank)
    for name, value in options.items():
        line = f"#SBATCH --{name}={value}"
        found = re.search(rf"^##?SBATCH --{name}=\S* *", new, re.M)
        if found:
            # A comment behind it keeps its column.
            new = new.replace(found[0], line.ljust(len(found[0])), 1)
        else:
            new = new.replace("#SBATCH", f"{line}\n#SBATCH", 1)
    if "partition" not in options:
        # An earlier call may have put in another partition.
        new = re.sub(r"^#SBATCH --partition=.*\n", "", new, flags=re.M)
    try:
        path.write_text(new)
    except OSError as error:
        sys.exit(f"check_site.py: cannot write {path}: {error.strerror}")
    lines = old.splitlines(), new.splitlines()
    said = [*difflib.unified_diff(*lines, str(path), str(path), n=0, lineterm="")]
    return "\n".join(said + ([f"sbatch: {refused}"] if refused else []))


# Lines of site.sh that only the user can know.
MODULES = """# source /etc/profile                                   # these two lines,
# module load python/3.12                               # if your Python needs a module"""
YOURS = """
# Each of these without its first #, if you need it:
# MASTER_ADDR=${MASTER_ADDR}i                            # if the fast network has names of its own
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # if ranks pick a slow network
# export NCCL_DEBUG=INFO                                 # to see where it hangs
"""


def known_site(cluster: str) -> Path | None:
    """The file for this cluster in sites/, beside aux/, if there is one. Its names are those in the
    sites' documents, so a ClusterName need only begin like one."""
    for path in sorted((Path(__file__).resolve().parents[1] / "sites").glob("*.sh")):
        names = re.search(r"^# ClusterName: (.+)$", path.read_text(), re.M)[1].split(", ")
        if any(cluster.lower().startswith(name) for name in names):
            return path
    return None


def site_lines(launcher: Path, known: Path | None = None) -> str:
    """The content of site.sh: what this shell has loaded and activated, and lines to edit or those
    for a known cluster."""
    lines = ["# shellcheck shell=bash disable=SC1090,SC1091"]
    lines.append("# What is special about this cluster. env.sh sources it in every job.")
    if modules := [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name]:
        lines.append("source /etc/profile  # it defines `module`")
        lines.append(f"module load {' '.join(map(shlex.quote, modules))}")
    else:
        lines.append(MODULES)

    venv, conda = os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")
    if venv:
        # env.sh activates .venv itself.
        if Path(venv).resolve() != (launcher.resolve().parent / ".venv").resolve():
            lines.append(f"source {shlex.quote(venv)}/bin/activate")
    elif conda and "CONDA_EXE" in os.environ:
        base = Path(os.environ["CONDA_EXE"]).parents[1]
        lines.append(f"source {shlex.quote(str(base))}/etc/profile.d/conda.sh")
        lines.append(f"conda activate {shlex.quote(conda)}")
    elif conda:
        lines.append(f"export PATH={shlex.quote(conda)}/bin:$PATH")
    return "\n".join(lines) + "\n" + (f"\n{known.read_text()}" if known else YOURS)


def write_site(launcher: Path, known: Path | None = None) -> str:
    """Makes site.sh beside the launcher, if there is none. Returns a sentence."""
    path = launcher.parent / "site.sh"
    if path.exists():
        return f"{path} is there, and stays as it is"
    try:
        path.write_text(site_lines(launcher, known))
    except OSError as error:
        sys.exit(f"check_site.py: cannot write {path}: {error.strerror}")
    what = f", and sites/{known.name}" if known else ""
    return f"{path} is new, with the modules and the environment of this shell{what}: look at it"


# --- what to know ---


def facts(site: Site, partition: dict) -> Iterator[tuple[str, str]]:
    """Sentences on what a job gets, each with the setting of Slurm that says so."""
    config, shape = site.config, site.shape(partition)
    yield f"a job may run for {partition['MaxTime']}", "MaxTime"
    if (nodes := partition.get("MaxNodes", "UNLIMITED")) != "UNLIMITED":
        yield f"a job may have {nodes} nodes at most", "MaxNodes"
    if shape.threads > 1:
        what = f"a core has {shape.threads} hardware threads, and Slurm counts threads"
        yield f"{what}: {shape.cpus} CPUs are {shape.cpus // shape.threads} cores", "ThreadsPerCore"
    if partition.get("DefaultTime", "NONE") != "NONE":
        yield f"without --time it gets {partition['DefaultTime']}", "DefaultTime"
    sentence = f"at its end SIGTERM comes {config['KillWait']} before SIGKILL, for a checkpoint"
    yield sentence, "KillWait"
    mode = partition.get("PreemptMode", config["PreemptMode"])
    if config["PreemptType"] in ("preempt/none", "") or mode == "OFF":
        yield "a job is not preempted", f"PreemptType={config['PreemptType']}, PreemptMode={mode}"
    elif "SUSPEND" in mode:
        yield "a preempted job stops where it is, and goes on later", f"PreemptMode={mode}"
    elif config["PreemptType"] == "preempt/qos":
        show = "sacctmgr show qos format=name,gracetime,preemptmode"
        yield f"whether and how a job is preempted depends on its QOS: {show}", "PreemptType"
    else:
        grace = partition.get("GraceTime", "0")
        grace = f"{grace} s" if grace != "0" else config["KillWait"]
        yield f"a preempted job has {grace} for its checkpoint", f"GraceTime, PreemptMode={mode}"
        if "CANCEL" in mode:
            what = "a preempted job is cancelled, and --requeue does not bring it back"
            how = "submit the next one with --dependency=singleton and the same --job-name"
            yield f"{what}: {how}", f"PreemptMode={mode}"
    again = re.search(r"cred_expire=(\d+)", config["AuthInfo"])
    yield f"a requeued job waits for {again[1] if again else 120} s", "cred_expire in AuthInfo"
    if config["JobRequeue"] == "0":
        sentence = "a job is only requeued with `#SBATCH --requeue`, which the launchers have"
        yield sentence, "JobRequeue"
    if config["ProctrackType"] == "proctrack/cgroup":
        yield "a signal reaches what srun starts, not its children: use exec", "ProctrackType"
    if site.has_accounts:
        yield f"sacct shows ended jobs; your accounts: {', '.join(site.accounts)}", "sacctmgr"
    else:
        yield "sacct shows no ended jobs", "AccountingStorageType"
    if not site.counts_memory():
        yield "Slurm does not count memory, so --mem reserves none", "SelectTypeParameters"
        return
    names = {"DefMemPerCPU": "each CPU", "DefMemPerNode": "each node"}
    # If the partition sets one of them, neither of the cluster's applies.
    source = partition if any(number(partition.get(n, "")) < math.inf for n in names) else config
    for name, whose in names.items():
        default = number(source.get(name, ""))
        if default < math.inf:
            yield f"without --mem a job gets {default:.0f} MB for {whose}", name
            by_gpu = default * (shape.cpus if "CPU" in name else 1) / max(1, shape.gpus)
            if shape.gpus and by_gpu < MEMORY_OF_A_RANK:
                what = f"{by_gpu:.0f} MB for each GPU, and a rank can need {MEMORY_OF_A_RANK}"
                yield f"with all CPUs of a node that is {what}: use --mem", name


def torch_for(driver: str) -> str:
    """How to install a torch for this version of NVIDIA's driver."""
    index = "--index-url https://download.pytorch.org/whl"
    major = int(driver.split(".")[0])
    if major >= 580:
        return "pip install torch"
    if major >= 570:
        blackwell = f"for Blackwell (B200) pip install torch==2.11.0 {index}/cu128"
        return f"pip install torch {index}/cu126; {blackwell}"
    if major >= 525:
        return f"pip install torch {index}/cu126"
    return "none of today: ask for a newer driver"


def this_node() -> Iterator[tuple[str, str]]:
    """What this node has that the nodes of a job may have as well."""
    with contextlib.suppress(OSError):
        path = Path("/proc/driver/nvidia/version")
        driver = re.search(r"\d+\.[\d.]+", path.read_text())[0]
        yield f"for NVIDIA's driver {driver}, which is here: {torch_for(driver)}", str(path)
    for kind, name in (("infiniband", "InfiniBand or RoCE"), ("cxi", "Slingshot")):
        if devices := sorted(each.name for each in Path("/sys/class", kind).glob("*")):
            yield f"a fast network: {name} ({', '.join(devices)})", f"/sys/class/{kind}"
    tools = ("enroot", "apptainer", "singularity", "podman-hpc", "shifter", "uenv", "uv")
    if found := [name for name in tools if shutil.which(name)]:
        yield f"commands for containers and environments: {', '.join(found)}", "PATH"


def unusual(site: Site, partition: dict) -> Iterator[tuple[str, str]]:
    """What is unusual here, and for each thing what to do."""
    config, shapes = site.config, [shape for shape, _, _ in site.shapes(partition)]
    version = config["SLURM_VERSION"]
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < (22, 5):
        yield f"Slurm {version}", "the launchers are tested from 22.05 on"
    others = sorted({name for shape in shapes for name in shape.others})
    if others and not shapes[0].gpus:
        how = f"if that is a GPU, --gres={others[0]}:N instead of --gpus-per-node, also in env.sh"
        yield f"the GRES {', '.join(others)}, and no gpu", how
    if len(shapes) > 1:
        kinds = "; ".join(f"{s.named_gpus()}, {s.cpus} CPUs, {s.memory} MB" for s in shapes)
        how = "the lines above are for the first; --constraint or --gpus-per-node=TYPE:N chooses"
        yield f"different nodes in one partition ({kinds})", how
    # Slurm 26.05 has a field of its own for it, Exclusive.
    exclusive = partition.get("OverSubscribe") == "EXCLUSIVE"
    exclusive = exclusive or "NODE" in partition.get("Exclusive", "")
    if exclusive or config["SelectType"] == "select/linear":
        yield "a job gets whole nodes", "use all GPUs of a node"
    if config["MpiDefault"] not in ("none", ""):
        yield f"MpiDefault={config['MpiDefault']}", "if srun complains of PMI: srun --mpi=none"
    if config["TaskProlog"]:
        yield f"TaskProlog={config['TaskProlog']}", "`srun env` shows what it sets"
    if config["JobSubmitPlugins"]:
        yield f"JobSubmitPlugins={config['JobSubmitPlugins']}", "it may change or refuse options"
    topology = config["TopologyPlugin"]
    if topology not in PLAIN_TOPOLOGY:
        how = "--switches=1 asks for near nodes"
        if topology == "topology/block":
            how = "--segment=N keeps each N of the job's nodes in one block"
        yield f"TopologyPlugin={topology}", how
    if (export := os.environ.get("SBATCH_EXPORT", "ALL")) != "ALL":
        how = "a variable that you set does not reach the job: sbatch --export=ALL, or site.sh"
        yield f"SBATCH_EXPORT={export}", how
    # A line is a date, a node, and why launch_slurm_with_spare.sh has left it out.
    # Others may write there as well.
    path = Path("bad_nodes.txt")
    readable = path.is_file() and os.access(path, os.R_OK)
    listed = path.read_text("utf-8", "replace") if readable else ""
    lines = re.findall(r"^\S+ ([\w.-]+) (.+)$", listed, re.M)
    if bad := {node: why for node, why in lines if why.isprintable()}:
        what = "; ".join(f"{node}: {why}" for node, why in sorted(bad.items()))
        how = f"--exclude={','.join(sorted(bad))}, or delete their lines"
        yield f"bad_nodes.txt ({what})", how
    names = [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_"))]
    if names := sorted({*names} - {"SLURM_CONF"}):
        yield f"in this shell: {', '.join(names)}", "sbatch and srun take them for options"
    address = site.nodes[0].get("NodeAddr", site.nodes[0]["NodeName"])
    try:
        socket.getaddrinfo(address, None)
    except OSError:
        yield f"the name {address} is unknown here", "aux/check_ranks.py shows if it is in a job"


def file_systems() -> Iterator[str]:
    """On which file systems the folders are that jobs use."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    places = {"this folder": Path.cwd(), "your home": Path.home()}
    if "SCRATCH" in os.environ:
        places["$SCRATCH"] = Path(os.environ["SCRATCH"])
    for name, path in places.items():
        above = [str(path.resolve()), *map(str, path.resolve().parents)]
        kind = max((len(mount), kind) for mount, kind in mounts if mount in above)[1]
        judged = "which nodes can share" if kind in SHARED else "so other nodes may not see it"
        yield f"{name} is on {kind}, {judged}"


def print_partitions(site: Site):
    """A row for each kind of node in each partition, those with GPUs first."""
    rows = []
    for partition in site.partitions:
        name = partition["PartitionName"]
        if partition.get("Default") == "YES":
            name += "*"
        if why := site.refusal(partition):
            rows.append((1, [name, f"not for you: {why}"]))
            continue
        for shape, nodes, up in site.shapes(partition):
            cpus, memory = shape.cpus, shape.memory
            share = f"{cpus / shape.gpus:g} CPU, {memory // shape.gpus} MB" if shape.gpus else "-"
            count = str(nodes) if up == nodes else f"{nodes} ({up} up)"
            cells = [count, shape.named_gpus(), str(cpus), str(memory), share]
            limit = partition["MaxTime"]
            rows.append((-1 if shape.gpus else 0, [name, *cells, limit]))
    head = ["partition", "nodes", "GPUs", "CPUs", "MB", "for each GPU", "MaxTime"]
    rows = [head, *(cells for _, cells in sorted(rows, key=lambda row: row[0]))]
    widths = [max(len(row[i]) for row in rows if len(row) > 2) for i in range(len(head))]
    for row in rows:
        cells = [*row, *[""] * (len(head) - len(row))]
        print("  ".join(map(str.ljust, cells, widths)).rstrip())


def main():
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=text, allow_abbrev=False)
    help = "look at this partition (default: the default one, or the first that has GPUs)"
    parser.add_argument("--partition", help=help)
    help = "put the lines for whole nodes into this launcher, show the diff, and make site.sh"
    parser.add_argument("--write", type=Path, metavar="LAUNCHER", help=help)
    args = parser.parse_args()
    if not shutil.which("scontrol"):
        sys.exit("check_site.py: there is no scontrol here: run it on a login node of a cluster")
    if args.write and not args.write.is_file():
        sys.exit(f"check_site.py: there is no file {args.write}")
    site = Site()
    partition = site.choose(args.partition)
    name = partition["PartitionName"]
    if args.write:
        print(write(args.write, site, partition) or f"{args.write} has these lines")
        print(write_site(args.write, known_site(site.config["ClusterName"])))
        return

    print(f"Slurm {site.config['SLURM_VERSION']}, cluster {site.config['ClusterName']}")
    if known := known_site(site.config["ClusterName"]):
        print(f"A known cluster: cp sites/{known.name} site.sh, and look at it")
    print()
    print_partitions(site)
    shares = [(True, "All of a node")]
    if site.shape(partition).gpus:
        shares.append((False, "One GPU"))
    for whole, what in shares:
        print(f"\n{what} in the partition {name}:")
        for by_rank, launcher in ((False, "torchrun, spawn"), (True, "launch_slurm_to_torch.sh")):
            options, refused = tried(site, partition, whole, by_rank)
            words = [f"--{option}={value}" for option, value in options.items()]
            if refused:
                words.append(f" <- {refused}")
            print(f"  {launcher:24}  {' '.join(words)}")
    print("\nGood to know (scontrol show config, scontrol show partition, /proc/mounts):")
    for sentence, source in (*facts(site, partition), *this_node()):
        print(f"- {sentence} [{source}]")
    for sentence in file_systems():
        print(f"- {sentence}")
    found = list(unusual(site, partition))
    print("\nUnusual:" if found else "\nNothing is unusual.")
    for what, remedy in found:
        print(f"- {what}: {remedy}")
    print("\nNot known from here: the network between the nodes, and whether all of them see this")
    print("folder. A job finds out: sbatch launch_slurm_with_torchrun.sh aux/check_ranks.py")


if __name__ == "__main__":
    main()
