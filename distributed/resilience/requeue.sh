#!/bin/bash
# Puts this Slurm job back into the queue, unless it is being cancelled. Prints the outcome; the
# status is 0 if the job will run again.
#
# Rank 0 of a stopped run calls this (job.py), or run_script.sh if the ranks are in a container,
# which has no scontrol.
set -euo pipefail

# Slurm sends SIGTERM to the job that is requeued.
trap '' TERM

# Of an array only this task, because the array's id without it can mean all tasks.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}

# slurmctld may be restarting.
for ((tries = 20; ; tries--)); do
    if shown=$(scontrol show job "$job" 2>&1); then break; fi
    if ((tries == 1)); then
        echo "$shown"
        exit 1
    fi
    sleep 5
done

# If this is false, Slurm has requeued it itself.
if [[ "$shown" == *" Restarts=${SLURM_RESTART_COUNT:-0} "* ]]; then
    # A job that scancel ends is COMPLETING for another reason.
    may='JobState=(RUNNING|COMPLETING Reason=TimeLimit) '
    if [[ ! "$shown" =~ $may ]]; then
        echo "Slurm is ending it"
        exit 1
    fi
    if ! refused=$(scontrol requeue "$job" 2>&1); then
        echo "$refused"
        exit 1
    fi
fi
echo "Requeued: it resumes by itself"
