"""aux/check_ranks.py before a long job, on the real cluster: a fault provoked on one node is one
sentence from it."""

import json
import os
import re
import resource
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import check_ranks
import watch_job
from conftest import (
    LAUNCHERS,
    Cluster,
    Job,
    at_once,
    cells,
    environment,
    one_rank_a_node,
    ranks,
    run,
    stand_ins,
)

# On which of the job's two nodes the fault is, how it is made, and the sentence. FOLDER is where
# checkpoints go, HOSTS a copy of /etc/hosts in which the name of that node (OWN) or of the first
# one (FIRST) is a loopback address.
FAULTS = {
    "full": (
        0,
        "mount -t tmpfs -o size=1m full FOLDER && ! head -c 2M /dev/zero >FOLDER/f",
        "has 0 MiB free, and 1024 MiB",
    ),
    "read-only": (
        0,
        "mount -t tmpfs -o ro locked FOLDER",
        "cannot write in .*: Read-only file system",
    ),
    "not shared": (
        1,
        "mount -t tmpfs own FOLDER",
        "does not see what rank 0 writes in .*all nodes share",
    ),
    "shared memory": (
        1,
        "mount -t tmpfs -o size=64m small /dev/shm",
        "/dev/shm has 64 MiB free, 256 MiB are needed",
    ),
    "own name": (
        0,
        "sed 's/^.* OWN$/127.0.1.1 OWN/' /etc/hosts >HOSTS && mount --bind HOSTS /etc/hosts",
        r"127\.0\.1\.1",
    ),
    "first name": (
        1,
        "sed 's/^.* FIRST$/127.0.0.1 FIRST/' /etc/hosts >HOSTS && mount --bind HOSTS /etc/hosts",
        "127.0.0.1",
    ),
}
ON_THE_SECOND_NODE = "import os\nif os.environ.get('SLURM_NODEID') == '1':\n"
IN_PYTHON = {  # these stand in a sitecustomize.py of the job's ranks
    "open files": (
        "import resource\n    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))",
        "may have 300 files open",
    ),
    "clock": (
        "import time\n    now = time.time\n    time.time = lambda: now() - 90",
        r"clock is (8\d|9\d) s behind rank 0",
    ),
    "slow": (
        "import time, torch\n    mm = torch.mm\n"
        "    torch.mm = lambda *args, **kw: (time.sleep(0.01), mm(*args, **kw))[1]",
        r"\d TFLOP/s, and the median is 0\.\d",
    ),
    "slow memory": (
        "import time, torch\n    copy = torch.Tensor.copy_\n"
        "    torch.Tensor.copy_ = lambda *args: (time.sleep(0.01), copy(*args))[1]",
        r"\d GB/s, and the median is \d",
    ),
    "ECC errors": (
        "os.environ['PATH'] = f\"{os.path.dirname(__file__)}:{os.environ['PATH']}\"",
        r"GPU 1 has 3 uncorrected ECC errors",
    ),
    "versions": (
        "import torch\n    torch.__version__ = '2.0.0'",
        r"different versions of torch: 2\.0\.0, rank 0 2\.13",
    ),
    "few CPUs": (
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
        "may use 1 CPUs, but the job asked for 2",
    ),
    "wrong sum": (
        "import torch.distributed as dist\n    reduce = dist.all_reduce\n"
        "    dist.all_reduce = lambda x, **kw: (reduce(x, **kw), x[7].add_(1))[0]",
        "gets a wrong sum in the all-reduce",
    ),
}


