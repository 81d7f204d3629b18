"""aux/check_ranks.py before a long job, on the real cluster: a fault provoked on one node is one
sentence from it."""

import re
from pathlib import Path

import pytest

import check_ranks
from conftest import LAUNCHERS, Cluster, Job, cells

# On which of the job's two nodes the fault is, how it is made, and the sentence. In a mount FOLDER
# is where checkpoints
# go, HOSTS a copy of /etc/hosts in which the name of that node (OWN) or of the first one (FIRST) is
# a loopback address.
FAULTS = {
    "full": (
        0,
        "mount -t tmpfs -o size=1m full FOLDER && ! head -c 2M /dev/zero >FOLDER/f",
        "has 0 MB free, and 1024 MB",
    ),
    "full elsewhere": (
        1,
        "mount -t tmpfs -o size=64m full FOLDER",
        r"has \d+ MB free, and 1024 MB are needed",
    ),
    "inodes": (
        0,
        "mount -t tmpfs -o nr_inodes=2 inodes FOLDER && touch FOLDER/f",
        "has inodes for 0 files left",
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
        "/dev/shm has 64 MB free, 256 MB are needed",
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
        r"clock is (89\.\d|90\.0) s behind rank 0",
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
            first, second = nodes[fault] = [f"node-{20 + 2 * i}", f"node-{21 + 2 * i}"]
            here, environment = folder / fault.replace(" ", "-"), {}
            (here / "checkpoints").mkdir(parents=True)
            if fault in FAULTS:
                index, command, _ = FAULTS[fault]
                node = (first, second)[index]
                for name, value in {
                    "FOLDER": here / "checkpoints",
                    "HOSTS": here / "hosts",
                    "OWN": node,
                }.items():
                    command = command.replace(name, str(value))
                made = cluster.exec("bash", "-c", command.replace("FIRST", first), node=node)
                assert made.returncode == 0, made.stderr
                place = re.search(r"mount .* (\S+)", command.replace(" && ", "\n"))[1]
                undo.append((node, place))
            else:
                (here / "sitecustomize.py").write_text(
                    f"{ON_THE_SECOND_NODE}    {IN_PYTHON[fault][0]}\n"
                )
                environment = {"PYTHONPATH": here}
            size = [
                f"--nodelist={first},{second}",
                "--ntasks-per-node=1",
                "--gpus-per-node=1",
                "--nodes=2",
            ]
            command = ["aux/check_ranks.py", "--checkpoint-dir", here / "checkpoints"]
            output = f"--output={here}/log"
            ids[fault] = cluster.submit(*size, output, LAUNCHERS["srun"], *command, env=environment)
        return {fault: (cluster.wait(job), nodes[fault]) for fault, job in ids.items()}
    finally:
        for node, place in undo:
            cluster.exec("umount", place, node=node)


QUICK = ["full", "not shared", "own name", "clock"]
OTHERS = [fault for fault in [*FAULTS, *IN_PYTHON] if fault not in QUICK]


@pytest.mark.parametrize("faults", cells([(QUICK,), (OTHERS,)], (QUICK,)), ids=["quick", "others"])
def test_a_fault_is_one_sentence_of_the_node_that_has_it(faults, cluster, tmp_path):
    for fault, (job, nodes) in faulty_jobs(cluster, tmp_path, faults).items():
        index, sentence = (
            (FAULTS[fault][0], FAULTS[fault][2]) if fault in FAULTS else (1, IN_PYTHON[fault][1])
        )
        assert job.state == "FAILED", job.log
        said = re.findall(r"^\[Rank \d+ on node-\d+\] .*", job.log, re.M)
        assert len(said) == 1 and said[0].startswith(f"[Rank {index} on {nodes[index]}] "), job.log
        assert re.search(sentence, said[0]), said[0]
        assert "VERDICT" not in job.log and "Traceback" not in job.log


def test_four_nodes_that_are_fine(cluster, tmp_path):
    """Nothing is left in the folder."""
    size = ["--nodes=4", "--nodelist=node-[10-13]", "--ntasks-per-node=1", "--gpus-per-node=1"]
    command = ["aux/check_ranks.py", "--checkpoint-dir", tmp_path / "not-there-yet"]
    job = cluster.sbatch(*size, f"--output={tmp_path}/log", LAUNCHERS["srun"], *command)
    assert job.state == "COMPLETED" and "VERDICT: 4 ranks started by srun are fine" in job.log, (
        job.log
    )
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("way", cells([("torchrun",), ("spawn",)], ("torchrun",)))
def test_a_fault_behind_torchrun_or_the_spawner(way, cluster, tmp_path):
    """Both ranks of a node have the fault, and one sentence says so."""
    node, folder = "node-15", tmp_path / "own"
    folder.mkdir()
    assert cluster.exec("mount", "-t", "tmpfs", "own", folder, node=node).returncode == 0
    try:
        size = ["--nodelist=node-[14-15]", f"--output={tmp_path}/log"]
        job = cluster.sbatch(
            *size, LAUNCHERS[way], "aux/check_ranks.py", "--checkpoint-dir", folder / "checkpoints"
        )
    finally:
        cluster.exec("umount", folder, node=node)
    assert job.state == "FAILED" and job.log.count("does not see what rank 0 writes in") == 1, (
        job.log
    )
    assert re.search(rf"^\[Rank 2 on {node}\] does not see", job.log, re.M), job.log


def test_the_difference_of_clocks_is_never_the_network():
    """A slow all-reduce makes long spans, which overlap; only clocks that really differ leave a
    gap."""
    ours = [(100.0, 100.1), (101.0, 104.0)]  # an all-reduce of 0.1 s and one of 3 s
    assert check_ranks.clock_difference(ours, [(100.05, 100.15), (103.9, 104.2)]) == 0
    assert check_ranks.clock_difference(ours, [(98.0, 98.1), (99.0, 102.0)]) == pytest.approx(1.9)
    assert check_ranks.clock_difference(ours, [(102.0, 102.1), (103.0, 106.0)]) == pytest.approx(
        -1.9
    )
