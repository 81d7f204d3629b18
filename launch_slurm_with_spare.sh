#!/bin/bash
#SBATCH --nodes=3             # EDIT: the nodes of the run, and SPARE more
#SBATCH --ntasks-per-node=1   # one task per node: torchrun starts its ranks
#SBATCH --gpus-per-node=2     # EDIT
#SBATCH --cpus-per-task=16    # EDIT: for all ranks of a node, 8 for each GPU
##SBATCH --mem=0              # EDIT: without the second #, all memory of each node
##SBATCH --signal=TERM@300    # EDIT: with preemption.py, without the second #: 300 s to save
#SBATCH --time=01:00:00       # EDIT
#SBATCH --output=%x_%j.out    # the log: this file's name and the job id
#SBATCH --requeue             # after a preemption, or the loss of the first node, it starts again
#SBATCH --open-mode=append    # a requeued job appends to its log
#SBATCH --no-kill             # the loss of any other node does not end the job
# As launch_slurm_with_torchrun.sh, with spare nodes: if a rank or a node fails, the run goes on in
# the same job, from its last checkpoint. A node that cannot run a step is left out, and so is one
# on which a rank has failed twice. Both are written into bad_nodes.txt, whose nodes this launcher
# does not use: delete a line if you disagree. A run that fails three times without a save ends.
#
# Your script resumes if SLURM_RESTART_COUNT is not 0, as after a requeue.
#
# Usage, in this folder: sbatch [sbatch options] launch_slurm_with_spare.sh [SCRIPT [ARGUMENTS]]
#        sbatch --nodes=5 --gpus-per-node=8 --cpus-per-task=96 \
#            launch_slurm_with_spare.sh distributed/train_preemptible.py
set -euo pipefail
# EDIT: so many of the nodes are spare
SPARE=1
SLURM_JOB_NUM_NODES=$((${SLURM_JOB_NUM_NODES:-0} - SPARE))
if ((SLURM_JOB_NUM_NODES < 1)); then echo "--nodes must be more than SPARE=$SPARE" && exit 1; fi
unset SLURM_NTASKS
source ./env.sh
# EDIT: the folder or file in which the run saves, and nothing else. A newer file there is progress.
saves=checkpoints/$RUN
# EDIT: a command that fails on a bad node, such as (nvidia-smi),
# or (env NNODES=1 MASTER_ADDR=localhost ./torchrun.sh aux/check_ranks.py)
probe=(true)
# EDIT: after so many seconds without a step heartbeat.py ends the run, and names the node.
export HEARTBEAT_LIMIT=600

# Slurm sends SIGTERM before it kills a job. Some scripts then save, and this shell waits for them.
told=
trap 'told=1' TERM
# EDIT: where the job's hours went. Needs heartbeats in your script.
trap 'python3 aux/ledger.py "$SLURM_JOB_ID" 2>/dev/null || true' EXIT

list() { (IFS=, && echo "$*"); }
# Neither told to end, nor started anew elsewhere. A busy Slurm is asked again, for a minute.
is_running() {
    local shown="" pause
    if [[ -n "$told" ]]; then return 1; fi
    for pause in 0 5 10 20 30; do
        sleep "$pause"
        if shown=$(squeue --noheader --jobs="$job" --Format=state:20,restartcnt:9); then break; fi
    done
    read -r state count <<<"$shown"
    [[ -z "$shown" || "$state $count" == "RUNNING $requeues" ]]
}
# A file that is newer than the start, whole, and neither a log nor checkpoint.py's mark of who may
# write.
has_saved() {
    [[ $(find -H "$saves" -newer "$started" -type f ! -name '*part' ! -name owner ! -name '*.log' \
        ! -name '*tfevents*' ! -path "$saves/.*" ! -path "$saves/*/.*" -print -quit 2>/dev/null) ]]
}
# Those of the job's nodes that can run a step now.
fit_nodes() {
    trap : TERM
    for node in "${nodes[@]}"; do
        if [[ -n "${out[$node]:-}" ]]; then continue; fi
        timeout --kill-after=9 120 srun --nodelist="$node" --nodes=1 --ntasks=1 \
            --cpus-per-task="$CPUS_PER_NODE" --overlap --kill-on-bad-exit=1 --immediate=30 \
            "${probe[@]}" &>/dev/null && echo "$node" &
    done
    wait
}
# leave_out NODE WHY
leave_out() {
    echo "Left out: $1, $2"
    out[$1]=$2
    if ! grep --quiet " $1 " bad_nodes.txt; then
        echo "$(date +%F) $1 $2 (job $SLURM_JOB_ID)" >>bad_nodes.txt
    fi
}

# Of an array only this task, because the array's id can mean all of them.
job=$SLURM_JOB_ID
if [[ -n "${SLURM_ARRAY_TASK_ID:-}" ]]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
unset "${!SQUEUE_@}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# site.sh may have changed the address, but the name of another node must fit into it.
address=$MASTER_ADDR port=$MASTER_PORT
if ((NNODES > 1)) && [[ "$address" != *"${nodes[0]}"* ]]; then
    die "MASTER_ADDR=$address does not have the name of the first node, ${nodes[0]}, in it"
fi
log=$(readlink "/proc/$$/fd/2") started=log/$SLURM_JOB_ID/started
if [[ ! -f "$log" ]]; then die "it reads its own log, so start it with sbatch"; fi
requeues=${SLURM_RESTART_COUNT:-0} restarts=0 failures=0 status=1 suspect=
declare -A out=() deaths=()
use=()
touch bad_nodes.txt
for node in "${nodes[@]}"; do
    if grep --quiet " $node " bad_nodes.txt; then leave_out "$node" "as bad_nodes.txt says"; fi
