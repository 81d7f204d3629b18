# shellcheck shell=bash    # for the linter shellcheck
# Every launcher reads this once per job, in the batch shell. RANK and LOCAL_RANK are set later, inside srun.
# ${A:-B}: A, or B if A is unset or empty. ${A##P} cuts the longest start of A that matches P, ${A%%P} the longest end.
if [[ "$-" == *i* || -z "${SLURM_JOB_ID:-}" ]]; then                 # an interactive shell ($- has an i), or no job
    echo "env.sh is read by the launchers: type sbatch launch_slurm_with_torchrun.sh, or without Slurm ./torchrun.sh SCRIPT" >&2
    return 1
fi
source aux/job.sh                        # no need to read it: it has is_uneven, die, start_job, finish_job

# --- world size: nodes x ranks per node -------------------------------------------------------------------------------
NNODES=$SLURM_JOB_NUM_NODES
gpus=${SLURM_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-0}}                # --gpus-per-node, or else the GPUs granted, or 0
gpus=${gpus##*:}                                                     # cuts the type before a colon: a100:4 becomes 4
tasks=${SLURM_NTASKS_PER_NODE:-1}
NPROC_PER_NODE=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : tasks))}       # a rank per GPU; without GPUs, per task
WORLD_SIZE=$((NNODES * NPROC_PER_NODE))                              # for launch_slurm_to_torch.sh; torchrun sets its own
if is_uneven; then WORLD_SIZE=$SLURM_NTASKS; fi                      # nodes with 4, 4 and 3 tasks: only way 1 runs them

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")               # of node-[1-2]: node-1, node-2, a line each
MASTER_ADDR=${MASTER_ADDR:-${hosts%%$'\n'*}}                         # up to the first newline, $'\n': rank 0's node
# MASTER_ADDR=${hosts%%$'\n'*}i                      # EDIT: appends i, where node-1 is node-1i on the fast network
MASTER_PORT=${MASTER_PORT:-$((61000 + 10#$SLURM_JOB_ID % 4536))}     # by job id; Linux gives none above 60999 to others; 10#: decimal

cpus=${SLURM_JOB_CPUS_PER_NODE:-1}                                   # 16(x4),8: 16 CPUs on each of 4 nodes, 8 on a 5th
CPUS_PER_NODE=${SLURM_CPUS_ON_NODE:-${cpus%%[(,]*}}                  # not set in salloc: then cpus up to its first ( or ,
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then CPUS_PER_NODE=$((SLURM_CPUS_PER_TASK * tasks)); fi  # --cpus-per-task wins
CPUS_PER_RANK=$((CPUS_PER_NODE > NPROC_PER_NODE ? CPUS_PER_NODE / NPROC_PER_NODE : 1))    # an equal share, at least 1
OMP_NUM_THREADS=${OMP_NUM_THREADS:-$CPUS_PER_RANK}                   # CPU threads of torch in each rank
export NNODES NPROC_PER_NODE WORLD_SIZE MASTER_ADDR MASTER_PORT CPUS_PER_NODE OMP_NUM_THREADS

# --- your cluster -----------------------------------------------------------------------------------------------------
set +u                                               # unset variables are no error: module and conda use them
# source /etc/profile || true; module load cuda/12.8 # EDIT: what `import torch` needs; /etc/profile defines `module`
# shellcheck source=/dev/null  # for the linter: it need not look into activate
if [[ -d .venv ]]; then source .venv/bin/activate; fi    # EDIT: your virtual environment; or conda, the next line:
# source "$(conda info --base)/etc/profile.d/conda.sh" && conda activate NAME
# PATH=$(./aux/stage_environment.sh .venv /tmp)/bin:$PATH    # EDIT: imports are slow? Copies .venv to /tmp; prints where
set -u
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0   # EDIT: if NCCL (GPUs) or gloo (CPUs) takes a wrong network
# export NCCL_IB_DISABLE=1                           # EDIT: no InfiniBand, or a broken one: use TCP
# umask 077                                          # EDIT: where nobody else may read what jobs write
export CONTAINER_IMAGE=$PWD/pytorch.sqsh             # these 4 lines: way 4 only. EDIT: made by aux/import_image.sh
export CONTAINER_NAME=pytorch${CONTAINER_IMAGE//[^[:alnum:]_.]/-}    # EDIT: any name; here the path, with - for /
export CONTAINER_MOUNTS=                             # EDIT: folders besides the repository: HOST:CONTAINER[:ro],...
export CONTAINER_ENV=                                # EDIT: more variables for the container: WANDB_API_KEY,...
