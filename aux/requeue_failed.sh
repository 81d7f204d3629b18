# shellcheck shell=bash
# Puts a failed job back into the queue if its run has saved: for the EDIT line of a launcher.
#
# Usage, before srun: source aux/requeue_failed.sh FOLDER
# FOLDER, or a file, is where the run saves. A job that has saved nothing there stays FAILED, and so
# does one that has been requeued three times since its last save. The script resumes by itself.
requeue_failed() {
    local status=$? saves=$1 folder=log/$SLURM_JOB_ID failures=0
    # COMPLETING, if somebody has cancelled the job, or it is in the queue already.
    local state job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    state=$(squeue --noheader --jobs="$job" --format=%T || true)
    if ((status == 0)) || [[ "$state" != RUNNING ]]; then return; fi

    # Not a file that was only begun (part, .step_100), nor the owner of the folder.
    if [[ $(find "$saves" -newer "$folder/started" -type f ! -name '*part' ! -name owner \
        ! -path '*/.*' -print -quit 2>/dev/null) ]]; then
        echo 0 >"$folder/failures"
    elif [[ -e "$folder/failures" ]]; then
        failures=$(($(<"$folder/failures") + 1))
        echo "$failures" >"$folder/failures"
    else
        echo "Not requeued: the run has saved nothing"
        return
    fi
    if ((failures > 3)); then
        echo "Not requeued: three requeues without a save"
    elif scontrol requeue "$job"; then
        echo "Failed with status $status, and requeued: it resumes by itself"
    fi
}
touch "log/$SLURM_JOB_ID/started"
# shellcheck disable=SC2064
trap "requeue_failed '$1'" EXIT
