#!/bin/bash
# A real Slurm cluster on this machine, without Docker: every node is a set of Linux namespaces.
#
# Usage, as root or with sudo:
#   ./local/cluster/namespaces.sh up [--nodes N] [--cpus C] [--gpus G]
#   ./local/cluster/namespaces.sh exec [--node NAME] COMMAND [ARG ...]    on node-1, or another
#   ./local/cluster/namespaces.sh status                                  status 1 if it is not up
#   ./local/cluster/namespaces.sh down                                    leaves nothing behind
# By default it has 2 nodes with 16 CPUs and 2 GPUs each, what the launchers' headers ask for.
#
#   ./local/cluster/namespaces.sh up --nodes 4 --cpus 2
#   ./local/cluster/namespaces.sh exec sbatch --wait launch_slurm_to_torch.sh
#   ./local/cluster/namespaces.sh exec --node node-2 hostname
#   CLUSTER=second ./local/cluster/namespaces.sh up    # another one, in /run/slurm-cluster-second
#
# Needs Linux, root, and `apt-get install slurm-wlm munge iproute2`: Slurm 22.05 or newer in PATH.
# The nodes see this machine's files at the same paths, and no network but each other's.
# exec keeps the caller's folder, environment, terminal and exit status. Under sudo it runs as the
# calling user; for a Python of your own, sudo env PATH="$PATH" ./local/cluster/namespaces.sh exec.
# A node may claim more CPUs than the machine has: Slurm then binds no task to CPUs, and
# task_prolog.sh gives each one thread. With --cpus up to the machine's own, tasks are bound.
# GPUs are simulated: Slurm grants them and sets CUDA_VISIBLE_DEVICES, but torch sees none of them,
# so task_prolog.sh tells the tasks that there are none, and they train on the CPU. If the machine
# has NVIDIA's GPUs, each node has them: with --gpus 1 all nodes share one, and NCCL takes them for
# different hosts.
# Each node has cgroups of its own (v1 or v2), in which Slurm tracks processes and limits CPUs and
# memory, as on a site. A machine that has none does without them.
#
# Logs: /run/slurm-cluster-default/log
# Crash a node: kill -9 "$(cat /run/slurm-cluster-default/node-2.pid)"
set -euo pipefail

CLUSTER="${CLUSTER:-default}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
state="/run/slurm-cluster-$CLUSTER"
inside="$state/inside" # where the namespaces, and only they, see a tmpfs of their own
login="node-1"
cgroup_root=/sys/fs/cgroup
cgroup_name="${state##*/}"                          # of the cgroup that holds the nodes'
v1_controllers=(cpuset cpuacct memory devices freezer) # those that Slurm uses
v2_controllers="+cpuset +cpu +memory +pids" # pids, as Slurm 22.05 cannot read the last one

# shellcheck source=local/cluster/shared.sh
source "$here/shared.sh"

# ---------------------------------------------------------------- on the host

