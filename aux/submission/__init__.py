"""For submit.py and slurm_task.py: Slurmfile.toml, the cluster, container images, earlier jobs.

Runs only where jobs are submitted, never in a job, and needs Python 3.11 for tomllib.
"""
