#!/bin/bash
# Becomes torchrun: in a job for the ranks of one node, by hand for those of this machine.
#
# Usage: ./torchrun.sh distributed/train_ddp.py --epochs 3
#        NPROC_PER_NODE=4 ./torchrun.sh distributed/train_ddp.py    (default: one rank per GPU, or two on the CPU)
set -euo pipefail

if [[ -n "${NNODES:-}" ]]; then
    # env.sh has been sourced, and srun starts this on each node: the first one, MASTER_ADDR, is node rank 0.
    rendezvous=(
        --nnodes="$NNODES" --node-rank="$SLURM_NODEID"
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"
        --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv-conf=timeout=300
    )
else
    rendezvous=(--standalone)
    if [[ -z "${VIRTUAL_ENV:-}" && -d .venv ]]; then
        # shellcheck source=/dev/null
        source .venv/bin/activate
    fi
    if [[ -z "${NPROC_PER_NODE:-}" ]]; then
        NPROC_PER_NODE=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')
    fi
    if [[ -z "${OMP_NUM_THREADS:-}" ]]; then
        cpus=$(nproc)
        export OMP_NUM_THREADS=$((cpus > NPROC_PER_NODE ? cpus / NPROC_PER_NODE : 1))
    fi
fi

# rendezvous+=(--numa-binding=node)    # EDIT: each rank on the CPUs next to its GPU (torch 2.13)

# Until torchrun listens, SIGTERM is nobody's. It would end the job as a failed one, which Slurm does not requeue.
trap '' TERM
exec torchrun "${rendezvous[@]}" --nproc-per-node="$NPROC_PER_NODE" "$@"
