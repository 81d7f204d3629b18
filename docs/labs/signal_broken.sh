#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# The task is a shell. SIGTERM reaches it, and not Python, its child.
{ sleep 10; scancel --signal=TERM "$SLURM_JOB_ID"; } &    # what Slurm does at the time limit
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c 'export RANK=$SLURM_PROCID
    python docs/labs/save_at_signal.py
    echo "rank $RANK has ended"'