def faulty_jobs(
    cluster: Cluster, folder: Path, faults: list[str]
) -> dict[str, tuple[Job, list[str]]]:
    """One job of two ranks for each fault, all at once, each on two nodes of its own: the job,
    and its nodes."""
    ids, nodes, undo = {}, {}, []
    try:
        for i, fault in enumerate(faults):
            first, second = nodes[fault] = [f"node-{3 + 2 * i}", f"node-{4 + 2 * i}"]
            here, environment = folder / fault.replace(" ", "-"), {}
            (here / "checkpoints").mkdir(parents=True)
            if fault in FAULTS:
                index, command, _ = FAULTS[fault]
                node = (first, second)[index]
                names = {"FOLDER": here / "checkpoints", "HOSTS": here / "hosts"}
                for name, value in (names | {"OWN": node, "FIRST": first}).items():
                    command = command.replace(name, str(value))
                made = cluster.exec("bash", "-c", command, node=node)
                assert made.returncode == 0, made.stderr
                place = re.search(r"mount .* (\S+)", command.replace(" && ", "\n"))[1]
                undo.append((node, place))
            else:
                (here / "sitecustomize.py").write_text(
                    f"{ON_THE_SECOND_NODE}    {IN_PYTHON[fault][0]}\n"
                )
                environment = {"PYTHONPATH": here}
                # Only the second node looks for it there.
                text = XML.format(mig="N/A", reasons="event_reason", hot="Not Active")
                nvidia_smi_says(here, text)
            size = [f"--nodelist={first},{second}", *one_rank_a_node("srun"), "--cpus-per-task=2"]
            command = ["aux/check_ranks.py", "--checkpoint-dir", here / "checkpoints"]
            output = f"--output={here}/log"
            ids[fault] = cluster.submit(*size, output, LAUNCHERS["srun"], *command, env=environment)
        return {fault: (cluster.wait(job), nodes[fault]) for fault, job in ids.items()}
    finally:
        for node, place in undo:
            cluster.exec("umount", place, node=node)


QUICK = ["full", "not shared", "slow"]
OTHERS = [fault for fault in [*FAULTS, *IN_PYTHON] if fault not in QUICK]


@pytest.mark.parametrize("faults", cells([(QUICK,), (OTHERS,)], (QUICK,)), ids=["quick", "others"])
def test_a_fault_is_one_sentence_of_the_node_that_has_it(faults, cluster, tmp_path):
    for fault, (job, nodes) in faulty_jobs(cluster, tmp_path, faults).items():
        index, sentence = 1, IN_PYTHON.get(fault, ("", ""))[1]
        if fault in FAULTS:
            index, _, sentence = FAULTS[fault]
        assert job.state == "FAILED", job.log
        [said] = re.findall(r"^\[Rank \d+ on node-\d+\] .*", job.log, re.M)
        assert said.startswith(f"[Rank {index} on {nodes[index]}] "), job.log
        assert re.search(sentence, said), said
        verdict = f"VERDICT: {nodes[index]} is bad, submit again with --exclude={nodes[index]}"
        assert "the sum is right" not in job.log or fault != "wrong sum", job.log
        # A rank that cannot meet the others knows of no verdict.
        assert verdict in job.log or fault.endswith("name"), job.log
        assert "all well" not in job.log and "Traceback" not in job.log, job.log


@pytest.mark.matrix
def test_a_fault_of_both_ranks_of_a_node(cluster, tmp_path):
    """One sentence says so."""
    node, folder = "node-15", tmp_path / "own"
    folder.mkdir()
    assert cluster.exec("mount", "-t", "tmpfs", "own", folder, node=node).returncode == 0
    try:
        options = ["--nodelist=node-[14-15]", f"--output={tmp_path}/log", LAUNCHERS["torchrun"]]
        command = ["aux/check_ranks.py", "--checkpoint-dir", folder / "checkpoints"]
        job = cluster.sbatch(*options, *command)
    finally:
        cluster.exec("umount", folder, node=node)
    assert job.state == "FAILED", job.log
    assert job.log.count("does not see what rank 0 writes in") == 1, job.log
    assert re.search(rf"^\[Rank 2 on {node}\] does not see", job.log, re.M), job.log


@pytest.mark.parametrize("count", [3, 4, 7, 10])
def test_a_ring_of_nodes(count):
    """In each round two partners agree, and after all of them each node had its two neighbours."""
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


def four(device: str, **last: object) -> list[dict]:
    """Ranks of two nodes that are alike, except for the last one."""
    found = []
    for i in range(4):
        its = {"host": f"n{i // 2}", "gpu": f"GPU-{i}", "device": device, "torch": "2.13"}
        its |= {"TFLOP/s": 10.0, "GB/s": 10.0, "clock": 1000.0, "bad": [], "warnings": []}
        found.append(its)
    found[-1] |= last
    return found


