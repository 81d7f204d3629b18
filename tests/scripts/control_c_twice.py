"""Run by test_preemption.py: the second control-C ends a run."""

import os
import signal

import preemption

preemption.listen()
os.kill(os.getpid(), signal.SIGINT)
print(preemption.received)
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("ends")
