#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=1     # EDIT: about 8 for a real GPU
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# Each task sees the GPUs of all tasks on its node, and takes the one of its local rank.
srun --kill-on-bad-exit=1 --cpus-per-task=1 python docs/labs/set_device.py
