"""Fault tolerance for train scripts: Step 0, stop requests, checkpoints, heartbeats, progress, arguments.

`cp -r` takes all of it along. train_preemptible.py shows its use. The package itself imports no torch, and neither do
arguments, stop_request, heartbeat, checksums and job.
"""
