#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# Each node's torchrun starts its ranks again, and they find the addresses of the first start.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
# shellcheck disable=SC2016  # each task expands its number
srun --kill-on-bad-exit=1 bash -c 'exec torchrun --max-restarts=2 \
    --nnodes=2 --node-rank="$SLURM_NODEID" --nproc-per-node=2 \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" docs/labs/dies_once.py'
