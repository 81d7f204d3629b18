#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# One rendezvous for all: the first host, a port of this job's own, the job's number.
export OMP_NUM_THREADS=1
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((61000 + 10#$SLURM_JOB_ID % 4536))
srun --kill-on-bad-exit=1 \
    torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=2 --rdzv-backend=c10d \
    --rdzv-endpoint="${hosts%%$'\n'*}:$port" --rdzv-id="$SLURM_JOB_ID" docs/labs/all_reduce.py
