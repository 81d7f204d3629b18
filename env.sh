# shellcheck shell=bash disable=SC1091
# pytorch-on-slurm 4.0: sizes, address and settings of a job, for its launcher on the first node.
# ${A:-B} is A, or B if A is empty; ${A%%[!B]*} is A up to the first that is no B; ${!A@}: A...
if [[ -z "${SLURM_JOB_ID:-}" || "${SLURM_PROCID:-0}" != 0 || "$-" == *i* ]]; then
    echo "env.sh is for the launchers: sbatch launch_slurm_with_torchrun.sh SCRIPT" >&2
    return 1
fi
die() { echo "env.sh: $1" >&2 && exit 1; }

# --- what this job is: Slurm knows, and variables may be left from the job that submitted it ---
fields=jobid:20,batchflag:10,hetjobid:20,arraytaskid:20,restartcnt:10
fields+=,tres-per-node:200,tres-per-job:200,cpus-per-tres:200
for pause in 0 5 10 20; do # Slurm may be busy
    sleep "$pause"
    shown=$(unset "${!SQUEUE_@}" && squeue --noheader --jobs="$SLURM_JOB_ID" --Format="$fields") &&
        break
done
# The id of an array's last task stands for the whole array, so there are lines of other tasks.
record=$(grep "^$SLURM_JOB_ID " <<<"$shown") || die "squeue does not show job $SLURM_JOB_ID"
read -r _ is_batch het_job array_task restarts per_node per_job cpus_per_gpu <<<"$record"
if [[ "$het_job" != N/A ]]; then die "srun leaves out nodes of a heterogeneous job (A : B)"; fi
unset SLURM_RESTART_COUNT "${!SLURM_STEP_@}"
if ((restarts > 0)); then export SLURM_RESTART_COUNT=$restarts; fi
if [[ "$array_task" == N/A ]]; then unset "${!SLURM_ARRAY_@}"; fi

# --- ranks: one for each GPU, or without GPUs one for each task ---
NNODES=$SLURM_JOB_NUM_NODES tasks=${SLURM_NTASKS_PER_NODE:-1}
if ((${SLURM_NTASKS:-NNODES * tasks} != NNODES * tasks)); then
    die "$SLURM_NTASKS tasks on $NNODES nodes: use --ntasks-per-node"
