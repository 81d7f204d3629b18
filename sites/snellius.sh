# shellcheck shell=bash
# Snellius (SURF): 4 x A100 or 4 x H100 per node, InfiniBand. Copy this to ../site.sh.
# ClusterName: snellius
# From github.com/HPC-TUE/multi-gpu, which cites "Snellius known issues, Using NCCL for GPU<=>GPU
# communication" of servicedesk.surf.nl/wiki, and OpenEuroLLM's oellm-autoexp,
# config/slurm/snellius.yaml of 2026-03-24; looked at on 2026-11-27. Nobody here could try it.
# NCCL's ranks only meet over this interface.
export NCCL_SOCKET_IFNAME=eno1np0
if [[ "$SLURM_JOB_PARTITION" == *h100* ]]; then NCCL_SOCKET_IFNAME=eno2np0; fi
export GLOO_SOCKET_IFNAME=$NCCL_SOCKET_IFNAME
# Triton's default folder for its cache has limits.
export TRITON_CACHE_DIR=/tmp/triton-$SLURM_JOB_ID
