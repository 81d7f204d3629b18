# shellcheck shell=bash
# What supervises a job, for env.sh and the launchers: checks before the ranks start, and what follows when they end.
# To use or to edit a launcher, nobody has to read this.
max_restarts=100                                     # how often a job may be requeued

die() { echo "${SLURM_JOB_NAME:-$0}, job ${SLURM_JOB_ID:-none}: ${*//[[:cntrl:]]/ }" >&2; exit 1; }

# --- what the job inherits --------------------------------------------------------------------------------------------
# A job submitted from inside a job inherits that one's values. Only what the user has set may win over Slurm's.
[[ "${ENV_SH_JOB_ID:-$SLURM_JOB_ID}" == "$SLURM_JOB_ID" ]] || unset NPROC_PER_NODE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS
unset RANK LOCAL_RANK TORCHELASTIC_RUN_ID SPAWN_RANKS                # of the rank that has submitted it
[[ "${NPROC_PER_NODE:-1}" =~ ^[1-9][0-9]*$ ]] || die "NPROC_PER_NODE is '$NPROC_PER_NODE', not a number of ranks"
[[ "${SLURM_GPUS_ON_NODE:-0}" =~ ^[0-9]+$ ]] || die "SLURM_GPUS_ON_NODE is '$SLURM_GPUS_ON_NODE', not a number"
[[ "${SLURM_GPUS_PER_NODE:-}" =~ ^([^:,]+:)?[0-9]+$ ]] || unset SLURM_GPUS_PER_NODE    # a100:2,h100:2: the granted ones count
# One submitted from `srun --pty bash` inherits that task's CPU masks and memory, which srun takes for options.
[[ "${SLURM_CPU_BIND:-}" != *_cpu:* ]] || unset SLURM_CPU_BIND SLURM_CPU_BIND_{LIST,TYPE,VERBOSE}
[[ "${SLURM_MEM_PER_CPU:+1}${SLURM_MEM_PER_GPU:+1}${SLURM_MEM_PER_NODE:+1}" != 11* ]] || unset SLURM_MEM_PER_{CPU,GPU,NODE}

job=$SLURM_JOB_ID                                    # as scontrol knows it: the number of an array alone is the whole array
[[ "${SLURM_ARRAY_JOB_ID:-}" != "$SLURM_JOB_ID" ]] || job+=_$SLURM_ARRAY_TASK_ID
[[ "$(scontrol show job "$job")" =~ Restarts=([0-9]+) ]] && SLURM_RESTART_COUNT=${BASH_REMATCH[1]}
[[ "${SLURM_RESTART_COUNT:-}" =~ ^[0-9]+$ ]] || SLURM_RESTART_COUNT=0
export ENV_SH_JOB_ID=$SLURM_JOB_ID SLURM_RESTART_COUNT
export SLURM_EXPORT_ENV=ALL                          # after sbatch --export=... srun would give the ranks no more than that
export BASH_ENV=                                     # a file that the submitter's shell would slip into every bash here
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"           # else C++ stacks of every rank when one dies
ulimit -c 0                                          # no core files: one per rank fills a quota
trap : USR1 TERM                                     # this shell outlives both: the ranks save, then finish_job requeues

log=log/$SLURM_JOB_ID
export JOB_OUTCOME="$log/outcome-$SLURM_RESTART_COUNT" JOB_FAILURE="$log/failure-$SLURM_RESTART_COUNT"
export TORCH_FR_DUMP_TEMP_FILE="$log/nccl_trace_rank_" TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$log/nccl_trace_rank_"
if [[ "${DEBUG:-0}" == 1 ]]; then                    # DEBUG=1 sbatch launch_...sh; DETAIL crashes gloo
    export NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=INFO TORCH_CPP_LOG_LEVEL=INFO LOGLEVEL=INFO
    export TORCH_FR_BUFFER_SIZE=20000 TORCH_NCCL_TRACE_BUFFER_SIZE=20000 TORCH_NCCL_DUMP_ON_TIMEOUT=1
fi

# --- before the ranks start -------------------------------------------------------------------------------------------
is_uneven() {                                        # 4(x2),3; for 11 tasks of 4 a node sbatch says 4(x3) all the same
    local even=$((NNODES * ${SLURM_NTASKS_PER_NODE:-0}))
    [[ "${SLURM_TASKS_PER_NODE:-1}" == *,* ]] || ((even > 0 && ${SLURM_NTASKS:-$even} != even))
}

