#!/bin/bash
# Becomes torchrun, which starts this node's ranks: in a job, or by hand on this machine.
#
# Usage: ./torchrun.sh distributed/train_ddp.py --epochs 3     # one rank per GPU, or two on the CPU
#        NPROC_PER_NODE=4 ./torchrun.sh distributed/train_ddp.py
#        ./torchrun.sh -m package.module --epochs 3
set -euo pipefail

# torchrun would take a script's --n or --log for the beginning of an option of its own, and refuse
# it as ambiguous, unless `--` stands before the script. A `--` that you write beside the script or
# the module, as for torchrun, is not passed on, by this or any other launcher.
module=
if [[ "${1-}" == -m ]]; then module=-m && shift; fi
if [[ "${1-}" == -- ]]; then shift; elif [[ "${2-}" == -- ]]; then set -- "$1" "${@:3}"; fi
if [[ "${1-}" == -* ]]; then
    echo "torchrun.sh: $1 is no script: sbatch's options stand before the launcher," \
        "and torchrun's in torchrun.sh" >&2
    exit 1
fi
set -- ${module:+-m} -- "$@"

# `python3 -m torch.distributed.run` is torchrun. In a venv over an image, the command torchrun is
# the image's, and does not see the packages of the venv.

# By hand: env.sh has set no sizes.
if [[ -z "${NNODES:-}" ]]; then
    if [[ -z "${NPROC_PER_NODE:-}" ]]; then
        count='import torch; print(torch.cuda.device_count() or torch.xpu.device_count() or 2)'
        NPROC_PER_NODE=$(python3 -c "$count")
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    exec python3 -m torch.distributed.run --standalone --nproc-per-node="$NPROC_PER_NODE" "$@"
fi

# SIGTERM is ignored until torchrun is up, because a job that it kills is FAILED, and not requeued.
# Then torchrun passes it on, and waits 600 seconds for ranks that save (30 before torch 2.12).
# Slurm may kill them earlier, after KillWait, which is often 30 seconds.
trap '' TERM
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600

# rdzv is the rendezvous, where each node's torchrun waits for all others, for 300 seconds and one
# more for each node. Its id changes with a requeue, so that no torchrun of the earlier start joins.
# EDIT: add --numa-binding=node if nodes have several NUMA domains: ranks stay near their GPU.
# EDIT: add --tee=3 if lines of several ranks run into each other: each then has a rank's label.
exec python3 -m torch.distributed.run \
    --nnodes="$NNODES" --node-rank="$SLURM_NODEID" --nproc-per-node="$NPROC_PER_NODE" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv-conf=timeout="$((300 + NNODES))" \
    "$@"
