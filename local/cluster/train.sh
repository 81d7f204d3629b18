#!/bin/bash
#SBATCH --job-name=training_job
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one rank on each node: the model is split over both
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
#SBATCH --output=training_job.log  # the same name for every job: tail -f training_job.log
#SBATCH --requeue
# Tensor parallelism over the two nodes of the Docker cluster, on Tiny Shakespeare.
#
# Usage: docker exec node-1 sbatch local/cluster/train.sh [arguments of train_tp.py]
set -euo pipefail
exec ./launch_slurm_to_torch.sh distributed/train_tp.py --tensor-parallel 2 --across-nodes --steps 200 "$@"
