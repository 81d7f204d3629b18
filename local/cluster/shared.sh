# shellcheck shell=bash
# shellcheck disable=SC2154
# What namespaces.sh and kernels.sh have in common. Before they source it they set
#   here     the folder of these scripts
#   state    the folder of the cluster $CLUSTER, with its logs and process ids
#   inside   a folder in it that is a tmpfs, which only processes of the cluster see
#   login    whose file state/$login.pid leads to where Slurm's commands work
# And they define enter, which becomes a command there, and stop.

me="$0"
if [[ "$CLUSTER" != default ]]; then me="CLUSTER=$CLUSTER $0"; fi

fail() {
    echo "${0##*/}: ${*//[[:cntrl:]]/ }" >&2
    exit 1
}

number() {
    if [[ ! "$2" =~ ^(0|[1-9][0-9]{0,4})$ ]] || (($2 < $3 || $2 > $4)); then
        fail "$1 takes a number from $3 to $4, not '$2'"
    fi
    echo "$2"
}

require_root() {
    [[ "$(uname -s)" == Linux ]] || fail "needs Linux, this is $(uname -s)"
    ((EUID == 0)) || fail "needs root: sudo $me ..."
}

# Locks the folder that holds the state folders, so that no lock file stays behind.
lock() {
    exec {lock}<"${state%/*}"
    flock --exclusive "$lock"
}

# A process id from a file may belong to another process by now. Only ours sees our tmpfs.
is_running() {
    [[ -e "$1" && -d "/proc/$(<"$1")/root$inside/spool" ]]
}

is_up() {
    [[ -e "$state/size" ]] && is_running "$state/machine.pid"
}

# Whether it is up already. If it has another size, this is the end.
is_up_with() {
    is_up || return
    [[ "$(<"$state/size")" == "$1" ]] ||
        fail "cluster $CLUSTER is up with $(<"$state/size"): run '$me down' first"
    echo "Cluster $CLUSTER is already up: $1."
}

# Ending the first process of the outer PID namespace ends all processes in it, and the mounts and
# the network with them.
stop_machine() {
    local pid deadline=$((SECONDS + 60))
    is_running "$state/machine.pid" || return 0
    pid="$(<"$state/machine.pid")"
    kill -KILL "$pid"
    while grep --quiet '^State:[[:space:]]*[^ZX]' "/proc/$pid/status" 2>/dev/null; do
        ((SECONDS < deadline)) || fail "process $pid does not end"
        sleep 0.05
    done
}

down() {
    require_root
    lock
    stop
    rm --recursive --force "$state"
    echo "Cluster $CLUSTER is down."
}

status() {
    require_root
    is_up || fail "cluster $CLUSTER is not up: run '$me up'"
    local nodes
    nodes="$(enter "$login" sinfo --Node --long)"
    echo "Cluster $CLUSTER is up: $(<"$state/size")."
    echo "$nodes"
    (enter "$login" squeue)
}

write_configuration() {
    local nodes="$1" cpus="$2" gpus="$3" cgroups="$4" gpu device
    head --bytes=1024 /dev/urandom >"$inside/key/munge.key"
    chmod 400 "$inside/key/munge.key"
    "$here/configure.sh" "$inside" "$nodes" "$cpus" "$gpus" "$cgroups"
    for ((gpu = 0; gpu < gpus; gpu++)); do
        # If this machine has as many GPUs, they are each node's.
        device="/dev/nvidia$gpu"
        if [[ -z "${real_gpus:-}" || ! -e "/dev/nvidia$((gpus - 1))" ]]; then
            # Slurm insists on a character device. It has NVIDIA's major number, but no driver.
            device="$inside/gpu$gpu"
            mknod "$device" c 195 "$gpu"
        fi
        echo "Name=gpu File=$device" >>"$inside/gres.conf"
    done
}

start_munged() {
    munged --key-file="$inside/key/munge.key" --socket="$inside/munge/socket" \
        --pid-file="$inside/munge/pid" --seed-file="$inside/munge/seed" \
        --log-file="$state/log/munged-$1.log"
}
