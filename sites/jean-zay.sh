# shellcheck shell=bash disable=SC1091
# Jean Zay (IDRIS): V100, A100 or H100, Omni-Path or InfiniBand. Copy this to ../site.sh.
# ClusterName: jean-zay, jeanzay
# From www.idris.fr/en/docs/jean-zay/slurm/slurm_partitions_gpu and
# github.com/jean-zay-users/jean-zay-doc of 2025-11-22; looked at on 2026-11-27. Nobody here could
# try it.
source /etc/profile
# EDIT: the site's torch, one of `module avail pytorch-gpu`. Without it, your own environment
# module load pytorch-gpu
# Compute nodes have no internet.
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
# In the header: -A, -C for a kind of node, such as v100-32g, and --hint=nomultithread, with which a
# CPU is a core and not a hardware thread. Without --time a job gets 10 minutes.
