# shellcheck shell=bash
# Puts a failed job back into the queue if its run has saved: for the EDIT line of a launcher.
#
# Usage, before srun: source aux/launch/requeue_failed.sh FOLDER
# FOLDER, or a file, is where the run saves. A job that has saved nothing there stays FAILED, and so
# does one after three requeues without a save. The script resumes by itself.
# The job's python3 has to be 3.10 or newer.
touch "log/$SLURM_JOB_ID/started" || true
saves=$1
requeue_if_failed() {
    local status=$?
    note_end "$status" 2>/dev/null || true # an older env.sh has none
    python3 aux/launch/requeue_failed.py "$status" "$saves" || true
    exit "$status"
}
trap requeue_if_failed EXIT