fi
gpus=
for asked in ${per_node//,/ }; do # gres:gpu:2, or gres/gpu:a100:4 gres/nic:1
    if [[ "$asked" =~ [:/]gpu(:[^:]+)?:([0-9]+)$ ]]; then gpus=$((gpus + BASH_REMATCH[2])); fi
done
# A salloc inherits those of the job in whose shell it was typed.
if ((!is_batch)) && shown=$(scontrol show job --details "$SLURM_JOB_ID"); then
    if [[ ! "$shown" =~ GRES=[^\ ]*gpu ]]; then unset SLURM_GPUS_ON_NODE; fi
fi
# An --exclusive job is granted all GPUs of a node, but uses those that it asked for.
gpus=${gpus:-${SLURM_GPUS_ON_NODE:-0}}
if [[ "$per_job" =~ [:/]gpu.*:([0-9]+)$ ]] && ((BASH_REMATCH[1] != NNODES * gpus)); then
    die "--gpus=${BASH_REMATCH[1]} on $NNODES nodes: use --gpus-per-node"
fi
NPROC_PER_NODE=$((gpus > 0 ? gpus : tasks))
WORLD_SIZE=$((NNODES * NPROC_PER_NODE))

# --- CPUs of a node: --cpus-per-task x tasks, or what Slurm granted ---
# 48(x2),16 is 48 on two nodes and 16 on a third. srun asks for as many on each: the fewest count.
granted=$(tr , '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sort --numeric-sort)
CPUS_PER_NODE=${granted%%[!0-9]*}
if [[ "$cpus_per_gpu" != N/A ]]; then unset SLURM_CPUS_PER_TASK; fi
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then CPUS_PER_NODE=$((SLURM_CPUS_PER_TASK * tasks)); fi
CPUS_PER_RANK=$((CPUS_PER_NODE > NPROC_PER_NODE ? CPUS_PER_NODE / NPROC_PER_NODE : 1))

# --- the first node, a port that Linux gives to no program, and the name of the run's folder ---
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_PORT=$((61000 + SLURM_JOB_ID % 4536)) RUN=$SLURM_JOB_ID
# A requeued job goes on with its run. In salloc each launch is another one.
if ((!is_batch)); then RUN+=_$(date +%H-%M-%S); fi
export NNODES NPROC_PER_NODE CPUS_PER_NODE MASTER_ADDR MASTER_PORT RUN

# --- srun: without what is left from another job, with all variables, and torch needs no MPI ---
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER_@}" "${!SLURM_GPUS_PER_@}" SLURM_GPUS
unset SLURM_CPUS_PER_GPU SLURM_NTASKS_PER_GPU SLURM_TRES_PER_TASK JOB_RESTARTS
unset "${!TORCHELASTIC_@}" GROUP_RANK
if ((gpus > 0)); then export SLURM_GPUS_PER_NODE=$gpus; fi
export SLURM_EXPORT_ENV=ALL SLURM_MPI_TYPE=none OMP_NUM_THREADS=$CPUS_PER_RANK

# --- log/JOB: which code each start runs, when and how it ended, and NCCL's last collectives ---
mkdir --parents "log/$SLURM_JOB_ID" || true
# start-N has a line when this launcher begins, and one when it ends, because Slurm forgets a job.
# Others who may write to log/ can have put a link or a FIFO there, into which nothing is written.
noted=$PWD/log/$SLURM_JOB_ID/start-$restarts
note() { if [[ ! -L "$noted" && ! -p "$noted" ]]; then echo "$@" >>"$noted"; fi; } 2>/dev/null
note began "$(date +%s)" "$SLURM_JOB_NODELIST" "$(readlink /proc/$$/fd/1)" || true
# If you set a trap for EXIT, begin it with: note_end $?
note_end() { note ended "$(date +%s)" "$1" || true; }
if [[ -z "$(trap -p EXIT)" ]]; then
    trap 'note_end $?' EXIT
elif [[ "$(trap -p EXIT)" != *note_end* ]]; then
    echo 'env.sh: begin your trap for EXIT with: note_end $?' >&2
fi
# Without a trap for a signal that ends this shell, $? is that of its last command, mostly 0.
for name in HUP INT TERM USR1 USR2 XCPU; do
    ended="exit $((128 + $(kill -l "$name")))"
    if [[ -z "$(trap -p "$name")" ]]; then trap -- "$ended" "$name"; fi
done
code=log/$SLURM_JOB_ID/code-$restarts before=log/$SLURM_JOB_ID/code-$((restarts - 1))
script=${1:-distributed/train_ddp.py} module=${2-}
if [[ "$script" == -- ]]; then script=$module; elif [[ "$module" == -- ]]; then module=${3-}; fi
if [[ "$script" == -m ]]; then script=${module//.//}; fi # package.module: package/module.py
(
    umask 077 # a secret in a file that you have edited is for nobody else
    rm --force "$code"
    set -o noclobber # a link or a file of others, who may write to log/, stays as it is
    {
        git describe --always
        git diff HEAD -- .
        sha256sum ./*.sh "$(dirname -- "$script")"/*.py "$script"/*.py
    } >"$code"
) 2>/dev/null || true
if [[ -f "$before" ]] && ! cmp --silent "$before" "$code"; then
    echo "The code has changed since this job's last start: diff $before $code"
fi
# NCCL's last collectives. Up to torch 2.10 none are kept unless a number is set.
export TORCH_FR_DUMP_TEMP_FILE=log/$SLURM_JOB_ID/nccl_rank_
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}

# --- settings: all files, sockets and pinned memory that Linux allows ---
ulimit -S -n "$(ulimit -H -n)" && ulimit -S -l "$(ulimit -H -l)"
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
# site.sh is yours: modules, and changes of the above, such as MASTER_ADDR=${MASTER_ADDR}i. It does
# not see the script and its arguments, which conda's activate would take for its own.
# A line of it that fails ends the job, because without its module NCCL may use TCP for days. But
# what it sources may end with a test that is false, as /etc/profile does, so `source` may fail.
site_sh_failed() {
    if [[ "${BASH_SOURCE[1]}" == ./site.sh && ! "$BASH_COMMAND" =~ ^(source|\.)" " ]]; then
        local line=${BASH_LINENO[0]}
        die "site.sh, line $line failed: $(sed --quiet "${line}p" site.sh) (may it? add || true)"
    fi
}
if [[ -e site.sh ]]; then
    env_sh_arguments=("$@")
    set +eu --
    trap site_sh_failed ERR
    source ./site.sh
    trap - ERR
    set -eu -- "${env_sh_arguments[@]}"
fi
# An environment that site.sh activates comes first.
if [[ -d .venv ]] && ! grep --quiet --no-messages '^[^#]*\<activate\>' site.sh; then
    source .venv/bin/activate
fi
getent ahosts "$MASTER_ADDR" >/dev/null || die "$MASTER_ADDR does not resolve: set it in site.sh"
echo "$SLURM_JOB_NAME: $WORLD_SIZE ranks on $SLURM_JOB_NODELIST, rank 0 at" \
    "$MASTER_ADDR:$MASTER_PORT. Each node: ranks $NPROC_PER_NODE," \
    "GPUs $gpus of ${SLURM_GPUS_ON_NODE:-0}, CPUs $CPUS_PER_NODE"
