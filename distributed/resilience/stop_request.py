"""Requests to stop, by signal. Without torch, because one may come while torch is being imported.

Slurm sends SIGTERM at preemption, at the time limit, and ahead of it with `sbatch
--signal=TERM@300`, and SIGUSR1 only if somebody asks for it. A person sends SIGINT by ctrl-C. The
handler sets a flag and no more, because it may run in the middle of anything. All ranks act on the
flag together, between two steps: see Checkpoints.due.
"""

import contextlib
import os
import signal
import time

SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
# The first signal that asked this process to stop, and when it came.
received, received_at = 0, 0.0
# A pipe to which Python writes each signal's number at once, and whether SIGNALS were among them.
arrivals, seen = -1, False


def listen():
    """From now on these signals are requests to stop."""
    global arrivals
    for number in SIGNALS:
        signal.signal(number, record)
    arrivals, numbers = os.pipe()
    for end in (arrivals, numbers):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(numbers, warn_on_full_buffer=False)


def record(number: int, frame: object):
    global received, received_at
    # A second ctrl-C ends this rank now, unless it may be torchrun forwarding the first one.
    if number == signal.SIGINT == received and time.monotonic() - received_at > 2:
        os._exit(130)
    if not received:
        received, received_at = number, time.monotonic()


def came() -> bool:
    """Whether this process has been asked to stop. For threads.

    Python runs handlers in the main thread, but not while that waits in a collective.
    """
    global seen
    with contextlib.suppress(OSError):  # nothing new, or nobody listens
        seen |= any(number in SIGNALS for number in os.read(arrivals, 4096))
    return seen or received > 0


def ignore(worker: int):
    """A DataLoader's worker_init_fn: a signal may reach workers, but the rank must decide."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
