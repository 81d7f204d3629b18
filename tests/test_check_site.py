"""aux/check_site.py: on the real cluster, and on what Slurm's commands say on clusters of other
shapes."""

import re
import shutil
import sys
from pathlib import Path

import pytest

import check_site
from copies import VARIABLES
from slurm import LAUNCHERS, REPOSITORY, cells, run, stand_ins

CHECK = "aux/check_site.py"
CONFIG = """Configuration data as of 2026-11-27T00:00:00
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = campus
DefMemPerCPU            = 2000
JobRequeue              = 0
JobSubmitPlugins        = lua
KillWait                = 30 sec
MpiDefault              = pmix
PreemptMode             = REQUEUE
PreemptType             = preempt/qos
ProctrackType           = proctrack/cgroup
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = 24.11.5
TaskProlog              = (null)
TopologyPlugin          = topology/tree
"""
GPU = "PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL Default=NO GraceTime=0 "
GPU += "MaxTime=2-00:00:00 DefaultTime=01:00:00 OverSubscribe=NO PreemptMode=REQUEUE State=UP "
GPU += "MaxCPUsPerNode=UNLIMITED DefMemPerNode=UNLIMITED"
DEBUG = GPU.replace("=gpu ", "=debug ").replace("2-00:00:00", "00:20:00")
CPU = GPU.replace("=gpu ", "=cpu ").replace("Default=NO", "Default=YES")
PRIVATE = GPU.replace("=gpu ", "=private ").replace("AllowGroups=ALL", "AllowGroups=them")
CLOSED = GPU.replace("=gpu ", "=closed ").replace("State=UP", "State=INACTIVE")
NODES = """NodeName=a[1] CPUEfctv=62 CPUTot=64 Gres=gpu:a100:4(S:0-1),nic:2 NodeAddr=a1 \
RealMemory=512000 MemSpecLimit=12000 State=IDLE Partitions=gpu,private
NodeName=a2 CPUEfctv=62 CPUTot=64 Gres=gpu:a100:4(S:0-1),nic:2 NodeAddr=a2 RealMemory=512000 \
MemSpecLimit=12000 State=DOWN*+DRAIN Partitions=gpu,private
NodeName=h1 CPUTot=96 Gres=gpu:h100:8(S:0-1) NodeAddr=h1 RealMemory=1000000 State=MIXED \
Partitions=gpu,debug
NodeName=c1 CPUTot=32 Gres=(null) NodeAddr=c1 RealMemory=128000 State=ALLOCATED Partitions=cpu"""


def site_of(*partitions: str, config: str = CONFIG, nodes: str = NODES, accounts: str = "mine"):
    """A cluster by what its commands say."""
    said = {"config": config, "partition": "\n".join(partitions), "node": nodes, "assoc": accounts}
    return check_site.Site(lambda *command: said[next(word for word in command if word in said)])


def test_a_campus_cluster(capsys, monkeypatch):
    monkeypatch.setenv("SBATCH_ACCOUNT", "x")
    site = site_of(CPU, GPU, DEBUG, PRIVATE, CLOSED)
    check_site.print_partitions(site)
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in row if cell] for row in rows]
    assert rows[1:] == [
        ["gpu", "1", "8 h100", "96", "1000000", "12 CPU, 125000 MB", "2-00:00:00"],
        ["gpu", "2 (1 up)", "4 a100", "62", "500000", "15.5 CPU, 125000 MB", "2-00:00:00"],
        ["debug", "1", "8 h100", "96", "1000000", "12 CPU, 125000 MB", "00:20:00"],
        ["cpu*", "1", "none", "32", "128000", "-", "2-00:00:00"],
        ["private", "not for you: AllowGroups is them"],
        ["closed", "not for you: its state is INACTIVE"],
    ]
    # The default partition has no GPUs, so the lines are for the first that has.
    gpu = site.choose(None)
    whole = {"partition": "gpu", "ntasks-per-node": "1", "gpus-per-node": "8"}
    whole |= {"cpus-per-task": "96", "mem": "0"}
    assert site.options(gpu, True, False) == whole
    by_rank = {"ntasks-per-node": "8", "cpus-per-task": "12"}
    assert site.options(gpu, True, True) == whole | by_rank
    one = {"gpus-per-node": "1", "cpus-per-task": "12", "mem": "125000M"}
    assert site.options(gpu, False, True) == site.options(gpu, False, False) == whole | one
    assert site.options(site.choose("debug"), True, False)["time"] == "00:20:00"
    cpu = {"gpus-per-node": "0", "ntasks-per-node": "16", "cpus-per-task": "2", "mem": "0"}
    assert site.options(site.choose("cpu"), True, False) == cpu
    strange = {what.split(" (")[0] for what, _ in check_site.unusual(site, gpu)}
    assert strange == {"different nodes in one partition", "MpiDefault=pmix",
                       "JobSubmitPlugins=lua", "TopologyPlugin=topology/tree",
                       "in this shell: SBATCH_ACCOUNT", "the name a1 is unknown here"}  # fmt: skip


