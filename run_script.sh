#!/bin/bash
#SBATCH --nodes=2             # EDIT
#SBATCH --ntasks-per-node=1   # one task per node: torchrun starts its ranks
#SBATCH --gpus-per-node=2     # EDIT
#SBATCH --cpus-per-task=16    # EDIT: for all ranks of a node, 8 for each GPU
##SBATCH --mem=0              # EDIT: without the second #, all memory of each node
##SBATCH --signal=TERM@300    # EDIT: without the second #, 300 s to save (torch 2.12 or newer)
#SBATCH --time=01:00:00       # EDIT
#SBATCH --output=%x_%j.out    # the log: this file's name and the job id
#SBATCH --requeue             # after a preemption or a lost node Slurm starts the job again
#SBATCH --open-mode=append    # a requeued job appends to its log
# srun starts an Enroot container with torchrun on each node, and torchrun starts the ranks.
#
# Usage, in this folder: sbatch [sbatch options] run_script.sh [SCRIPT [ARGUMENTS]]
#        sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=64 \
#            run_script.sh distributed/train_ddp.py
# Run ./aux/import_image.sh once on the login node first. For Pyxis see docs/containers.md.
set -euo pipefail
source ./env.sh

# EDIT: the file that ./aux/import_image.sh made
export CONTAINER_IMAGE=$PWD/pytorch.sqsh
# EDIT: or a container that you made with `enroot create`
export CONTAINER_NAME=
# EDIT: the folder to mount as /workspace/mnt, or $HOME
export CONTAINER_FOLDER=$PWD
# EDIT: more folders: /nfs/data:/data,/nfs/text:/text:ro
export CONTAINER_MOUNTS=
# EDIT: more variables: WANDB_API_KEY,HF_HOME
export CONTAINER_ENV=

# EDIT: without the second line's #, a job that fails is requeued if its run has saved.
#source aux/launch/requeue_failed.sh "checkpoints/$RUN"

# Slurm sends SIGTERM before it kills a job. Some scripts then save, and this shell waits for them.
trap : TERM

# A container has no scontrol, so rank 0 of a stopped run writes into this file, and this shell
# requeues the job.
stopped=log/$SLURM_JOB_ID/requeue
(rm --force "$stopped" && set -o noclobber && true >"$stopped") || true

# --overlap: also in an salloc whose own step holds the CPUs.
# --wait=0: a rank that has ended does not end one that still saves, as a site's WaitTime would.
# --kill-on-bad-exit: a task that fails ends the others, instead of leaving them waiting.
status=0
srun --ntasks="$NNODES" --ntasks-per-node=1 --cpus-per-task="$CPUS_PER_NODE" --overlap \
    --wait=0 --kill-on-bad-exit=1 \
    ./aux/launch/enroot.sh ./torchrun.sh "${@:-distributed/train_ddp.py}" || status=$?

if [[ -s "$stopped" ]]; then
    # It holds the arguments that resume the run.
    python3 distributed/preemption.py "$(<"$stopped")" || status=$?
fi
exit "$status"
