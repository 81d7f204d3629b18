# shellcheck shell=bash
# Several programs in one job, each on nodes of its own. Source it in a job script, after env.sh:
#
#   keep SERVER 1 vllm serve MODEL --port "$PORT"    # once on each of the next nodes, here one
#   ready "http://$SERVER:$PORT/health" 3600         # until it answers, here for an hour at most
#   start TRAINER 3 ./torchrun.sh train.py           # its NNODES is 3, MASTER_ADDR its first node
#   finish                                           # when the last program ends, all end
#
# SERVER then has the names of its nodes, with blanks between them, and later programs inherit it.
# Each program has a RUN of its own, such as 123_TRAINER, and so its own checkpoints, and its own
# heartbeats (python aux/watch_job.py 123/TRAINER). On its nodes SLURM_NODEID counts from 0.
# If a program ends that `keep` has started, it is started again on the same nodes, after each of
# these PAUSES once, and the others go on.
# Slurm sends a signal to all programs. If a server ends for good, the last program has LAST_WORDS
# seconds to save and end, or the job fails. It also fails if a server has not answered in
# READY_LIMIT seconds.
PAUSES="5 30 120"
LAST_WORDS=300
READY_LIMIT=1800
if [[ "$(trap -p EXIT)" == *requeue_if_failed* ]]; then
    die "programs.sh and requeue_failed.sh do not go together"
fi
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# site.sh may have changed the address, but the name of another node must fit into it.
if ((${#hosts[@]} > 1)) && [[ "$MASTER_ADDR" != *"${hosts[0]}"* ]]; then
    die "MASTER_ADDR=$MASTER_ADDR does not have the name of the first node, ${hosts[0]}, in it"
fi
programs=() names=() used=0
# The job's end ends them as well. This is quieter.
end_programs() {
    local status=$?
    note_end "$status" 2>/dev/null || true
    kill "${programs[@]}" 2>/dev/null || true
    exit "$status"
}
trap end_programs EXIT
# Slurm signals this shell as well, whose `sleep` may then end early.
trap : TERM

start() { place exec "$@"; }

keep() { place again "$@"; }

# place exec|again NAME NODES COMMAND...
place() {
    local how=$1 name=$2 nodes=$3 own list
    own=("${hosts[@]:used:nodes}")
    if ((nodes < 1 || ${#own[@]} < nodes)); then
        echo "$name needs $nodes nodes, and $((${#hosts[@]} - used)) of the job's are left" >&2
        exit 1
    fi
    used=$((used + nodes))
    export "$name=${own[*]}"
    list=$(IFS=, && echo "${own[*]}")
    # A site's proxy does not know the nodes.
    no_proxy=${no_proxy:-${NO_PROXY:-}}
    no_proxy=${no_proxy:+$no_proxy,}$list
    export no_proxy
    NNODES=$nodes MASTER_ADDR=${MASTER_ADDR/"${hosts[0]}"/${own[0]}} \
        RUN=${RUN}_$name HEARTBEAT_PROGRAM=$name \
        "$how" srun --nodes="$nodes" --nodelist="$list" --ntasks="$nodes" \
        --ntasks-per-node=1 --cpus-per-task="$CPUS_PER_NODE" --overlap \
        --wait=0 --kill-on-bad-exit=1 "${@:4}" &
    programs+=($!) names+=("$name")
}

# Runs a command, and again when it has ended. This shell of its own is the program for `ended`.
again() {
    local name=$HEARTBEAT_PROGRAM pause pauses status child=
    read -ra pauses <<<"$PAUSES"
    trap 'kill "$child" 2>/dev/null; exit 143' TERM
    for pause in "${pauses[@]}" ""; do
        "$@" &
        child=$! status=0
        wait "$child" || status=$?
        if [[ "$pause" ]]; then
            echo "$name has ended with status $status, and starts again in $pause seconds" >&2
            sleep "$pause" &
            child=$!
            wait "$child" || true
        fi
    done
    echo "$name has ended with status $status, the last of $((${#pauses[@]} + 1)) times" >&2
    exit "$status"
}

# The name of a program that has ended, or nothing.
ended() {
    local i
    for i in "${!programs[@]}"; do
        kill -0 "${programs[i]}" 2>/dev/null || echo "${names[i]}"
    done
}

# ready URL [SECONDS]
ready() {
    local limit=${2:-$READY_LIMIT} began=$SECONDS host name server="the server"
    command -v curl >/dev/null || die "no curl on $HOSTNAME"
    until curl --max-time 10 --silent --fail --noproxy '*' --output /dev/null "$1"; do
        if [[ $(ended) ]]; then
            echo "$(ended) has ended before $1 answered" >&2
            exit 1
        fi
        if ((SECONDS - began >= limit)); then
            host=${1#*://} host=${host%%[:/]*}
            for name in "${names[@]}"; do
                if [[ " ${!name} " == *" $host "* ]]; then server=$name; fi
            done
            echo "$server on $host has not answered $1 in $limit seconds:" \
                "see its lines in $(readlink /proc/$$/fd/1)" >&2
            exit 1
        fi
        sleep 1 || true
    done
}

finish() {
    local last=${programs[-1]} seconds=$LAST_WORDS
    while kill -0 "$last" 2>/dev/null; do
        if [[ $(ended) ]]; then
            if ((seconds == LAST_WORDS)); then
                echo "$(ended) has ended: ${names[-1]} has $seconds seconds to save and end" >&2
            fi
            if ((seconds == 0)); then exit 1; fi
            seconds=$((seconds - 1))
        fi
        sleep 1 || true
    done
    wait "$last"
}
