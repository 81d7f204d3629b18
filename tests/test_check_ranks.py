"""aux/check_ranks.py before a long job, on the real cluster: a fault provoked on one node is one
sentence from it."""

import getpass
import json
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import check_ranks
import job_processes
from slurm import (
    LAUNCHERS,
    REPOSITORY,
    at_once,
    cells,
    environment,
    kill,
    one_rank_a_node,
    ranks,
    run,
    stand_ins,
    wait_for,
)

# In a sitecustomize.py of the job's ranks
ON_ONE_NODE = "import os\nif os.environ.get('SLURM_NODEID') == '{}':\n    "
LOOPBACK = """import socket
    lookup = socket.gethostbyname
    socket.gethostbyname = lambda name: '127.0.1.1' if name == {} else lookup(name)"""
SLOW = """import time, torch
    mm = torch.mm
    torch.mm = lambda *args, **kw: (time.sleep(0.01), mm(*args, **kw))[1]"""
WRONG = """import torch.distributed as dist
    reduce = dist.all_reduce
    dist.all_reduce = lambda x, **kw: (reduce(x, **kw), x[7].add_(1))[0]"""
LATE = "import time\n    now = time.time\n    time.time = lambda: now() - 90"
FEW_FILES = "import resource\n    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))"
ECC_PATH = "os.environ['PATH'] = f\"{os.path.dirname(__file__)}:{os.environ['PATH']}\""
# On which of the job's two nodes each fault is, the sentence, and what makes it: those lines, or a
# file system of this size over the folder of checkpoints.
FAULTS = {
    "full": (0, "has 1 MiB free, and 1024 MiB", "size=1m"),
    "not shared": (1, "does not see what rank 0 writes in .*all nodes share", "size=2g"),
    "slow": (1, r"\d TFLOP/s, and the median is 0\.\d", SLOW),
    "own name": (0, r"127\.0\.1\.1", LOOPBACK.format("socket.gethostname()")),
    "first name": (1, r"127\.0\.1\.1", LOOPBACK.format("os.environ['MASTER_ADDR']")),
    "open files": (1, "may have 300 files open", FEW_FILES),
    "clock": (1, r"clock is (8\d|9\d) s behind rank 0", LATE),
    "ECC errors": (1, "GPU 1 has 3 uncorrected ECC errors", ECC_PATH),
    "wrong sum": (1, "gets a wrong sum in the all-reduce", WRONG),
    "a site's test": (1, "false: status 1", "import sys\n    sys.argv += ['--also', 'false']"),
}
QUICK, OTHERS = [*FAULTS][:3], [*FAULTS][3:]


@pytest.mark.parametrize("faults", cells([(QUICK,), (OTHERS,)], (QUICK,)), ids=["quick", "others"])
def test_a_fault_is_one_sentence_of_the_node_that_has_it(faults, cluster, tmp_path):
    """A job of two ranks for each, all at once, on two nodes of its own."""

    def scenario(number: int, fault: str):
        nodes = [f"node-{3 + 2 * number}", f"node-{4 + 2 * number}"]
        index, sentence, how = FAULTS[fault]
        here = tmp_path / str(number)
        folder = here / "checkpoints"
        folder.mkdir(parents=True)
        # Only the node with this fault looks for it there.
        stand_ins(here, {"nvidia-smi": f"echo '{nvidia_smi()}'"})
        if how.startswith("size="):
            mount = ["mount", "-t", "tmpfs", "-o", how, "tmpfs", folder]
            assert cluster.exec(*mount, node=nodes[index]).returncode == 0
        else:
            (here / "sitecustomize.py").write_text(ON_ONE_NODE.format(index) + how)
        size = [f"--nodelist={','.join(nodes)}", *one_rank_a_node("srun"), "--cpus-per-task=2"]
        command = [LAUNCHERS["srun"], "aux/check_ranks.py", "--checkpoint-dir", folder]
        job = cluster.sbatch(*size, f"--output={here}/log", *command, env={"PYTHONPATH": here})
        cluster.exec("umount", "--lazy", folder, node=nodes[index])
        assert job.state == "FAILED", job.log
        [said] = re.findall(r"^\[Rank \d+ on node-\d+\] .*", job.log, re.M)
        assert said.startswith(f"[Rank {index} on {nodes[index]}] "), job.log
        assert re.search(sentence, said), said
        verdict = f"VERDICT: {nodes[index]} is bad, submit again with --exclude={nodes[index]}"
        assert "the sum is right" not in job.log or fault != "wrong sum", job.log
        # A rank that cannot meet the others knows of no verdict.
        assert verdict in job.log or fault.endswith("name"), job.log
        assert "all well" not in job.log and "Traceback" not in job.log, job.log

    at_once(scenario, [*enumerate(faults)])


@pytest.mark.parametrize("count", [3, 4, 7, 10])
def test_a_ring_of_nodes(count):
    """In each round two partners agree, and all have both neighbours."""
    partners = [check_ranks.neighbours(node, count) for node in range(count)]
    for node, its in enumerate(partners):
        assert all(partners[other][round] == node for round, other in enumerate(its))
        assert {*its, node} == {(node - 1) % count, node, (node + 1) % count}


def test_a_slow_link_is_named(cluster, tmp_path):
    """It slows every all-reduce down, but only this node's with both neighbours."""
    link = ["tc", "qdisc"], ["dev", "eth0", "root"]
    slow = ["tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms"]
    made = cluster.exec(*link[0], "add", *link[1], *slow, node="node-12")
    assert made.returncode == 0, made.stderr
    try:
        size = ["--nodes=3", "--nodelist=node-[11-13]", *one_rank_a_node("srun")]
        options = [*size, f"--output={tmp_path}/log", LAUNCHERS["srun"]]
        job = cluster.sbatch(*options, "aux/check_ranks.py")
    finally:
        cluster.exec(*link[0], "del", *link[1], node="node-12")
    assert job.state == "FAILED" and "the sum is right" in job.log, job.log
    said = r"^\[Rank 1 on node-12\] 0\.0\d+ GB/s in the all-reduce with each neighbouring node, and"
    assert re.search(said, job.log, re.M) and job.log.count("[Rank ") == 1, job.log
    assert "VERDICT: node-12 is bad, submit again with --exclude=node-12" in job.log