SPEEDS = [
    (device, name, share, bad)
    for device, shares in {"cuda:0": (0.79, 0.81), "xpu:1": (0.7, 0.9), "cpu": (0.49, 0.51)}.items()
    for name in ("TFLOP/s", "GB/s")
    for share, bad in zip(shares, (True, False), strict=True)
]


@pytest.mark.parametrize(("device", "name", "share", "bad"), SPEEDS)
def test_a_slow_rank(device, name, share, bad):
    """A GPU with two thirds of the median's speed is bad, and one with 0.9 of it is not."""
    found = four(device, **{name: 10 * share})
    check_ranks.compare(found)
    said = [f"{10 * share:.3f} {name}, and the median is 10.000"] if bad else []
    assert [its["bad"] for its in found] == [[], [], [], said]


@pytest.mark.parametrize("name", ["inside", "between"])
@pytest.mark.parametrize(
    ("device", "share", "bad"),
    [("cuda:0", 0.79, True), ("cuda:0", 0.81, False), ("cpu", 0.09, True), ("cpu", 0.11, False)],
)
def test_a_slow_node(name, device, share, bad):
    """Of three. One of its ranks speaks for it."""
    found = [*four(device), *four(device)[:2]]
    for i, its in enumerate(found):
        its |= {"host": f"n{i // 2}", "gpu": f"GPU-{i}", name: 10 * share if i > 3 else 10.0}
    check_ranks.compare(found)
    assert [len(its["bad"]) for its in found] == [0, 0, 0, 0, int(bad), 0]


def test_ranks_that_differ():
    """In their clocks, in their torch, or in nothing although they should."""
    for seconds, how in ((90, "90 s ahead of"), (-90, "90 s behind"), (6, "6 s ahead of")):
        found = four("cpu", clock=1000.0 + seconds)
        check_ranks.compare(found)
        assert [how in said for said in found[3]["bad"]] == [True], found[3]
    same = four("cpu", clock=996.0, gpu="", torch="2.12")
    check_ranks.compare(same)
    assert same[3]["bad"] == ["different versions of torch: 2.12, rank 0 2.13"]
    shared, elsewhere = four("cuda:0", gpu="GPU-2"), four("cuda:0", gpu="GPU-0")
    check_ranks.compare(shared)
    check_ranks.compare(elsewhere)
    nameless = [its | {"gpu": "", "bad": []} for its in four("cpu")]
    check_ranks.compare(nameless)
    assert not any(its["bad"] for its in nameless)
    assert shared[3]["bad"] == ["shares a GPU with rank 2: ask for one GPU for each rank"]
    assert elsewhere[3]["bad"] == []


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
    found = four("cpu", right=True, warnings=["odd"])
    found[0]["all-reduce"] = "1 GB/s"
    for its in found:
        its |= {"right": its["host"] == "n0" or not bad}
    for i in bad:
        found[i]["bad"].append("is slow")
    assert check_ranks.report(found, False) == status
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == f"VERDICT: {verdict}"
    assert "[Rank 3 on n1] warning: odd" in said
    assert f"1 GB/s, the sum is {'wrong' if bad else 'right'}" in said
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    assert not bad or f"[Rank {bad[0]} on n{bad[0] // 2}] is slow{more}" in said
    assert [i for i in range(4) if said[2 + i].endswith("<- bad")] == bad


# --- what no machine here has ---

PLACES = [  # GPUs that torch sees, local rank, Slurm's grant; device, fault
    (8, 3, 8, "xpu:3", ""),
    (1, 3, 4, "xpu:0", ""),
    (2, 3, 4, "cpu", "local rank 3 has no GPU: torch sees 2"),
    (0, 0, 4, "cpu", "Slurm granted 4 GPUs on this node, but torch"),
    (0, 0, 0, "cpu", ""),
]


@pytest.mark.parametrize(("count", "local_rank", "granted", "device", "fault"), PLACES)
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
    assert len(bad) == bool(fault) and all(said.startswith(fault) for said in bad)
    assert check_ranks.choose_device("cpu") == (torch.device("cpu"), [])
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    assert check_ranks.choose_device("auto") == (torch.device("cpu"), [])


