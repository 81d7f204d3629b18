# shellcheck shell=bash disable=SC1091
# Isambard-AI (BriCS): 4 x GH200 per node, Slingshot. Copy this to ../site.sh.
# ClusterName: isambard
# From the site's github.com/isambard-sc/skills.isambard.ac.uk, skills nccl and slurm, which come
# from docs.isambard.ac.uk; looked at on 2026-11-27. Nobody here could try it.
source /etc/profile
# NCCL with the plugin for Slingshot, and all variables that it needs. On two nodes an all-reduce
# of 8 GB has 163 GB/s on the bus with it, and 2.3 GB/s without.
module load brics/nccl
# pip's torch brings its own NCCL, and only takes the plugin from the module. Fail if it does not.
export NCCL_NET="AWS Libfabric" NCCL_SOCKET_IFNAME=hsn
# A GPU has 72 cores: --cpus-per-task=288 for a node. Jobs end after 24 hours. The CPUs are Arm, so
# make the environment on such a node.
