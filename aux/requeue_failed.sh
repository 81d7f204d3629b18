# shellcheck shell=bash
# Puts a failed job back into the queue if its run has saved: for the EDIT line of a launcher.
#
# Usage, before srun: source aux/requeue_failed.sh FOLDER
# FOLDER, or a file, is where the run saves. A job that has saved nothing there stays FAILED, and so
# does one that has been requeued three times since its last save. The script resumes by itself.
requeue_failed() {
    local status=$? saves=$1 folder=log/$SLURM_JOB_ID failures=0
    # COMPLETING, if somebody has cancelled the job, or it is in the queue already.
    local state pause job=$SLURM_JOB_ID
    if [[ -n "${SLURM_ARRAY_TASK_ID:-}" ]]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    if ((status == 0)); then return; fi
    for pause in 0 5 10; do
        sleep "$pause"
        if state=$(squeue --noheader --jobs="$job" --format=%T); then break; fi
    done
    if [[ -z "$state" ]]; then echo "Not requeued: Slurm does not answer"; fi
    if [[ "$state" != RUNNING ]]; then return; fi

    # Not a file that was only begun (part, .step_100), nor a log, nor the owner of the folder.
    if [[ $(find -H "$saves" -newer "$folder/started" -type f ! -name '*part' ! -name owner \
        ! -name '*.log' ! -name '*tfevents*' ! -path "$saves/.*" ! -path "$saves/*/.*" \
        -print -quit 2>/dev/null) ]]; then
        echo 0 >"$folder/failures" || true
    elif [[ -e "$folder/failures" || "${SLURM_RESTART_COUNT:-0}" != 0 ]]; then
        failures=$(($(cat "$folder/failures" 2>/dev/null || echo 0) + 1))
        echo "$failures" >"$folder/failures" || true
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