@pytest.mark.parametrize(
    ("asked", "cpus", "machine", "says"),
    [
        (8, 1, 64, ["may use 1 CPUs, but the job asked for 8: look at srun's --cpus-per-task"]),
        (8, 8, 64, []),
        # A node of the local cluster claims more CPUs than there are.
        (16, 2, 2, []),
        (16, 1, 2, ["may use 1 CPUs, but the job asked for 16: look at srun's --cpus-per-task"]),
    ],
)
@pytest.mark.parametrize("way", ["srun", "torchrun"])
def test_cpus(way, asked, cpus, machine, says, monkeypatch):
    name = "SLURM_CPUS_PER_TASK" if way == "srun" else "CPUS_PER_NODE"
    monkeypatch.setattr(check_ranks, "launcher", way)
    monkeypatch.setattr(check_ranks, "env", {name: str(asked)})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(cpus)})
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    assert [sentence for sentence in check_ranks.limits() if "CPUs" in sentence] == says


@pytest.mark.parametrize(("free", "found"), [(255, 1), (256, 0)])
def test_shared_memory(free, found, monkeypatch):
    usage = SimpleNamespace(free=free << 20)
    monkeypatch.setattr(check_ranks.shutil, "disk_usage", lambda folder: usage)
    assert len([said for said in check_ranks.limits() if "/dev/shm" in said]) == found


@pytest.mark.parametrize(
    ("launcher", "hosts"), [("srun", ["a", "a", "b"]), ("torchrun", ["a", "a", "b", "b"])]
)
def test_the_nodes_of_missing_ranks(launcher, hosts, tmp_path, monkeypatch):
    """Of uneven tasks, and of two ranks in each task."""
    monkeypatch.setenv("PATH", f"{stand_ins(tmp_path, {'scontrol': 'echo a; echo b'})}:/bin")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "[a-b]")
    values = {"slurm": os.environ, "launcher": launcher, "tasks": [2, 1], "nodes": 2}
    for name, value in (values | {"ranks_per_node": 2}).items():
        monkeypatch.setattr(check_ranks, name, value)
    assert check_ranks.hosts_of_ranks() == hosts


@pytest.mark.parametrize(
    ("soft", "hard", "says"),
    [
        (1024, 65536, "may have 1024 files open, 1536 are needed: ulimit -n 1536 before srun"),
        (1024, 1500, "may have 1024 files open, 1536 are needed: the hard limit is 1500"),
        (1024, resource.RLIM_INFINITY, "ulimit -n 1536 before srun"),
        (1536, 1536, ""),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, ""),
    ],
)
def test_open_files(soft, hard, says, monkeypatch):
    """Of 512 ranks. Under a launcher the limit is the hard one."""
    monkeypatch.setattr(check_ranks, "world_size", 512)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (soft, hard))
    said = [sentence for sentence in check_ranks.limits() if "files" in sentence]
    assert len(said) == bool(says) and all(says in sentence for sentence in said)


XML = """<nvidia_smi_log><driver_version>580.95.05</driver_version>
<gpu id="00000000:07:00.0">
  <uuid>GPU-07</uuid>
  <mig_mode><current_mig>{mig}</current_mig></mig_mode>
  <ecc_errors>
    <volatile>
      <sram_correctable>9</sram_correctable>
      <sram_uncorrectable_parity>0</sram_uncorrectable_parity>
      <sram_uncorrectable_secded>N/A</sram_uncorrectable_secded>
      <dram_uncorrectable>0</dram_uncorrectable>
    </volatile>
    <aggregate><dram_uncorrectable>5</dram_uncorrectable></aggregate>
  </ecc_errors>
</gpu>
<gpu id="00000000:0B:00.0">
  <uuid>GPU-0B</uuid>
  <mig_mode><current_mig>N/A</current_mig></mig_mode>
  <clocks_{reasons}s>
    <clocks_{reasons}_sw_power_cap>Active</clocks_{reasons}_sw_power_cap>
    <clocks_{reasons}_hw_slowdown>Not Active</clocks_{reasons}_hw_slowdown>
    <clocks_{reasons}_hw_thermal_slowdown>{hot}</clocks_{reasons}_hw_thermal_slowdown>
  </clocks_{reasons}s>
  <ecc_errors><volatile>
    <sram_uncorrectable>1</sram_uncorrectable><dram_uncorrectable>2</dram_uncorrectable>
  </volatile></ecc_errors>
</gpu>
</nvidia_smi_log>"""


