"""Fault tolerance for training scripts. `cp -r` copies all of it. See train_preemptible.py.

The package itself imports no torch, and neither do arguments, ranks, stop_request, heartbeat,
checksums and job.
"""
