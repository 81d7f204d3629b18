#!/bin/bash -p
#SBATCH --nodes=2                  # EDIT
#SBATCH --ntasks-per-node=1        # one task per node: torchrun starts its ranks
#SBATCH --gpus-per-node=2          # EDIT
#SBATCH --cpus-per-task=2          # EDIT: CPUs of one node's ranks together
#SBATCH --time=01:00:00            # EDIT
#SBATCH --output=%x_%j.out         # the log: this file's name, the job's id
#SBATCH --requeue                  # after a preemption or a lost node Slurm starts the job again
#SBATCH --open-mode=append         # and it goes on in its log
#SBATCH --signal=USR1@120          # EDIT: 120 s before the end: save and stop. Scripts without a handler ignore it (run_task.sh)
##SBATCH --mem=0                   # EDIT: where the site's default is too small: with one # less this asks for all memory of each node
# Way 2: srun starts one torchrun per node; torchrun sets RANK, LOCAL_RANK and WORLD_SIZE, env.sh the other two.
#
# Usage: sbatch [sbatch options] launch_slurm_with_torchrun.sh [train script] [its arguments]
#        sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=96 launch_slurm_with_torchrun.sh distributed/train_ddp.py
set -euo pipefail                  # ends at a command that fails (-e), also in a pipe, and at a variable not set (-u)
[[ -f env.sh ]] || { echo "No env.sh in $PWD: cd to the repository before sbatch, or sbatch --chdir=REPOSITORY" >&2; exit 1; }
source ./env.sh                    # and aux/job.sh: die (print and exit), start_job, finish_job
command -v python >/dev/null || die "no python on $HOSTNAME: make a .venv here, or edit env.sh"

if (($# == 0)); then set -- distributed/train_ddp.py; fi    # no train script given: "$@" becomes this one
! is_uneven ||
    die "uneven allocation: $SLURM_NTASKS tasks on $NNODES nodes, but torchrun starts as many on each; use launch_slurm_to_torch.sh"
start_job "Way 2, torchrun starts the ranks of each node" "$@"    # last checks, and a line in the log

# --ntasks...         one task on each node: its torchrun
# --kill-on-bad-exit  one dead torchrun ends the step, and so the others
# --wait              EDIT: seconds that the others still have when the first task has ended well
# --cpus-per-task     again, since srun of Slurm 22.05 and 23.02 does not take it over from sbatch
srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=300 --cpus-per-task="$CPUS_PER_NODE" \
    ./aux/run_task.sh ./torchrun.sh "$@" || status=$?    # without this, set -e would end the script here
finish_job "${status:-0}" "$@"     # requeues a job whose script saved and stopped; else exits with srun's status
