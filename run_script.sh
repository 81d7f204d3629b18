#!/bin/bash -p
#SBATCH --nodes=2                  # EDIT
#SBATCH --ntasks-per-node=1        # one task per node: torchrun starts its ranks
#SBATCH --gpus-per-node=2          # EDIT
#SBATCH --cpus-per-task=2          # EDIT: CPUs of one node's ranks together
#SBATCH --time=01:00:00            # EDIT
#SBATCH --output=%x_%j.out         # the log: this file's name, the job's id
#SBATCH --requeue                  # after a preemption or a lost node Slurm starts the job again
#SBATCH --open-mode=append         # and it goes on in its log
#SBATCH --signal=USR1@120          # EDIT: 120 s before the end: save and stop. Scripts without a handler ignore it (run_task.sh)
##SBATCH --mem=0                   # EDIT: where the site's default is too small: with one # less this asks for all memory of each node
# Way 4: way 2 in an Enroot container: srun starts one torchrun per node, inside it; env.sh's variables go in by name.
#
# Usage: sbatch [sbatch options] run_script.sh [train script] [its arguments]
#        sbatch --nodes=4 --gpus-per-node=8 --cpus-per-task=96 run_script.sh distributed/train_ddp.py
# Before: ./aux/import_image.sh, on the login node, once. What a node prints is in log/JOB-ID/NODE.out, what goes wrong
# in the job's own log. With Pyxis or Apptainer in the place of Enroot: docs/containers.md.
set -euo pipefail                  # ends at a command that fails (-e), also in a pipe, and at a variable not set (-u)
[[ -f env.sh ]] || { echo "No env.sh in $PWD: cd to the repository before sbatch, or sbatch --chdir=REPOSITORY" >&2; exit 1; }
source ./env.sh                    # and aux/job.sh: die (print and exit), start_job, finish_job

if (($# == 0)); then set -- distributed/train_ddp.py; fi    # no train script given: "$@" becomes this one
! is_uneven ||
    die "uneven allocation: $SLURM_NTASKS tasks on $NNODES nodes, but torchrun starts as many on each; use launch_slurm_to_torch.sh"
start_job "Way 4, torchrun starts the ranks of each node in container $CONTAINER_NAME, logs in log/$SLURM_JOB_ID" "$@"

# --ntasks...         one task on each node: its torchrun
# --kill-on-bad-exit  one dead torchrun ends the step, and so the others
# --wait              EDIT: seconds that the others still have when the first task has ended well
# --cpus-per-task     again, since srun of Slurm 22.05 and 23.02 does not take it over from sbatch
# --output            a log for each node; --error=all: errors come here, to the job's log
# --open-mode         a requeued job has the same id
# bash --norc -p      reads no ~/.bashrc, and (-p, as in line 1) takes no functions that your shell has exported
# shellcheck disable=SC2016  # each task's own shell expands these; "$@" is the train script and its arguments
srun --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=300 --cpus-per-task="$CPUS_PER_NODE" \
    --output="log/$SLURM_JOB_ID/%N.out" --error=all --open-mode=append \
    ./aux/run_task.sh bash --norc -pc '
        folder=$PWD                # EDIT: this is /workspace/mnt in there; folder=$HOME, if your data are in your home
        source aux/container.sh    # waits for another job that creates it; a half-made or outdated container is removed
        container_exists ||
            create_container enroot create --name "$CONTAINER_NAME" "$CONTAINER_IMAGE"
        start_container enroot start --root --rw --mount "$folder:/workspace/mnt" "${options[@]}" \
            "$CONTAINER_NAME" "${enter[@]}" ./torchrun.sh "$@"
    ' - "$@" || status=$?    # - is the $0 of bash -c. After || a failed srun does not end this script
finish_job "${status:-0}" "$@"     # requeues a job whose script saved and stopped; else exits with srun's status
