# shellcheck shell=bash disable=SC1091
# Perlmutter (NERSC): 4 x A100 per node, Slingshot. Copy this to ../site.sh.
# ClusterName: perlmutter
# From NERSC's own github.com/NERSC/dl-at-scale-training, submit_pm_dp.sh of 2025-02-26, and
# NERSC/pytorch-examples of 2024-10-28; looked at on 2026-11-27. Nobody here could try it.
source /etc/profile
# The site's torch, whose NCCL has the plugin for Slingshot. In Shifter: --module=gpu,nccl-plugin
module load pytorch
# In the header: -C gpu, -q regular and -A, as in those scripts, instead of the --partition that
# check_site.py proposes, and 32 CPUs for each GPU. A node has 64 cores with two hardware threads
# each, so a CPU is a thread.
