#!/bin/bash
# Slurm runs this before every task, and a line of its output that begins with "export" becomes
# part of the task's environment. Slurm also runs it before the batch script, which needs nothing
# of it, and whose slurmstepd is called "slurmstepd: [JOB.batch]". Its variables do not tell: they
# may be those of a step in which sbatch was typed.
if [[ "$(tr '\0' ' ' <"/proc/$PPID/cmdline")" == *.batch]* ]]; then exit; fi

# The nodes share this machine's CPUs, and each claims more than there are.
echo "export OMP_NUM_THREADS=1"
# Slurm grants simulated GPUs, and torch sees none, so a train script would stop.
if [[ ! -e /dev/nvidiactl ]]; then echo "export SLURM_GPUS_ON_NODE=0"; fi
# NCCL refuses two ranks on one GPU if they are on one host. Nodes that share a GPU are not.
if [[ -e /dev/nvidiactl ]]; then echo "export NCCL_HOSTID=$SLURMD_NODENAME"; fi
