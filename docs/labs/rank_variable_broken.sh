#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# Expanded here, in the batch shell, SLURM_PROCID is 0: every rank is rank 0.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
export RANK=$SLURM_PROCID
srun --kill-on-bad-exit=1 python docs/labs/all_reduce.py