# --- the verdict ---


def alike(device: str, count: int = 4, **last: object) -> list[dict]:
    """So many ranks, two on each node, that are alike, except for the last one."""
    ranks = []
    for i in range(count):
        its = {"host": f"n{i // 2}", "gpu": f"GPU-{i}", "device": device, "torch": "2.13"}
        its |= {"TFLOP/s": 10.0, "GB/s": 10.0, "clock": 1000.0, "bad": [], "warnings": []}
        ranks.append(its)
    ranks[-1] |= last
    check_ranks.compare(ranks)
    return ranks


SHARES = [("cuda:0", 7.9), ("xpu:1", 7.9), ("cpu", 4.9)]
NAMES = ("TFLOP/s", "GB/s")


@pytest.mark.parametrize(
    ("device", "last", "says"),
    [
        *[(x, {y: z}, f"{z:.3f} {y}, and the median is 10.000") for x, z in SHARES for y in NAMES],
        *[(device, {name: low + 0.2}, "") for device, low in SHARES for name in NAMES],
        ("cpu", {"clock": 910.0}, "its clock is 90 s behind rank 0's: chronyd or ntpd"),
        ("cpu", {"clock": 1006.0}, "its clock is 6 s ahead of rank 0's: chronyd or ntpd"),
        ("cpu", {"clock": 996.0}, ""),
        ("cpu", {"torch": "2.12"}, "different versions of torch: 2.12, rank 0 2.13"),
        ("cpu", {"gpu": ""}, ""),
        ("cuda:0", {"gpu": "GPU-2"}, "shares a GPU with rank 2: ask for one GPU for each rank"),
        ("cuda:0", {"gpu": "GPU-0"}, ""),  # on another node
    ],
)
def test_a_rank_that_differs(device, last, says):
    assert [its["bad"] for its in alike(device, **last)] == [[], [], [], [says] if says else []]


@pytest.mark.parametrize(
    ("device", "name", "share", "pairs", "said"),
    [
        ("cuda:0", "inside", 0.79, [], "bad"),
        ("cuda:0", "inside", 0.81, [], ""),
        ("cuda:0", "between", 0.81, [], ""),
        ("cpu", "inside", 0.09, [], "bad"),
        ("cpu", "between", 0.11, [], ""),
        # On a fat tree a node without a neighbour on its switch has a part of the others' speed.
        ("cuda:0", "between", 0.5, [4.8, 5.0], "warnings"),
        ("cuda:0", "between", 0.34, [3.4, 3.3], "warnings"),
        # No network is built with less, and a switch does not tell two neighbours apart.
        ("cuda:0", "between", 0.1, [1.0, 1.0], "bad"),
        ("cuda:0", "between", 0.7, [7.0, 3.0], "bad"),
        ("cpu", "between", 0.09, [0.9, 0.9], "bad"),
    ],
)
def test_a_node_that_differs(device, name, share, pairs, said):
    """One of three. One of its ranks speaks for it."""
    its_ranks = alike(device, 6)
    for i, its in enumerate(its_ranks):
        its |= {name: 10 * share, "pairs": pairs} if i > 3 else {name: 10.0}
    check_ranks.compare(its_ranks)
    for kind in ("bad", "warnings"):
        assert [len(its[kind]) for its in its_ranks] == [0, 0, 0, 0, int(kind == said), 0]


@pytest.mark.parametrize(
    ("bad", "status", "verdict"),
    [
        ([], 0, "all well, 4 ranks started by hand"),
        ([3], 1, "n1 is bad, submit again with --exclude=n1"),
        ([2, 3], 1, "n1 is bad, submit again with --exclude=n1"),
        ([0, 3], 1, "bad on every node, so the cause may be the job: see above"),
    ],
)
def test_the_verdict(bad, status, verdict, capsys):
    its_ranks = alike("cpu", right=True, warnings=["odd"])
    its_ranks[0]["all-reduce"] = "1 GB/s"
    for its in its_ranks:
        its |= {"right": its["host"] == "n0" or not bad}
    for i in bad:
        its_ranks[i]["bad"].append("is slow")
    assert check_ranks.report(its_ranks, False) == status
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"VERDICT: {verdict}"
    assert "[Rank 3 on n1] warning: odd" in said
    assert f"1 GB/s, the sum is {'wrong' if bad else 'right'}" in said
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    assert not bad or f"[Rank {bad[0]} on n{bad[0] // 2}] is slow{more}" in said
    assert [i for i in range(4) if said[2 + i].endswith("<- bad")] == bad


# --- what no machine here has ---


NONE = f"but torch {torch.__version__} sees none: look at nvidia-smi or amd-smi, and the build of "
NONE += "torch, or pass --device cpu"


@pytest.mark.parametrize(
    ("count", "local_rank", "granted", "device", "fault"),
    [
        (8, 3, 8, "xpu:3", ""),
        (1, 3, 4, "xpu:0", ""),
        (
            2,
            3,
            4,
            "cpu",
            "local rank 3 has no GPU: torch sees 2; ask for as many GPUs per node as ranks",
        ),
        (0, 0, 4, "cpu", f"Slurm granted 4 GPUs on this node, {NONE}"),
        (0, 0, 0, "cpu", ""),
    ],
)
def test_the_device_of_a_rank(count, local_rank, granted, device, fault, monkeypatch):
    """By torch.accelerator, so Intel's XPU stands for every kind."""
    chosen = []
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(check_ranks, "local_rank", local_rank)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", str(granted))
    found, bad = check_ranks.choose_device("auto")
    assert str(found) == device and chosen == ([found.index] if found.type == "xpu" else [])
    assert bad == ([fault] if fault else [])
    assert check_ranks.choose_device("cpu") == (torch.device("cpu"), [])
    if count == granted == 0:
        asked = check_ranks.choose_device("cuda")
        assert asked == (torch.device("cpu"), [f"--device cuda was given, {NONE}"])
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    assert check_ranks.choose_device("auto") == (torch.device("cpu"), [])


