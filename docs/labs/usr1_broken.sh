#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
#SBATCH --signal=USR1@120
# Without --signals-to-handle torchrun dies of SIGUSR1.
export OMP_NUM_THREADS=1
# What Slurm does 120 s before the time limit.
{ sleep 20; scancel --signal=USR1 "$SLURM_JOB_ID"; } &
srun --kill-on-bad-exit=1 torchrun --standalone --nproc-per-node=2 docs/labs/save_at_signal.py
