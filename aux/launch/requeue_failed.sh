# shellcheck shell=bash
# Puts a failed job back into the queue if its run has saved: for the EDIT line of a launcher.
#
# Usage, before srun: source aux/launch/requeue_failed.sh FOLDER
# FOLDER, or a file, is where the run saves. A job that has saved nothing there stays FAILED, and so
# does one after three requeues without a save. The script resumes by itself.
# The job's python3 has to be 3.10 or newer.
touch "log/$SLURM_JOB_ID/started" || true
# shellcheck disable=SC2064
trap "python3 aux/launch/requeue_failed.py \$? ${1@Q} || true" EXIT