FEW, FILES = "may use 1 CPUs, but the job asked for ", "may have 1024 files open, 1536 are needed: "
CLEAR = "256 MiB are needed: clear it, or --shm-size=1g"
ROOT = "which only root can raise (LimitNOFILE of slurmd)"
NEVER = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({}, None),
        ({"cpus": 1}, f"{FEW}8: look at srun's --cpus-per-task"),
        # A node of the local cluster claims more CPUs than there are.
        ({"asked": 16, "cpus": 2, "machine": 2}, None),
        ({"asked": 16, "cpus": 1, "machine": 2}, f"{FEW}16: look at srun's --cpus-per-task"),
        ({"shm": 255}, f"/dev/shm has 255 MiB free, {CLEAR}"),
        # Under a launcher the limit of open files is the hard one.
        ({"files": (1536, 1536)}, None),
        ({"files": (1024, 65536)}, f"{FILES}ulimit -n 1536 before srun, as env.sh does"),
        ({"files": (1024, 1500)}, f"{FILES}the hard limit is 1500, {ROOT}"),
        ({"files": (1024, NEVER)}, f"{FILES}ulimit -n 1536 before srun, as env.sh does"),
    ],
)
@pytest.mark.parametrize("way", ["srun", "torchrun"])
def test_limits(way, node, says, monkeypatch):
    """Of 512 ranks."""
    its = {"asked": 8, "cpus": 8, "machine": 64, "shm": 256, "files": (NEVER, NEVER)} | node
    name = "SLURM_CPUS_PER_TASK" if way == "srun" else "CPUS_PER_NODE"
    monkeypatch.setattr(check_ranks, "launcher", way)
    monkeypatch.setattr(check_ranks, "world_size", 512)
    monkeypatch.setattr(check_ranks, "env", {name: str(its["asked"])})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(its["cpus"])})
    monkeypatch.setattr(os, "cpu_count", lambda: its["machine"])
    usage = SimpleNamespace(free=its["shm"] << 20)
    monkeypatch.setattr(check_ranks.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: its["files"])
    assert list(check_ranks.limits()) == ([says] if says else [])


def test_the_folder_of_checkpoints(tmp_path, monkeypatch):
    """It need not be there yet. Rank 1 looks for what rank 0 has written."""

    def faults(rank: int, free: int = 1024) -> list[str]:
        usage = SimpleNamespace(f_bavail=free << 8, f_frsize=1 << 12)
        monkeypatch.setattr(os, "statvfs", lambda path: usage)
        monkeypatch.setattr(check_ranks, "rank", rank)
        return check_ranks.folder_faults(tmp_path / "a/b", store)

    store = dist.HashStore()
    full = f"{tmp_path} has 1023 MiB free, and 1024 MiB are needed: delete old checkpoints"
    assert faults(0) == faults(1) == [] and faults(1, 1023) == [full]
    [mark] = tmp_path.iterdir()
    mark.unlink()
    hidden = f"does not see what rank 0 writes in {tmp_path}: use a folder that all nodes share"
    assert faults(1) == [hidden]
    assert faults(0, 1023) == [full] and faults(1) == []


def test_the_nodes_of_missing_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{stand_ins(tmp_path, {'scontrol': 'echo a; echo b'})}:/bin")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "[a-b]")
    monkeypatch.setattr(check_ranks, "slurm", os.environ)
    monkeypatch.setattr(check_ranks, "ranks_per_node", 2)
    assert check_ranks.hosts_of_ranks() == ["a", "a", "b", "b"]


def nvidia_smi(
    reason="event_reason",
    mig="N/A",
    hot="Not Active",
    pending="No",
    failure="No",
    slow="hw_thermal_slowdown",
):
    """What it says of two GPUs, of which the second has three uncorrected errors."""
    return f"""<nvidia_smi_log><driver_version>580.95.05</driver_version>
<gpu id="00000000:07:00.0"><uuid>GPU-07</uuid><mig_mode><current_mig>{mig}</current_mig></mig_mode>
  <ecc_errors><volatile>
    <sram_correctable>9</sram_correctable><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
    <sram_uncorrectable_secded>N/A</sram_uncorrectable_secded>
  </volatile><aggregate><dram_uncorrectable>5</dram_uncorrectable></aggregate></ecc_errors>
  <remapped_rows>
    <remapped_row_corr>0</remapped_row_corr><remapped_row_pending>{pending}</remapped_row_pending>
    <remapped_row_failure>{failure}</remapped_row_failure>
  </remapped_rows></gpu>
<gpu id="00000000:0B:00.0"><uuid>GPU-0B</uuid><mig_mode><current_mig>N/A</current_mig></mig_mode>
  <clocks_{reason}s><clocks_{reason}_sw_power_cap>Active</clocks_{reason}_sw_power_cap>
    <clocks_{reason}_{slow}>{hot}</clocks_{reason}_{slow}>
  </clocks_{reason}s><ecc_errors><volatile>
    <sram_uncorrectable>1</sram_uncorrectable><dram_uncorrectable>2</dram_uncorrectable>
  </volatile></ecc_errors><remapped_rows>N/A</remapped_rows></gpu>
</nvidia_smi_log>"""


AMD = '{"gpu": 0, "ecc": {"total_correctable_count": 9, "total_uncorrectable_count": %s}}'
ECC, HOT = "GPU 1 has 3 uncorrected ECC errors", "GPU 1 is throttled: hw_thermal_slowdown"
SLOW_NOW, BRAKE = (f"GPU 1 is throttled: hw_{why}slowdown" for why in ("", "power_brake_"))
WARM = "GPU 1 is throttled: sw_thermal_slowdown"
PENDING = "GPU 0 has a failed row of memory: it needs a reset"
FAILURE = "GPU 0 has no spare row left for one that failed: replace the GPU"
PART = "GPU 0 is in MIG mode: a rank gets a part of it"


