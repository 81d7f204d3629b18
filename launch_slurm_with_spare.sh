#!/bin/bash
#SBATCH --nodes=3             # EDIT: the nodes of the run, and SPARE more
#SBATCH --ntasks-per-node=1   # one task per node: torchrun starts its ranks
#SBATCH --gpus-per-node=2     # EDIT
#SBATCH --cpus-per-task=16    # EDIT: for all ranks of a node, 8 for each GPU
##SBATCH --mem=0              # EDIT: without the second #, all memory of each node
##SBATCH --signal=TERM@300    # EDIT: without the second #, 300 s to save (torch 2.12 or newer)
#SBATCH --time=01:00:00       # EDIT
#SBATCH --output=%x_%j.out    # the log: this file's name and the job id
#SBATCH --requeue             # after a preemption, or the loss of the first node, it starts again
#SBATCH --open-mode=append    # a requeued job appends to its log
#SBATCH --no-kill             # the loss of any other node does not end the job
# As launch_slurm_with_torchrun.sh, with spare nodes: if a rank or a node fails, the run goes on in
# the same job, from its last checkpoint. A node that cannot run a step is left out, and so is one
# on which a rank has failed twice. bad_nodes.txt remembers both for later jobs, unless the rank
# failed at one step twice: delete a line if you disagree. A run that fails three times without a
# save ends. aux/launch/spare.py decides, and says why in the log. It needs Python 3.10 on the
# first node.
#
# Your script resumes if SLURM_RESTART_COUNT is not 0, as after a requeue.
#
# Usage, in this folder: sbatch [sbatch options] launch_slurm_with_spare.sh [SCRIPT [ARGUMENTS]]
#        sbatch --nodes=5 --gpus-per-node=8 --cpus-per-task=64 \
#            launch_slurm_with_spare.sh distributed/train_preemptible.py
set -euo pipefail
# EDIT: how many of the nodes are spare
SPARE=1
SLURM_JOB_NUM_NODES=$((${SLURM_JOB_NUM_NODES:-0} - SPARE))
unset SLURM_NTASKS
source ./env.sh
if ((NNODES < 1)); then die "--nodes must be more than SPARE=$SPARE"; fi
if [[ ! -f /dev/stderr || ! /dev/stdout -ef /dev/stderr ]]; then
    die "this launcher reads the job's log: start it with sbatch, without --error"
fi

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
at_exit() {
    status=$?
    note_end "$status" 2>/dev/null || true
    # EDIT: where the job's hours went. Needs heartbeats in your script.
    python3 aux/ledger.py "$SLURM_JOB_ID" 2>/dev/null || true
    exit "$status"
}
trap at_exit EXIT

# Tasks on other nodes requeue the job if it loses the first one, on which this shell is.
python3 aux/launch/spare.py watch &>/dev/null &

address=$MASTER_ADDR port=$MASTER_PORT requeues=${SLURM_RESTART_COUNT:-0} status=1
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# site.sh may have changed the address, but the name of another node must fit into it.
if ((NNODES > 1)) && [[ "$address" != *"$first"* ]]; then
    die "MASTER_ADDR=$address does not have the name of the first node, $first, in it"
fi

for ((start = 0; ; start++)); do
    # The first nodes that can run a step. If there are too few, it says so, and the job ends.
    hosts=$(python3 aux/launch/spare.py choose "$start" "${probe[@]}") || exit "$status"
    if [[ -n "$told" ]]; then exit "$status"; fi
    echo "Start $((start + 1)) on $hosts"

    # Each start has a port of its own, and a number, for which scripts resume.
    export MASTER_ADDR=${address/"$first"/${hosts%%,*}} MASTER_PORT=$port
    if ((start > 0)); then MASTER_PORT=$((61000 + (port + 1009 * start) % 4536)); fi
    if ((requeues + start > 0)); then
        export SLURM_RESTART_COUNT=$((10000 * requeues + start)) JOB_RESTARTS=$requeues
    fi

    # --no-kill=off: this step ends if it loses a node. The others are as in the other launchers.
    status=0
    srun --nodelist="$hosts" --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 \
        --cpus-per-task="$CPUS_PER_NODE" --no-kill=off --overlap --wait=0 --kill-on-bad-exit=1 \
        ./torchrun.sh "${@:-distributed/train_ddp.py}" || status=$?

    # Which node it was. A run that has ended, or makes no progress, does not start again.
    if [[ -n "$told" ]] || ! python3 aux/launch/spare.py blame "$status" "$saves"; then
        exit "$status"
    fi
done
