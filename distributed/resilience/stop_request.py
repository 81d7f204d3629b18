"""Requests to stop, by signal. Without torch: a signal may come while that is still being imported.

Slurm sends SIGUSR1 ahead of the time limit (the launchers' --signal), and SIGTERM at preemption and at the time limit.
A person sends SIGINT by ctrl-C. The handler sets a flag and no more, for it may run in the middle of anything. All
ranks act on the flag together, between two steps: see Checkpoints.due.
"""

import os
import signal
import time

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
received, received_at = 0, 0.0  # the first signal that asked this process to stop, and when


def listen():
    """From now on these signals are requests to stop."""
    for number in SIGNALS:
        signal.signal(number, record)


def record(number: int, frame: object):
    global received, received_at
    if number == signal.SIGINT == received and time.monotonic() - received_at > 2:  # torchrun forwards the first again
        os._exit(130)  # ctrl-C again: now. A checkpoint that is being written does not get its name
    if not received:
        received, received_at = number, time.monotonic()


def ignore(worker: int):
    """A DataLoader's worker_init_fn: Slurm signals every process of a step, and the rank is the one to decide."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