@pytest.mark.parametrize(
    ("command", "text", "bad", "notes"),
    [
        ("nvidia-smi", nvidia_smi(), [ECC], []),
        # Drivers before 535 and after have two names for a reason.
        ("nvidia-smi", nvidia_smi(hot="Active", mig="Enabled"), [ECC, HOT], [PART]),
        ("nvidia-smi", nvidia_smi("throttle_reason", hot="Active"), [ECC, HOT], []),
        ("nvidia-smi", nvidia_smi(hot="Active", slow="hw_slowdown"), [ECC, SLOW_NOW], []),
        ("nvidia-smi", nvidia_smi(hot="Active", slow="hw_power_brake_slowdown"), [ECC, BRAKE], []),
        ("nvidia-smi", nvidia_smi(hot="Active", slow="sw_thermal_slowdown"), [ECC, WARM], []),
        ("nvidia-smi", nvidia_smi(hot="Active", slow="sw_power_cap"), [ECC], []),
        ("nvidia-smi", nvidia_smi(pending="Yes"), [PENDING, ECC], []),
        ("nvidia-smi", nvidia_smi(pending="Yes", failure="Yes"), [FAILURE, ECC], []),
        # The forms of ROCm 7 and of ROCm 6
        ("amd-smi", f'{{"gpu_data": [{AMD % 3}]}}', ["GPU 0 has 3 uncorrected ECC errors"], []),
        ("amd-smi", f"[{AMD % 3}]", ["GPU 0 has 3 uncorrected ECC errors"], []),
        ("amd-smi", f"[{AMD % 0}]", [], []),
        ("amd-smi", "[" + AMD % '"N/A"' + "]", [], []),
    ],
)
def test_what_the_vendors_commands_say(command, text, bad, notes, tmp_path, monkeypatch):
    """AMD's can need rights, and tell of GPUs that are another job's."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    stand_ins(tmp_path, {command: f"cat <<'END'\n{text}\nEND"})
    assert check_ranks.ask_about_gpus() == (bad, notes)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    ours = command == "nvidia-smi"
    assert check_ranks.ask_about_gpus() == ((bad, notes) if ours else ([], bad))
    for program in ("exit 15", "echo no rights"):
        stand_ins(tmp_path, {command: program})
        found = check_ranks.ask_about_gpus()
        assert found[not ours][0].startswith(f"{command} fails here: ")
        assert found[ours] == []
    (tmp_path / command).unlink()
    assert check_ranks.ask_about_gpus() == ([], [])


def test_an_nvidia_smi_that_hangs(commands_hang, monkeypatch):
    """As with some broken GPUs."""
    monkeypatch.setattr(check_ranks.shutil, "which", lambda name: name)
    said = "nvidia-smi fails here: Command 'nvidia-smi' timed out after 60 seconds"
    assert check_ranks.ask_about_gpus() == ([said], [])


def test_other_jobs_gpus_are_not_ours(tmp_path, monkeypatch):
    """On a shared node nvidia-smi may list them."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    stand_ins(tmp_path, {"nvidia-smi": f"echo '{nvidia_smi()}'"})
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    module = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(uuid="07"))
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    assert check_ranks.ask_about_gpus()[0] == []
    # Of two ranks on this node, one sees one.
    monkeypatch.setattr(check_ranks, "ranks_per_node", 2)
    assert check_ranks.ask_about_gpus()[0] == [ECC]


def test_memory_that_is_in_use(monkeypatch):
    """Where the CPU shares the GPU's memory, it may be the page cache."""
    for name, gib, kind in (("H100", 3, "bad"), ("H100", 1, ""), ("GH200 480GB", 3, "warnings")):
        gpu = SimpleNamespace(get_device_name=lambda device, its=f"NVIDIA {name}": its)
        gpu.mem_get_info = lambda gib=gib: ((80 - gib) << 30, 80 << 30)
        monkeypatch.setattr(torch, "get_device_module", lambda device, its=gpu: its)
        mine = {"bad": [], "warnings": []}
        check_ranks.memory_in_use(torch.device("cuda:0"), mine)
        assert {kind for kind in ("bad", "warnings") if mine[kind]} == {kind} - {""}
        assert mine["GPU memory in use"] == f"{gib}.0 GiB"


# A rank that uses a GPU, and has forked a loader worker
HOLDS = """import os, sys, time
gpu = open(sys.argv[1])
if os.fork():
    print("forked", flush=True)
time.sleep(600)
"""


def test_what_an_earlier_job_has_left_on_the_gpu(tmp_path, monkeypatch):
    """A server that nvidia-smi names, and a loader worker that it does not, because only its rank,
    which was killed, had used the GPU. The command that the sentence ends with ends both."""
    device = tmp_path / "nvidia3"
    device.touch()
    monkeypatch.setattr(check_ranks, "DEVICES", f"{tmp_path}/nvidia")
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    left = environment(SLURM_JOB_ID=77, MARK=f"left-{os.getpid()}")
    command = [sys.executable, "-c", HOLDS, device]
    rank = subprocess.Popen(command, env=left, stdout=subprocess.PIPE)
    # Of this job
    ours = subprocess.Popen(["sleep", "600"], stdin=device.open(), env=environment(SLURM_JOB_ID=78))
    rank.stdout.readline()
    rank.kill()
    rank.wait()
    gpu = SimpleNamespace(get_device_name=lambda device: "NVIDIA H100")
    gpu.mem_get_info = lambda: (60 << 30, 80 << 30)
    gpu.get_device_properties = lambda device: SimpleNamespace(uuid="0B")
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    process = "<process_info><gpu_instance_id>N/A</gpu_instance_id><compute_instance_id>N/A"
    process += "</compute_instance_id><pid>{}</pid><type>C</type><process_name></process_name>"
    process += "<used_memory>20220 MiB</used_memory></process_info>"
    shown = nvidia_smi().replace(
        "<uuid>", f"<processes>{process.format(os.getppid())}</processes><uuid>", 1
    )
    own = "".join(map(process.format, (server.pid, os.getpid())))
    with_minor = f"<minor_number>3</minor_number><processes>{own}</processes><uuid>GPU-0B"
    shown = shown.replace("<uuid>GPU-0B", with_minor)
    path = stand_ins(tmp_path / "bin", {"nvidia-smi": f"cat <<'END'\n{shown}\nEND"})
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    mine = {"bad": [], "warnings": []}
    try:
        check_ranks.memory_in_use(torch.device("cuda:0"), mine)
        [said] = mine["bad"]
        [worker] = {process for process, _ in job_processes.having(f"MARK=left-{os.getpid()}")}
        both = sorted((server.pid, worker))
        who = getpass.getuser()
        about = r"process {} \(\S+python\S* -c import .*\) of {}, job {}, 0\.0 hours old"
        assert re.search(about.format(server.pid, who, r"\S+"), said), said
        assert re.search(about.format(worker, who, 77), said), said
        assert said.endswith(f". If no job of yours needs them: kill -9 {both[0]} {both[1]}"), said
        assert str(os.getppid()) not in re.findall(r"\d+", said), "another GPU's"
        ends = said.rpartition(": ")[2]
        assert run("bash", "-c", ends).returncode == 0
        assert server.wait(10) == -signal.SIGKILL
        wait_for(lambda: not [*job_processes.having(f"MARK=left-{os.getpid()}")], 10)
        assert ours.poll() is None
    finally:
        kill(f"MARK=left-{os.getpid()}")
        for each in (server, ours):
            each.kill()
            each.wait()
    mine["bad"].clear()
    check_ranks.memory_in_use(torch.device("cuda:0"), mine)
    ended = f"other programs use its GPU's memory: process {server.pid}"
    assert mine["bad"] == [ended], "nvidia-smi may name a process that is not visible here"
    stand_ins(path, {"nvidia-smi": "exit 9"})
    mine["bad"].clear()
    check_ranks.memory_in_use(torch.device("cuda:0"), mine)
    assert mine["bad"] == ["other programs use its GPU's memory: nvidia-smi or amd-smi names them"]


