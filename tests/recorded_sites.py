"""What Slurm's commands say at known sites, reduced to what check_site.py reads.

Only the node of `soperator` is a recorded `scontrol show node` (of 2026-01-14, in a public report
on Nebius' Slurm on Kubernetes, by a user). The others are composed from the documents that
sites/NAME.sh names: cores, threads, GPUs and partitions are theirs. Settings of which they say
nothing have Slurm's defaults, and some sizes of memory and time limits are placeholders.
"""

CONFIG = """AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = {name}
JobRequeue              = 1
KillWait                = 30 sec
MpiDefault              = none
PreemptMode             = OFF
PreemptType             = preempt/none
ProctrackType           = proctrack/cgroup
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SLURM_VERSION           = 25.05.5
TopologyPlugin          = topology/default
"""
SOPERATOR = "NodeName=worker-1 Arch=x86_64 CoresPerSocket=32 CPUAlloc=0 CPUEfctv=128 CPUTot=128 "
SOPERATOR += "CPULoad=0.67 Gres=gpu:nvidia_h100_80gb_hbm3:8(S:0-1) NodeAddr=10.5.170.103 "
SOPERATOR += "NodeHostName=worker-1 Version=24.11.5 RealMemory=1570840 AllocMem=0 Sockets=2 "
SOPERATOR += "State=IDLE+DYNAMIC_NORM ThreadsPerCore=2 Partitions=main,background "
SOPERATOR += "CfgTRES=cpu=128,mem=1570840M,billing=128,gres/gpu=8"

# ClusterName, the file in sites/, partition, its line, node: CPUs, threads per core, GRES, MB; and
# GPUs and CPUs for all of a node, or if a CPU is a core
NODE = "NodeName=n1 CPUEfctv={cpus} CPUTot={cpus} ThreadsPerCore={threads} Gres={gres} NodeAddr=n1 "
NODE += "RealMemory={memory} State=IDLE Partitions={partition}"
SITES = {
    "soperator": (None, "main Default=YES MaxTime=UNLIMITED", SOPERATOR, 8, 128, 64),
    # MaxNodes, MaxTime, DefMemPerNode and MaxCPUsPerNode are recorded.
    "lumi": (
        "lumi.sh",
        "small-g MaxNodes=4 MaxTime=3-00:00:00 DefMemPerNode=65536 MaxCPUsPerNode=UNLIMITED",
        (112, 2, "gpu:mi250:8", 491520),
        8,
        112,
        56,
    ),
    "frontier": ("frontier.sh", "batch Default=YES MaxTime=12:00:00", (112, 2, "gpu:8", 512000), 8,
                 112, 56),
    "perlmutter": ("perlmutter.sh", "gpu_ss11 MaxTime=2-00:00:00", (128, 2, "gpu:a100:4", 256000),
                   4, 128, 64),
    "clariden": ("alps.sh", "normal Default=YES MaxTime=1-00:00:00", (288, 1, "gpu:4", 460000), 4,
                 288, 288),
    "isambard-ai": ("isambard.sh", "workq Default=YES MaxTime=1-00:00:00",
                    (288, 1, "gpu:gh200:4", 460000), 4, 288, 288),
    "jupiter": ("jupiter.sh", "booster MaxTime=12:00:00 MaxNodes=2048",
                (288, 1, "gpu:gh200:4", 460000), 4, 288, 288),
    "juwels": ("juwels.sh", "booster MaxTime=1-00:00:00", (96, 2, "gpu:4", 512000), 4, 96, 48),
    "leonardo": ("leonardo.sh", "boost_usr_prod MaxTime=1-00:00:00",
                 (32, 1, "gpu:a100:4", 494000), 4, 32, 32),
    "mn5": ("marenostrum5.sh", "acc MaxTime=3-00:00:00", (160, 2, "gpu:4", 512000), 4, 160, 80),
    "snellius": ("snellius.sh", "gpu_h100 MaxTime=5-00:00:00", (64, 1, "gpu:h100:4", 720000), 4,
                 64, 64),
    "jean-zay": ("jean-zay.sh", "gpu_p13 Default=YES MaxTime=4-04:00:00 DefaultTime=00:10:00",
                 (80, 2, "gpu:4", 160000), 4, 80, 40),
}  # fmt: skip


def answers(name: str, **settings: str) -> dict[str, str]:
    """By a word of the command. Settings take the place of those in CONFIG."""
    _, partition, node, *_ = SITES[name]
    config = "".join(
        f"{line.split()[0]} = {settings.get(line.split()[0], line.split(' = ')[1])}\n"
        for line in CONFIG.format(name=name).splitlines()
    )
    if not isinstance(node, str):
        values = dict(zip(("cpus", "threads", "gres", "memory"), node, strict=True))
        node = NODE.format(**values, partition=partition.split()[0])
    partition = f"PartitionName={partition} AllowGroups=ALL State=UP"
    return {"config": config, "partition": partition, "node": node, "assoc": "mine"}
