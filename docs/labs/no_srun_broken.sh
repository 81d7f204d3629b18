#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# Without srun one process starts, on the first node.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
python docs/labs/all_reduce.py