def nvidia_smi_says(folder: Path, text: str):
    stand_ins(folder, {"nvidia-smi": f"cat <<'END'\n{text}\nEND"})


@pytest.mark.parametrize("reasons", ["throttle_reason", "event_reason"])
def test_what_nvidia_smi_says(reasons, tmp_path, monkeypatch):
    """Its drivers before 535 and after have two names for a reason."""
    text = XML.format(mig="Enabled", reasons=reasons, hot="Active")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    nvidia_smi_says(tmp_path, text)
    bad, notes = check_ranks.ask_about_gpus()
    assert bad == [
        "GPU 1 has 3 uncorrected ECC errors",
        "GPU 1 is throttled: hw_thermal_slowdown",
    ]
    assert notes == ["GPU 0 is in MIG mode: a rank gets a part of it"]


def test_other_jobs_gpus_are_not_ours(tmp_path, monkeypatch):
    """On a shared node nvidia-smi may list them."""
    text = XML.format(mig="Enabled", reasons="event_reason", hot="Active")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    nvidia_smi_says(tmp_path, text)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    module = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(uuid="07"))
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    assert check_ranks.ask_about_gpus()[0] == []
    # Of two ranks on this node, one sees one.
    monkeypatch.setattr(check_ranks, "ranks_per_node", 2)
    assert len(check_ranks.ask_about_gpus()[0]) == 2


AMD = '{"gpu": 0, "ecc": {"total_correctable_count": 9, "total_uncorrectable_count": %s}}'
# The third part of what Intel's guide of xpu-smi shows, and two statuses changed
XPU = """
+------------------------------+-------------------------------------------------------------------+
| Device ID                    | 0                                                                 |
+------------------------------+-------------------------------------------------------------------+
| 1. GPU Core Temperature      | Status: Ok                                                        |
|                              | Description: All temperature sensors are healthy.                 |
|                              | Throttle Threshold: 105 Celsius Degree                            |
+------------------------------+-------------------------------------------------------------------+
| 4. GPU Memory                | Status: Critical                                                  |
|                              | Description: All memory channels are healthy.                     |
+------------------------------+-------------------------------------------------------------------+
| 5. Xe Link Port              | Status: Unknown                                                   |
+------------------------------+-------------------------------------------------------------------+
| 6. GPU Frequency             | Status: OK                                                        |
+------------------------------+-------------------------------------------------------------------+
"""
OTHER_GPUS = [
    ("amd-smi", f'{{"gpu_data": [{AMD % 3}]}}', ["GPU 0 has 3 uncorrected ECC errors"]),
    ("amd-smi", f"[{AMD % 3}]", ["GPU 0 has 3 uncorrected ECC errors"]),
    ("amd-smi", f"[{AMD % 0}]", []),
    ("amd-smi", "[" + AMD % '"N/A"' + "]", []),
    ("xpu-smi", XPU, ["GPU 0: GPU Memory, Status: Critical"]),
    ("xpu-smi", XPU.replace("Critical", "Ok"), []),
]


