# shellcheck shell=bash disable=SC1091
# Frontier (OLCF): 8 GPUs for torch per node (4 x MI250X), Slingshot. Copy this to ../site.sh.
# ClusterName: frontier
# From docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html, as of 2026-07-22; looked at on
# 2026-11-27. Nobody here could try it.
source /etc/profile
module load PrgEnv-gnu/8.7.0 cpe/26.03 miniforge3/23.11.0-0 rocm/7.1.1 craype-accel-amd-gfx90a
# RCCL's plugin for Slingshot, without which it uses TCP, with the site's FI_ variables
module load rccl-net-plugin
export LD_LIBRARY_PATH=$CRAY_LD_LIBRARY_PATH:$LD_LIBRARY_PATH
# The ranks meet over Slingshot. If they hang, the guide says to try hsn0 only.
export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
# MIOpen's files on a shared file system give errors.
export MIOPEN_USER_DB_PATH=/tmp/$USER-miopen-$SLURM_JOB_ID
export MIOPEN_CUSTOM_CACHE_DIR=$MIOPEN_USER_DB_PATH
# The site advises against torchrun, because it puts all ranks on one core there. So use
# launch_slurm_to_torch.sh with --cpus-per-task=7, add --gpu-bind=closest to its srun, and put
# `#SBATCH --network=disable_rdzv_get` into its header. 56 of 64 cores are for jobs.
