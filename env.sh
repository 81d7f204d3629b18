# shellcheck shell=bash disable=SC1091
# pytorch-on-slurm 1.0: sizes, address and settings of a job, for its launcher on the first node.
# ${A:-B} is A, or B if A is empty; ${A%%[XY]*} is A up to the first X or Y; ${!A@}: names like A*
if [[ -z "${SLURM_JOB_ID:-}" || "${SLURM_PROCID:-0}" != 0 || "$-" == *i* ]]; then
    echo "env.sh is for the launchers: sbatch launch_slurm_with_torchrun.sh SCRIPT" >&2
    return 1
fi
die() { echo "env.sh: $1" >&2 && exit 1; }

# --- ranks: one for each GPU, or without GPUs one for each task ---
job=$(scontrol show job "$SLURM_JOB_ID") # Slurm's record of this job
[[ "$job" =~ HetJobId= ]] && die "a heterogeneous job (sbatch A : B) has nodes that srun leaves out"
NNODES=$SLURM_JOB_NUM_NODES
tasks=${SLURM_NTASKS_PER_NODE:-1}
((${SLURM_NTASKS:-NNODES * tasks} != NNODES * tasks)) &&
    die "$SLURM_NTASKS tasks on $NNODES nodes: use --ntasks-per-node"
gpus=${SLURM_GPUS_ON_NODE:-0}
# An --exclusive job is granted all GPUs of a node, but uses those that it asked for: gres:gpu:2 or
# gres/gpu:a100:2 in the record. SLURM_GPUS_PER_NODE may be that of a job in which sbatch was typed.
number='[:/]gpu[^,[:space:]]*:([0-9]+)([[:space:]]|$)'
if [[ "$job" =~ TresPerNode=gres$number ]]; then gpus=${BASH_REMATCH[1]}; fi
[[ "$job" =~ TresPerJob=gres$number ]] && ((BASH_REMATCH[1] != NNODES * gpus)) &&
    die "--gpus=${BASH_REMATCH[1]} on $NNODES nodes: use --gpus-per-node"
NPROC_PER_NODE=$((gpus > 0 ? gpus : tasks))
WORLD_SIZE=$((NNODES * NPROC_PER_NODE))

# --- CPUs of a node: --cpus-per-task x tasks, or what Slurm granted ---
# 48(x2),16 is 48 on each of two nodes, and 16 on a third. srun asks for the same number on every
# node, so the smallest one counts.
granted=$(tr , '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sort --numeric-sort)
CPUS_PER_NODE=${granted%%[($'\n']*}
# With --cpus-per-gpu, SLURM_CPUS_PER_TASK is left from a job in which sbatch was typed.
[[ "$job" =~ CpusPerTres= ]] && unset SLURM_CPUS_PER_TASK
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then CPUS_PER_NODE=$((SLURM_CPUS_PER_TASK * tasks)); fi
CPUS_PER_RANK=$((CPUS_PER_NODE > NPROC_PER_NODE ? CPUS_PER_NODE / NPROC_PER_NODE : 1))

# --- where the ranks meet: the first node, at a port that Linux does not give to other programs ---
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # one per line
MASTER_ADDR=${hosts%%$'\n'*}
MASTER_PORT=$((61000 + SLURM_JOB_ID % 4536))
export NNODES NPROC_PER_NODE CPUS_PER_NODE OMP_NUM_THREADS=$CPUS_PER_RANK MASTER_ADDR MASTER_PORT

# --- srun would obey these variables of a job in which sbatch was typed ---
unset "${!SLURM_CPU_BIND@}" "${!SLURM_MEM_PER_@}" "${!SLURM_GPUS_PER_@}" SLURM_GPUS
unset SLURM_CPUS_PER_GPU SLURM_NTASKS_PER_GPU SLURM_TRES_PER_TASK
if ((gpus > 0)); then export SLURM_GPUS_PER_NODE=$gpus; fi
# srun is to pass on all variables, even after sbatch --export=NONE. torch needs no MPI.
export SLURM_EXPORT_ENV=ALL SLURM_MPI_TYPE=none

# --- your cluster: the only part to edit, and most need only its first two lines ---
# set +eu; source /etc/profile; module load cuda/12.8; set -eu    # EDIT: what `import torch` needs
if [[ -d .venv ]]; then source .venv/bin/activate; fi             # EDIT: your environment
# MASTER_ADDR=${MASTER_ADDR}i                            # EDIT: if the fast network has node-1i
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # EDIT: if ranks pick a slow network
# export NCCL_DEBUG=INFO TORCH_DISTRIBUTED_DEBUG=INFO    # EDIT: to see where it hangs
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

getent hosts "$MASTER_ADDR" >/dev/null ||
    die "the host name $MASTER_ADDR does not resolve on $HOSTNAME: edit MASTER_ADDR"
[[ -e /dev/nvidiactl ]] && ((gpus > 0 && CPUS_PER_RANK < 2)) &&
    echo "env.sh: a GPU rank needs 2 CPUs or more, better 8: use --cpus-per-task" >&2
echo "$SLURM_JOB_NAME: $WORLD_SIZE ranks on $SLURM_JOB_NODELIST, rank 0 at" \
    "$MASTER_ADDR:$MASTER_PORT. Each node: ranks $NPROC_PER_NODE," \
    "GPUs $gpus of ${SLURM_GPUS_ON_NODE:-0}, CPUs $CPUS_PER_NODE"
