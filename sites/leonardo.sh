# shellcheck shell=bash
# Leonardo Booster (CINECA): 4 x A100 and 32 cores per node, InfiniBand. Copy this to ../site.sh.
# ClusterName: leonardo
# From docs.hpc.cineca.it/hpc/leonardo.html and OpenEuroLLM's oellm-autoexp,
# config/slurm/leonardo.yaml of 2026-07-09; looked at on 2026-11-27. Nobody here could try it.
# Those jobs run offline.
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
# NCCL before 2.27.3 may stop with `Could not find NET with id 0` on these nodes
# (github.com/NVIDIA-NeMo/Speech/issues/13996): take a newer torch.
# In the header: --partition=boost_usr_prod, --cpus-per-task=32 for a node, --gres=gpu:4 or
# --gpus-per-node=4, and -A. Scratch, $CINECA_SCRATCH, is cleaned after 40 days.
