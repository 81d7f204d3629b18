#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
#SBATCH --requeue
set -e
# Slurm starts the whole job again, but not for ever, because a mistake would come again.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
# shellcheck disable=SC2016  # each task expands its number
if ! srun --kill-on-bad-exit=1 bash -c 'exec torchrun \
    --nnodes=2 --node-rank="$SLURM_NODEID" --nproc-per-node=2 \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" docs/labs/dies_once.py'; then
    if ((${SLURM_RESTART_COUNT:-0} >= 3)); then exit 1; fi
    scontrol requeue "$SLURM_JOB_ID"
fi
