# shellcheck shell=bash disable=SC1091
# LUMI (CSC): 8 GPUs for torch per node (4 x MI250X), Slingshot. Copy this to ../site.sh.
# ClusterName: lumi
# From the LUMI AI guide, github.com/Lumi-supercomputer/LUMI-AI-Guide of 2026-05-19, chapter 05, and
# pull request 118; looked at on 2026-11-27. Nobody here could try it.
source /etc/profile
# What the site's containers need from the node. They contain torch and the plugin for Slingshot:
# start torchrun.sh with Apptainer, as in docs/containers.md, but without --nv.
module use /appl/local/laifs/modules
module load lumi-aif-singularity-bindings
# MIOpen keeps its files on the node.
export MIOPEN_CUSTOM_CACHE_DIR=/tmp/$USER-miopen-$SLURM_JOB_ID
export MIOPEN_USER_DB=$MIOPEN_CUSTOM_CACHE_DIR/config MIOPEN_USER_DB_PATH=$MIOPEN_CUSTOM_CACHE_DIR
# Without it, the site's containers can hang in training (pull request 118).
export FI_MR_CACHE_MONITOR=userfaultfd
# Ask for --cpus-per-task=56: a node has 64 cores, and jobs get 56. In torchrun.sh add
# --numa-binding=exclusive, because GPUs 0 and 1 belong to the cores 48 to 63. In the srun launcher
# that is --cpu-bind=mask_cpu:..., with the masks of
# docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/distribution-binding.
