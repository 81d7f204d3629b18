"""The launchers on clusters that are set up in other ways than the local one: with accounting,
sockets, other names, nodes that differ. A variant is a few changes of Slurm's configuration."""

import json
import os
import re
import shutil
import sys

import pytest

from copies import VARIABLES, assert_five_variables
from slurm import LAUNCHERS, REPOSITORY, Cluster, at_once, wait_for
from trials import PREEMPTIBLE, Trial

pytestmark = pytest.mark.matrix

NODES = ("node-1", "node-2")
STOP = "pkill -x 'slurmctld|slurmd'; while pgrep -x 'slurmctld|slurmd'; do sleep 0.1; done"
CHANGE = 'cd "$(dirname "$SLURM_CONF")"; sed -E -i "$@" slurm.conf generated.conf gres.conf'


@pytest.fixture
def cluster():
    cluster = Cluster(f"variant-{os.getpid()}", nodes=2, cpus=16, gpus=2)
    yield cluster
    cluster.down()


def bash(cluster, command: str, *arguments: str, node: str = "node-1"):
    done = cluster.exec("bash", "-euc", command, "bash", *arguments, node=node)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(cluster, node: str, arguments: str):
    """slurmd, which then registers."""
    bash(cluster, f"slurmd {arguments}", node=node)
    name = re.search(r"-N (\S+)", arguments)[1]
    state = ["sinfo", "--noheader", "--Node", "--format=%T", "--nodes", name]
    wait_for(lambda: cluster.exec(*state).stdout.strip() == "idle", 30)


def restart(cluster, *changes: str, slurmd: dict[str, str] | None = None):
    """Slurm's daemons with changes, by sed, and slurmd's arguments by node, in that order."""
    if changes:
        bash(cluster, CHANGE, *(part for change in changes for part in ("-e", change)))
    slurmd = slurmd or {node: f"-N {node}" for node in NODES}
    for node in slurmd:
        bash(cluster, STOP, node=node)
    bash(cluster, "slurmctld")
    for node, arguments in slurmd.items():
        start(cluster, node, arguments)


def assert_all_ways(cluster, tmp_path, *options: str):
    """Every launcher starts two ranks on each node, which know of each other."""

    def scenario(way):
        command = [*options, f"--output={tmp_path}/log-{way}", LAUNCHERS[way], VARIABLES]
        job = cluster.sbatch(*command)
        assert job.state == "COMPLETED", job.log
        assert_five_variables(job.ranks(), [2, 2])
        assert {len(rank["cuda"].split(",")) for rank in job.ranks()} == {2}, job.log

    at_once(scenario, [(way,) for way in LAUNCHERS])


def test_gpus_bound_to_sockets(cluster, tmp_path):
    """A step keeps both of a node's GPUs, although each belongs to a socket of its own."""
    sockets = "s/Sockets=1 CoresPerSocket=16/Sockets=2 CoresPerSocket=8/"
    cores = [rf"s/^(Name=gpu .*gpu{gpu})$/\1 Cores={8 * gpu}-{8 * gpu + 7}/" for gpu in (0, 1)]
    restart(cluster, sockets, *cores)
    assert "gpu:2(S:0-1)" in cluster.exec("scontrol", "show", "node", "node-1").stdout
    assert_all_ways(cluster, tmp_path)


def test_nodes_that_register_in_another_order(cluster, tmp_path):
    """Dynamic nodes: rank 0 is where the batch script runs."""
    size = '--conf "CPUs=16 RealMemory=64000 Gres=gpu:2"'
    order = {node: f"-Z {size} -N {node}" for node in reversed(NODES)}
    restart(cluster, "s/^NodeName=.*/MaxNodeCount=4/", slurmd=order)
    assert "DYNAMIC_NORM" in cluster.exec("scontrol", "show", "node", "node-1").stdout
    assert_all_ways(cluster, tmp_path)


def test_names_unlike_the_hosts(cluster, tmp_path):
    """A NodeName that resolves nowhere is one sentence, and the EDIT line mends it."""
    names = r"s/^NodeName=node-\[1-2\] /NodeName=cn-[1-2] NodeHostname=node-[1-2] /"
    restart(cluster, names, slurmd={node: f"-N cn-{node[-1]}" for node in NODES})
    job = cluster.sbatch(f"--output={tmp_path}/log", LAUNCHERS["srun"], VARIABLES)
    assert job.state == "FAILED"
    assert job.log == "env.sh: cn-1 does not resolve: set it in site.sh\n"

    for name in ("env.sh", "torchrun.sh", "aux", "distributed", "tests", *LAUNCHERS.values()):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / "site.sh").write_text("MASTER_ADDR=$(uname --nodename)\n")
    for way in LAUNCHERS:
        check = [f"--output=log-{way}", LAUNCHERS[way], "aux/check_ranks.py"]
        job = cluster.sbatch(*check, cwd=tmp_path)
        assert job.state == "COMPLETED" and "VERDICT: all well, 4 ranks" in job.log, job.log