up() {
    local nodes=2 cpus=16 gpus=2 # machine, set below, is global because the trap needs it
    while (($#)); do
        case "$1" in
            --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
            --nodes) nodes="$(number "$1" "${2-}" 1 1000)" ;;
            --cpus) cpus="$(number "$1" "${2-}" 1 1024)" ;;
            --gpus) gpus="$(number "$1" "${2-}" 0 64)" ;;
            *) fail "up knows --nodes, --cpus and --gpus, not '$1'" ;;
        esac
        shift 2
    done
    require_root
    export PATH="$PATH:/usr/local/sbin:/usr/sbin"
    local tool
    for tool in slurmctld slurmd munged ip; do
        type -P "$tool" >/dev/null ||
            fail "$tool is not installed (Debian, Ubuntu: apt-get install slurm-wlm munge iproute2)"
    done
    unshare --net --mount --pid --uts --ipc --fork true 2>/dev/null ||
        fail "this machine does not let root make namespaces" \
            "(in a container: start it with --privileged)"
    lock
    local size="--nodes $nodes --cpus $cpus --gpus $gpus" cgroups
    if is_up_with "$size"; then return; fi
    stop
    rm --recursive --force "$state"
    cgroups="$(make_cgroups)"
    if [[ "$cgroups" == none ]]; then
        remove_cgroups
        echo "Without cgroups (proctrack/linuxproc): a signal reaches every process of a step. On" \
            "most clusters it reaches only the processes that Slurm itself has started."
    fi
    umask 022
    mkdir --parents "$inside" "$state/log"
    trap 'stop; kill -KILL "$machine" 2>/dev/null || true' EXIT
    trap 'exit 130' INT TERM
    # A fresh environment, so that no variable of the caller's gets into the jobs of others.
    setsid unshare --net --mount --propagation slave --pid --uts --ipc --fork --kill-child \
        env --ignore-environment PATH="$PATH" CLUSTER="$CLUSTER" \
        "$here/namespaces.sh" machine "$nodes" "$cpus" "$gpus" "$cgroups" \
        </dev/null &>"$state/log/machine.log" {lock}>&- &
    machine="$!"
    wait_until_idle "$nodes"
    echo "$size" >"$state/size"
    trap - EXIT INT TERM
    echo "Cluster $CLUSTER is up: $size."
}

wait_until_idle() {
    local deadline=$((SECONDS + 60 + $1 / 2)) log=""
    until [[ "$(enter node-1 sinfo --noheader --format="%T %D" 2>/dev/null)" == "idle $1" ]]; do
        if ! kill -0 "$machine" 2>/dev/null; then
            log="$state/log/machine.log"
        elif [[ -s "$state/ended" ]]; then
            log="$(head --lines=1 "$state/ended")"
        elif ((SECONDS > deadline)); then
            log="$state/log/slurmctld.log"
        fi
        if [[ -n "$log" ]]; then
            tail --lines=10 "$log" >&2 || true
            fail "cluster $CLUSTER did not come up, see the last lines of $log above;" \
                "the other logs are beside it"
        fi
        sleep 0.1
    done
}

# Makes the cgroup that will hold the nodes', and prints its version, or "none" if this machine or
# container has no cgroups to give.
make_cgroups() {
    local controller file
    if [[ -e "$cgroup_root/cgroup.controllers" ]]; then
        if mkdir "$cgroup_root/$cgroup_name" &&
            echo "$v2_controllers" >"$cgroup_root/cgroup.subtree_control" &&
            echo "$v2_controllers" >"$cgroup_root/$cgroup_name/cgroup.subtree_control"; then
            echo v2
        else
            echo none
        fi
        return
    fi
    for controller in "${v1_controllers[@]}"; do
        if ! mkdir "$cgroup_root/$controller/$cgroup_name"; then
            echo none
            return
        fi
    done
    # A new cpuset is empty, and no process can join it.
    for file in cpuset.cpus cpuset.mems; do
        cat "$cgroup_root/cpuset/$file" >"$cgroup_root/cpuset/$cgroup_name/$file"
    done
    # Cgroups made in it inherit these.
    echo 1 >"$cgroup_root/cpuset/$cgroup_name/cgroup.clone_children"
    echo v1
} 2>/dev/null

# It tries for a while, because the kernel still counts a process that has just ended.
remove_cgroups() {
    local folder deadline=$((SECONDS + 10))
    for folder in "$cgroup_root"/{.,*}/"$cgroup_name"; do
        until [[ ! -e "$folder" ]] || find "$folder" -depth -type d -exec rmdir {} + 2>/dev/null; do
            ((SECONDS < deadline)) || fail "$folder cannot be removed"
            sleep 0.05
        done
    done
}

stop() {
    stop_machine
    remove_cgroups
}

