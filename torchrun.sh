#!/bin/bash -p
# Start this machine's ranks with torchrun: as one node of a job (way 2), or by hand on one machine, without Slurm.
# The only file that spells torchrun's flags.
#
# Usage: ./torchrun.sh distributed/train_ddp.py --epochs 3
#        NPROC_PER_NODE=4 ./torchrun.sh distributed/train_ddp.py        (default: one rank per GPU, two without GPUs)
set -euo pipefail
trap '' USR1                                         # torchrun would die of it; ranks that save when it comes listen for it
die() {
    echo "torchrun.sh on ${SLURMD_NODENAME:-$HOSTNAME}: ${*//[[:cntrl:]]/ }" >&2    # in a task HOSTNAME is the batch shell's
    [[ -z "${SLURM_STEP_ID:-}" ]] || sleep 1         # srun ends the step at once, and what it has not read is lost
    exit 1
}

[[ $# -gt 0 ]] || set -- distributed/train_ddp.py
[[ -f "$1" ]] || die "no such train script: $1 (in $PWD)"

if [[ -z "${NNODES:-}" ]]; then                      # by hand: no launcher has read env.sh
    venv=$(dirname "${BASH_SOURCE[0]}")/.venv
    # shellcheck source=/dev/null
    [[ -n "${VIRTUAL_ENV:-}" || ! -d "$venv" ]] || source "$venv/bin/activate"
    NPROC_PER_NODE=${NPROC_PER_NODE:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}
    [[ "$NPROC_PER_NODE" =~ ^[1-9][0-9]*$ ]] || die "NPROC_PER_NODE is '$NPROC_PER_NODE', not a number of ranks"
    cpus=$(getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus > NPROC_PER_NODE ? cpus / NPROC_PER_NODE : 1))}
fi
command -v torchrun >/dev/null || die "no torch here: activate an environment that has it, or take an image that has it"

rendezvous=(--standalone)                            # a free port on this machine, no other node
if [[ -n "${MASTER_ADDR:-}" && -n "${NNODES:-}" ]]; then
    [[ -n "${SLURM_STEP_ID:-}" ]] || die "a job needs one torchrun on each of $NNODES nodes: srun --ntasks-per-node=1 $0 $1"
    getent hosts "$MASTER_ADDR" >/dev/null || {
        [[ "$SLURM_NODEID" == 0 ]] || sleep 5        # one node ends the job, and one is enough to say it
        die "the host name MASTER_ADDR=$MASTER_ADDR does not resolve here"
    }
    is_host=false
    if [[ "$SLURM_NODEID" == 0 ]]; then              # inside srun: this node's index
        is_host=true
        ! (exec 3<>"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null ||
            die "port $MASTER_PORT on $MASTER_ADDR is taken by another program: submit with MASTER_PORT=ANOTHER"
    fi
    rendezvous=(
        --nnodes="$NNODES"
        --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"
        --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
        --rdzv-conf=is_host="$is_host"               # torchrun does not always recognise its own host name
        --local-addr="${SLURMD_NODENAME:-$HOSTNAME}"
    )
fi
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"    # to save after SIGTERM; 30 s by default
export LOGLEVEL="${LOGLEVEL:-ERROR}"                 # torchrun warns on every node when another node's torchrun ends first
exec torchrun "${rendezvous[@]}" --nproc-per-node="$NPROC_PER_NODE" "$@"