PRIORITY = "preempt/qos>preempt/partition_prio"
CANCEL = f"{PRIORITY} PreemptMode=REQUEUE>PreemptMode=CANCEL"
OTHER = "gpu:a100:4>tesla:4 gpu:h100:8>tesla:4"
NO_MEMORY = "with all CPUs of a node that is 8000 MB for each GPU, and a rank can need 16000"
# What is different from the cluster above, and what a line then says, or with ! does not say
CHANGES = [
    ("", "MaxTime: a job may run for 2-00:00:00"),
    ("", "DefaultTime: without --time it gets 01:00:00"),
    ("", "cred_expire in AuthInfo: a requeued job waits for 120 s"),
    ("", "only requeued with"),
    ("", "your accounts: mine"),
    ("", "DefMemPerCPU: without --mem a job gets 2000 MB for each CPU"),
    ("DefMemPerNode=UNLIMITED>DefMemPerNode=64000", "a job gets 64000 MB for each node"),
    ("DefMemPerNode=UNLIMITED>DefMemPerNode=64000", NO_MEMORY),
    # The partition's own replaces the cluster's, whichever of the two it is.
    ("DefMemPerNode=UNLIMITED>DefMemPerNode=64000", "!MB for each CPU"),
    ("", "PreemptType: whether and how a job is preempted depends on its QOS: sacctmgr show qos"),
    (PRIORITY, "PreemptMode=REQUEUE: a preempted job has 30 sec for its checkpoint"),
    (f"{PRIORITY} GraceTime=0>GraceTime=60", "a preempted job has 60 s for its checkpoint"),
    # Whatever the header's --requeue says
    (CANCEL, "a preempted job has 30 sec for its checkpoint"),
    (CANCEL, "a preempted job is cancelled, and --requeue does not bring it back"),
    (PRIORITY, "!does not bring it back"),
    (f"{PRIORITY} PreemptMode=REQUEUE>PreemptMode=SUSPEND,GANG", "stops where it is, and goes on"),
    (f"{PRIORITY} PreemptMode=REQUEUE>PreemptMode=OFF", "a job is not preempted"),
    ("preempt/qos>preempt/none", "a job is not preempted"),
    # A block plugin ignores --switches.
    ("topology/tree>topology/block", "TopologyPlugin=topology/block: --segment=N"),
    ("", "TopologyPlugin=topology/tree: --switches=1"),
    ("topology/tree>topology/default", "!TopologyPlugin"),
    ("24.11.5>21.08.8-2", "Slurm 21.08.8-2: the launchers are tested from 22.05 on"),
    ("", "!tested from 22.05"),
    ("OverSubscribe=NO>OverSubscribe=EXCLUSIVE", "a job gets whole nodes: use all GPUs"),
    # Slurm 26.05's name for it
    ("OverSubscribe=NO>Exclusive=NODE", "a job gets whole nodes: use all GPUs"),
    ("", "!a job gets whole nodes"),
    ("CR_CORE_MEMORY>CR_CORE", "Slurm does not count memory, so --mem reserves none"),
    ("slurmdbd>none", "sacct shows no ended jobs"),
    (OTHER, "the GRES tesla, and no gpu: if that is a GPU, --gres=tesla:N"),
]