exec_on_node() {
    local node=node-1
    case "${1-}" in
        --node) node="${2-}" && shift $(($# < 2 ? $# : 2)) ;;
        --node=*) node="${1#*=}" && shift ;;
        -*) fail "exec knows --node NAME before the command, not '$1'" ;;
    esac
    (($#)) || fail "exec needs a command: $me exec sinfo"
    require_root
    is_up || fail "cluster $CLUSTER is not up: run '$me up'"
    [[ "$node" =~ ^node-[0-9]+$ && -e "$state/$node.pid" ]] ||
        fail "no node '$node' in cluster $CLUSTER, which is up with $(<"$state/size")"
    # In a job of another cluster these are that job's, and srun would take them for its own.
    [[ ! -v SLURM_JOB_ID ]] || unset "${!SLURM_@}"
    local user=(--pdeathsig TERM) # nsenter waits in between and does not pass signals on
    if [[ -n "${SUDO_UID-}" ]]; then
        user+=(--reuid "$SUDO_UID" --regid "$SUDO_GID" --init-groups)
        export USER="$SUDO_USER" LOGNAME="$SUDO_USER" HOME
        HOME="$(getent passwd "$SUDO_UID" | cut --delimiter=: --fields=6)"
    fi
    # If stdin is closed, the first file that Slurm opens would become its stdin.
    { true <&0; } 2>/dev/null || exec </dev/null
    enter "$node" setpriv "${user[@]}" env --chdir="$PWD" "$@"
}

# Becomes a command on a node.
enter() {
    local node="$1"
    shift
    is_running "$state/$node.pid" || fail "$node of cluster $CLUSTER has crashed"
    export SLURM_CONF="$inside/slurm.conf"
    exec nsenter --target "$(<"$state/$node.pid")" --net --mount --uts --ipc --pid -- "$@"
}

# ---------------------------------------------------------------- in the namespaces

# The first process of the outer namespaces, which hold the nodes, the cables between them, and a
# tmpfs.
machine() {
    local nodes="$1" cpus="$2" gpus="$3" cgroups="$4" node
    # Not /run's own tmpfs, which is often noexec, because jobs run from here.
    mount -t tmpfs -o mode=755 slurm-cluster "$inside"
    mkdir "$inside"/{key,spool,state,munge,cgroup}
    write_host_pid machine
    real_gpus=yes write_configuration "$nodes" "$cpus" "$gpus" "$cgroups"
    # Every name twice, because torch also looks up IPv4 addresses in IPv6 form.
    printf '%s\n' "127.0.0.1 localhost" "::ffff:127.0.0.1 localhost" >"$inside/hosts"
    for ((node = 1; node <= nodes; node++)); do
        printf '%s\n' "$(address "$node") node-$node" "::ffff:$(address "$node") node-$node"
    done >>"$inside/hosts"
    [[ -e /etc/hosts ]] || touch /etc/hosts # a minimal system has none
    mount --bind "$inside/hosts" /etc/hosts
    touch "$inside/router"
    mount --bind /proc/self/ns/net "$inside/router"
    ip link set lo up
    echo 1 >/proc/sys/net/ipv4/ip_forward
    # Enough for slurmctld, while a limit of a billion would make daemons close a billion files.
    ulimit -S -n 16384 2>/dev/null || true
    for ((node = 1; node <= nodes; node++)); do
        unshare --net --mount --propagation slave --pid --uts --ipc --fork --kill-child \
            "$here/namespaces.sh" enter_cgroups "$node" "$cgroups" &
    done
    wait
}

# /proc is still the host's, so it shows this process's id on the host.
write_host_pid() {
    local pid
    read -r pid _ </proc/self/stat
    echo "$pid" >"$state/$1.pid"
}

address() {
    echo "10.7.$(($1 / 256)).$(($1 % 256))"
}

# The first process of a node enters the node's own cgroups, which must appear where Slurm looks for
# the machine's.
enter_cgroups() {
    local node="node-$1" version="$2" controller become=()
    case "$version" in
        v1)
            # They replace the machine's instead of lying on top of them, because Enroot takes the
            # first mount that it finds.
            for controller in "${v1_controllers[@]}"; do
                mkdir "$cgroup_root/$controller/$cgroup_name/$node"
                mount --bind "$cgroup_root/$controller/$cgroup_name/$node" "$inside/cgroup"
                umount "$cgroup_root/$controller"
                mount --move "$inside/cgroup" "$cgroup_root/$controller"
            done
            ;;
        v2)
            mkdir "$cgroup_root/$cgroup_name/$node"
            echo $$ >"$cgroup_root/$cgroup_name/$node/cgroup.procs"
            become=(unshare --cgroup) # from here on this cgroup is the root
            ;;
    esac
    exec "${become[@]}" "$here/namespaces.sh" node "$@"
}