done

# This shell is on the first node. Slurm does not requeue a --no-kill job that loses that node, so
# tasks on up to three other nodes requeue it.
others=("${nodes[@]:1:3}")
# shellcheck disable=SC2016
srun --nodelist="$(list "${others[@]}")" --nodes="${#others[@]}" --ntasks="${#others[@]}" \
    --cpus-per-task=1 --overlap --no-kill --kill-on-bad-exit=0 \
    bash -c 'while sleep 20; do
        start=$(squeue --noheader --jobs="$0" --Format=restartcnt:9) || continue
        shown=$(squeue --noheader --states=all --jobs="$0" --nodelist="$1") || continue
        if [[ -z "$shown" && $((start)) == "$2" ]]; then scontrol requeue "$0"; fi
    done' "$job" "${nodes[0]}" "$requeues" &>/dev/null &

while true; do
    # --- the first nodes that can run a step ---
    fit=$(fit_nodes) || true
    if ! is_running; then exit "$status"; fi
    if [[ -z "$fit" ]]; then echo "No node runs a step: the job ends" && exit "$status"; fi
    for node in "${nodes[@]}"; do
        if [[ -z "${out[$node]:-}" ]] && ! grep --quiet --line-regexp "$node" <<<"$fit"; then
            leave_out "$node" "it does not run a step"
            # A rank that fails when it has lost this node is not to blame.
            if [[ " ${use[*]} " == *" $node "* ]]; then suspect=; fi
        fi
    done
    if [[ -n "$suspect" ]]; then
        deaths[$suspect]=$((${deaths[$suspect]:-0} + 1))
        if ((deaths[$suspect] == 2)); then leave_out "$suspect" "a rank has failed there twice"; fi
    fi
    use=()
    for node in "${nodes[@]}"; do
        if [[ -z "${out[$node]:-}" ]] && ((${#use[@]} < NNODES)); then use+=("$node"); fi
    done
    hosts=$(list "${use[@]}")
    if ((${#use[@]} < NNODES)); then
        echo "No spare node is left: the run needs $NNODES, and only ${#use[@]} can be used." \
            "Submit it again with --exclude=$(list "${!out[@]}")"
        exit "$status"
    fi
    echo "Start $((restarts + 1)) on $hosts"

    # --- the run: each start has a port of its own, and a number, for which scripts resume ---
    export MASTER_ADDR=${address/${nodes[0]}/${use[0]}} MASTER_PORT=$port
    if ((restarts > 0)); then MASTER_PORT=$((61000 + (port + 1009 * restarts) % 4536)); fi
    if ((requeues + restarts > 0)); then
        export SLURM_RESTART_COUNT=$((100 * requeues + restarts)) JOB_RESTARTS=$requeues
    fi
    touch "$started"
    before=$(stat --format=%s "$log") status=0
    # --no-kill=off: this step ends if it loses a node. The others are as in the other launchers.
    srun --nodelist="$hosts" --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 \
        --cpus-per-task="$CPUS_PER_NODE" --no-kill=off --overlap --wait=0 --kill-on-bad-exit=1 \
        ./torchrun.sh "${@:-distributed/train_ddp.py}" || status=$?

    # --- why it has ended: the node of a rank that was killed, as torchrun's report says, or the
    # first one that srun or heartbeat.py names ---
    # srun's --label or torchrun's --tee may have put a label before the line.
    label='^(\[[^]]*\]: ?|[0-9]+: )?'
    signs="/$label(Requeued|Not requeued): /p; s/^srun: error: (\\S+): task .*/\\1/p"
    signs+="; s/${label}Ended, because of rank \\S+ on (\\S+): .*/\\2/p"
    signs+="; s/${label}Ended, because of no rank .*/-/p"
    # SIGKILL and SIGBUS. Other signals may follow from the end of another rank.
    signs+="; /Root Cause/,/====/{/ host +: /{h;n;n}; /exitcode +: -(7|9) /{x; s/.* /killed: /p}}"
    said=$(tail --bytes=+$((before + 1)) "$log" | sed --quiet --regexp-extended "$signs")
    if ((status == 0)) || [[ "$said" == *equeued:* ]] || ! is_running; then exit "$status"; fi
    restarts=$((restarts + 1)) failures=$((failures + 1))
    suspect=$(grep --invert-match --max-count=1 '^killed: ' <<<"$said") || true
    while read -r host; do
        # The report may have a domain that Slurm's name lacks.
        for name in "$host" "${host%%.*}"; do
            if [[ " ${nodes[*]} " == *" $name "* ]]; then suspect=$name && break 2; fi
        done
    done < <(sed --quiet 's/^killed: //p' <<<"$said")
    if [[ "$suspect" == - ]]; then suspect=; fi
    echo "start $restarts: status $status, ${suspect:-no node} first" >>"log/$SLURM_JOB_ID/ends"
    if has_saved; then failures=0; fi
    if ((failures == 3)); then
        # More likely the script's fault than that of the nodes on which it failed.
        sed --in-place "/failed there twice (job $SLURM_JOB_ID)/d" bad_nodes.txt
        echo "The run has failed three times without a new file in $saves: it ends"
        exit "$status"
    fi
done