def test_whose_process_it_is_by_its_control_group(tmp_path, monkeypatch):
    """Of another user's, which shows no variables. Its command may have what a terminal obeys."""
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"python\0\x1b]52;c;bHM=\x07\xff")
    (folder / "stat").write_text("7 (a) b) S 1" + " 0" * 17 + " 0 9")
    group = f"0::/system.slice/slurmstepd.scope/job_9/docker-{'ab' * 32}.scope\n"
    (folder / "cgroup").write_text(group)
    monkeypatch.setattr(
        check_ranks, "Path", lambda path: Path(path.replace("/proc/7", f"{folder}"))
    )
    said = check_ranks.about(7)
    assert re.fullmatch(
        r"process 7 \(python \?\]52;c;bHM=\?.\) of \S+, job 9, \d+\.\d hours old, in a container "
        r"\(docker kill abababababab\)",
        said,
    ), said


def test_a_test_of_the_site_s_own():
    def says(*command: str) -> list[str]:
        return check_ranks.own_test([*command], timeout=0.5)

    assert says("true") == [] and says("false") == ["false: status 1"]
    assert says("sh", "-c", "echo two; echo GPU 3 is tired; exit 2") == ["sh: GPU 3 is tired"]
    assert says("absent")[0].startswith("absent: ") and says("sleep", "9")[0].startswith("sleep: ")


def test_nobody_measures_during_a_test_of_the_site_s_own(tmp_path):
    """It may use the GPUs of all ranks of its node."""
    code, measures = (REPOSITORY / "aux/check_ranks.py").read_text(), "    measure(device, mine)\n"
    assert code.count(measures) == 1
    marks = f"    open('measures', 'w').close()\n{measures}"
    (tmp_path / "check_ranks.py").write_text(code.replace(measures, marks))
    (tmp_path / "own.sh").write_text("sleep 1; test ! -e measures\n")
    done = ranks(2, "check_ranks.py", "--also", "bash own.sh", cwd=tmp_path)
    assert "VERDICT: all well, 2 ranks" in done.stdout, done.stdout + done.stderr


def test_a_gpu_has_a_name_of_its_own(monkeypatch):
    """Parts of an NVIDIA GPU share its address, and both halves of an MI250X may share a UUID."""
    found = set()
    for kind, number in (("a", 1), ("b", 1), ("a", 2), (None, None)):
        properties = SimpleNamespace(uuid=kind, pci_bus_id=number) if kind else SimpleNamespace()
        module = SimpleNamespace(get_device_properties=lambda device, its=properties: its)
        monkeypatch.setattr(torch, "get_device_module", lambda device, its=module: its)
        found.add(check_ranks.name_of(torch.device("xpu:0")))
    assert found == {"a 1", "b 1", "a 2", ""}


START = "node-1:812:900 [0] NCCL INFO "
CHANNEL = f"{START}Channel 00/0 : 1[0] -> 0[0] [send] via NET"
OVER_TCP = f"{START}Using network Socket\n{CHANNEL}/Socket/0\n"
OVER_IB = f"{START}Using network IB\n{CHANNEL}/IB/0/GDRDMA\n"
# A job of one node lists its devices, and sends nothing over a network.
INSIDE = (
    f"{START}NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>\n{START}Using network IB\n"
)
INSIDE += f"{START}Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"
TCP = "NCCL uses TCP, although this node has"
CHOOSES = "without NCCL_NET, NCCL_IB_DISABLE and NCCL_IB_HCA it chooses by itself; a container "
CHOOSES += "needs /dev/infiniband"
COPIES = "NCCL copies its data to the CPU's memory first (no GPUDirect RDMA): is nvidia_peermem "
COPIES += "loaded?"
SLINGSHOT = "load the site's module for Slingshot, which has the plugin aws-ofi-{}; "
SLINGSHOT += 'NCCL_NET="AWS Libfabric" makes NCCL fail without it'
OVER_CXI = f"{START}Using network AWS Libfabric\n{CHANNEL}/AWS Libfabric/0\n"


