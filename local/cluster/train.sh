#!/bin/bash
#SBATCH --job-name=training_job
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one rank on each node: the model is split over all of them
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=training_job.log  # the same name for every job: tail -f training_job.log
#SBATCH --requeue
# Tensor parallelism over the nodes of the Docker cluster, on Tiny Shakespeare.
#
# Usage: docker exec node-1 sbatch local/cluster/train.sh [arguments of train_fsdp.py]
#        docker exec node-1 sbatch --nodes=3 --ntasks=3 local/cluster/train.sh
set -euo pipefail

# Two pairs of keys and values for each node, because they are not split.
nodes=$SLURM_JOB_NUM_NODES
exec ./launch_slurm_to_torch.sh distributed/train_fsdp.py --tensor-parallel "$nodes" \
    --num-attention-heads $((4 * nodes)) --num-key-value-heads $((2 * nodes)) --steps 200 "$@"
