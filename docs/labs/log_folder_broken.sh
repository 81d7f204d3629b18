#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:05:00
#SBATCH --output=no_such_folder/%x.out
# Named where no such folder is, the log cannot be written, and the job ends before its first
# command.
echo "Training"
