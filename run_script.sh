#!/bin/bash -p
#SBATCH --nodes=2                  # EDIT
#SBATCH --ntasks-per-node=1        # one task per node: torchrun starts its ranks
#SBATCH --gpus-per-node=2          # EDIT
#SBATCH --cpus-per-task=2          # EDIT: CPUs of one node's ranks together
#SBATCH --time=01:00:00            # EDIT
#SBATCH --output=%x_%j.out
#SBATCH --open-mode=append         # a requeued job goes on in its log
#SBATCH --requeue
#SBATCH --signal=B:USR1@120        # EDIT: seconds before the time limit, enough to save
# Way 4: way 2 in an Enroot container: srun starts one torchrun per node, inside it; torchrun starts the ranks as in way 2.
#
# Usage: sbatch [sbatch options] run_script.sh [train script] [its arguments]
#        sbatch --nodes=4 --gpus-per-node=8 run_script.sh distributed/train_ddp.py --epochs 10
# Before: ./aux/import_image.sh, on the login node, once. What a node prints is in log/JOB-ID/NODE.out, what goes wrong
# in the job's own log. In the container the repository is /workspace/mnt; CONTAINER_MOUNTS in env.sh adds other folders.
set -euo pipefail
[[ -n "${SLURM_JOB_ID:-}" ]] ||
    { echo "Not in a Slurm job: type sbatch $0, or without Slurm ./torchrun.sh distributed/train_ddp.py" >&2; exit 1; }
[[ -f env.sh ]] || { echo "No env.sh in $PWD: cd to the repository before sbatch, or sbatch --chdir=REPOSITORY" >&2; exit 1; }
source ./env.sh

[[ $# -gt 0 ]] || set -- distributed/train_ddp.py
[[ -f "$1" ]] || die "no such train script: $1 (in $PWD)"
! is_uneven ||
    die "uneven allocation: $SLURM_NTASKS tasks on $NNODES nodes, but torchrun starts as many on each; use launch_slurm_to_torch.sh"
mkdir --parents "log/$SLURM_JOB_ID" || die "cannot make the folder log/$SLURM_JOB_ID in $PWD"

echo "Way 4: torchrun starts $NPROC_PER_NODE ranks in container $CONTAINER_NAME on each of $SLURM_JOB_NODELIST," \
    "rendezvous at $MASTER_ADDR:$MASTER_PORT, logs in log/$SLURM_JOB_ID"
# --cpus-per-task: srun of Slurm 22.05 and 23.02 does not inherit it. --kill-on-bad-exit: one dead torchrun ends the step.
# --wait: nor does the step go on for ever when a rank has ended early. A minute is too little to start 4,096 ranks.
# --error=all: errors come here, to the job's log. --open-mode: a requeued job has the same id.
start_ranks=(
    srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=300
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$CPUS_PER_NODE"}
    --output="log/$SLURM_JOB_ID/%N.out" --error=all --open-mode=append
    ./aux/enter_container.sh ./torchrun.sh
)
run_job "$@"

# The same with Pyxis or with Apptainer: one of these in the place of ./aux/enter_container.sh's line. (Apptainer takes a
# .sif as well.)
# Pyxis:
#   --container-image="$CONTAINER_IMAGE" --container-workdir=/workspace/mnt
#   --container-mounts="$PWD:/workspace/mnt${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}" ./torchrun.sh
# Apptainer:
#   apptainer exec --nv --pwd /workspace/mnt --bind "$PWD:/workspace/mnt${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}"
#   "$CONTAINER_IMAGE" ./torchrun.sh