@pytest.mark.parametrize(("changes", "says"), CHANGES)
def test_a_setting_and_what_it_means(changes, says):
    texts = [CONFIG, GPU, NODES]
    for old, new in (change.split(">") for change in changes.split()):
        assert any(old in text for text in texts)
        texts = [text.replace(old, new) for text in texts]
    site = site_of(texts[1], config=texts[0], nodes=texts[2])
    gpu = site.choose(None)
    lines = [f"{source}: {sentence}" for sentence, source in check_site.facts(site, gpu)]
    lines += [f"{what}: {remedy}" for what, remedy in check_site.unusual(site, gpu)]
    assert any(says.strip("!") in line for line in lines) != says.startswith("!"), lines
    assert ("mem" in site.options(gpu, True, False)) == ("CR_CORE_MEMORY" in texts[0])


DRIVERS = {"580.95.05": "pip install torch", "610.1": "pip install torch", "570.148.08": "cu126; "}
DRIVERS |= {"535.183.01": "whl/cu126", "470.82": "none of today: ask for a newer driver"}
DRIVERS |= {"525.60.13": "whl/cu126", "524.1": "none of today: ask for a newer driver"}


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_torch_for_a_driver(driver):
    said = check_site.torch_for(driver)
    assert DRIVERS[driver] in said and ("torch==2.11.0" in said) == driver.startswith("57")
    assert (said == "pip install torch") == (int(driver[:3]) >= 580)


# --- known sites ---

# By ClusterName
KNOWN = "lumi frontier perlmutter clariden:alps isambard-ai:isambard jupiter juwels leonardo "
KNOWN += "mn5:marenostrum5 snellius jean-zay Clariden:alps campus: soperator:"


def test_the_file_of_a_known_site():
    for name, file in (pair.split(":") if ":" in pair else (pair, pair) for pair in KNOWN.split()):
        known = check_site.known_site(name)
        assert (known.stem if known else "") == file


# Of a node, as Slurm says it on Nebius' cluster, LUMI, Jupiter and JUWELS: CPUs, threads of a core
# and GRES
SHAPES = [
    (128, 2, "gpu:nvidia_h100_80gb_hbm3:8(S:0-1)"),
    (112, 2, "gpu:mi250:8"),
    (288, 1, "gpu:gh200:4"),
    (96, 2, "gpu:4"),
]


