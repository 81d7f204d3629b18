#!/bin/bash -p
#SBATCH --nodes=2                  # EDIT
#SBATCH --ntasks-per-node=1        # one task per node: spawn_ranks.py starts its ranks
#SBATCH --gpus-per-node=2          # EDIT
#SBATCH --cpus-per-task=2          # EDIT: CPUs of one node's ranks together
#SBATCH --time=01:00:00            # EDIT
#SBATCH --output=%x_%j.out
#SBATCH --open-mode=append         # a requeued job goes on in its log
#SBATCH --requeue
#SBATCH --signal=B:USR1@120        # EDIT: seconds before the time limit, enough to save
# Way 3: srun starts one spawner per node; torch.multiprocessing starts the ranks, which get RANK, LOCAL_RANK and WORLD_SIZE.
#
# Usage: sbatch [sbatch options] launch_slurm_with_mp.sh [train script] [its arguments]
#        sbatch --nodes=4 --gpus-per-node=8 launch_slurm_with_mp.sh distributed/train_ddp.py --epochs 10
set -euo pipefail
[[ -n "${SLURM_JOB_ID:-}" ]] ||
    { echo "Not in a Slurm job: type sbatch $0, or without Slurm ./torchrun.sh distributed/train_ddp.py" >&2; exit 1; }
[[ -f env.sh ]] || { echo "No env.sh in $PWD: cd to the repository before sbatch, or sbatch --chdir=REPOSITORY" >&2; exit 1; }
source ./env.sh

[[ $# -gt 0 ]] || set -- distributed/train_ddp.py
[[ -f "$1" ]] || die "no such train script: $1 (in $PWD)"
! is_uneven ||
    die "uneven allocation: $SLURM_NTASKS tasks on $NNODES nodes, but the spawner starts as many on each; use launch_slurm_to_torch.sh"

echo "Way 3: the spawner starts $NPROC_PER_NODE ranks on each of $SLURM_JOB_NODELIST, rendezvous at $MASTER_ADDR:$MASTER_PORT"
# --cpus-per-task: srun of Slurm 22.05 and 23.02 does not inherit it. --kill-on-bad-exit: one dead spawner ends the step.
# --wait: nor does the step go on for ever when a rank has ended early. A minute is too little to start 4,096 ranks.
# bash: a rank that does not listen yet must not die of the signal to save. --norc: else it reads ~/.bashrc, as under ssh.
start_ranks=(
    srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=300
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$CPUS_PER_NODE"}
    bash --norc -pc 'trap "" USR1; exec python distributed/spawn_ranks.py "$@"' -
)
run_job "$@"
