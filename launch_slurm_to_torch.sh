#!/bin/bash -p
#SBATCH --nodes=2                  # EDIT
#SBATCH --ntasks-per-node=2        # EDIT: one task per GPU: Slurm starts every rank
#SBATCH --gpus-per-node=2          # EDIT
#SBATCH --cpus-per-task=1          # EDIT: CPUs of one rank, for its threads and loader workers
#SBATCH --time=01:00:00            # EDIT
#SBATCH --output=%x_%j.out
#SBATCH --open-mode=append         # a requeued job goes on in its log
#SBATCH --requeue
#SBATCH --signal=USR1@120          # EDIT: ranks get USR1 120 s before the limit: some scripts save, the others ignore it
##SBATCH --mem=0                   # EDIT: take one # away: all memory of the nodes, where a site's default is small
# Way 1: srun starts every rank. Each task sets RANK and LOCAL_RANK (below), env.sh sets the other three variables.
#
# Usage: sbatch [sbatch options] launch_slurm_to_torch.sh [train script] [its arguments]
#        sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 launch_slurm_to_torch.sh distributed/train_ddp.py
set -euo pipefail                  # ends at a command that fails (-e), also in a pipe, and at a variable not set (-u)
[[ -f env.sh ]] || { echo "No env.sh in $PWD: cd to the repository before sbatch, or sbatch --chdir=REPOSITORY" >&2; exit 1; }
source ./env.sh                    # sets WORLD_SIZE, MASTER_ADDR, MASTER_PORT; die, start_job, finish_job are aux/job.sh's
command -v python >/dev/null || die "no python on $HOSTNAME: make a .venv here, or edit env.sh"

set -- "${@:-distributed/train_ddp.py}"    # "$@" stays what was given; if nothing was, it is this train script
((WORLD_SIZE == ${SLURM_NTASKS:-$WORLD_SIZE})) ||
    die "$SLURM_NTASKS tasks, but $NNODES nodes x $NPROC_PER_NODE ranks: a rank is a task, add --ntasks-per-node=$NPROC_PER_NODE"
start_job "Way 1, srun starts every rank" "$@"    # last checks, and a line in the log

# --ntasks            a task for each rank
# --kill-on-bad-exit  a task that fails ends the step, and so the others, at once
# --wait              EDIT: seconds after the first task exits, until Slurm ends the rest
# --distribution      block:block: fill a node, then the next; in a node fill a CPU socket, then the next
# --cpus-per-task     srun of Slurm 22.05 and 23.02 does not inherit it
# RANK                by node number: Slurm's task 0 need not be on the node MASTER_ADDR, but RANK 0 has to be
# --norc -p           this bash reads no ~/.bashrc (--norc), and no functions from the environment (-p, as in line 1)
# shellcheck disable=SC2016  # each task's bash, not this one, fills in the variables in '...'
srun --ntasks="$WORLD_SIZE" --kill-on-bad-exit=1 --wait=300 --distribution=block:block \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-$CPUS_PER_RANK}" bash --norc -pc '
        export LOCAL_RANK=$SLURM_LOCALID RANK=$((SLURM_NODEID * NPROC_PER_NODE + SLURM_LOCALID))
        if [[ "$SLURM_STEP_TASKS_PER_NODE" == *,* ]]; then RANK=$SLURM_PROCID; fi    # unequal nodes, as 4,3,4 tasks
        exec ./aux/run_task.sh python "$@"    # runs python; the rank that fails first is noted
    ' - "$@" || status=$?    # this bash gets - as its $0, the rest as "$@". If srun fails, || keeps -e from ending here
finish_job "${status:-0}" "$@"     # status unset: srun succeeded. Requeues a job that saved and stopped; else exits