def test_signals_to_all_processes_of_a_step(cluster, tiny, tmp_path):
    """SignalChildrenProcesses=yes: torchrun or the spawner gets SIGTERM, and each rank twice."""
    if re.search(r" 22\.| 23\.02", cluster.exec("slurmd", "-V").stdout):
        pytest.skip("this Slurm has no SignalChildrenProcesses")
    bash(cluster, 'echo SignalChildrenProcesses=yes >>"$(dirname "$SLURM_CONF")/cgroup.conf"')
    restart(cluster)
    for way in LAUNCHERS:
        trial = Trial(cluster, way, PREEMPTIBLE, {PREEMPTIBLE: tiny}, tmp_path / way)
        trial.train_a_little()
        trial.signal("--signal=TERM")
        trial.resumes()


def test_nodes_that_differ(cluster, tmp_path):
    """Node 1 has more GPUs and CPUs. An exclusive job has the ranks that its header asks for."""
    bash(cluster, 'mknod "$(dirname "$SLURM_CONF")/gpu2" c 195 2')
    first = r"NodeName=node-1 CPUs=32 RealMemory=128000 Gres=gpu:3"
    second = r"NodeName=node-2 CPUs=16 RealMemory=64000 Gres=gpu:2"
    gpus = r"s/^Name=gpu File=(.*)gpu0$/NodeName=node-1 Name=gpu File=\1gpu[0-2]\n"
    gpus += r"NodeName=node-2 Name=gpu File=\1gpu[0-1]/"
    restart(cluster, rf"s/^NodeName=.*/{first}\n{second}/", gpus, "/^Name=gpu File=.*gpu1$/d")
    assert "gpu:3" in cluster.exec("sinfo", "--Node", "--format=%G").stdout
    assert_all_ways(cluster, tmp_path, "--exclusive")

    # Without this line of its header a job has all CPUs, and a step can use 16 on both nodes.
    launcher = (REPOSITORY / LAUNCHERS["torchrun"]).read_text()
    edited = tmp_path / "launcher.sh"
    edited.write_text(re.sub(r"^#SBATCH --cpus-per-task.*\n", "", launcher, flags=re.M))
    job = cluster.sbatch("--exclusive", f"--output={tmp_path}/log", edited, VARIABLES)
    assert job.state == "COMPLETED", job.log
    assert_five_variables(job.ranks(), [2, 2])


def slurm_26(cluster):
    """Skips the test with an older Slurm."""
    version = re.search(r" (\d+\.\d+)", cluster.exec("slurmd", "-V").stdout)[1]
    if float(version) < 26:
        pytest.skip(f"Slurm {version} is older than 26.05")


