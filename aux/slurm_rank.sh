#!/bin/bash
# Becomes the command as one rank, with RANK and LOCAL_RANK set from Slurm's numbers.
#
# Usage: srun ./aux/slurm_rank.sh python distributed/train_ddp.py
set -euo pipefail

# Not SLURM_PROCID: with some topology plugins task 0 is not on the first node, but rank 0 must be,
# because MASTER_ADDR is that node.
export RANK=$((SLURM_NODEID * NPROC_PER_NODE + SLURM_LOCALID))
export LOCAL_RANK=$SLURM_LOCALID

exec "$@"
