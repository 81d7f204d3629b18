#!/bin/bash
#SBATCH --ntasks=1
#SBATCH --mem=1G
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# Python needs 500 MB, with room to spare.
srun --kill-on-bad-exit=1 python -c '
import time
data = bytearray(b"x") * 500_000_000
time.sleep(5)
print("Finished")
'