@pytest.mark.parametrize(
    ("log", "devices", "hip", "network", "says"),
    [
        (OVER_TCP, "", None, "Socket, GPUDirect RDMA: no", []),
        (OVER_TCP, "mlx5_0", None, "Socket", [f"{TCP} mlx5_0: {CHOOSES}"]),
        (OVER_IB, "mlx5_0", None, "IB, GPUDirect RDMA: yes", []),
        (OVER_IB.replace("/GDRDMA", ""), "mlx5_0", None, "IB", [COPIES]),
        (INSIDE, "mlx5_0", None, "IB", []),
        # Slingshot, where NCCL only uses the network with a plugin
        (OVER_TCP, "cxi0", None, "Socket", [f"{TCP} cxi0: {SLINGSHOT.format('nccl')}"]),
        (OVER_TCP, "cxi0", "7.1", "Socket", [f"{TCP} cxi0: {SLINGSHOT.format('rccl')}"]),
        (OVER_CXI, "cxi0", None, "AWS Libfabric, GPUDirect RDMA: no", []),
    ],
)
def test_what_nccl_s_log_says(log, devices, hip, network, says, tmp_path, monkeypatch, capsys):
    """Lines of NCCL 2.28.9, by the formats in its library."""
    for name in ("INFINIBAND", "CXI"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(check_ranks, name, tmp_path / name)
    if devices:
        (tmp_path / ("CXI" if devices == "cxi0" else "INFINIBAND") / devices).mkdir()
    monkeypatch.setattr(torch.version, "hip", hip)
    mine = {"warnings": []}
    warning = f"{START.replace('INFO', 'WARN')}no route\n"
    check_ranks.read_log_of_nccl(log + warning, mine)
    assert capsys.readouterr().err == warning
    assert mine["network"].startswith(network) and mine["warnings"] == says


@pytest.mark.parametrize(("debug", "reads"), [("WARN", True), (None, True), ("INFO", False)])
def test_nccl_s_log_is_asked_for(debug, reads, tmp_path, monkeypatch):
    """Although env.sh has set NCCL_DEBUG, and not if the user wants to see the log."""
    asked = {} if debug is None else {"NCCL_DEBUG": debug}
    monkeypatch.setattr(check_ranks, "env", asked)
    monkeypatch.setattr(check_ranks.tempfile, "tempdir", str(tmp_path))
    path = check_ranks.log_of_nccl()
    assert (path is not None) == reads and asked["NCCL_DEBUG"] == "INFO"
    assert asked.get("NCCL_DEBUG_FILE") == (str(path) if path else None)


def test_speeds_on_the_bus(monkeypatch):
    """As nccl-tests count them: of calls that take a second, over four ranks."""
    clock = iter(range(99))
    monkeypatch.setattr(check_ranks.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(check_ranks, "world_size", 4)
    monkeypatch.setattr(dist, "all_reduce", lambda numbers, group: None)
    size = 8 << 20
    speed = check_ranks.bus_speed(torch.device("cpu"), [*range(4)], size, {"right": True}, 9)
    assert speed == pytest.approx(2 * 3 / 4 * size / 1e9)


@pytest.mark.parametrize("wrong", [0, 1])
def test_every_number_of_an_all_reduce_counts(wrong, monkeypatch):
    """Of ranks 1 and 3, which add 2 and 4."""

    def add(numbers: torch.Tensor, group: object):
        numbers.add_(4)[-1] += wrong

    monkeypatch.setattr(check_ranks, "rank", 1)
    monkeypatch.setattr(check_ranks, "world_size", 2)
    monkeypatch.setattr(dist, "all_reduce", add)
    mine = {"right": True}
    check_ranks.bus_speed(torch.device("cpu"), [1, 3], 1 << 10, mine, 9)
    assert mine["right"] == (not wrong)


@pytest.mark.parametrize(
    ("backend", "hosts", "tried", "end"),
    [
        ("gloo", "a", None, "GB/s on the bus"),
        # Two ranks share a node's network.
        ("xccl", "aabbcc", 20, "on the bus, about 100 Gbit/s of the network for each GPU"),
    ],
)
def test_speeds_of_nodes(backend, hosts, tried, end, monkeypatch):
    """Each all-reduce has 25 GB/s. If the ranks have another backend, gloo is tried as well."""
    store, mine = dist.HashStore(), {"bad": []}
    store.set("hosts", json.dumps([*hosts]))
    monkeypatch.setattr(check_ranks, "HOST", "a")
    monkeypatch.setattr(check_ranks, "bus_speed", lambda *arguments: 25.0)
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments: None)
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda device: backend)
    monkeypatch.setattr(check_ranks, "try_gloo", lambda its, timeout: its.update(tried=timeout))
    check_ranks.all_reduce(torch.device("cuda:0"), store, mine, 20)
    assert mine["bad"] == [] and mine["right"] and mine["bus"] == 25 and mine.get("tried") == tried
    assert [mine.get(name) for name in ("inside", "between", "pairs")] == (
        [25, 25, [25, 25]] if len(hosts) > 1 else [None] * 3
    )
    assert mine["all-reduce"].endswith(end)


@pytest.mark.parametrize("backend", ["gloo", "nccl", "xccl"])
def test_an_all_reduce_that_fails_names_the_backend_s_variable(backend, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("no route")

    monkeypatch.setattr(check_ranks, "env", {})  # where it sets what NCCL shall log
    store, mine = dist.HashStore(), {"bad": []}
    store.set("hosts", json.dumps(["a"]))
    monkeypatch.setattr(check_ranks, "bus_speed", fails)
    monkeypatch.setattr(dist, "init_process_group", lambda *arguments: None)
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda device: backend)
    check_ranks.all_reduce(torch.device("cpu"), store, mine, 20)
    names = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME", "xccl": "a variable"}
    said = "the all-reduce over all ranks fails (no route): set "
    assert mine["bad"] == [f"{said}{names[backend]} in site.sh to the right network"]


