#!/bin/bash -p
# Slurm runs this before every task; a line that begins with "export" becomes part of the task's
# environment. Configured only if the GPUs are simulated: Slurm grants them, but torch sees none of
# them, and the train scripts would stop instead of training on the CPU unasked. So this asks for
# the CPU.
[[ -v TRAIN_DEVICE ]] || echo "export TRAIN_DEVICE=cpu"