@pytest.mark.parametrize(("command", "text", "expected"), OTHER_GPUS)
def test_what_amd_smi_and_xpu_smi_say(command, text, expected, tmp_path, monkeypatch):
    """By the form of ROCm 7, of ROCm 6, and of XPU manager 1.2. With GPUs that may be another
    job's, a fault is a warning."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    stand_ins(tmp_path, {command: f"cat <<'END'\n{text}\nEND"})
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    assert check_ranks.ask_about_gpus() == (expected, [])
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    assert check_ranks.ask_about_gpus() == ([], expected)
    stand_ins(tmp_path, {command: "echo no rights; exit 0" if command == "amd-smi" else "exit 7"})
    bad, [note] = check_ranks.ask_about_gpus()
    assert bad == [] and note.startswith(f"{command} fails here: ")


def test_a_gpu_has_a_name_of_its_own(monkeypatch):
    """Parts of an NVIDIA GPU share its address, and both halves of an MI250X may share a UUID."""
    found = set()
    for kind, number in (("a", 1), ("b", 1), ("a", 2), (None, None)):
        properties = SimpleNamespace(uuid=kind, pci_bus_id=number) if kind else SimpleNamespace()
        module = SimpleNamespace(get_device_properties=lambda device, its=properties: its)
        monkeypatch.setattr(torch, "get_device_module", lambda device, its=module: its)
        found.add(check_ranks.name_of(torch.device("xpu:0")))
    assert found == {"a 1", "b 1", "a 2", ""}


def test_what_nccl_s_log_says(tmp_path, monkeypatch, capsys):
    """Lines of NCCL 2.28.9, by the formats in its library."""
    monkeypatch.setattr(check_ranks, "INFINIBAND", tmp_path)
    start = "node-1:812:900 [0] NCCL INFO "
    chosen, channel = f"{start}Using network", f"{start}Channel 00/0 : 1[0] -> 0[0] [send] via NET"
    over_tcp = f"{chosen} Socket\n{channel}/Socket/0\n{start.replace('INFO', 'WARN')}no route\n"
    over_ib = f"{chosen} IB\n{channel}/IB/0/GDRDMA\n"

    def read(log: str) -> tuple[str, list[str]]:
        mine = {"warnings": []}
        check_ranks.read_log_of_nccl(log, mine)
        return mine["network"], mine["warnings"]

    assert read(over_tcp) == ("Socket, GPUDirect RDMA: no", [])
    assert capsys.readouterr().err == f"{start.replace('INFO', 'WARN')}no route\n"
    (tmp_path / "mlx5_0").mkdir()
    [warning] = read(over_tcp)[1]
    assert "NCCL uses TCP, although this node has mlx5_0" in warning
    assert read(over_ib) == ("IB, GPUDirect RDMA: yes", [])
    [warning] = read(over_ib.replace("/GDRDMA", ""))[1]
    assert "no GPUDirect RDMA" in warning
    # A job of one node has no network.
    assert read(f"{chosen} IB\n") == ("IB", [])

    # Slingshot, where NCCL only uses the network with a plugin.
    monkeypatch.setattr(check_ranks, "CXI", tmp_path / "cxi")
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    [warning] = read(over_tcp)[1]
    assert "although this node has cxi0" in warning and "aws-ofi-nccl" in warning
    assert 'NCCL_NET="AWS Libfabric" makes NCCL fail without it' in warning
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert "aws-ofi-rccl" in read(over_tcp)[1][0]
    over_cxi = f"{chosen} AWS Libfabric\n{channel}/AWS Libfabric/0\n"
    assert read(over_cxi) == ("AWS Libfabric, GPUDirect RDMA: no", [])


@pytest.fixture
def alone(monkeypatch):
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_gloo_is_tried_beside_nccl(alone, monkeypatch):
    """Over an interface that is not there, over one that is, and with a wrong sum."""

    def findings() -> dict:
        mine = {"right": True, "bad": []}
        check_ranks.try_gloo(mine, timeout=20)
        return mine

    assert findings() == {"right": True, "bad": []}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    [said] = findings()["bad"]
    assert re.match(
        r"gloo's all-reduce, which checkpoints need, fails \(.*none7.*\): set GLOO_S", said
    )
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(check_ranks, "world_size", 2)
    assert findings() == {"right": False, "bad": []}


@pytest.mark.parametrize(("backend", "tried"), [("gloo", 0), ("cpu:gloo", 1)])
def test_gloo_is_tried_if_the_ranks_have_another_backend(backend, tried, monkeypatch):
    store, calls = dist.HashStore(), []
    store.set("hosts", json.dumps([check_ranks.HOST]))
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda device: backend)
    monkeypatch.setattr(check_ranks, "try_gloo", lambda *arguments: calls.append(arguments))
    mine = {"bad": []}
    check_ranks.all_reduce(torch.device("cpu"), store, mine, 20)
    dist.destroy_process_group()
    assert mine["bad"] == [] and calls == [(mine, 20)] * tried


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


@pytest.mark.parametrize(("debug", "reads"), [("WARN", True), (None, True), ("INFO", False)])
def test_nccl_s_log_is_asked_for(debug, reads, tmp_path, monkeypatch):
    """Although env.sh has set NCCL_DEBUG, and not if the user wants to see the log."""
    asked = {} if debug is None else {"NCCL_DEBUG": debug}
    monkeypatch.setattr(check_ranks, "env", asked)
    monkeypatch.setattr(check_ranks.tempfile, "tempdir", str(tmp_path))
    path = check_ranks.log_of_nccl()
    assert (path is not None) == reads and asked.get("NCCL_DEBUG_FILE") == (
        str(path) if path else None
    )
    assert asked["NCCL_DEBUG"] == "INFO"


def test_nvidia_smi_that_fails_or_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    stand_ins(tmp_path, {"nvidia-smi": "exit 15"})
    [bad], notes = check_ranks.ask_about_gpus()
    assert "nvidia-smi fails here" in bad and "15" in bad and notes == []
    (tmp_path / "nvidia-smi").unlink()
    assert check_ranks.ask_about_gpus() == ([], [])


def test_warnings(tmp_path, monkeypatch):
    """Of GPUs that Slurm hides from their peers, and of memory that InfiniBand cannot lock."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(check_ranks, "INFINIBAND", tmp_path)
    monkeypatch.setattr(check_ranks, "ranks_per_node", 4)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (65536, 65536))
    [hidden] = check_ranks.warnings(gpu)
    assert "sees 1 of this node's 4 GPUs" in hidden and "--gpus-per-node" in hidden
    # The site's own advice on Frontier.
    with monkeypatch.context() as amd:
        amd.setattr(torch.version, "hip", "7.1")
        assert list(check_ranks.warnings(gpu)) == []
    (tmp_path / "mlx5_0").mkdir()
    [locked] = check_ranks.warnings(torch.device("cpu"))
    assert "may lock 64 KiB" in locked and "ulimit -l unlimited" in locked
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (infinity, infinity))
    assert list(check_ranks.warnings(gpu)) == []


