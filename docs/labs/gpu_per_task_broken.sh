#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=1     # EDIT: about 8 for a real GPU
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# Each task sees one GPU, and torch counts what it sees from 0: cuda:1 is in no task.
srun --kill-on-bad-exit=1 --cpus-per-task=1 python docs/labs/set_device.py
