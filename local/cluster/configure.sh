#!/bin/bash
# Write the Slurm configuration of a local cluster into a folder that each of its nodes sees under
# the same path: slurm.conf and task_prolog.sh (those beside this file), generated.conf and
# cgroup.conf. Used by namespaces.sh and entrypoint.sh, which make FOLDER/key/munge.key first, and
# then add to generated.conf what only they need.
#
# Usage: ./local/cluster/configure.sh FOLDER NODES CPUS GPUS v1|v2|none
# The last argument is the version of the nodes' own cgroups.
set -euo pipefail

folder="$1" nodes="$2" cpus="$3" gpus="$4" cgroups="$5"

cp "$(dirname "${BASH_SOURCE[0]}")"/{slurm.conf,task_prolog.sh} "$folder"
# Threads and tasks get what they ask for only if the CPUs exist.
exist=$((cpus <= $(nproc --all)))
if ((exist)); then sed --in-place /OMP_NUM_THREADS/d "$folder/task_prolog.sh"; fi
{
    echo "TaskProlog=$folder/task_prolog.sh"
    # One munged per node, because newer Slurm takes a credential that one munged decodes twice for
    # a replay. A requeued job waits for cred_expire seconds, plus one, instead of two minutes. A
    # job must reach its last node in that time, which takes longer the more nodes share this
    # machine.
    echo "AuthInfo=socket=$folder/munge/socket,cred_expire=$((5 + nodes / 2))"
    # The default, 10, is too short when many nodes share two cores. UnkillableStepTimeout must be
    # at least five times as long.
    wait=$((nodes > 100 ? 300 : 60))
    echo "MessageTimeout=$wait"
    echo "UnkillableStepTimeout=$((5 * wait))"
    # A different range for each key, so that no cluster finds another's logs and checkpoints under
    # its own job ids.
    checksum=$(cksum <"$folder/key/munge.key")
    echo "FirstJobId=$((${checksum%% *} % 60000000 + 1))"
    echo "StateSaveLocation=$folder/state"
    echo "SlurmctldPidFile=$folder/slurmctld.pid"
    echo "SlurmdSpoolDir=$folder/spool/%n"
    echo "SlurmdPidFile=$folder/spool/%n.pid"
    # One socket, so that srun --cores-per-socket finds as many cores as there are CPUs. The memory
    # is only claimed, because all nodes share this machine's.
    size="CPUs=$cpus Sockets=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=$((cpus * 4000))"
    if ((gpus > 0)); then size+=" Gres=gpu:$gpus"; fi
    echo "NodeName=node-[1-$nodes] $size"
    if [[ "$cgroups" == none ]]; then
        # With linuxproc a signal reaches every process of a step. On most sites it reaches only
        # those that slurmstepd has started.
        echo "ProctrackType=proctrack/linuxproc"
        # No cgroup limits a job's memory, so Slurm checks every second whether it uses more than it
        # asked for.
        echo "JobAcctGatherType=jobacct_gather/linux"
        echo "JobAcctGatherFrequency=task=1"
        echo "JobAcctGatherParams=OverMemoryKill"
        echo "TaskPlugin=task/none"
    else
        echo "ProctrackType=proctrack/cgroup"
        echo "JobAcctGatherType=jobacct_gather/cgroup"
        echo "JobAcctGatherFrequency=30"
        echo "PrologFlags=Contain"
        # The nodes share the CPUs, so every node's first CPU is the machine's first.
        if ((exist)); then
            echo "TaskPlugin=task/affinity,task/cgroup"
        else
            echo "TaskPlugin=task/cgroup"
        fi
    fi
} >"$folder/generated.conf"

if [[ "$cgroups" == none ]]; then
    # slurmd wants a cgroup plugin, although nothing here uses cgroups. 22.05 cannot disable it yet,
    # but its v1 plugin touches nothing until it is used.
    if [[ "$(slurmd -V)" == *" 22."* ]]; then
        echo "CgroupPlugin=cgroup/v1" >"$folder/cgroup.conf"
    else
        echo "CgroupPlugin=disabled" >"$folder/cgroup.conf"
    fi
else
    {
        echo "CgroupPlugin=cgroup/$cgroups"
        echo "CgroupMountpoint=/sys/fs/cgroup"
        if [[ "$cgroups" == v2 ]]; then
            echo "IgnoreSystemd=yes" # the nodes are not its services
        fi
        echo "ConstrainCores=$( ((exist)) && echo yes || echo no)"
        echo "ConstrainRAMSpace=yes"
        echo "ConstrainSwapSpace=yes"
        echo "ConstrainDevices=yes"
    } >"$folder/cgroup.conf"
fi
