#!/bin/bash
# Starts torchrun, which starts this node's ranks in a job, or this machine's by hand.
#
# Usage: ./torchrun.sh distributed/train_ddp.py --epochs 3
#        NPROC_PER_NODE=4 ./torchrun.sh distributed/train_ddp.py
# By hand the default is one rank per GPU, or two on the CPU.
set -euo pipefail

if [[ -n "${NNODES:-}" ]]; then
    # srun starts this on each node. Node rank 0 is the first node, MASTER_ADDR. The id changes
    # with a requeue, so that no torchrun of the earlier start joins. All torchruns have to join
    # within 300 seconds.
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

# rendezvous+=(--numa-binding=node)    # EDIT: each rank on the CPUs next to its GPU

# torchrun passes SIGTERM on to the ranks once it has its handler. Until then the signal is ignored,
# also after exec, or it would end torchrun before a rank could save and requeue the job.
trap '' TERM
exec torchrun "${rendezvous[@]}" --nproc-per-node="$NPROC_PER_NODE" "$@"
