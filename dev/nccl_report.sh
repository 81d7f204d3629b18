#!/bin/bash
# A machine with one GPU in ten minutes: as nodes that share it, and then by itself.
#
# Usage: MIRROR=URL ./dev/nccl_report.sh prepare noble     here: Slurm's packages, in .nccl
#        OUT=FOLDER ./dev/nccl_report.sh run ROW ...       there, as root: rows of cluster_report.py
#
# NCCL refuses two ranks on one GPU of one host, and a host is what NCCL_HOSTID says. So the nodes
# of a local cluster, which have it from local/cluster/task_prolog.sh, share the GPU, and talk over
# TCP. Their speed means nothing, everything else does. Where Slurm does not start, a process stands
# for each node. The machine needs Python with torch, and no network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CLUSTER=nccl

prepare() {
    local state options name
    state=$(mktemp --directory)
    rm -rf .nccl
    mkdir -p .nccl "$state"/{lists,archives}/partial "$state/parts"
    touch "$state/status" # as if nothing were installed
    echo "deb [trusted=yes] $MIRROR $1 main universe" >"$state/sources.list"
    options=(-o "Dir::State=$state" -o "Dir::State::status=$state/status"
        -o "Dir::Cache::archives=$state/archives" -o "Dir::Etc::SourceList=$state/sources.list"
        -o "Dir::Etc::SourceParts=$state/parts" -o APT::Architecture=amd64
        -o APT::Sandbox::User=root -o APT::Install-Recommends=false --quiet=2)
    apt-get "${options[@]}" update
    apt-get "${options[@]}" --yes --download-only install \
        slurmctld slurmd slurm-client munge iproute2 procps
    mv "$state"/archives/*.deb .nccl
    # Every system has these, and Slurm's daemons need no Perl.
    for name in libc6 libperl5 perl dpkg tar passwd coreutils; do rm -f ".nccl/$name"[-_0-9.]*; done
    rm -rf "$state"
}

# Unpacks the packages that are not installed, beside what is there.
install_slurm() {
    local deb name
    for deb in .nccl/*.deb; do
        name=${deb##*/}
        if ! dpkg --status "${name%%_*}" &>/dev/null; then
            # dpkg --extract would replace /lib, which is a link, by a folder.
            dpkg --fsys-tarfile "$deb" |
                tar --extract --directory=/ --keep-directory-symlink --skip-old-files
        fi
    done
    # Installing them would link their names.
    for name in slurmctld slurmd slurmstepd; do
        if ! type -P "$name" >/dev/null; then ln --symbolic "$name-wlm" "/usr/sbin/$name"; fi
    done
    ldconfig
}

# nodes NAME COUNT PART ...: dev/cluster_report.py on so many nodes; its log is OUT/NAME.
nodes() {
    local log=$OUT/$1 count=$2 node
    shift 2
    if ./local/cluster/namespaces.sh status >/dev/null; then
        timeout 250 ./local/cluster/namespaces.sh exec sbatch --wait --output="$log" \
            --nodes="$count" --gpus-per-node=1 --cpus-per-task=4 \
            launch_slurm_with_torchrun.sh dev/cluster_report.py "$@" || true
    else
        export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 10000)) WORLD_SIZE=$count
        for ((node = 0; node < count; node++)); do
            RANK=$node SLURMD_NODENAME=node-$node NCCL_HOSTID=node-$node \
                timeout 250 python3 dev/cluster_report.py "$@" >>"$log" 2>&1 &
        done
        wait
    fi
    sed --quiet '/^# Cluster report/,$p' "$log"
}

run() {
    mkdir -p "$OUT"
    if [[ -e .nccl ]]; then install_slurm; fi
    # More CPUs than there are, so that no job waits for another.
    timeout 60 ./local/cluster/namespaces.sh up --nodes 12 --cpus 64 --gpus 1 || true
    nodes losses 4 losses &
    nodes stop 4 stop &
    nodes checks 2 checks hang &
    # Meanwhile the models compile, and find that done when they are timed.
    timeout 250 python3 dev/cluster_report.py 0.6b 1.7b &>/dev/null &
    timeout 250 python3 dev/cluster_report.py 1.7b-float8 0.6b-fsdp &>/dev/null &
    wait
    ./local/cluster/namespaces.sh down || true
    python3 dev/cluster_report.py checks "$@" 2>&1 | tee "$OUT/alone" || true
    tar --create --gzip --file="$OUT/logs.tar.gz" --exclude='*.bin' --exclude=digits log
}

"$@"
