#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:05:00
#SBATCH --output=%x.out
# In place of another job on this node: a program that has port 29500.
python -c 'import socket, time; taken = socket.create_server(("", 29500)); time.sleep(60)' &
other=$!
sleep 2
export MASTER_ADDR=$SLURMD_NODENAME MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
srun --kill-on-bad-exit=1 python docs/labs/all_reduce.py || status=$?
kill $other
exit "${status:-0}"