@pytest.mark.parametrize(("cpus", "threads", "gres"), SHAPES)
def test_a_node_of_a_known_site(cpus, threads, gres, tmp_path, monkeypatch):
    """Its lines, also where sbatch refuses a CPU for each thread, because it counts cores."""
    gpus = int(re.search(r":(\d)(\(|$)", gres)[1])
    node = f"NodeName=n1 Arch=x86_64 CPUEfctv={cpus} CPUTot={cpus} Gres={gres} NodeAddr=10.5.1.3 "
    node += f"RealMemory=460000 State=IDLE+DYNAMIC_NORM ThreadsPerCore={threads} "
    node += f"Partitions=gpu,background CfgTRES=cpu={cpus},mem=460000M,gres/gpu=8"
    site = site_of(GPU, nodes=node)
    partition = site.choose(None)
    for limit in (cpus, cpus // threads):
        takes = f'[[ "$*" =~ cpus-per-task=([0-9]+) ]] && ((BASH_REMATCH[1] <= {limit}))'
        monkeypatch.setenv("PATH", f"{stand_ins(tmp_path, {'sbatch': takes})}:/usr/bin:/bin")
        options, refused = check_site.tried(site, partition, True, False)
        assert refused == "" and options["gpus-per-node"] == str(gpus)
        assert options["cpus-per-task"] == str(limit)
        # The share of one GPU, of a node that sbatch would take
        one, refused = check_site.tried(site, partition, False, False)
        assert refused == "" and one["cpus-per-task"] == str(limit // gpus)
    said = [sentence for sentence, _ in check_site.facts(site, partition) if "threads" in sentence]
    assert len(said) == (threads > 1)
    assert all(each.endswith(f"{cpus} CPUs are {cpus // threads} cores") for each in said)


FILES = sorted((REPOSITORY / "sites").glob("*.sh"))
# What the files decide: with an ordinary job's variables, or with these, this one has this value.
DECIDED = [
    ("jupiter", {}, "MASTER_ADDR", "n1-interconnect-1.jupiter.internal"),
    ("jupiter", {"known": "false"}, "MASTER_ADDR", "n1"),
    ("jupiter", {"SLURM_JOB_NUM_NODES": 1}, "MASTER_ADDR", "127.0.0.1"),
    ("juwels", {}, "MASTER_ADDR", "n1i"),
    ("juwels", {"known": "false"}, "MASTER_ADDR", "n1"),
    ("snellius", {}, "NCCL_SOCKET_IFNAME", "eno2np0"),
    ("snellius", {}, "GLOO_SOCKET_IFNAME", "eno2np0"),
    ("snellius", {"SLURM_JOB_PARTITION": "gpu_a100"}, "NCCL_SOCKET_IFNAME", "eno1np0"),
    ("alps", {}, "MASTER_ADDR", "n1"),
    # Without these, NCCL uses TCP, and on GH200 sums can be wrong.
    ("alps", {}, "NCCL_PROTO", "^LL128"),
    ("alps", {}, "NCCL_NET", "AWS Libfabric"),
    ("isambard", {}, "NCCL_NET", "AWS Libfabric"),
]


def sourced(path: Path, folder: Path, known: str = "true", **job: object):
    """The environment after env.sh has sourced this file, with a `module` of ours."""
    (folder / "profile").write_text('module() { echo "module $*"; }\n')
    script = path.read_text().replace("/etc/profile", str(folder / "profile"))
    (folder / "site.sh").write_text(script)
    stand_ins(folder, {"getent": known})
    job = {"SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_PARTITION": "gpu_h100"} | job
    job |= {"SLURM_JOB_ID": 7, "USER": "me", "MASTER_ADDR": "n1", "PATH": f"{folder}:/usr/bin:/bin"}
    shell = "set -euo pipefail; set +eu; source ./site.sh; set -eu; env"
    return run("bash", "-c", shell, cwd=folder, env={name: str(job[name]) for name in job})


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_a_file_for_a_known_site(path, tmp_path):
    """It says where its lines are from and when, and env.sh can source it."""
    text = re.sub(r"\n# ", " ", path.read_text())
    assert re.search(r"looked at on \d{4}-\d\d-\d\d", text) and "could try it" in text
    assert re.search(r"\b[\w-]+(\.[\w-]+)+/\w", text), "no address of a document"
    done = sourced(path, tmp_path)
    assert done.returncode == 0 and done.stderr == "", done
    assert done.stdout.count("module ") == len(re.findall(r"^module", path.read_text(), re.M))


@pytest.mark.parametrize(("name", "job", "variable", "value"), DECIDED)
def test_what_a_site_s_file_decides(name, job, variable, value, tmp_path):
    done = sourced(REPOSITORY / f"sites/{name}.sh", tmp_path, **job)
    assert f"\n{variable}={value}\n" in f"\n{done.stdout}"


def test_site_sh_of_a_known_site(tmp_path, monkeypatch):
    """The file's lines take the place of those to edit."""
    monkeypatch.setenv("LOADEDMODULES", "")
    said = check_site.write_site(tmp_path / "launch.sh", check_site.known_site("Clariden"))
    assert said.endswith("environment of this shell, and sites/alps.sh: look at it")
    written = (tmp_path / "site.sh").read_text()
    assert written.endswith((REPOSITORY / "sites/alps.sh").read_text()) and "ib0" not in written


def first_shape(old: str, new: str):
    """Of a cluster with one node: its shape, how many there are, and how many are up."""
    site = site_of(GPU, nodes=NODES.splitlines()[0].replace(old, new))
    return site.shapes(site.choose(None))[0]


UNUSABLE = "DOWN DRAIN DRAINED DRAINING ERROR FAIL FAILING FUTURE INVALID_REG IDLE+MAINT IDLE* "
UNUSABLE += "IDLE+NOT_RESPONDING MIXED*+DRAIN UNKNOWN"
USABLE = "IDLE MIXED ALLOCATED+COMPLETING IDLE+CLOUD+POWERED_DOWN"


def test_states_and_types():
    assert [state for state in UNUSABLE.split() if first_shape("IDLE", state)[2]] == []
    assert [state for state in USABLE.split() if not first_shape("IDLE", state)[2]] == []
    two = first_shape("gpu:a100:4", "gpu:a100:2,gpu:v100:2")[0]
    assert two.named_gpus() == "2 a100, 2 v100"


def test_the_lines_are_for_nodes_that_are_up():
    """Although those with more GPUs are down."""
    site = site_of(GPU, nodes=NODES.replace("State=MIXED", "State=DOWN*"))
    found = [(shape.gpus, n, up) for shape, n, up in site.shapes(site.choose(None))]
    assert found == [(4, 2, 1), (8, 1, 0)]
    assert site.options(site.choose(None), True, False)["gpus-per-node"] == "4"


def test_the_lines_are_for_the_default_partition():
    """If it has GPUs, whichever comes first."""
    default = DEBUG.replace("Default=NO", "Default=YES")
    for partitions in ((GPU, default), (default, GPU)):
        site = site_of(*partitions)
        assert site.choose(None)["PartitionName"] == "debug"
        assert "partition" not in site.options(site.choose(None), True, False)


def test_bad_nodes_that_others_have_written(tmp_path, monkeypatch):
    """What is no node is in no command, and nothing reaches the terminal."""
    monkeypatch.chdir(tmp_path)
    bad = "day n1 caf\xe9\nday $(id) bad\nday n2 \x1b[2J\nhello\n"
    (tmp_path / "bad_nodes.txt").write_text(bad, "latin-1")
    site = site_of(GPU)
    found = dict(check_site.unusual(site, site.choose(None)))
    assert found["bad_nodes.txt (n1: caf\ufffd)"] == "--exclude=n1, or delete their lines"


def test_file_systems(tmp_path, monkeypatch):
    """The innermost mount counts."""
    monkeypatch.setenv("HOME", str(tmp_path / "home/me"))
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.chdir(tmp_path)
    mounts = f"disk / ext4 rw\nserver:/a {tmp_path} nfs4 rw\nnone {tmp_path}/home tmpfs rw\n"
    monkeypatch.setattr(check_site.Path, "read_text", lambda path: mounts)
    own = "so other nodes may not see it"
    assert [*check_site.file_systems()] == [
        "this folder is on nfs4, which nodes can share",
        f"your home is on tmpfs, {own}",
        f"$SCRATCH is on ext4, {own}",
    ]


NETWORK = "nfs nfs4 lustre gpfs beegfs ceph fuse.ceph panfs wekafs 9p"
LOCAL = "ext4 xfs zfs tmpfs overlay"


@pytest.mark.parametrize("kind", f"{NETWORK} {LOCAL}".split())
def test_kinds_of_file_systems(kind, monkeypatch):
    monkeypatch.setattr(check_site.Path, "read_text", lambda path: f"a / {kind} rw\n")
    judged = "so other nodes may not see it"
    if kind in NETWORK.split():
        judged = "which nodes can share"
    assert next(check_site.file_systems()) == f"this folder is on {kind}, {judged}"


@pytest.mark.parametrize("way", cells([("srun",), ("torchrun",)], ("srun",)))
def test_its_lines_in_a_launcher_that_runs(cluster, tmp_path, way):
    """The diff, the comments where they were, and a job that has what was asked for."""
    said = cluster.exec(sys.executable, CHECK)
    assert said.returncode == 0 and "refused" not in said.stdout, said.stdout + said.stderr
    row = r"^train\* +24 +8 GPUs +64 +\d+ +8 CPU, \d+ MB +UNLIMITED$"
    assert re.search(row, said.stdout, re.M), said.stdout
    for name in ("env.sh", "torchrun.sh", "aux", "distributed", "tests"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    launcher = tmp_path / LAUNCHERS[way]
    shutil.copy(REPOSITORY / LAUNCHERS[way], launcher)
    before = launcher.read_text()
    wrote = cluster.exec(sys.executable, CHECK, "--write", launcher)
    assert wrote.returncode == 0, wrote.stderr
    changed = [line for line in wrote.stdout.splitlines() if line[0] == "+"][1:]
    per_task = ["+#SBATCH --ntasks-per-node=8", "+#SBATCH --cpus-per-task=8"]
    for line in [*(per_task if way == "srun" else []), "+#SBATCH --gpus-per-node=8"]:
        assert any(found.startswith(line) for found in changed) or line[1:] in before, changed
    header = re.findall(r"^#+SBATCH.*", launcher.read_text(), re.M)
    column = {line.index("# EDIT") for line in header if "# EDIT" in line}
    assert len(column) == 1, launcher.read_text()
    again = cluster.exec(sys.executable, CHECK, "--write", launcher)
    there = f"{tmp_path}/site.sh is there, and stays as it is"
    assert again.stdout == f"{launcher} has these lines\n{there}\n"
    job = cluster.sbatch(f"--output={tmp_path}/log", f"--chdir={tmp_path}", launcher, VARIABLES)
    assert job.state == "COMPLETED", job.log
    assert "16 ranks on node-" in job.log and "GPUs 8 of 8, CPUs 64" in job.log, job.log


LOADED = [
    ({}, []),
    ({"LOADEDMODULES": "gcc/12:cuda/12.8"}, ["source PROFILE", "module load gcc/12 cuda/12.8"]),
    ({"LOADEDMODULES": ":", "VIRTUAL_ENV": "HERE/.venv"}, []),
    ({"VIRTUAL_ENV": "HERE/a b"}, ["source 'HERE/a b'/bin/activate"]),
    (
        {"CONDA_PREFIX": "HERE/envs/a", "CONDA_EXE": "HERE/bin/conda"},
        ["source HERE/etc/profile.d/conda.sh", "conda activate HERE/envs/a"],
    ),
    ({"CONDA_PREFIX": "HERE/envs/a"}, ["export PATH=HERE/envs/a/bin:$PATH"]),
    # It was activated in conda's shell.
    ({"CONDA_PREFIX": "HERE", "VIRTUAL_ENV": "HERE/v"}, ["source HERE/v/bin/activate"]),
]


@pytest.mark.parametrize(("variables", "expected"), LOADED)
def test_site_sh_has_what_this_shell_has(variables, expected, tmp_path, monkeypatch):
    """And is not written over."""
    for name in ("LOADEDMODULES", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_EXE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("HERE", str(tmp_path)))
    said = check_site.write_site(tmp_path / "launch.sh")
    site, what = tmp_path / "site.sh", "the modules and the environment of this shell"
    assert said == f"{site} is new, with {what}: look at it"
    lines = site.read_text().splitlines()
    live = [line.partition("  #")[0] for line in lines if line and line[0] != "#"]
    places = {"PROFILE": "/etc/profile", "HERE": str(tmp_path)}
    assert live == [re.sub("PROFILE|HERE", lambda word: places[word[0]], line) for line in expected]

    site.write_text("mine\n")
    assert check_site.write_site(tmp_path / "launch.sh") == f"{site} is there, and stays as it is"
    assert site.read_text() == "mine\n"


def test_every_line_of_site_sh_can_be_used(tmp_path, monkeypatch):
    """Also the commented ones, and though a profile reads a variable that is not set."""
    (tmp_path / "profile").write_text('module() { echo "$@"; }\nfalse\necho $UNSET >/dev/null\n')
    for modules in ("", "gcc/12"):
        monkeypatch.setenv("LOADEDMODULES", modules)
        text = check_site.site_lines(tmp_path / "launch.sh")
        text = text.replace("/etc/profile", str(tmp_path / "profile"))
        text = re.sub(r"^# (?=source|module|MASTER|export)", "", text, flags=re.M)
        (tmp_path / "site.sh").write_text(text)
        script = "set -euo pipefail; MASTER_ADDR=node-1; set +eu; source ./site.sh; set -eu; "
        script += "echo $MASTER_ADDR $NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $NCCL_DEBUG"
        done = run("bash", "-c", script, cwd=tmp_path)
        loaded = f"load {modules or 'python/3.12'}\n"
        assert done.stdout == f"{loaded}node-1i ib0 ib0 INFO\n" and done.returncode == 0, done


def test_the_header_s_other_lines_stay(tmp_path, monkeypatch):
    """Those to uncomment, such as --signal, and --mem where Slurm counts no memory."""
    launcher = tmp_path / "launch.sh"
    header = "#!/bin/bash\n#SBATCH --nodes=2             # EDIT\n#SBATCH --partition=old\n"
    header += "#SBATCH --gpus-per-node=2     # EDIT\n#SBATCH --cpus-per-task=16    # EDIT\n"
    header += "##SBATCH --mem=0              # EDIT\n##SBATCH --signal=TERM@300   # EDIT\n"
    launcher.write_text(f"{header}srun true\n")
    site = site_of(GPU.replace("Default=NO", "Default=YES"))
    check_site.write(launcher, site, site.choose(None))
    expected = header.replace("#SBATCH --partition=old\n", "")
    expected = expected.replace("node=2     #", "node=8     #").replace("=16 ", "=96 ")
    expected = expected.replace("##SBATCH --mem=0 ", "#SBATCH --mem=0  ")
    first, rest = launcher.read_text().split("#SBATCH --ntasks-per-node=1\n")
    assert first + rest == f"{expected}srun true\n"
    config = CONFIG.replace("CR_CORE_MEMORY", "CR_CORE")
    launcher.write_text(header)
    monkeypatch.setattr(check_site, "sbatch_says", lambda options: "refused: no account")
    said = check_site.write(launcher, site_of(GPU, config=config), site.choose(None))
    assert "\n##SBATCH --mem=0              # EDIT\n" in launcher.read_text()
    assert said.endswith("\nsbatch: refused: no account")


@pytest.mark.parametrize(
    ("limit", "whole", "by_rank", "one"),
    [("48", "48", "6", "6"), ("200", "96", "12", "12"), ("4", "4", "1", "1")],
)
def test_a_partition_that_limits_cpus(limit, whole, by_rank, one):
    """MaxCPUsPerNode, of nodes with 96 CPUs and 8 GPUs."""
    site = site_of(GPU.replace("MaxCPUsPerNode=UNLIMITED", f"MaxCPUsPerNode={limit}"))
    shapes = ((True, False), (True, True), (False, False))
    found = [site.options(site.choose(None), *shape)["cpus-per-task"] for shape in shapes]
    assert found == [whole, by_rank, one]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--partition", "none"], "no partition none, but train"),
        (["--write", "missing.sh"], "there is no file missing.sh"),
        (["--write", "README.md"], "README.md has no line '#SBATCH --gpus-per-node='"),
        (["--write", "{}/latin-1.sh"], "latin-1.sh: 'utf-8' codec can't decode byte 0xfc"),
    ],
)
def test_one_sentence(cluster, tmp_path, arguments, sentence):
    (tmp_path / "latin-1.sh").write_text("#SBATCH --gpus-per-node=2  # für alle\n", "latin-1")
    arguments = [argument.format(tmp_path) for argument in arguments]
    done = cluster.exec(sys.executable, CHECK, *arguments)
    assert done.returncode == 1 and sentence in done.stderr and done.stdout == "", done.stderr
    assert done.stderr.startswith("check_site.py: ") and done.stderr.count("\n") == 1


def test_a_slurm_that_hangs(commands_hang):
    assert check_site.ask("scontrol", "show", "partition") == ""
    said = check_site.sbatch_says({"mem": "0"})
    assert said == "not tried: Command 'sbatch' timed out after 60 seconds"


def test_elsewhere(tmp_path):
    """Without Slurm, and with a Slurm that does not answer."""
    done = run(sys.executable, CHECK, env={"PATH": "/nowhere"})
    assert done.returncode == 1 and "there is no scontrol here" in done.stderr
    stand_ins(tmp_path, {"scontrol": "exit 1"})
    done = run(sys.executable, CHECK, env={"PATH": f"{tmp_path}:/bin"})
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "Slurm does not answer here" in done.stderr
