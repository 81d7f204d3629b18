"""A rank that is killed while its loader workers have batches that no pipe can hold."""

import os
import signal
import sys
import time

import preemption


def starts(worker: int):
    preemption.ignore(worker)
    open(f"worker{worker}", "w").close()


if __name__ == "__main__":
    from torch.utils.data import DataLoader

    options = {"num_workers": 2, "multiprocessing_context": sys.argv[1], "worker_init_fn": starts}
    images = [bytes(3_000_000)] * 9
    batches = iter(DataLoader(images, persistent_workers=True, **options))
    while not (os.path.exists("worker0") and os.path.exists("worker1")):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
