# shellcheck shell=bash
# The sizes, address and port of this job, and your cluster's settings. Every launcher sources this in the batch shell.
# It reads nothing but Slurm's own variables: what a job gets is decided by sbatch's options.
if [[ -z "${SLURM_JOB_ID:-}" || "${SLURM_PROCID:-0}" != 0 || "$-" == *i* ]]; then
    echo "env.sh is for the launchers: sbatch launch_slurm_with_torchrun.sh SCRIPT, without Slurm ./torchrun.sh SCRIPT" >&2
    return 1
fi

# --- ranks: one per GPU asked for, without GPUs one per task ---
NNODES=$SLURM_JOB_NUM_NODES
tasks=${SLURM_NTASKS_PER_NODE:-1}
gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}
gpus=${gpus##*:} # a100:4 is 4
NPROC_PER_NODE=$((gpus > 0 ? gpus : tasks))
WORLD_SIZE=$((NNODES * NPROC_PER_NODE))

if [[ "${SLURM_TASKS_PER_NODE:-}" == *,* ]] || ((${SLURM_NTASKS:-0} > 0 && SLURM_NTASKS != NNODES * tasks)); then
    echo "env.sh: ${SLURM_NTASKS:-?} tasks do not make $tasks on each of $NNODES nodes: use --nodes and --ntasks-per-node" >&2
    return 1
fi

total=${SLURM_GPUS:-0} # --gpus leaves it to Slurm how many each node has
total=${total##*:}
if [[ -z "${SLURM_GPUS_PER_NODE:-}" ]] && ((total > 0 && total != NNODES * gpus)); then
    echo "env.sh: --gpus=$total are not $gpus on each of $NNODES nodes: use --gpus-per-node" >&2
    return 1
fi

# --- CPUs: 16(x4) is 16 on each of 4 nodes ---
CPUS_PER_NODE=${SLURM_JOB_CPUS_PER_NODE%%[(,]*}
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then
    CPUS_PER_NODE=$((SLURM_CPUS_PER_TASK * tasks))
fi
CPUS_PER_RANK=$((CPUS_PER_NODE > NPROC_PER_NODE ? CPUS_PER_NODE / NPROC_PER_NODE : 1))
OMP_NUM_THREADS=$CPUS_PER_RANK

# --- rendezvous: the first node, and a port above those that Linux gives to others ---
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
# MASTER_ADDR=${MASTER_ADDR}i    # EDIT: if node-1 is node-1i on the fast network
MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
if ! getent hosts "$MASTER_ADDR" >/dev/null; then
    echo "env.sh: the first node's name, '$MASTER_ADDR', does not resolve on $HOSTNAME: edit MASTER_ADDR in env.sh" >&2
    return 1
fi

export NNODES NPROC_PER_NODE WORLD_SIZE CPUS_PER_NODE OMP_NUM_THREADS MASTER_ADDR MASTER_PORT

# --- for srun and torchrun ---
# sbatch typed inside another job leaves these of it behind, and srun would take them for options.
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER_@}" "${!TORCHELASTIC_@}"
# After sbatch --export=... the ranks still get what this shell has.
export SLURM_EXPORT_ENV=ALL
# How long torchrun waits for ranks that were told to stop and are saving, in seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
# A step of an exclusive job gets no GPUs unless srun asks for them.
if ((gpus > 0)); then export SLURM_GPUS_PER_NODE="${SLURM_GPUS_PER_NODE:-$gpus}"; fi
# On a shared file system the kernels that Triton caches go stale.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-$UID}"
# No core files: one per rank fills a quota.
ulimit -c 0

# --- your cluster ---
# source /etc/profile || true; module load cuda/12.8     # EDIT: what `import torch` needs
if [[ -d .venv ]]; then
    # shellcheck source=/dev/null
    source .venv/bin/activate # EDIT: your environment
fi
# PATH=$(./aux/stage_environment.sh .venv /tmp)/bin:$PATH # EDIT: if imports are slow, a copy on the node's own disk
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0    # EDIT: if NCCL or gloo takes the wrong network
# export NCCL_IB_DISABLE=1                                # EDIT: if InfiniBand is broken
# export NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=INFO     # EDIT: to see where it hangs

echo "$SLURM_JOB_NAME: $WORLD_SIZE ranks on $SLURM_JOB_NODELIST, $CPUS_PER_RANK CPUs each, at $MASTER_ADDR:$MASTER_PORT"
