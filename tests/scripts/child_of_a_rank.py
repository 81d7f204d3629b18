"""Run by test_preemption.py: a forked child of a rank, its loader worker and its handler."""

import multiprocessing
import signal

import preemption

preemption.listen()
import meanings
from torch.utils.data import DataLoader


class Meanings(list):
    def __getitem__(self, index):
        return meanings.meaning()


def in_child():
    loader = DataLoader(Meanings([0]), None, num_workers=1, multiprocessing_context="fork")
    print("its loader worker:", *loader, flush=True)
    signal.signal(signal.SIGTERM, own)
    context.Process(target=lambda: print(signal.getsignal(signal.SIGTERM).__name__)).start()


def own(number, frame):
    pass


context = multiprocessing.get_context("fork")
child = context.Process(target=in_child)
child.start()
child.join()
