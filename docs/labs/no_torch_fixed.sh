#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# The environment that has torch is the one that is used.
srun --kill-on-bad-exit=1 python -c 'import torch; print("torch", torch.__version__)'
