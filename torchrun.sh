#!/bin/bash -p
# Start this machine's ranks with torchrun: as one node of a job (way 2), or by hand on one machine, without Slurm.
# The only file that sets torchrun's options.
#
# Usage: ./torchrun.sh distributed/train_ddp.py --epochs 3
#        NPROC_PER_NODE=4 ./torchrun.sh distributed/train_ddp.py        (default: one rank per GPU, two without GPUs)
set -euo pipefail
trap '' USR1                                         # it would end torchrun; scripts that save when it comes handle it
here=$(dirname "${BASH_SOURCE[0]}")
die() { echo "torchrun.sh on ${SLURMD_NODENAME:-$HOSTNAME}: ${*//[[:cntrl:]]/ }" >&2; exit 1; }

if (($# == 0)); then set -- distributed/train_ddp.py; fi
[[ ! "$1" =~ ^[0-9]+$ ]] ||
    die "'$1' is no train script: the launcher sets node rank and address: sbatch launch_slurm_with_torchrun.sh SCRIPT"
[[ -f "$1" ]] || die "no such train script: $1 (in $PWD)"

# shellcheck source=/dev/null
[[ -n "${NNODES:-}${VIRTUAL_ENV:-}" || ! -d "$here/.venv" ]] || source "$here/.venv/bin/activate"    # by hand
command -v torchrun >/dev/null ||
    die "no torch here: activate an environment or take an image that has it. PATH, which a login shell may reset, is $PATH"
if [[ -z "${NNODES:-}" ]]; then                      # by hand: no launcher has read env.sh
    NPROC_PER_NODE=${NPROC_PER_NODE:-$(python3 -c 'import torch; print(torch.cuda.device_count() or 2)')}
    [[ "$NPROC_PER_NODE" =~ ^[1-9][0-9]*$ ]] || die "NPROC_PER_NODE is '$NPROC_PER_NODE', not a number of ranks"
    cpus=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > NPROC_PER_NODE ? cpus / NPROC_PER_NODE : 1))}
fi

rendezvous=(--standalone)                            # one node: a free port on this machine
if [[ -n "${NNODES:-}" ]]; then                      # in a job: node rank 0 listens where env.sh says
    [[ -n "${SLURM_STEP_ID:-}" ]] || die "a job needs one torchrun on each of $NNODES nodes: srun --ntasks-per-node=1 $0 $1"
    rendezvous=(
        --nnodes="$NNODES" --node-rank="$SLURM_NODEID"
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --rdzv-conf=timeout=300
        --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
    )
fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"    # to save after SIGTERM; 30 s by default
# torchrun, but with the exit status of the rank that has failed, and one line on it: torchrun's own is always 1.
exec python3 "$here/aux/quiet_torchrun.py" "${rendezvous[@]}" --nproc-per-node="$NPROC_PER_NODE" "$@"
