#!/bin/bash
# Submitted by test_preemption.py: the task of an array. Its second start submits inner_job.py.
if [[ "${SLURM_RESTART_COUNT:-0}" == 0 ]]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    sleep 60
fi
sbatch --parsable --nodes=1 --gpus-per-node=0 --ntasks-per-node=1 --cpus-per-task=1 \
    --output=inner.out launch_slurm_to_torch.sh tests/scripts/inner_job.py >inner.part
mv inner.part inner.id
sleep 300
