#!/bin/bash -p
#SBATCH --nodes=2                  # EDIT
#SBATCH --ntasks-per-node=2        # EDIT: one task per GPU: Slurm starts every rank
#SBATCH --gpus-per-node=2          # EDIT
#SBATCH --cpus-per-task=1          # EDIT: CPUs of one rank, for its threads and loader workers
#SBATCH --time=01:00:00            # EDIT
#SBATCH --output=%x_%j.out         # the log: this file's name, the job's id
#SBATCH --requeue                  # after a preemption or a lost node Slurm starts the job again
#SBATCH --open-mode=append         # and it goes on in its log
#SBATCH --signal=USR1@120          # EDIT: 120 s before the end: save and stop. Scripts without a handler ignore it (run_task.sh)
##SBATCH --mem=0                   # EDIT: where the site's default is too small: with one # less this asks for all memory of each node
# Way 1: srun starts every rank. env.sh sets WORLD_SIZE, MASTER_ADDR and MASTER_PORT; each task its RANK and LOCAL_RANK.
#
# Usage: sbatch [sbatch options] launch_slurm_to_torch.sh [train script] [its arguments]
#        sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 launch_slurm_to_torch.sh distributed/train_ddp.py
set -euo pipefail                  # ends at a command that fails (-e), also in a pipe, and at a variable not set (-u)
[[ -f env.sh ]] || { echo "No env.sh in $PWD: cd to the repository before sbatch, or sbatch --chdir=REPOSITORY" >&2; exit 1; }
source ./env.sh                    # and aux/job.sh: die (print and exit), start_job, finish_job
command -v python >/dev/null || die "no python on $HOSTNAME: make a .venv here, or edit env.sh"

if (($# == 0)); then set -- distributed/train_ddp.py; fi    # no train script given: "$@" becomes this one
((WORLD_SIZE == ${SLURM_NTASKS:-$WORLD_SIZE})) ||    # as many tasks as ranks? Where SLURM_NTASKS is not set, nothing is compared
    die "$SLURM_NTASKS tasks, but $NNODES nodes x $NPROC_PER_NODE ranks: a rank is a task, add --ntasks-per-node=$NPROC_PER_NODE"
start_job "Way 1, srun starts every rank" "$@"    # last checks, and a line in the log

# --ntasks            a task for each rank
# --kill-on-bad-exit  a task that fails ends the step, all that this srun has started, at once
# --wait              EDIT: seconds that the others still have when the first task has ended well
# --distribution      block:block: ranks in a row are near: fill a node, then the next; in it a CPU socket, then the next
# --cpus-per-task     again, since srun of Slurm 22.05 and 23.02 does not take it over from sbatch
# RANK                in the order of the nodes: rank 0 is on the first, MASTER_ADDR. Task 0 may be on another (topology plugins)
# bash --norc -p      reads no ~/.bashrc, and (-p, as in line 1) takes no functions that your shell has exported
# shellcheck disable=SC2016  # for a linter: in '...' each task's bash, not this one, fills in the variables
srun --ntasks="$WORLD_SIZE" --kill-on-bad-exit=1 --wait=300 --distribution=block:block \
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-$CPUS_PER_RANK}" bash --norc -pc '
        export LOCAL_RANK=$SLURM_LOCALID RANK=$((SLURM_NODEID * NPROC_PER_NODE + SLURM_LOCALID))
        if [[ "$SLURM_STEP_TASKS_PER_NODE" == *,* ]]; then RANK=$SLURM_PROCID; fi    # unequal nodes: 4,3 tasks, not 4(x2)
        exec ./aux/run_task.sh python "$@"    # runs python, and notes who fails first
    ' - "$@" || status=$?    # - is the $0 of bash -c. After || a failed srun does not end this script
finish_job "${status:-0}" "$@"     # requeues a job whose script saved and stopped; else exits with srun's status
