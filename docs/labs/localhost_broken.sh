#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# On the second node localhost is the second node.
export MASTER_ADDR=localhost MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
srun --kill-on-bad-exit=1 python docs/labs/all_reduce.py
