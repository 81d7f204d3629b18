#!/bin/bash
# A Slurm cluster on this machine in which every node has a Linux kernel of its own, with cgroup v2,
# and mounts this repository by NFS 4.2. It is for tests: namespaces.sh is faster and needs less.
#
# Usage, as root:
#   ./dev/kernels.sh up [--nodes N] [--cpus C] [--gpus G] [--memory 3G] [--share FOLDER]
#   ./dev/kernels.sh exec [--node NAME] COMMAND [ARG ...]    on login, or another
#   ./dev/kernels.sh status                                  status 1 if it is not up
#   ./dev/kernels.sh down                                    leaves nothing behind
# By default it has 2 nodes that claim 16 CPUs and 2 GPUs each, and have one CPU and 3 GiB.
# --share names a folder that the nodes get from the NFS server, and may be repeated. Without it the
# repository is shared. All else of this machine's files they see too, by hostfs, but /tmp and /run.
#
#   ./dev/kernels.sh exec sbatch launch_slurm_with_torchrun.sh aux/check_ranks.py
#   ./dev/kernels.sh exec --node node-2 uname --kernel-release
#   ./dev/kernels.sh exec --node server ip link set eth0 down  # nobody reaches the files
#   kill -9 "$(cat /run/slurm-kernels-default/node-2.pid)"      # a power cut
#   kill -STOP "$(cat /run/slurm-kernels-default/nfs.pid)"      # an NFS server that hangs
#   CLUSTER=second ./dev/kernels.sh up    # another one, in /run/slurm-kernels-second
#
# login has slurmctld, server has nfs-ganesha. Both are network namespaces of this machine, so login
# sees the files themselves. The nodes are user-mode Linux, ordinary processes of this machine.
# Needs `make kernels`, which installs Debian's packages. Logs: /run/slurm-kernels-default/log
set -euo pipefail

CLUSTER="${CLUSTER:-default}"
self="$(realpath "${BASH_SOURCE[0]}")"
here="$(realpath "$(dirname "$self")/../local/cluster")"
state="/run/slurm-kernels-$CLUSTER"
inside="$state/inside" # a tmpfs of the cluster's, and in each kernel another one
login=machine          # Slurm's commands work around login as well
cgroup=/sys/fs/cgroup
# shellcheck source=local/cluster/shared.sh
source "$here/shared.sh"

# ---------------------------------------------------------------- on the host

