#!/bin/bash -p
#SBATCH --nodes=2                  # EDIT
#SBATCH --ntasks-per-node=2        # EDIT: one task per GPU: Slurm starts every rank
#SBATCH --gpus-per-node=2          # EDIT
#SBATCH --cpus-per-task=1          # EDIT: CPUs of one rank, for its threads and loader workers
#SBATCH --time=01:00:00            # EDIT
#SBATCH --output=%x_%j.out
#SBATCH --open-mode=append         # a requeued job goes on in its log
#SBATCH --requeue
#SBATCH --signal=B:USR1@120        # EDIT: seconds before the time limit, enough to save
# Way 1: srun starts every rank; the script reads RANK, LOCAL_RANK and WORLD_SIZE from Slurm's own variables.
#
# Usage: sbatch [sbatch options] launch_slurm_to_torch.sh [train script] [its arguments]
#        sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 launch_slurm_to_torch.sh distributed/train_ddp.py --epochs 10
set -euo pipefail
[[ -n "${SLURM_JOB_ID:-}" ]] ||
    { echo "Not in a Slurm job: type sbatch $0, or without Slurm ./torchrun.sh distributed/train_ddp.py" >&2; exit 1; }
[[ -f env.sh ]] || { echo "No env.sh in $PWD: cd to the repository before sbatch, or sbatch --chdir=REPOSITORY" >&2; exit 1; }
source ./env.sh

[[ $# -gt 0 ]] || set -- distributed/train_ddp.py
[[ -f "$1" ]] || die "no such train script: $1 (in $PWD)"
((WORLD_SIZE == SLURM_NTASKS)) ||
    die "$SLURM_NTASKS tasks for $NNODES nodes x $NPROC_PER_NODE GPUs: a rank is a task, add --ntasks-per-node=$NPROC_PER_NODE"

echo "Way 1: srun starts $WORLD_SIZE ranks on $SLURM_JOB_NODELIST, rendezvous at $MASTER_ADDR:$MASTER_PORT"
# --cpus-per-task: srun of Slurm 22.05 and 23.02 does not inherit it. --kill-on-bad-exit: one dead rank ends the step.
# --wait: nor does the step go on for ever when a rank has ended early. A minute is too little to start 4,096 ranks.
# bash: a rank that does not listen yet must not die of the signal to save. --norc: else it reads ~/.bashrc, as under ssh.
start_ranks=(
    srun --kill-on-bad-exit=1 --wait=300 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}
    bash --norc -pc 'trap "" USR1; exec python "$@"' -
)
run_job "$@"
