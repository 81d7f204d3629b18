#!/bin/bash
#SBATCH --nodes=3             # EDIT: the nodes of the run, and SPARE more
#SBATCH --ntasks-per-node=1   # one task per node: torchrun starts its ranks
#SBATCH --gpus-per-node=2     # EDIT
#SBATCH --cpus-per-task=16    # EDIT: for all ranks of a node, 8 for each GPU
##SBATCH --mem=0              # EDIT: without the second #, all memory of each node
##SBATCH --signal=TERM@300    # EDIT: with preemption.py, without the second #: 300 s to save
#SBATCH --time=01:00:00       # EDIT
#SBATCH --output=%x_%j.out    # the log: this file's name and the job id
#SBATCH --requeue             # after a preemption or a lost first node Slurm starts the job again
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
unset SLURM_NTASKS
source ./env.sh
# EDIT: the folder in which the run saves. A newer file there is progress.
saves=checkpoints/$RUN
# EDIT: a command that fails on a bad node, such as (nvidia-smi)
probe=(true)
# EDIT: after so many seconds without a step heartbeat.py ends the run, and names the node.
export HEARTBEAT_LIMIT=600

# Slurm sends SIGTERM before it kills a job. Some scripts then save, and this shell waits for them.
trap : TERM

leave_out() {
    echo "Left out: $1, $2"
    out[$1]=$2
}
remember() { echo "$(date +%F) $1 $2 (job $SLURM_JOB_ID)" >>bad_nodes.txt; }
is_running() { [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING* ]]; }
# A step that has just been written, or belongs to no step yet, is no save.
has_saved() {
    [[ $(find "$saves" -newer "$started" -type f ! -name part ! -name owner ! -path '*/.*' -print \
        -quit 2>/dev/null) ]]
}

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# site.sh may have appended something to the name of the first node.
suffix=${MASTER_ADDR#"${nodes[0]}"} port=$MASTER_PORT
log=$(readlink "/proc/$$/fd/2") started=log/$SLURM_JOB_ID/started
declare -A out=() deaths=()
touch bad_nodes.txt
for node in "${nodes[@]}"; do
    if grep --quiet "^[^ ]* $node " bad_nodes.txt; then leave_out "$node" "as bad_nodes.txt says"; fi
done

requeues=${SLURM_RESTART_COUNT:-0} restarts=0 failures=0 status=1
while true; do
    # --- nodes: the first that can run a step ---
    mapfile -t fit < <(
        for node in "${nodes[@]}"; do
            timeout --kill-after=9 60 srun --nodelist="$node" --nodes=1 --ntasks=1 --overlap \
                --immediate=30 "${probe[@]}" &>/dev/null && echo "$node" &
        done
        wait
    )
    if ! is_running; then exit "$status"; fi
    use=()
    for node in "${nodes[@]}"; do
        if [[ -n "${out[$node]:-}" ]]; then continue; fi
        if [[ " ${fit[*]} " != *" $node "* ]]; then
            leave_out "$node" "which does not run a step"
            remember "$node" "did not run a step"
        elif ((${#use[@]} < NNODES)); then
            use+=("$node")
        fi
    done
    if ((${#use[@]} < NNODES)); then
        echo "No spare node is left: ${#use[@]} of the $NNODES that the run needs. Submit it again" \
            "with --exclude=$(IFS=, && echo "${!out[*]}")"
        exit "$status"
    fi
    hosts=$(IFS=, && echo "${use[*]}")
    echo "Start $((restarts + 1)) on $hosts"

    # --- the run: each start has an own port, and a number of its own, by which scripts resume ---
    export MASTER_ADDR=${use[0]}$suffix MASTER_PORT=$((port - restarts))
    if ((requeues + restarts > 0)); then
        export SLURM_RESTART_COUNT=$((100 * requeues + restarts)) JOB_RESTARTS=$requeues
    fi
    touch "$started"
    before=$(stat --format=%s "$log") status=0
    # --no-kill=off: without one of its nodes this step ends.
    srun --nodelist="$hosts" --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 \
        --cpus-per-task="$CPUS_PER_NODE" --no-kill=off --overlap --wait=0 --kill-on-bad-exit=1 \
        ./torchrun.sh "${@:-distributed/train_ddp.py}" || status=$?

    # --- why it ended ---
    causes='^(Requeued|Not requeued): |^srun: error: \S+: task |^Ended, because of rank \S+ on '
    said=$(tail --bytes=+$((before + 1)) "$log" | grep --extended-regexp "$causes" || true)
    if ((status == 0)) || [[ "$said" == *equeued:* ]] || ! is_running; then exit "$status"; fi
    failures=$((failures + 1)) restarts=$((restarts + 1))
    if has_saved; then failures=0; fi
    if [[ "$said" =~ (of rank [0-9]+ on |srun: error: )([^ :]+) ]]; then
        node=${BASH_REMATCH[2]}
        deaths[$node]=$((${deaths[$node]:-0} + 1))
        if ((deaths[$node] == 2)); then
            leave_out "$node" "where a rank has failed twice"
            remember "$node" "a rank failed twice"
        fi
    fi
    if ((failures == 3)); then
        echo "The run has failed three times without a newer file in $saves: it ends"
        exit "$status"
    fi
done
