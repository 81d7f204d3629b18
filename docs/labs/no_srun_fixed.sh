#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# srun starts a process for each task.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
srun --kill-on-bad-exit=1 python docs/labs/all_reduce.py
