# shellcheck shell=bash
# Read once per job by every launcher, in the batch shell: what to edit for your cluster, then what Slurm already knows.
# What differs from rank to rank (RANK, LOCAL_RANK) is not here: it exists only inside srun.

# --- your cluster -----------------------------------------------------------------------------------------------------
trap 'asked_to_stop=1' USR1                          # so early that it cannot end this shell: run_job takes it up
set +u                                               # module and conda are not written for set -u
# source /etc/profile.d/modules.sh && module load cuda/12.8    # EDIT: whatever `import torch` needs (Lmod: lmod.sh)
# shellcheck source=/dev/null
[[ ! -d .venv ]] || source .venv/bin/activate        # EDIT: your virtual environment; or with conda:
# source "$(conda info --base)/etc/profile.d/conda.sh" && conda activate NAME
set -u
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # EDIT: only where ranks pick the wrong network interface
# export NCCL_IB_DISABLE=1                           # EDIT: no InfiniBand, or a broken one: use TCP
# export NCCL_NET_GDR_LEVEL=PHB                      # EDIT: how near a GPU and its network card must be for GPUDirect
# umask 077                                          # EDIT: where nobody else may read what jobs write
# export SLURM_EXPORT_ENV=ALL                        # EDIT: for sbatch --export=NONE, after which srun has no PATH
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
CONTAINER_IMAGE=$PWD/pytorch.sqsh                    # EDIT: for run_script.sh: what aux/import_image.sh has made,
CONTAINER_NAME=pytorch                               # EDIT: the name of its container on every node,
CONTAINER_MOUNTS=                                    # EDIT: what it sees besides the repository: HOST:CONTAINER,...

# --- what Slurm already knows -----------------------------------------------------------------------------------------
die() { echo "${SLURM_JOB_NAME:-$0}, job ${SLURM_JOB_ID:-none}: ${*//[[:cntrl:]]/ }" >&2; exit 1; }

# A job submitted from inside a job inherits that one's values; only what the user set may win over what Slurm says.
[[ "${ENV_SH_JOB_ID:-$SLURM_JOB_ID}" == "$SLURM_JOB_ID" ]] || unset NPROC_PER_NODE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS
ENV_SH_JOB_ID=$SLURM_JOB_ID
job=$SLURM_JOB_ID                                    # as scontrol knows it: the number of an array alone is the whole array
[[ "${SLURM_ARRAY_JOB_ID:-}" != "$SLURM_JOB_ID" ]] || job+=_$SLURM_ARRAY_TASK_ID
[[ "$(scontrol show job "$job")" =~ Restarts=([0-9]+) ]] && SLURM_RESTART_COUNT=${BASH_REMATCH[1]}    # not an inherited one
[[ "${SLURM_RESTART_COUNT:-}" =~ ^[0-9]+$ ]] || SLURM_RESTART_COUNT=0
command -v python >/dev/null || [[ -e "$CONTAINER_IMAGE" ]] || die "no python on $HOSTNAME: make a .venv here, or edit env.sh"

NNODES=$SLURM_JOB_NUM_NODES gpus=${SLURM_GPUS_ON_NODE:-0}
[[ "$gpus" =~ ^[0-9]+$ ]] || die "SLURM_GPUS_ON_NODE is '$gpus', not a number"
NPROC_PER_NODE=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : ${SLURM_NTASKS_PER_NODE:-1}))}
[[ "$NPROC_PER_NODE" =~ ^[1-9][0-9]*$ ]] || die "NPROC_PER_NODE is '$NPROC_PER_NODE', not a number of ranks"
WORLD_SIZE=$((NPROC_PER_NODE * NNODES))
is_uneven() {                                        # 4(x2),3; sbatch writes 4(x3) all the same when it has 11 tasks
    # shellcheck disable=SC2153  # both names are Slurm's
    [[ "$SLURM_TASKS_PER_NODE" == *,* ]] ||
        [[ -n "${SLURM_NTASKS_PER_NODE:-}" && "$SLURM_NTASKS" != "$((NNODES * SLURM_NTASKS_PER_NODE))" ]]
}
! is_uneven || WORLD_SIZE=$SLURM_NTASKS

# No pipe into `head`: on a long list scontrol would die of SIGPIPE, and with pipefail so would the job.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${MASTER_ADDR:-${hosts%%$'\n'*}}
[[ "$MASTER_ADDR" =~ ^[[:alnum:]][[:alnum:]._:-]*$ ]] ||     # before 23.11 an error is printed here, with status 0
    die "scontrol names no first host in '$SLURM_JOB_NODELIST' ($hosts): submit with MASTER_ADDR=HOST"
MASTER_PORT=${MASTER_PORT:-$((61000 + 10#$SLURM_JOB_ID % 4536))}     # above the ephemeral ports; 10#: 0089 is not octal

# One task has CPUS_PER_NODE in ways 2 and 3, where it is the parent of all ranks of its node.
CPUS_PER_NODE=${SLURM_CPUS_PER_TASK:+$((SLURM_CPUS_PER_TASK * ${SLURM_NTASKS_PER_NODE:-1}))}
CPUS_PER_NODE=${CPUS_PER_NODE:-${SLURM_CPUS_ON_NODE:-1}}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CPUS_PER_NODE > NPROC_PER_NODE ? CPUS_PER_NODE / NPROC_PER_NODE : 1))}

