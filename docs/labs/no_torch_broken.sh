#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# In place of an image with Python and without torch: an empty virtual environment.
folder=$(mktemp --directory)
python3 -m venv --without-pip "$folder"
srun --kill-on-bad-exit=1 \
    "$folder/bin/python" -c 'import torch; print("torch", torch.__version__)' ||
    status=$?
rm --recursive "$folder"
exit "${status:-0}"
