#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# One task on each of two nodes.
srun --kill-on-bad-exit=1 hostname | sort | uniq --count