export ENV_SH_JOB_ID NNODES NPROC_PER_NODE WORLD_SIZE MASTER_ADDR MASTER_PORT CPUS_PER_NODE OMP_NUM_THREADS SLURM_RESTART_COUNT
export CONTAINER_IMAGE CONTAINER_NAME CONTAINER_MOUNTS PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export BASH_ENV=                                     # a file the submitter's shell would slip into every bash here
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"           # else every survivor prints C++ stacks when one rank dies
ulimit -c 0                                          # no core files: one per rank fills a quota
if [[ "${DEBUG:-0}" == 1 ]]; then                    # DEBUG=1 sbatch launch_...sh
    export NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_CPP_LOG_LEVEL=INFO LOGLEVEL=INFO
    export TORCH_NCCL_TRACE_BUFFER_SIZE=20000 TORCH_NCCL_DUMP_ON_TIMEOUT=1
    env | grep -E '^((SLURM|NCCL|CUDA|OMP)_|(NNODES|NPROC_PER_NODE|WORLD_SIZE|MASTER_(ADDR|PORT))=)' | grep -v ^SLURM_JWT= | sort
fi

# --- the job's step: started, stopped in time, requeued ---------------------------------------------------------------
# Rank 0 leaves in JOB_OUTCOME what became of the job, as "finished STEP" or "stopped STEP": srun's status does not tell.
max_restarts=100                                     # EDIT: how often a job may be requeued

run_job() {                                          # script and arguments
    local outcome='' step before status=0 log=log/$SLURM_JOB_ID start=$SLURM_RESTART_COUNT
    mkdir -p "$log"
    [[ "$start" != 0 ]] || rm --recursive --force "$log"/{outcome,ranks,stop}-*    # left by another cluster's job of this number
    before=$(cat "$log"/outcome-* 2>/dev/null | sort --key=2n | tail --lines=1) || true
    [[ "$before" != finished* ]] || { echo "Finished at step ${before#* } before it was requeued: nothing to do"; exit 0; }
    export JOB_OUTCOME="$log/outcome-$start" JOB_STOP="$log/stop-$start" JOB_STEP_BEFORE="${before#* }"    # each start its own: older ranks may live
    # srun passes the signal on, though not in its first seconds, and ranks may not listen yet: ours look for the file as well.
    trap 'signalled=1; : >"$JOB_STOP" || true; ((SECONDS < 10)) || kill -USR1 "$pid" 2>/dev/null || true' USR1
    trap 'signalled=1' TERM                          # Slurm tells the ranks itself: outlive them
    [[ -z "${asked_to_stop:-}" ]] || : >"$JOB_STOP"
    # shellcheck disable=SC2154  # start_ranks is the launcher's
    if [[ "${PREFLIGHT:-0}" == 1 ]]; then            # PREFLIGHT=1 sbatch launch_...sh
        SECONDS=-3600                                # no signal for these ranks
        in_background "${start_ranks[@]}" aux/check_ranks.py --before "$@" ||
            { requeue_preempted; die "not started: the preflight above has failed"; }
    fi
    SECONDS=0
    in_background "${start_ranks[@]}" "$@" || status=$?
    trap '' USR1 TERM
    [[ ! -s "$JOB_OUTCOME" ]] || read -r outcome step <"$JOB_OUTCOME"
    [[ "$outcome" != stopped ]] || requeue_job "$step" "${before#* }" "$@"
    [[ "$status" == 0 ]] || requeue_preempted
    [[ "$status" == 0 ]] || echo "The ranks ended with status $status: the first line above that names a rank says why" >&2
    exit "$status"
}

in_background() {                                    # bash runs a trap only between two commands, but at once while it waits
    local code status=127
    "$@" &
    pid=$!
    until
        signalled='' code=0
        wait "$pid" || code=$?                       # 127: waited for already, and the signal came just then
        ((code == 127)) || status=$code
        [[ -z "$signalled" ]]
    do :; done
    return "$status"
}

show_job() { for _ in {1..20}; do scontrol show job "$job" && return; sleep 5; done; }    # slurmctld may be restarting
requeue_preempted() {                                # before its ranks listened: Slurm requeues only what has not failed by then
    [[ "$(show_job)" != *PreemptTime=[0-9]* ]] ||
        { scontrol requeue "$job" && echo "Preempted before it could save, requeued" && exit 0; } || true
}

requeue_job() {                                      # step, step before, script and arguments
    local shown reason='' step=$1 before=${2:--1} again=(--resume)
    shown=$(show_job)
    [[ " $* " == *" --checkpoint-dir"* ]] || again+=(--checkpoint-dir "checkpoints/$SLURM_JOB_ID")
    if [[ -z "$shown" ]]; then reason="slurmctld does not answer"
    elif [[ "$shown" != *JobState=RUNNING*" Restarts=$SLURM_RESTART_COUNT "* ]]; then reason="Slurm is ending or requeueing it"
    elif ((step <= before)); then reason="it got no further than when it was requeued before"
    elif ((SLURM_RESTART_COUNT >= max_restarts)); then reason="it has been requeued $SLURM_RESTART_COUNT times"
    elif reason=$(scontrol requeue "$job" 2>&1); then echo "Stopped after step $step, saved, requeued"; exit 0
    fi
    [[ "$shown" =~ Command=([^[:space:]]+) ]] || BASH_REMATCH=('' LAUNCHER)
    echo "Stopped after step $step, saved, not requeued here: $reason. When squeue shows it no more, go on with your options and:" >&2
    echo "    sbatch ${BASH_REMATCH[1]##*/}$(printf ' %q' "${@:3}" "${again[@]}")" >&2
    exit 1
}
