#!/bin/bash
#SBATCH --nodes=2             # EDIT
#SBATCH --ntasks-per-node=2   # EDIT: one task per GPU, because srun starts every rank
#SBATCH --gpus-per-node=2     # EDIT
#SBATCH --cpus-per-task=1     # EDIT: for one rank
#SBATCH --time=01:00:00       # EDIT
#SBATCH --output=%x_%j.out    # the log: this file's name and the job id
#SBATCH --requeue             # after a preemption or a lost node Slurm starts the job again
#SBATCH --open-mode=append    # a requeued job appends to its log
# srun starts every rank itself.
#
# Usage, in this folder: sbatch [sbatch options] launch_slurm_to_torch.sh [SCRIPT [ARGUMENTS]]
#        sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 \
#            launch_slurm_to_torch.sh distributed/train_ddp.py
set -euo pipefail
source ./env.sh

# Before Slurm ends a job it sends SIGTERM, on which some scripts save. This shell waits for them.
trap : TERM

# The default script
if (($# == 0)); then set -- distributed/train_ddp.py; fi

# --overlap lets this run inside an salloc that holds the CPUs. If a task fails, srun ends the
# others. Once one has ended well, the others have 300 seconds to end, so that none waits for ever.
srun --ntasks="$WORLD_SIZE" --ntasks-per-node="$NPROC_PER_NODE" --cpus-per-task="$CPUS_PER_RANK" \
    --distribution=block:block --overlap --kill-on-bad-exit=1 --wait=300 \
    ./aux/slurm_rank.sh python "$@"