node() {
    local name="node-$1" mac=02:00:00:00:00:01
    write_host_pid "$name"
    # Unless it is killed by SIGKILL, this process ends only if something fails.
    trap 'echo "$state/log/machine.log" >>"$state/ended"' EXIT
    mount -t proc proc /proc
    mount -t tmpfs tmpfs /dev/shm
    mount -t tmpfs -o mode=755 tmpfs "$inside/munge"
    echo "$name" >/proc/sys/kernel/hostname
    if [[ "$2" == v2 ]]; then
        umount "$cgroup_root" # two on top of each other confuse Slurm
        mount -t cgroup2 cgroup2 "$cgroup_root"
        # A cgroup has either processes or controllers to pass on. Slurm makes
        # system.slice/slurmstepd.scope.
        mkdir "$cgroup_root"/{init.scope,system.slice}
        echo $$ >"$cgroup_root/init.scope/cgroup.procs"
        echo "$v2_controllers" >"$cgroup_root/cgroup.subtree_control"
        echo "$v2_controllers" >"$cgroup_root/system.slice/cgroup.subtree_control"
        # A slurmstepd that ends moves into the root, which accepts processes only on a real
        # machine. Here it moves into a leaf instead.
        mount --bind "$cgroup_root/init.scope/cgroup.procs" "$cgroup_root/cgroup.procs"
    fi
    # A cable to a router instead of a bridge, and without ARP, because the kernel keeps one ARP
    # table for all namespaces, and 64 nodes that talk to each other overflow its 1,024 entries.
    # With one hardware address everywhere, nobody needs ARP.
    ip -batch - <<END_OF_BATCH
link set lo up
link add eth0 address $mac type veth peer name $name address $mac netns $inside/router
link set eth0 arp off up
address add $(address "$1")/16 dev eth0
END_OF_BATCH
    nsenter --net="$inside/router" ip -batch - <<END_OF_BATCH
link set $name arp off up
route add $(address "$1") dev $name
END_OF_BATCH
    start_munged "$name"
    export SLURM_CONF="$inside/slurm.conf"
    if [[ "$name" == node-1 ]]; then
        daemon "$state/log/slurmctld.log" slurmctld -D &
    fi
    daemon "$state/log/slurmd-$name.log" slurmd -D -N "$name" &
    sleep infinity & # the node lives on without its slurmd
    wait
}

daemon() {
    local log="$1"
    shift
    "$@" &>"$log" || true
    echo "$log" >>"$state/ended"
}

main() {
    [[ "$CLUSTER" =~ ^[A-Za-z0-9_-]{1,32}$ ]] ||
        fail "CLUSTER takes up to 32 letters, digits, '-' and '_', not '$CLUSTER'"
    if [[ "${1-}" =~ ^(up|down|status|exec)$ && -e "$inside/slurm.conf" ]]; then
        fail "this shell is on a node of cluster $CLUSTER:" \
            "type the command without '$me exec', or 'exit' before '$me $1'"
    fi
    case "${1---help}" in
        up) "$@" ;;
        down | status)
            (($# == 1)) || fail "$1 takes no argument, not '$2'"
            "$1"
            ;;
        exec) exec_on_node "${@:2}" ;;
        machine | enter_cgroups | node)
            (($$ == 1)) || fail "unknown command '$1', see '$0 --help'"
            "$@"
            ;;
        -h | --help) sed --quiet '2,/^[^#]/ { s/^# \{0,1\}//p }' "${BASH_SOURCE[0]}" ;;
        *) fail "unknown command '$1', see '$0 --help'" ;;
    esac
}

main "$@"
