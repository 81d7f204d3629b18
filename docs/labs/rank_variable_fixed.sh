#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# In single quotes it is expanded by each task.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
# shellcheck disable=SC2016  # as said above
srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID exec python docs/labs/all_reduce.py'
