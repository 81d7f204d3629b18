#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# Two tasks fit on one node, so Slurm puts both there.
srun --kill-on-bad-exit=1 hostname | sort | uniq --count
