"""What survives a cluster: Step 0, stop requests, checkpoints, heartbeats, progress, arguments.

`cp -r` takes all of it along. train_preemptible.py shows the use. Importing the package alone imports no torch.
"""
