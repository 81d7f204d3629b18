#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
#SBATCH --signal=TERM@120
# torchrun hands SIGTERM on to its ranks, which listen to it. Told to stop, it fails, although they
# have saved.
export OMP_NUM_THREADS=1
# What Slurm does 120 s before the time limit.
{ sleep 20; scancel --signal=TERM "$SLURM_JOB_ID"; } &
srun --kill-on-bad-exit=1 torchrun --standalone --nproc-per-node=2 docs/labs/save_at_signal.py
