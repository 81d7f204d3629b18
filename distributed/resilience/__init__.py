"""What training a large model needs on top of preemption.py and heartbeat.py.

See train_fsdp.py. The package imports no torch, and neither do its modules arguments, checksums and
ranks.
"""
