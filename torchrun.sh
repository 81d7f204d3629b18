#!/bin/bash
# Becomes torchrun, which starts this node's ranks: in a job, or by hand on this machine.
#
# Usage: ./torchrun.sh distributed/train_ddp.py --epochs 3     # one rank per GPU, or two on the CPU
#        NPROC_PER_NODE=4 ./torchrun.sh distributed/train_ddp.py
set -euo pipefail

if [[ -z "${NNODES:-}" ]]; then
    ranks=2
    if [[ -e /dev/nvidiactl ]]; then ranks=gpu; fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    exec torchrun --standalone --nproc-per-node="${NPROC_PER_NODE:-$ranks}" "$@"
fi

# torchrun passes SIGTERM on to its ranks once it has started them. Before, the signal is ignored,
# or the job would have failed, and failed jobs are not requeued. After it, torchrun gives the ranks
# 600 seconds to save (30 before torch 2.12).
trap '' TERM
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600

# The id changes with a requeue, so that no torchrun of the earlier start joins.
# EDIT: add --numa-binding=node if a node has two sockets, to keep ranks on the CPUs of their GPU.
exec torchrun \
    --nnodes="$NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node="$NPROC_PER_NODE" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv-conf=timeout=300 \
    "$@"