up() {
    local nodes=2 cpus=16 gpus=2 memory=3G shares=() tool
    while (($#)); do
        case "$1" in
            --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
            --nodes) nodes="$(number "$1" "${2-}" 1 200)" ;;
            --cpus) cpus="$(number "$1" "${2-}" 1 1024)" ;;
            --gpus) gpus="$(number "$1" "${2-}" 0 64)" ;;
            --memory) memory="${2-}" ;;
            --share) shares+=("$(realpath "${2-}")") ;;
            *) fail "up knows --nodes, --cpus, --gpus, --memory and --share, not '$1'" ;;
        esac
        shift 2
    done
    if ((${#shares[@]} == 0)); then shares=("$(realpath "$here/../..")"); fi
    require_root
    export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"
    for tool in linux.uml ganesha.nfsd mount.nfs4 modprobe sshd slurmctld slurmd munged ip; do
        type -P "$tool" >/dev/null || fail "$tool is not installed: run make kernels"
    done
    # AMX's registers are larger than these kernels know: "ptrace set fp regs failed", and a panic.
    tool="$(linux.uml --version)"
    if grep --quiet --word-regexp amx_tile /proc/cpuinfo &&
        printf '%s\n' "$tool" 6.12.999 | sort --check=quiet --version-sort; then
        fail "Linux $tool in user mode dies on this processor, which has AMX: use another machine"
    fi
    lock
    local size="--nodes $nodes --cpus $cpus --gpus $gpus --memory $memory ${shares[*]/#/--share }"
    if is_up_with "$size"; then return; fi
    stop
    rm --recursive --force "$state"
    umask 022
    mkdir --parents "$inside" "$state/log"
    trap 'stop; kill -KILL "$machine" 2>/dev/null || true' EXIT
    trap 'exit 130' INT TERM
    # A fresh environment, so that no variable of the caller's gets into the jobs of others.
    setsid unshare --net --mount --propagation slave --pid --uts --ipc --fork --kill-child \
        env --ignore-environment PATH="$PATH" HOME=/root LC_ALL=C.UTF-8 CLUSTER="$CLUSTER" \
        "$self" machine "$nodes" "$cpus" "$gpus" "$memory" "${shares[@]}" \
        </dev/null &>"$state/log/machine.log" {lock}>&- &
    machine="$!"
    wait_until_idle "$nodes"
    connect "$nodes"
    echo "$size" >"$state/size"
    trap - EXIT INT TERM
    echo "Cluster $CLUSTER is up: $size."
}

wait_until_idle() {
    local deadline=$((SECONDS + 120 + 10 * $1))
    until [[ "$(enter machine sinfo --noheader --format="%T %D" 2>/dev/null)" == "idle $1" ]]; do
        if ! kill -0 "$machine" 2>/dev/null || ((SECONDS > deadline)) ||
            grep --quiet "Kernel panic" "$state"/log/boot-*.log 2>/dev/null; then
            tail --lines=5 "$state"/log/* >&2 || true
            fail "cluster $CLUSTER did not come up, see the ends of its logs above"
        fi
        sleep 0.3
    done
}

# Opens a connection to each node, over which exec then takes a tenth of a second.
connect() {
    local node
    for ((node = 1; node <= $1; node++)); do
        (enter machine ssh "${ssh_options[@]}" -M -N -f -o ServerAliveInterval=10 "node-$node") \
            </dev/null &>>"$state/log/ssh.log"
    done
}
ssh_options=(-F none -i "$inside/key/ssh" -o "ControlPath=$inside/ssh-%h" -o BatchMode=yes
    -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR
    -o ConnectTimeout=10)

# The kernels are among its processes.
stop() {
    stop_machine
}

exec_on_node() {
    local node=login
    case "${1-}" in
        --node) node="${2-}" && shift $(($# < 2 ? $# : 2)) ;;
        --node=*) node="${1#*=}" && shift ;;
        -*) fail "exec knows --node NAME before the command, not '$1'" ;;
    esac
    (($#)) || fail "exec needs a command: $0 exec sinfo"
    require_root
    is_up || fail "cluster $CLUSTER is not up: run '$me up'"
    # In a job of another cluster these are that job's, and srun would take them for its own.
    [[ ! -v SLURM_JOB_ID ]] || unset "${!SLURM_@}"
    # If stdin is closed, the first file that Slurm opens would become its stdin.
    { true <&0; } 2>/dev/null || exec </dev/null
    case "$node" in
        login) enter machine env --chdir="$PWD" "$@" ;;
        server) enter server env --chdir="$PWD" "$@" ;;
        *)
            [[ "$node" =~ ^node-[0-9]+$ && -e "$state/$node.pid" ]] ||
                fail "no node '$node' in cluster $CLUSTER, which is up with $(<"$state/size")"
            kill -0 "$(<"$state/$node.pid")" 2>/dev/null ||
                fail "$node of cluster $CLUSTER has crashed"
            local variables terminal=()
            readarray -d '' variables < <(env --null SLURM_CONF="$inside/slurm.conf")
            if [[ -t 0 && -t 1 ]]; then terminal=(-t); fi
            enter machine ssh "${ssh_options[@]}" "${terminal[@]}" "$node" \
                "exec $(printf '%q ' env -i --chdir="$PWD" "${variables[@]}" "$@")"
            ;;
    esac
}

# Becomes a command on login or the server.
enter() {
    local pid="$state/$1.pid"
    shift
    export SLURM_CONF="$inside/slurm.conf"
    exec nsenter --target "$(<"$pid")" --net --mount --uts --ipc --pid -- "$@"
}

# ---------------------------------------------------------------- in the namespaces

# login, and around it the network to which all are connected.
machine() {
    local nodes="$1" cpus="$2" gpus="$3" memory="$4" node
    mount -t tmpfs -o mode=755 slurm-kernels "$inside"
    mkdir "$inside"/{key,spool,state,munge,uml,proc}
    mount --rbind /proc "$inside/proc" # the host's
    mount -t proc proc /proc
    write_host_pid machine
    ssh-keygen -q -t ed25519 -N "" -f "$inside/key/ssh"
    write_configuration "$nodes" "$cpus" "$gpus" v2
    sed --in-place 's/^SlurmctldHost=.*/SlurmctldHost=login/' "$inside/slurm.conf"
    # Such a kernel has one CPU, no controller for cpusets, and none for swap.
    sed --in-place 's/task.affinity,//' "$inside/generated.conf"
    sed --in-place 's/^\(ConstrainCores\|ConstrainSwapSpace\)=.*/\1=no/' "$inside/cgroup.conf"
    printf '%s\n' "${@:5}" >"$inside/shares"
    # Every name twice, because torch also looks up IPv4 addresses in IPv6 form.
    printf '%s\n' "127.0.0.1 localhost" "::ffff:127.0.0.1 localhost" >"$inside/hosts"
    for node in login:254 server:253 $(seq "$nodes"); do
        [[ "$node" == *:* ]] || node="node-$node:$node"
        printf '%s\n' "10.9.0.${node#*:} ${node%:*}" "::ffff:10.9.0.${node#*:} ${node%:*}"
    done >>"$inside/hosts"
    mount --bind "$inside/hosts" /etc/hosts
    mkdir --parents "$inside/modules/lib/modules"
    ln --symbolic /usr/lib/uml/modules/* "$inside/modules/lib/modules/"
    touch "$inside/network"
    mount --bind /proc/self/ns/net "$inside/network"
    echo login >/proc/sys/kernel/hostname
    ip -batch - <<END_OF_BATCH
link set lo up
link add network type bridge
address add 10.9.0.254/24 dev network
link set network up
END_OF_BATCH
    unshare --net "$self" server &
    ulimit -S -n 16384 2>/dev/null || true
    for ((node = 1; node <= nodes; node++)); do
        ip tuntap add "tap$node" mode tap
        ip link set "tap$node" master network up
        "$self" power_on "$node" "$memory" \
            </dev/null &>"$state/log/boot-node-$node.log" &
    done
    munge_and_slurm slurmctld -D
    wait
}

# As the host sees it.
write_host_pid() {
    local pid
    read -r pid _ <"$inside/proc/self/stat"
    echo "$pid" >"$state/$1.pid"
}

# Starts munged here, and then a daemon of Slurm's.
munge_and_slurm() {
    local name
    name="$(</proc/sys/kernel/hostname)"
    start_munged "$name"
    SLURM_CONF="$inside/slurm.conf" "$@" &>"$state/log/$1-$name.log" &
}

# The NFS server has a cable of its own, so that it can be cut off.
server() {
    local share number=0
    write_host_pid server
    ip -batch - <<END_OF_BATCH
link set lo up
link add eth0 type veth peer name server netns $inside/network
address add 10.9.0.253/24 dev eth0
link set eth0 up
END_OF_BATCH
    nsenter --net="$inside/network" ip link set server master network up
    mkdir "$inside/nfs"
    {
        # No other version, so that it needs no rpcbind.
        echo "NFS_CORE_PARAM { Protocols = 4; Enable_NLM = false; Enable_RQUOTA = false;"
        echo "  Enable_UDP = false; fsid_device = true; allow_set_io_flusher_fail = true; }"
        # As Linux's own server: a client that vanishes keeps its locks for 90 seconds.
        echo "NFSV4 { Lease_Lifetime = 90; Graceless = true; Minor_Versions = 1, 2;"
        echo "  Only_Numeric_Owners = true; RecoveryRoot = $inside/nfs; }"
        # login writes the same files without the server's knowledge, so it caches nothing.
        echo "EXPORT_DEFAULTS { Access_Type = RW; Squash = No_Root_Squash; SecType = sys;"
        echo "  Protocols = 4; Transports = TCP; Attr_Expiration_Time = 0; }"
        while read -r share; do
            number=$((number + 1))
            echo "EXPORT { Export_Id = $number; Filesystem_Id = 9.$number; Path = \"$share\";"
            echo "  Pseudo = \"$share\"; FSAL { Name = VFS; } }"
        done <"$inside/shares"
    } >"$inside/ganesha.conf"
    while true; do
        "$self" serve || sleep 1
    done
}

serve() {
    write_host_pid nfs
    exec ganesha.nfsd -F -f "$inside/ganesha.conf" -p "$inside/nfs/pid" -N EVENT \
        -L "$state/log/ganesha.log"
}

power_on() {
    local node="$1" memory="$2"
    write_host_pid "node-$node"
    # seccomp: programs run twice as fast, from Linux 6.16 on. Older kernels ignore it.
    exec linux.uml root=/dev/root rootfstype=hostfs rootflags=/ rw "mem=$memory" seccomp=on \
        "uml_dir=$inside/uml/" "umid=node-$node" \
        "vec0:transport=tap,ifname=tap$node,depth=64,gro=1" con=null con0=null,fd:1 quiet \
        "init=$self" "CLUSTER=$CLUSTER" "number=$node" boot
}

# ---------------------------------------------------------------- in each kernel

# Its first process.
boot() {
    local name="node-$number" folder share
    export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    export HOME=/root LC_ALL=C.UTF-8
    unset number
    mount -t proc proc /proc
    mount -t sysfs sysfs /sys
    mkdir --parents /dev/pts /dev/shm
    ln --symbolic /proc/self/fd /dev/fd
    mount -t devpts devpts /dev/pts
    mount -t tmpfs tmpfs /dev/shm
    mount -t tmpfs tmpfs /tmp
    mount -t cgroup2 cgroup2 "$cgroup"
    echo "$name" >/proc/sys/kernel/hostname
    # The logs are the host's, the configuration is a copy.
    mkdir /tmp/state /tmp/inside
    shopt -s nullglob
    cp --archive "$inside"/{key,modules,hosts,shares,*.conf,*.sh,gpu*} /tmp/inside
    mount --bind "$state" /tmp/state
    mount -t tmpfs -o mode=755 tmpfs /run
    mkdir --parents "$state" /run/sshd
    mount --move /tmp/state "$state"
    mount -t tmpfs -o mode=755 tmpfs "$inside"
    cp --archive /tmp/inside/. "$inside"
    rm --recursive /tmp/inside /tmp/state
    mkdir "$inside"/{munge,spool,state}

    modprobe --dirname="$inside/modules" nfsv4
    # Newer kernels have ipv6 built in. The others are for containers.
    modprobe --dirname="$inside/modules" --quiet --all ipv6 fuse overlay squashfs || true
    ip link set lo up
    ip address add "10.9.0.${name#node-}/24" dev vec0
    ip link set vec0 up
    while read -r share; do
        mkdir --parents "$share"
        until mount -t nfs4 -o vers=4.2 "server:$share" "$share"; do sleep 1; done
    done <"$inside/shares"

    # A cgroup has either processes or controllers to pass on.
    mkdir "$cgroup"/{init.scope,system.slice}
    echo $$ >"$cgroup/init.scope/cgroup.procs"
    for folder in "$cgroup" "$cgroup/system.slice"; do
        echo "+cpu +memory +pids" >"$folder/cgroup.subtree_control"
    done
    "$(type -P sshd)" -f /dev/null -h "$inside/key/ssh" -E "$state/log/sshd-$name.log" \
        -o "AuthorizedKeysFile=$inside/key/ssh.pub" -o StrictModes=no -o MaxSessions=100 \
        -o PidFile=none
    munge_and_slurm slurmd -D -N "$name"
    sleep infinity & # the node lives on without its slurmd
    wait
}

main() {
    [[ "$CLUSTER" =~ ^[A-Za-z0-9_-]{1,32}$ ]] ||
        fail "CLUSTER takes up to 32 letters, digits, '-' and '_', not '$CLUSTER'"
    case "${1---help}" in
        up) "$@" ;;
        down | status)
            (($# == 1)) || fail "$1 takes no argument, not '$2'"
            "$1"
            ;;
        exec) exec_on_node "${@:2}" ;;
        machine | server | serve | power_on | boot) "$@" ;;
        -h | --help) sed --quiet '2,/^[^#]/ { s/^# \{0,1\}//p }' "${BASH_SOURCE[0]}" ;;
        *) fail "unknown command '$1', see '$0 --help'" ;;
    esac
}

main "$@"
