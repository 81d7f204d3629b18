# shellcheck shell=bash
# JUPITER (JSC): 4 x GH200 per node, InfiniBand. Copy this to ../site.sh.
# ClusterName: jupiter
# From github.com/OpenEuroLLM: titan-oellm, slurm/jupiter.sh of 2026-07-14, and oellm-autoexp,
# config/slurm/jupiter.yaml of 2026-07-09; looked at on 2026-11-27. Nobody here could try it.
# The nodes' other name, in the network over which the ranks can meet. The address of the plain name
# cannot be bound.
name=$MASTER_ADDR-interconnect-1.jupiter.internal
if getent hosts "$name" >/dev/null; then MASTER_ADDR=$name; fi
if [[ "$SLURM_JOB_NUM_NODES" == 1 ]]; then MASTER_ADDR=127.0.0.1; fi
export NCCL_SOCKET_IFNAME=ib0 NCCL_SOCKET_FAMILY=AF_INET GLOO_SOCKET_FAMILY=AF_INET
# All ranks see all GPUs of a node.
export SLURM_GPU_BIND=none
# In the header: --partition=booster, -A, --threads-per-core=1, and 288 CPUs for a node. Those jobs
# have --gres=gpu:4 and run offline. The CPUs are Arm.
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
