# shellcheck shell=bash
# The sizes, address and port of this job, and your cluster's settings. Every launcher sources this.
# The sizes come only from Slurm's variables, so sbatch's options decide what a job gets.
#
# bash: ${A:-B} is A, or B if A is unset or empty; ${A##*:} is A after its last colon; ${A%%[(,]*}
# is A before its first ( or comma.

# Outside a job, in a rank or in an interactive shell, only say what this file is for.
if [[ -z "${SLURM_JOB_ID:-}" || "${SLURM_PROCID:-0}" != 0 || "$-" == *i* ]]; then
    echo "env.sh is for the launchers: sbatch launch_slurm_with_torchrun.sh SCRIPT" >&2
    return 1
fi

# --- ranks: one for each GPU, or without GPUs one for each task ---
NNODES=$SLURM_JOB_NUM_NODES
tasks=${SLURM_NTASKS_PER_NODE:-1}
# SLURM_GPUS_ON_NODE counts those of the first node, on which this runs.
gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}
gpus=${gpus##*:} # a100:4 is 4
NPROC_PER_NODE=$((gpus > 0 ? gpus : tasks))
WORLD_SIZE=$((NNODES * NPROC_PER_NODE))

# SLURM_TASKS_PER_NODE is 2(x3) on three nodes, and 2(x2),1 if one of them has fewer.
job_tasks=${SLURM_NTASKS:-$((NNODES * tasks))}
if [[ "${SLURM_TASKS_PER_NODE:-}" == *,* ]] || ((job_tasks != NNODES * tasks)); then
    echo "env.sh: $job_tasks tasks do not make $tasks on each of $NNODES nodes:" \
        "use --ntasks-per-node" >&2
    return 1
fi

# With --gpus, Slurm decides how many each node gets, and they may differ.
job_gpus=${SLURM_GPUS:-0}
job_gpus=${job_gpus##*:}
if [[ -z "${SLURM_GPUS_PER_NODE:-}" ]] && ((job_gpus > 0 && job_gpus != NNODES * gpus)); then
    echo "env.sh: --gpus=$job_gpus does not give each node $gpus GPUs: use --gpus-per-node" >&2
    return 1
fi

# --- CPUs for each rank: SLURM_JOB_CPUS_PER_NODE is 16(x4) on four nodes ---
CPUS_PER_NODE=${SLURM_JOB_CPUS_PER_NODE%%[(,]*}
# Only those that the job asked for, because an exclusive node lists all its CPUs.
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then
    CPUS_PER_NODE=$((SLURM_CPUS_PER_TASK * tasks))
fi
CPUS_PER_RANK=$((CPUS_PER_NODE > NPROC_PER_NODE ? CPUS_PER_NODE / NPROC_PER_NODE : 1))
# torchrun would set it to 1.
OMP_NUM_THREADS=$CPUS_PER_RANK

# --- where the ranks meet: a port of the first node ---
# One host name per line.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
# MASTER_ADDR=${MASTER_ADDR}i    # EDIT: if node-1 is node-1i on the fast network
# From 61000 to 65535, which Linux by default does not use for outgoing connections. It comes from
# the job id, so two jobs on a node rarely get the same one. 10# makes an id such as 0089 decimal.
MASTER_PORT=$((61000 + 10#$SLURM_JOB_ID % 4536))
if ! getent hosts "$MASTER_ADDR" >/dev/null; then
    echo "env.sh: the host name $MASTER_ADDR does not resolve on $HOSTNAME: edit MASTER_ADDR" >&2
    return 1
fi

export NNODES NPROC_PER_NODE WORLD_SIZE CPUS_PER_NODE OMP_NUM_THREADS MASTER_ADDR MASTER_PORT

# --- for srun and torchrun ---
# sbatch inside another job passes on that job's variables. This unsets those that srun or torchrun
# would obey, by the beginnings of their names.
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER_@}" "${!TORCHELASTIC_@}"
# The ranks need this shell's variables, which sbatch --export=NONE would keep from them.
export SLURM_EXPORT_ENV=ALL
# srun's --mpi: the ranks need no MPI, and a site's default plugin may fail to load.
export SLURM_MPI_TYPE=none
# Seconds that torchrun of torch 2.12 and newer gives the ranks to save after SIGTERM. Older ones
# give them 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600
# Lines reach the log at once, a crash prints where it happened, NCCL prints warnings, and torch's
# C++ only errors.
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}" TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
# srun reads this as --gpus-per-node. In an exclusive job it gets no GPUs unless it asks for them.
if ((gpus > 0)); then export SLURM_GPUS_PER_NODE="${SLURM_GPUS_PER_NODE:-$gpus}"; fi
# Triton's cache of GPU kernels can break on a shared file system.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-$UID}"
# No core files, because one per rank would fill a quota.
ulimit -c 0

# --- your cluster ---
# set +eu; source /etc/profile; set -eu; module load cuda/12.8    # EDIT: what `import torch` needs
if [[ -d .venv ]]; then
    # shellcheck source=/dev/null
    source .venv/bin/activate # EDIT: your environment
fi
# PATH=$(./aux/stage_environment.sh .venv /tmp)/bin:$PATH # EDIT: if imports are slow, a local copy
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0    # EDIT: if the ranks pick the wrong one
# export NCCL_IB_DISABLE=1                                # EDIT: if InfiniBand is broken
# export NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=INFO     # EDIT: to see where it hangs

place="on $SLURM_JOB_NODELIST, $CPUS_PER_RANK CPUs each, at $MASTER_ADDR:$MASTER_PORT"
echo "$SLURM_JOB_NAME: $WORLD_SIZE ranks $place"
