#!/bin/bash -p
# Slurm runs this before every task; a line that begins with "export" becomes part of the task's
# environment. Configured only where the GPUs are pretended: Slurm grants them, but torch sees none
# of them, and the training scripts would stop rather than train on the CPU unasked. So the CPU is
# asked for here.
[[ -v TRAIN_DEVICE ]] || echo "export TRAIN_DEVICE=cpu"