def test_gloo_is_tried_beside_nccl(monkeypatch):
    """By one rank, over an interface that is there, over one that is not, and with a wrong sum."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fails = r"gloo's all-reduce, which checkpoints need, fails \(.*none7.*\): set "
    fails += "GLOO_SOCKET_IFNAME in site.sh "
    try:
        for interface, count, says in (("lo", 1, ""), ("none7", 1, fails), ("lo", 2, "")):
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
            monkeypatch.setattr(check_ranks, "world_size", count)
            mine = {"right": True, "bad": []}
            check_ranks.try_gloo(mine, timeout=20)
            assert mine["right"] == (count == 1) and len(mine["bad"]) == bool(says)
            assert all(re.match(says, said) for said in mine["bad"]), mine
    finally:
        dist.destroy_process_group()


def test_rank_0_says_what_does_not_end(monkeypatch):
    said = []
    monkeypatch.setattr(check_ranks, "stop", said.append)
    for rank in (0, 1):
        monkeypatch.setattr(check_ranks, "rank", rank)
        with check_ranks.watched("it", "look there", -4.8):
            time.sleep(0.5)
        with check_ranks.watched("what ends in time", "look there", -4.8):
            pass
    time.sleep(0.5)
    assert said == ["it has not ended within -4.8 s: look for a firewall, or look there"]


HIDDEN = "sees 1 of this node's 4 GPUs: --gpus-per-task or --gpu-bind hides its peers' from NCCL; "
HIDDEN += "ask with --gpus-per-node instead"
LOCKED = "may lock 64 KiB of memory, and InfiniBand needs more: ulimit -l unlimited in site.sh, or "
LOCKED += "LimitMEMLOCK=infinity for slurmd"


@pytest.mark.parametrize(
    ("sees", "hip", "locked", "says"),
    [
        (4, None, NEVER, ""),
        (1, None, NEVER, HIDDEN),
        # The site's own advice on Frontier
        (1, "7.1", NEVER, ""),
        (4, None, 65536, LOCKED),
    ],
)
def test_warnings(sees, hip, locked, says, tmp_path, monkeypatch):
    """Of GPUs that Slurm hides from their peers, and of memory that InfiniBand cannot lock."""
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(check_ranks, "INFINIBAND", tmp_path)
    monkeypatch.setattr(check_ranks, "ranks_per_node", 4)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: sees)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (locked, locked))
    assert list(check_ranks.warnings(torch.device("cuda", 0))) == ([says] if says else [])
    (tmp_path / "mlx5_0").rmdir()
    assert len(list(check_ranks.warnings(torch.device("cpu")))) == 0


def test_a_batch_shell_is_one_rank(tmp_path):
    """It has the variables of a task."""
    batch = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": -5, "SLURM_NTASKS": 4, "SLURM_PROCID": 0}
    done = ranks(0, "aux/check_ranks.py", "--checkpoint-dir", tmp_path, **batch)
    assert "VERDICT: all well, 1 ranks started by hand" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0 and done.stderr == ""


# --- a bare srun ---

TASK = {"SLURM_STEP_NUM_TASKS": 8, "SLURM_STEP_NUM_NODES": 4}
TASK |= {"SLURM_PROCID": 1, "SLURM_NODEID": 3, "SLURM_LOCALID": 1}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, (7, 1, 8)),
        ({"SLURM_STEP_NUM_NODES": 1, "SLURM_NODEID": 0, "SLURM_STEP_NUM_TASKS": 2}, (1, 1, 2)),
        ({"RANK": 5, "LOCAL_RANK": 0, "WORLD_SIZE": 16}, (5, 0, 16)),
    ],
)
def test_the_ranks_of_a_bare_srun(changes, place, monkeypatch):
    """By node, although task 1 is on the last one."""
    for name, value in (TASK | changes).items():
        monkeypatch.setenv(name, str(value))
    its = runpy.run_path(check_ranks.__file__)
    assert (its["rank"], its["local_rank"], its["world_size"]) == place


# --- the ranks meet ---


@pytest.fixture
def ends(monkeypatch):
    """Whatever ends a rank is an exception: of its sentence, or of the status."""

    def end(why: object):
        raise SystemExit(why)

    monkeypatch.setattr(check_ranks, "stop", end)
    monkeypatch.setattr(os, "_exit", end)


ALONE = "2 independent training runs instead of one: srun started 2 x torchrun, and this one knows "
ALONE += "of 1 node (world size 4); torchrun needs --nnodes=2 and the same --master-addr "
ALONE += "everywhere, never --standalone (torchrun.sh does that)"


@pytest.mark.parametrize(
    ("way", "groups", "layout", "task", "local_rank", "why"),
    [
        ("torchrun", 2, "1(x2)", 0, 0, None),
        ("torchrun", 1, "1(x2)", 0, 0, ALONE),
        ("torchrun", 1, "1(x2)", 1, 0, 0),
        ("torchrun", 1, "1(x2)", 0, 1, 0),
        ("srun", 1, "2(x2)", 0, 0, None),
        ("srun", 1, "3,1", 0, 0, "4 tasks on 2 nodes: use --ntasks-per-node"),
        ("srun", 1, "3,1", 1, 1, 0),
    ],
)
def test_several_runs_that_do_not_know_of_each_other(
    way, groups, layout, task, local_rank, why, ends, monkeypatch
):
    """One of their ranks says it, and the others say nothing."""
    variables = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": layout}
    variables |= {"SLURM_PROCID": str(task), "GROUP_WORLD_SIZE": str(groups)}
    given = {"env": variables, "slurm": variables, "launcher": way, "local_rank": local_rank}
    for name, value in (given | {"world_size": 4, "nodes": 2}).items():
        monkeypatch.setattr(check_ranks, name, value)
    try:
        check_ranks.check_world_size()
        assert why is None
    except SystemExit as ended:
        assert ended.code == why


@pytest.mark.parametrize(
    ("variables", "hosts", "why"),
    [
        ({}, [], "this is one of 2 ranks, but MASTER_ADDR is not set: use a launcher"),
        ({}, ["own"], "own is 127.0.1.1 here, where no other node reaches it: check /etc/hosts"),
        ({"MASTER_ADDR": "own"}, [], "own is 127.0.1.1 here, where no other node reaches it: "),
        ({"MASTER_ADDR": "localhost"}, [], "own is 127.0.1.1 here"),
    ],
)
def test_an_address_that_no_other_node_reaches(variables, hosts, why, ends, monkeypatch):
    env = {"MASTER_PORT": "7", "SLURM_JOB_ID": "7"} | variables
    given = {"env": env, "world_size": 2, "nodes": 2, "hosts_of_ranks": lambda: hosts}
    for name, value in given.items():
        monkeypatch.setattr(check_ranks, name, value)
    monkeypatch.setattr(check_ranks.socket, "gethostname", lambda: "own")
    monkeypatch.setattr(check_ranks.socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(SystemExit, match=re.escape(why)):
        check_ranks.open_store(1)
    if hosts:
        assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("own", "61007")


def test_a_rank_0_that_is_not_there(ends, monkeypatch):
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in {"env": env, "world_size": 2, "rank": 1}.items():
        monkeypatch.setattr(check_ranks, name, value)
    said = r"cannot reach rank 0 at 127\.0\.0\.1:9 \(.*\): look for its error, or for a firewall"
    with pytest.raises(SystemExit, match=said):
        check_ranks.open_store(-29)


def test_what_is_said_of_ranks_that_have_not_come(ends, monkeypatch, capsys):
    """Rank 1 may know why. Of eleven that are missing eight are named."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=9))
    monkeypatch.setattr(check_ranks, "world_size", 13)
    monkeypatch.setattr(check_ranks, "hosts_of_ranks", lambda: ["a", "b", "c"])
    store.set("start/1", json.dumps({"host": "b", "bad": ["has a cold"]}))
    said = r"11 of 13 ranks have not reached the start in 0\.1 s: rank 2 on c, rank 3 on a node "
    said += r"that Slurm does not name, .*, rank 9 on a node that Slurm does not name, \.\.\.$"
    with pytest.raises(SystemExit, match=said):
        check_ranks.gather(store, "start", {"host": "a", "bad": []}, 0.1)
    assert capsys.readouterr().err == "[Rank 1 on b] has a cold\n"
    monkeypatch.setattr(check_ranks, "world_size", 2)
    its = {"host": "a", "bad": []}
    assert check_ranks.gather(store, "start", its, 1)[0] == its
    monkeypatch.setattr(check_ranks, "rank", 1)
    assert check_ranks.gather(store, "start", {}, 1) == [], "rank 0 has said that all are there"


