#!/bin/bash -p
#SBATCH --nodes=2                  # EDIT
#SBATCH --ntasks-per-node=2        # EDIT: one task per GPU: Slurm starts every rank
#SBATCH --gpus-per-node=2          # EDIT
#SBATCH --cpus-per-task=1          # EDIT: CPUs of one rank, for its threads and loader workers
#SBATCH --time=01:00:00            # EDIT
#SBATCH --output=%x_%j.out
#SBATCH --open-mode=append         # a requeued job goes on in its log
#SBATCH --requeue
#SBATCH --signal=USR1@120          # EDIT: USR1, 120 s before the limit: save; scripts without a handler ignore it
##SBATCH --mem=0                   # EDIT: take one # away: all memory of the nodes, where a site's default is small
# Way 1: srun starts every rank; the task sets RANK and LOCAL_RANK, env.sh the other three.
#
# Usage: sbatch [sbatch options] launch_slurm_to_torch.sh [train script] [its arguments]
#        sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 launch_slurm_to_torch.sh distributed/train_ddp.py
set -euo pipefail                  # ends at a command that fails (-e), also in a pipe, and at a variable not set (-u)
[[ -f env.sh ]] || { echo "No env.sh in $PWD: cd to the repository before sbatch, or sbatch --chdir=REPOSITORY" >&2; exit 1; }
source ./env.sh                    # sets WORLD_SIZE, MASTER_ADDR, MASTER_PORT; die, start_job, finish_job are aux/job.sh's
command -v python >/dev/null || die "no python on $HOSTNAME: make a .venv here, or edit env.sh"

set -- "${@:-distributed/train_ddp.py}"    # without arguments: this train script
((WORLD_SIZE == ${SLURM_NTASKS:-$WORLD_SIZE})) ||
    die "$SLURM_NTASKS tasks, but $NNODES nodes x $NPROC_PER_NODE ranks: a rank is a task, add --ntasks-per-node=$NPROC_PER_NODE"
start_job "Way 1, srun starts every rank" "$@"    # last checks, and a line in the log

# --ntasks            a task for each rank
# --kill-on-bad-exit  one dead rank ends the step, and so the others
# --wait              EDIT: seconds that the others have when one has ended well; a failed one ends all at once
# --distribution      neighbouring ranks fill one CPU socket before the next; Slurm's default alternates
# --cpus-per-task     srun of Slurm 22.05 and 23.02 does not inherit it
# RANK                by node, so that rank 0 is on MASTER_ADDR (node 0): with topology plugins task 0 may be elsewhere
# --norc -p           this bash takes neither your ~/.bashrc (--norc) nor functions of your shell (-p, as in line 1)
# shellcheck disable=SC2016  # each task runs what is in '...', with its own SLURM_ variables; "$@": what stands after -
srun --ntasks="$WORLD_SIZE" --kill-on-bad-exit=1 --wait=300 --distribution=block:block \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-$CPUS_PER_RANK}" bash --norc -pc '
        export LOCAL_RANK=$SLURM_LOCALID RANK=$((SLURM_NODEID * NPROC_PER_NODE + SLURM_LOCALID))
        if [[ "$SLURM_STEP_TASKS_PER_NODE" == *,* ]]; then RANK=$SLURM_PROCID; fi    # as 4,3,4 tasks: no product fits
        exec ./aux/run_task.sh python "$@"    # runs python; the rank that fails first is noted
    ' - "$@" || status=$?    # - is $0 in there. Without ||, set -e would end this script when a rank fails
finish_job "${status:-0}" "$@"     # requeues a job that has saved and stopped; else exits with the failed rank's status
