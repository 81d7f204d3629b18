#!/bin/bash
# Becomes the command as one rank. launch_slurm_to_torch.sh has srun start it once for each rank.
set -euo pipefail

# python SCRIPT, or python -m MODULE: a `--` beside it is for torchrun, and not passed on.
python=("$1") && shift
if [[ "${1-}" == -m ]]; then python+=(-m) && shift; fi
if [[ "${1-}" == -- ]]; then shift; elif [[ "${2-}" == -- ]]; then set -- "$1" "${@:3}"; fi

# RANK is not SLURM_PROCID, because with some topology plugins task 0 is not on the first node. Rank
# 0 must be there, because MASTER_ADDR is that node.
export RANK=$((SLURM_NODEID * NPROC_PER_NODE + SLURM_LOCALID))
export LOCAL_RANK=$SLURM_LOCALID
export WORLD_SIZE=$((NNODES * NPROC_PER_NODE))
export LOCAL_WORLD_SIZE=$NPROC_PER_NODE

exec "${python[@]}" "$@"