def test_order_of_tasks_by_topology(cluster, tmp_path):
    """Blocks number the tasks, so SLURM_PROCID 0 is not on the first node by name."""
    slurm_26(cluster)
    blocks = "BlockName=b1 Nodes=node-2\\nBlockName=b2 Nodes=node-1\\nBlockSizes=1\\n"
    bash(cluster, f'printf "{blocks}" >"$(dirname "$SLURM_CONF")/topology.conf"')
    bash(cluster, 'echo TopologyPlugin=topology/block >>"$(dirname "$SLURM_CONF")/slurm.conf"')
    restart(cluster)
    srun = ["srun", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
    shown = cluster.exec(*srun, "bash", "-c", 'echo "$SLURM_PROCID $SLURMD_NODENAME"').stdout
    assert sorted(shown.splitlines())[0] == "0 node-2", shown
    assert_all_ways(cluster, tmp_path)
    checked = cluster.exec(*srun, sys.executable, "aux/check_ranks.py")
    assert checked.returncode == 0 and "VERDICT: all well, 4 ranks" in checked.stdout, checked


@pytest.fixture
def four_nodes():
    cluster = Cluster(f"variant-{os.getpid()}", nodes=4, cpus=2, gpus=0)
    yield cluster
    cluster.down()


def test_reasons_of_a_topology(four_nodes):
    """A job that has to fit into a block of nodes waits for one, and says so."""
    slurm_26(four_nodes)
    blocks = "BlockName=b1 Nodes=node-[1-2]\\nBlockName=b2 Nodes=node-[3-4]\\nBlockSizes=2\\n"
    bash(four_nodes, f'printf "{blocks}" >"$(dirname "$SLURM_CONF")/topology.conf"')
    bash(four_nodes, 'echo TopologyPlugin=topology/block >>"$(dirname "$SLURM_CONF")/slurm.conf"')
    restart(four_nodes, slurmd={f"node-{number}": f"-N node-{number}" for number in range(1, 5)})
    command = ["sbatch", "--exclusive", "--output=/dev/null", "--wrap=sleep 60"]
    for options in (["--nodelist=node-1"], ["--nodelist=node-3"], ["--nodes=2", "--segment=2"]):
        four_nodes.exec(*command, *options)
    four_nodes.exec(*command, "--nodes=2", "--segment=1")
    states = ["squeue", "--noheader", "--sort=i", "--format=%T %r"]
    expected = ["RUNNING None"] * 2 + ["PENDING No suitable topology unit found", "RUNNING None"]
    wait_for(lambda: four_nodes.exec(*states).stdout.splitlines() == expected, 40)


def test_fewer_tasks_than_nodes(cluster):
    """sbatch takes fewer nodes, and Slurm itself refuses them."""
    slurm_26(cluster)
    hold = ["sbatch", "--parsable", "--hold", "--nodes=2", "--wrap=true"]
    warned = cluster.exec(*hold, "--ntasks=1")
    assert "can't run 1 processes on 2 nodes, setting nnodes to 1" in warned.stderr, warned
    job = cluster.exec(*hold, "--ntasks=2").stdout.strip()
    refused = cluster.exec("scontrol", "update", f"JobId={job}", "NumTasks=1")
    assert refused.returncode == 1, refused
    assert "Task count specification invalid" in refused.stdout + refused.stderr, refused


def test_no_requeue_is_not_final(cluster, tmp_path):
    """If a node does not power up, as in a cloud, a site may have all batch jobs requeued."""
    slurm_26(cluster)
    lines = "SuspendProgram=/bin/true\\nResumeProgram=/bin/true\\nSuspendTime=600\\n"
    lines += "SuspendTimeout=2\\nResumeTimeout=5\\n"
    bash(cluster, f'printf "{lines}" >>"$(dirname "$SLURM_CONF")/slurm.conf"')
    restart(cluster, "s/^SchedulerParameters=/&requeue_on_resume_failure,/")
    bash(cluster, "scontrol update NodeName=node-2 State=POWER_DOWN_FORCE")
    state = ["sinfo", "--noheader", "--nodes=node-2", "--format=%T"]
    wait_for(lambda: cluster.exec(*state).stdout.strip().endswith("~"), 60)
    bash(cluster, STOP, node="node-2")
    options = ["--parsable", "--no-requeue", "--nodelist=node-2", f"--output={tmp_path}/log"]
    job = cluster.exec("sbatch", *options, "--wrap", "true").stdout.strip()
    try:
        shown = ["scontrol", "show", "job", job]
        wait_for(lambda: " Restarts=1 " in cluster.exec(*shown).stdout, 90)
        assert " Requeue=0 Restarts=1 " in cluster.exec(*shown).stdout
    finally:
        cluster.exec("scancel", job)


def with_accounting(cluster, *changes: str):
    if not shutil.which("slurmdbd"):
        pytest.skip("no slurmdbd: `make accounting`, on Debian 12")
    made = cluster.exec("./tests/scripts/variants/accounting.sh", timeout=60)
    assert made.returncode == 0, made.stderr
    restart(cluster, *changes)


def test_accounting(cluster, tiny, tmp_path):
    """README's command with --account as it stands, sacct, and a preemption by QOS."""
    with_accounting(cluster)
    check = ["--partition=train", f"--output={tmp_path}/check", LAUNCHERS["srun"]]
    check += ["aux/check_ranks.py"]
    refused = cluster.exec("sbatch", "--account=B", *check)
    assert refused.returncode == 1 and "Invalid account" in refused.stderr
    job = cluster.sbatch("--account=A", *check)
    assert job.state == "COMPLETED" and "VERDICT: all well, 4 ranks" in job.log, job.log
    account = "sacct --allocations --noheader --parsable2 --format=account,qos,state --jobs="
    assert bash(cluster, f"{account}{job.id}") == "a|normal|COMPLETED\n"
    assert_all_ways(cluster, tmp_path, "--account=A")
    site = cluster.exec("python3", "aux/check_site.py").stdout
    assert re.search(r"sacct shows ended jobs; your accounts: a\b", site), site
    assert "whether and how a job is preempted depends on its QOS" in site

    data, sbatch = {PREEMPTIBLE: tiny}, ["--account=A"]
    preempted = Trial(cluster, "srun", PREEMPTIBLE, data, tmp_path / "train", sbatch=sbatch)
    preempted.train_a_little()
    urgent = ["--account=A", "--qos=urgent", "--exclusive", "--output=/dev/null", "--wrap=true"]
    assert cluster.sbatch(*urgent).state == "COMPLETED"
    preempted.resumes()


LIMITS = [
    ("account a set GrpTRES", 2, "AssocGrpGRES", "your account's", r"UserName= GrpTRES=\S*2\(2"),
    ("account a set GrpTRESMins", 99, "AssocGrpGRESMinutes", "your account's", r"Mins=\S*99\("),
    ("account a set GrpTRESRunMins", 99, "AssocGrpGRESRunMinutes", "your account's", r"99\(60"),
    ("qos normal set GrpTRES", 2, "QOSGrpGRES", "everybody's", r"GrpTRES=\S*2\(2\)"),
    ("qos normal set MaxTRESPerUser", 2, "QOSMaxGRESPerUser", "yours", r"PU=\S*2\(2\)"),
    ("qos normal set MaxTRES", 1, "QOSMaxGRESPerJob", "this job's", r"PJ=\S*1"),
]
# As sites have it that give hours to accounts.
HOURS = r"s/^(AccountingStorageEnforce=.*)/\1,safe\nPriorityType=priority\/multifactor/"


def test_whose_limit_it_is(cluster):
    """Every limit gives a reason whose row in troubleshooting.md names its owner, and the page's
    commands show the limit and how full it is. Those of recipes.md show the hours, and those of
    AGENTS.md what a program asks for."""
    with_accounting(cluster, HOURS)
    pages = [
        REPOSITORY / f"{name}.md" for name in ("docs/troubleshooting", "docs/recipes", "AGENTS")
    ]
    page, recipes, agents = (path.read_text() for path in pages)
    [shown] = re.findall(r"^```sh\n(squeue --me --start.*?)^```$", page, re.M | re.S)
    shown = shown.replace("accounts=A", "accounts=a").replace("qos=Q", "qos=normal")
    rows = re.findall(r"^\| (`\(.*?) \| (.*?) \|", page, re.M)

    def whose(reason: str) -> str:
        pairs = [(part, owner) for said, owner in rows for part in re.findall("`(.+?)`", said)]
        patterns = [(".*".join(map(re.escape, x.split("..."))), owner) for x, owner in pairs]
        [owner] = [owner for x, owner in patterns if re.fullmatch(x, f"({reason})")]
        return owner

    job = ["--account=A", "--partition=train", "--gpus-per-node=2", "--time=30"]
    job += ["--output=/dev/null", "--wrap=sleep 600"]
    running, waiting = cluster.submit(*job), cluster.submit("--hold", *job)
    wait_for(lambda: cluster.show(running)["JobState"] == "RUNNING", 30)
    lift = f"scontrol release {waiting}"
    for limit, value, reason, owner, usage in LIMITS:
        change = f"sacctmgr --immediate modify {limit}=gres/gpu="
        bash(cluster, f"{change}{value}; {lift}")
        lift = f"{change}-1"
        wait_for(lambda reason=reason: cluster.show(waiting)["Reason"] == reason, 60)
        assert whose(reason).startswith(owner), reason
        printed = " ".join(bash(cluster, shown).split())
        assert f"a normal N/A ({reason})" in printed, printed
        assert re.search(usage, printed), printed

    bash(cluster, "sacctmgr --immediate modify account a set GrpTRESMins=gres/gpu=900")
    [shown] = re.findall(r"^(sacct --jobs=JOB --format=\S*TRES.*?)^```$", recipes, re.M | re.S)
    shown = shown.replace("accounts=A", "accounts=a").replace("JOB", str(running), 1)
    printed = bash(cluster, shown)
    for part in (
        rf"{running}\S* .*gres/gpu=2",
        r"Usage reported in TRES Hours",  # It counts at the end of an hour
        r"a\|\|gres/gpu=900",
        r"UserName=\nGrpTRESMins=\S*gpu=900\(\d+\)",
    ):
        assert re.search(part, printed), (part, printed)

    _, _, section = agents.partition("## Ask Slurm by program")
    [watch] = re.findall(r"^python3 aux/watch_job.py .*", section, re.M)
    may, used, record = re.findall(r"^- `(.+?)`", section, re.M)[:3]
    launcher = f"--account=A --partition=train {LAUNCHERS['torchrun']}"
    bash(cluster, may.replace("LAUNCHER", launcher).replace("SCRIPT", VARIABLES))
    assert bash(cluster, record.replace("JOB", str(running))).startswith(f"JobId={running} ")
    [said] = json.loads(bash(cluster, used.replace("JOB", str(running))))["jobs"]
    assert said["job_id"] == running and "RUNNING" in said["state"]["current"], said
    # Accounting knows who has cancelled a job. It hears of it a moment later.
    watch = watch.replace("JOB", str(waiting)).split()
    waits = json.loads(cluster.exec(*watch[:-1]).stdout)
    assert (waits["state"], waits["reason"]) == ("PENDING", "QOSMaxGRESPerJob"), waits
    cluster.exec("scancel", waiting)
    wait_for(lambda: json.loads(cluster.exec(*watch).stdout)["by"] == "root", 30)
