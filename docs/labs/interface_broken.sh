#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# A network interface that the nodes do not have.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
export GLOO_SOCKET_IFNAME=ib7
srun --kill-on-bad-exit=1 python docs/labs/all_reduce.py
