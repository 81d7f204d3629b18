#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
#SBATCH --signal=USR1@120
# The shell that becomes torchrun has SIGUSR1 ignored; the ranks listen for it.
export OMP_NUM_THREADS=1
{ sleep 20; scancel --signal=USR1 "$SLURM_JOB_ID"; } &    # what Slurm does 120 s before the time limit
srun --kill-on-bad-exit=1 bash -c 'trap "" USR1
    exec torchrun --standalone --nproc-per-node=2 docs/failures/save_at_usr1.py'
