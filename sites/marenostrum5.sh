# shellcheck shell=bash disable=SC1091
# MareNostrum 5 ACC (BSC): 4 x H100 and 80 cores per node, InfiniBand. Copy this to ../site.sh.
# ClusterName: mn5, marenostrum
# From OpenEuroLLM's oellm-autoexp, config/slurm/marenostrum.yaml of 2026-07-11;
# looked at on 2026-11-27. The site's guide is www.bsc.es/supportkc/docs/MareNostrum5/slurm. Nobody
# here could try it.
source /etc/profile
module load singularity
# A node has several adapters, and these four belong to the GPUs.
export NCCL_NET=IB NCCL_SOCKET_IFNAME=ib0,ib1,ib2,ib3 NCCL_IB_HCA=mlx5_0,mlx5_1,mlx5_4,mlx5_5
# All ranks see all GPUs of a node.
export SLURM_GPU_BIND=none
# The machine has no internet (README of oellm-autoexp): copy wheels and models there.
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
# In the header: -A, --qos (acc_debug for two hours at most), and 20 cores for each GPU.
# --cpus-per-task=160 counts hardware threads, with --threads-per-core=2.
