# shellcheck shell=bash
# JUWELS Booster and JURECA-DC (JSC): 4 x A100 per node, InfiniBand. Copy this to ../site.sh.
# ClusterName: juwels, jureca
# From github.com/HelmholtzAI-FZJ/torchrun_jsc of 2025-11-27 and from OpenEuroLLM's oellm-autoexp,
# config/slurm/juwels.yaml of 2026-06-01; looked at on 2026-11-27. Nobody here could try it.
# The nodes' other name, in the InfiniBand network: jwb0001i instead of jwb0001
if getent hosts "${MASTER_ADDR}i" >/dev/null; then MASTER_ADDR=${MASTER_ADDR}i; fi
# gloo takes another network otherwise, and fails.
export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
export NCCL_SOCKET_FAMILY=AF_INET GLOO_SOCKET_FAMILY=AF_INET
# All ranks see all GPUs of a node.
export SLURM_GPU_BIND=none
# The site's torchrun_jsc is not needed: torchrun.sh passes --node-rank and --master-addr, so that
# torchrun does not have to find out by names which node is the first. In the header:
# --partition=booster and -A. Those jobs have --gres=gpu:4 and run offline.
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