@pytest.mark.parametrize(("tasks", "layout"), [(7, "2(x3),1"), (8, "3,2(x2),1")])
def test_a_bare_srun_of_uneven_nodes(tasks, layout):
    uneven = {"SLURM_STEP_NUM_TASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": layout}
    done = ranks(0, "aux/check_ranks.py", **TASK | uneven | {"SLURM_PROCID": 0})
    said = f"{tasks} tasks on 4 nodes: use --ntasks-per-node"
    assert done.returncode == 1 and said in done.stderr, done.stderr


def test_a_bare_srun_whose_task_0_is_on_the_second_node(cluster, tmp_path):
    """As with a topology plugin of Slurm 26.05. Rank 0 is on the first node nevertheless."""
    said = {}

    def scenario(task: int):
        node = f"node-{2 - task}"
        place = {"SLURM_PROCID": task, "SLURM_NODEID": 1 - task, "SLURM_LOCALID": 0}
        place |= {"SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 2}
        place |= {"SLURM_STEP_NODELIST": "node-[1-2]"}
        place |= {"SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": 0, "SLURMD_NODENAME": node}
        variables = [f"{name}={value}" for name, value in place.items()]
        command = ["aux/check_ranks.py", "--timeout", 30, "--checkpoint-dir", tmp_path]
        said[node] = cluster.exec("env", *variables, sys.executable, *command, node=node)

    at_once(scenario, [(0,), (1,)])
    assert said["node-2"].stdout == "", said["node-2"]
    rows = re.findall(r"^(\d) +0 +(\S+)", said["node-1"].stdout, re.M)
    assert rows == [("0", "node-1"), ("1", "node-2")], said["node-1"]
    assert "VERDICT: all well, 2 ranks started by srun" in said["node-1"].stdout


# --- in the long run ---


@pytest.mark.matrix
@pytest.mark.parametrize("way", LAUNCHERS)
def test_signals_reach_the_ranks(way, cluster, tmp_path):
    """torchrun does not survive it, as --help says."""
    job = cluster.sbatch(
        f"--output={tmp_path}/log", LAUNCHERS[way], "aux/check_ranks.py", "--sigterm"
    )
    assert "\nsignals reach the ranks: yes\n" in job.log, job.log
    assert f"VERDICT: all well, 4 ranks started by {way}" in job.log, job.log
    assert job.state == ("FAILED" if way == "torchrun" else "COMPLETED"), job.log


@pytest.mark.matrix
def test_signals_that_do_not_reach_a_rank(cluster, tmp_path):
    """A shell that stays between Slurm and the rank, and keeps the signal for itself."""
    script = tmp_path / "between.sh"
    script.write_text(
        "#!/bin/bash\nsource ./env.sh\n"
        "srun bash -c 'trap : TERM; "
        "./aux/launch/slurm_rank.sh python aux/check_ranks.py --sigterm; true'\n"
    )
    size = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    job = cluster.sbatch(*size, f"--output={tmp_path}/log", script)
    assert re.search(r"signals reach the ranks: not rank 0 on \S+, rank 1 on ", job.log), job.log
    assert job.state == "COMPLETED", job.log


@pytest.mark.matrix
def test_a_rank_that_does_not_come_is_named(cluster, tmp_path):
    hangs = "import time, torch\n    torch.mm = lambda *args, **kw: time.sleep(999)"
    (tmp_path / "sitecustomize.py").write_text(ON_ONE_NODE.format(1) + hangs)
    options = ["--ntasks-per-node=1", "--gpus-per-node=1", f"--output={tmp_path}/log"]
    command = [LAUNCHERS["srun"], "aux/check_ranks.py", "--timeout", 20]
    job = cluster.sbatch(*options, *command, env={"PYTHONPATH": tmp_path})
    said = r"1 of 2 ranks have not reached the all-reduce in 20 s: rank 1 on node-\d+$"
    assert job.state == "FAILED" and re.search(said, job.log, re.M), job.log
