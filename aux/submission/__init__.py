"""What submit.py and slurm_task.py need to send a job: Slurmfile.toml, the cluster, container
images, jobs sent before.

Runs where one submits, never in a job, and on Python 3.11: tomllib is newer than 3.10.
"""
