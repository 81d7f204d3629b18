#!/bin/bash -p
# One task of srun: runs a rank (way 1), or what starts the ranks of this node (ways 2 to 4). Slurm signals every
# process of a task; what a signal means is for the ranks to decide.
#
# Usage: srun ./aux/run_task.sh python distributed/train_ddp.py
trap '' USR1                                         # ignored here and in what is started, until a script listens for it
trap : TERM INT                                      # ends after its ranks, which may be saving
host=${SLURMD_NODENAME:-$HOSTNAME}                   # in a task HOSTNAME is the batch shell's
exec {stderr}>&2 2>/dev/null                         # of this shell alone: its "Terminated" explains nothing
"$@" 2>&"$stderr" {stderr}>&- && exit 0
status=$?
who=${RANK:+rank $RANK}
how="ended with status $status"
((status <= 128)) || how="was killed by SIG$(kill -l "$status" 2>/dev/null || echo "$((status - 128))")"
# The first to fail writes; set -C: what is there is kept. Where several ranks have one parent, it has written before.
(set -C && echo "$status ${who:-the process that starts the ranks} on $host $how" >"${JOB_FAILURE:-/dev/null}") 2>/dev/null
sleep 1                                              # srun ends the step at once, and what it has not read is lost
exit "$status"