@pytest.mark.parametrize("step", [-5, 2**32 - 5])
def test_a_batch_shell_is_one_rank(step, tmp_path):
    """It has the variables of a task, and this step id: -5 in Slurm 26.05, else 4294967291."""
    batch = {"SLURM_JOB_ID": 7, "SLURM_STEP_ID": step, "SLURM_NTASKS": 4, "SLURM_PROCID": 0}
    done = ranks(0, "aux/check_ranks.py", "--checkpoint-dir", tmp_path, **batch)
    assert "VERDICT: all well, 1 ranks started by hand" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0 and done.stderr == ""


# --- a bare srun ---

TASK = {"SLURM_STEP_NUM_TASKS": 8, "SLURM_STEP_NUM_NODES": 4, "SLURM_STEP_TASKS_PER_NODE": "2(x4)"}
TASK |= {"SLURM_PROCID": 1, "SLURM_NODEID": 3, "SLURM_LOCALID": 1}
BARE = [
    ({}, (7, 1, 8)),
    ({"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": 0, "SLURM_STEP_NUM_TASKS": 2}, (1, 1, 2)),
    ({"SLURM_STEP_TASKS_PER_NODE": "1,2,1(x2)", "SLURM_LOCALID": 0}, (4, 0, 8)),
    ({"RANK": 5, "LOCAL_RANK": 0, "WORLD_SIZE": 16}, (5, 0, 16)),
]


@pytest.mark.parametrize(("changes", "place"), BARE)
def test_the_ranks_of_a_bare_srun(changes, place, monkeypatch):
    """By node, although task 1 is on the last one."""
    for name, value in (TASK | changes).items():
        monkeypatch.setenv(name, str(value))
    its = runpy.run_path(check_ranks.__file__)
    assert (its["rank"], its["local_rank"], its["world_size"]) == place


