#!/bin/bash
#SBATCH --nodes=2             # EDIT
#SBATCH --ntasks-per-node=2   # EDIT: one task per GPU: srun starts every rank
#SBATCH --gpus-per-node=2     # EDIT
#SBATCH --cpus-per-task=1     # EDIT: for one rank
#SBATCH --time=01:00:00       # EDIT
#SBATCH --output=%x_%j.out    # the log: this file's name and the job's number
#SBATCH --open-mode=append    # a requeued job goes on in its log
#SBATCH --requeue             # after a preemption or a lost node Slurm starts the job again
# srun starts every rank itself.
#
# Usage: sbatch [sbatch options] launch_slurm_to_torch.sh [SCRIPT [ARGUMENTS]]
#        sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 launch_slurm_to_torch.sh distributed/train_ddp.py
set -euo pipefail
source ./env.sh

# SIGTERM is for the ranks, which may save: this shell waits for them.
trap : TERM

if (($# == 0)); then set -- distributed/train_ddp.py; fi

srun --ntasks="$WORLD_SIZE" --ntasks-per-node="$NPROC_PER_NODE" --cpus-per-task="$CPUS_PER_RANK" \
    --distribution=block:block --overlap --kill-on-bad-exit=1 --wait=300 \
    ./aux/slurm_rank.sh python "$@"
