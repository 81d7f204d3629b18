#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# Each torchrun --standalone knows of its own node alone.
export OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 torchrun --standalone --nproc-per-node=2 docs/labs/all_reduce.py