# shellcheck disable=SC2154  # env.sh sets gpus and hosts
start_job() {                                        # what starts the ranks, script and arguments
    local before='' name
    [[ -f "$2" ]] || die "no such train script: $2 (in $PWD)"
    [[ "$MASTER_ADDR" =~ ^[[:alnum:]][[:alnum:]._:-]*$ ]] ||         # before 23.11 an error is printed here, with status 0
        die "scontrol names no first host in '$SLURM_JOB_NODELIST' ($hosts): submit with MASTER_ADDR=HOST"
    [[ "$MASTER_PORT" =~ ^[1-9][0-9]{0,4}$ && "$MASTER_PORT" -lt 65536 ]] ||
        die "MASTER_PORT is '$MASTER_PORT', which is no port number"
    getent hosts "$MASTER_ADDR" >/dev/null || die "the host name MASTER_ADDR=$MASTER_ADDR does not resolve on $HOSTNAME"
    # shellcheck disable=SC2016  # the inner shell expands these
    ! timeout 5 bash -c ': 3<>"/dev/tcp/$1/$2"' - "$MASTER_ADDR" "$MASTER_PORT" 2>/dev/null ||
        die "port $MASTER_PORT on $MASTER_ADDR is taken by another program: submit with MASTER_PORT=ANOTHER"

    mkdir --parents "$log" || die "cannot make the folder $log in $PWD"
    [[ "$SLURM_RESTART_COUNT" != 0 ]] || rm --recursive --force "$log"/{outcome,failure,ranks}-*     # another cluster's job of this number
    before=$(cat "$log"/outcome-* 2>/dev/null | sort --key=2n | tail --lines=1) || true
    [[ "$before" != finished* ]] || { echo "Finished at step ${before#* } before it was requeued: nothing to do"; exit 0; }
    export JOB_SAVED_STEP="${before#* }"

    [[ "${DEBUG:-0}" != 1 ]] ||
        env | grep -E '^((SLURM|NCCL|CUDA|OMP)_|(NNODES|NPROC_PER_NODE|WORLD_SIZE|MASTER_(ADDR|PORT))=)' | grep -v ^SLURM_JWT= | sort
    for name in BATCH_SIZE EPOCHS LEARNING_RATE; do                  # other repositories' scripts read these
        [[ -z "${!name:-}" ]] || grep --quiet "$name" "$2" ||
            echo "note: $name=${!name} is not read by $2: say --$(tr _A-Z -a-z <<<"$name") ${!name} after its name, if --help has it"
    done
    [[ "${PREFLIGHT:-0}" != 1 ]] || PREFLIGHT=running "$BASH" -p "$0" aux/check_ranks.py --before "${@:2}" ||
        { requeue_preempted; die "not started: the preflight above has failed"; }
    echo "$1: $WORLD_SIZE ranks on $SLURM_JOB_NODELIST, CPUs per rank: $CPUS_PER_RANK, rendezvous at $MASTER_ADDR:$MASTER_PORT"
    ((gpus == 0 || CPUS_PER_RANK > 1)) ||
        echo "note: a rank with a GPU has one CPU, for its threads and loader workers: sbatch --cpus-per-task asks for more"
}

# --- when they have ended ---------------------------------------------------------------------------------------------
# Rank 0 writes the job's outcome to JOB_OUTCOME, "finished STEP" or "stopped STEP"; run_task.sh writes to
# JOB_FAILURE which rank failed first. srun's status alone tells neither.
finish_job() {                                       # srun's status, script and arguments
    local status=$1 outcome='' step='' failure="srun ended with status $1"
    trap '' USR1 TERM
    [[ "${PREFLIGHT:-0}" != running ]] || exit "$status"
    [[ ! -s "$JOB_OUTCOME" ]] || read -r outcome step <"$JOB_OUTCOME"
    [[ "$outcome" != stopped ]] || requeue_job "$step" "${@:2}"
    [[ "$status" != 0 ]] || exit 0
    requeue_preempted
    [[ ! -s "$JOB_FAILURE" ]] || read -r status failure <"$JOB_FAILURE"
    echo "${SLURM_JOB_NAME:-$0}, job $SLURM_JOB_ID: $failure" >&2
    exit "$status"
}

show_job() {                                         # slurmctld may be restarting; or Slurm has killed the shell that asks
    for _ in {1..20}; do scontrol show job "$job" && return; sleep 5; kill -0 $$ || return; done
}

requeue_preempted() {                                # before its ranks listened: Slurm requeues only what has not failed by then
    local shown
    shown=$(show_job)
    [[ -z "$shown" || "$shown" == *" Restarts=$SLURM_RESTART_COUNT "* ]] ||
        { echo "Slurm requeues this job: the errors above are from the end of its ranks"; exit 0; }
    [[ "$shown" != *PreemptTime=[0-9]* ]] ||
        { scontrol requeue "$job" && echo "Preempted before it could save, requeued" && exit 0; } || true
}

requeue_job() {                                      # step, script and arguments
    local shown reason='' step=$1 before=${JOB_SAVED_STEP:--1} again=(--resume)
    shown=$(show_job)
    [[ " $* " == *" --checkpoint-dir"* ]] || again+=(--checkpoint-dir "checkpoints/$SLURM_JOB_ID")
    if [[ -z "$shown" ]]; then reason="slurmctld does not answer"
    elif [[ "$shown" != *" Restarts=$SLURM_RESTART_COUNT "* ]]; then echo "Stopped after step $step, saved, Slurm requeues it"; exit 0
    elif [[ ! "$shown" =~ JobState=(RUNNING|SIGNALING) ]]; then reason="Slurm is ending it"
    elif ((step <= before)); then reason="it made no progress since it was requeued before"
    elif ((SLURM_RESTART_COUNT >= max_restarts)); then reason="it has been requeued $SLURM_RESTART_COUNT times"
    elif reason=$(scontrol requeue "$job" 2>&1); then echo "Stopped after step $step, saved, requeued"; exit 0
    fi
    [[ "$shown" =~ Command=([^[:space:]]+) ]] || BASH_REMATCH=('' LAUNCHER)
    echo "Stopped after step $step, saved, not requeued here: $reason. When squeue shows it no more, resume it with your options and:" >&2
    echo "    sbatch ${BASH_REMATCH[1]##*/}$(printf ' %q' "${@:2}" "${again[@]}")" >&2
    exit 1
}
