#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# The CPUs of the task, divided among its two ranks.
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / 2))
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    torchrun --standalone --nproc-per-node=2 --no-python \
    python -c 'import torch; print("threads of a rank:", torch.get_num_threads())'