def test_a_bare_srun_whose_task_0_is_on_the_second_node(cluster, tmp_path):
    """As with a topology plugin of Slurm 26.05. Rank 0 is on the first node nevertheless."""
    said = {}

    def scenario(task: int):
        node = f"node-{2 - task}"
        place = {"SLURM_PROCID": task, "SLURM_NODEID": 1 - task, "SLURM_LOCALID": 0}
        place |= {"SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_NUM_NODES": 2}
        place |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "node-[1-2]"}
        place |= {"SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": 0, "SLURMD_NODENAME": node}
        variables = [f"{name}={value}" for name, value in place.items()]
        command = ["aux/check_ranks.py", "--timeout", 30, "--checkpoint-dir", tmp_path]
        said[node] = cluster.exec("env", *variables, sys.executable, *command, node=node)

    at_once(scenario, [(0,), (1,)])
    assert said["node-2"].stdout == "", said["node-2"]
    rows = re.findall(r"^(\d) +0 +(\S+)", said["node-1"].stdout, re.M)
    assert rows == [("0", "node-1"), ("1", "node-2")], said["node-1"]
    assert "VERDICT: all well, 2 ranks started by srun" in said["node-1"].stdout


def test_watch_job_shows_the_latest_start(tmp_path):
    """By time: a start by hand is named after a port, and ranks-10 is not older than ranks-2."""
    for start, age in (("ranks-10", 1), ("ranks-2", 5), ("ranks-9", 30)):
        folder = tmp_path / "log/local" / start
        folder.mkdir(parents=True)
        beat = {"rank": 0, "world_size": 1, "host": start, "time": time.time(), "interval": 2}
        beat |= {"step": 7, "seconds_in_step": 1.0, "waits": False, "frame": "f", "stack": ["f"]}
        (folder / "0").write_text(json.dumps(beat))
        os.utime(folder, 2 * (time.time() - age,))
    done = run(sys.executable, watch_job.__file__, "local", cwd=tmp_path)
    assert re.search(r"^   0  ranks-10 +7 ", done.stdout, re.M) and done.returncode == 0, done


def test_watch_job_finds_the_ranks_of_a_bare_srun(monkeypatch):
    """With the numbers that scripts take. A Python of the batch shell is no rank, though it has
    SLURM_PROCID, nor is a loader worker, nor what watch_job.py has started."""
    job = os.getpid()
    batch = environment(SLURM_JOB_ID=job, SLURM_PROCID=0, SLURM_NTASKS=2)
    task = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": 3, "SLURM_STEP_NUM_TASKS": 2}
    tasks = [environment(**task, SLURM_PROCID=i, SLURM_NODEID=1 - i) for i in (0, 1)]
    started = []
    try:
        for env in (batch, *tasks, tasks[0]):
            command = [sys.executable, "-c", "input()"]
            started.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE))
            # A process's start is counted in hundredths of a second.
            time.sleep(0.05)
        found = watch_job.ranks_here(str(job))
        monkeypatch.setenv("SLURM_STEP_ID", "3")
        assert watch_job.ranks_here(str(job)) == []
    finally:
        for process in started:
            process.communicate()
    assert found == [(i, 2, started[1 + i].pid) for i in (0, 1)]


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
        "./aux/slurm_rank.sh python aux/check_ranks.py --sigterm; true'\n"
    )
    size = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    job = cluster.sbatch(*size, f"--output={tmp_path}/log", script)
    assert re.search(r"signals reach the ranks: not rank 0 on \S+, rank 1 on ", job.log), job.log
    assert job.state == "COMPLETED", job.log


@pytest.mark.matrix
def test_a_rank_that_does_not_come_is_named(cluster, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        f"{ON_THE_SECOND_NODE}    import time, torch\n"
        "    torch.mm = lambda *args, **kw: time.sleep(999)\n"
    )
    options = ["--ntasks-per-node=1", "--gpus-per-node=1", f"--output={tmp_path}/log"]
    command = [LAUNCHERS["srun"], "aux/check_ranks.py", "--timeout", 20]
    job = cluster.sbatch(*options, *command, env={"PYTHONPATH": tmp_path})
    said = r"1 of 2 ranks have not reached the all-reduce in 20 s: rank 1 on node-\d+$"
    assert job.state == "FAILED" and re.search(said, job.log, re.M), job.log
