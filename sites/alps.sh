# shellcheck shell=bash
# Alps (CSCS): 4 x GH200 per node, Slingshot; Clariden, Daint, Santis. Copy this to ../site.sh.
# ClusterName: clariden, daint, santis
# From github.com/eth-cscs/cscs-docs of 2026-08-20, docs/software/communication/nccl_env_vars and
# nccl.md; looked at on 2026-11-27. Nobody here could try it. For jobs in a uenv, such as
# `#SBATCH --uenv=pytorch/v2.9.1:v2 --view=default`: a container's hook sets all of this itself.
# NCCL uses libfabric's plugin, or fails instead of using TCP.
export NCCL_NET="AWS Libfabric"
# GPUDirect RDMA, if GPU and adapter are on one NUMA node
export NCCL_NET_GDR_LEVEL=PHB NCCL_CROSS_NIC=1
# From NCCL 2.27 on LL128 is the default, and slower on Slingshot. On GH200 it has also corrupted
# sums without an error (github.com/NVIDIA/nccl/issues/2001).
export NCCL_PROTO=^LL128
# Best on this network for a wide range of programs, says the site.
export FI_CXI_DEFAULT_CQ_SIZE=131072 FI_CXI_DEFAULT_TX_SIZE=16384 FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_RX_MATCH_MODE=software FI_MR_CACHE_MONITOR=userfaultfd
# If NCCL hangs, or its watchdog ends a job, the site's cure is to turn eager messages off:
# export FI_CXI_RDZV_GET_MIN=0 FI_CXI_RDZV_THRESHOLD=0 FI_CXI_RDZV_EAGER_SIZE=0
# MPI that uses GPUs can block NCCL (docs/software/ml/pytorch.md).
export MPICH_GPU_SUPPORT_ENABLED=0
