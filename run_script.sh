#!/bin/bash -p
#SBATCH --nodes=2                  # EDIT
#SBATCH --ntasks-per-node=1        # one task per node: torchrun starts its ranks
#SBATCH --gpus-per-node=2          # EDIT
#SBATCH --cpus-per-task=2          # EDIT: CPUs of one node's ranks together
#SBATCH --time=01:00:00            # EDIT
#SBATCH --output=%x_%j.out
#SBATCH --open-mode=append         # a requeued job goes on in its log
#SBATCH --requeue
#SBATCH --signal=USR1@120          # EDIT: seconds before the time limit, to save; ignored by scripts that do not listen
##SBATCH --mem=0                   # EDIT: take one # away: all memory of the nodes, where a site's default is small
# Way 4: way 2 in an Enroot container: srun starts one torchrun per node, inside it; env.sh's variables go in by name.
#
# Usage: sbatch [sbatch options] run_script.sh [train script] [its arguments]
#        sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=96 run_script.sh distributed/train_ddp.py
# Before: ./aux/import_image.sh, on the login node, once. What a node prints is in log/JOB-ID/NODE.out, what goes wrong
# in the job's own log. In the container the repository is /workspace/mnt; CONTAINER_MOUNTS in env.sh adds other folders.
set -euo pipefail
[[ -f env.sh ]] || { echo "No env.sh in $PWD: cd to the repository before sbatch, or sbatch --chdir=REPOSITORY" >&2; exit 1; }
source ./env.sh                    # sets WORLD_SIZE, MASTER_ADDR, MASTER_PORT; die, start_job, finish_job are aux/job.sh's

set -- "${@:-distributed/train_ddp.py}"
! is_uneven ||
    die "uneven allocation: $SLURM_NTASKS tasks on $NNODES nodes, but torchrun starts as many on each; use launch_slurm_to_torch.sh"
start_job "Way 4, torchrun starts the ranks of each node in container $CONTAINER_NAME, logs in log/$SLURM_JOB_ID" "$@"

# --kill-on-bad-exit  one dead torchrun ends the step, and so the others
# --wait              EDIT: seconds that the others have once a task has ended well; one that fails ends them at once
# --cpus-per-task     srun of Slurm 22.05 and 23.02 does not inherit it
# --error=all         errors come here, to the job's log
# --open-mode         a requeued job has the same id
srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=300 --cpus-per-task="$CPUS_PER_NODE" \
    --output="log/$SLURM_JOB_ID/%N.out" --error=all --open-mode=append \
    ./aux/run_task.sh ./aux/enter_container.sh ./torchrun.sh "$@" || status=$?
finish_job "${status:-0}" "$@"     # requeues a stopped job; else exits with the failed rank's status

# With Pyxis or Apptainer the last line of srun, the one of ./aux/enter_container.sh, gives way to one of these. With Pyxis
# CONTAINER_IMAGE may be an image of a registry, nvcr.io#nvidia/pytorch:25.06-py3, with Apptainer a .sif.
# Pyxis:
#   --container-image="$CONTAINER_IMAGE" --container-workdir=/workspace/mnt \
#   --container-mounts="$PWD:/workspace/mnt${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}" \
#   ./aux/run_task.sh ./torchrun.sh "$@" || status=$?
# Apptainer:
#   ./aux/run_task.sh apptainer exec --nv --pwd /workspace/mnt \
#   --bind "$PWD:/workspace/mnt${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}" \
#   "$CONTAINER_IMAGE" ./torchrun.sh "$@" || status=$?
