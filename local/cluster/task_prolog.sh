#!/bin/bash
# Slurm runs this before every task, and a line of its output that begins with "export" becomes
# part of the task's environment. The GPUs here are simulated: Slurm grants them, but torch sees
# none, and a train script would stop. So the tasks are told that there are none. Slurm also runs
# this before the batch script, whose env.sh must count them. Only a step has a small step id.
step=${SLURM_STEP_ID:--1}
if ((0 <= step && step < 2 ** 31)); then
    echo "export SLURM_GPUS_ON_NODE=0"
fi
