"""What a signal means to a process: of test_preemption.py, imported by what starts processes."""

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor

import preemption

preemption.listen()


def meaning():
    handlers = [signal.getsignal(number) for number in preemption.REQUESTS]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(preemption.REQUESTS)
    return "a request" if preemption.set_flag in handlers or blocked else "ordinary"


def put(queue):
    queue.put(meaning())


def main(method):
    print("rank:", meaning())
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    context.Process(target=put, args=(queue,)).start()
    print("Process:", queue.get())
    with context.Pool(1) as pool:
        print("Pool:", pool.apply(meaning))
    with ProcessPoolExecutor(1, context) as pool:
        print("Executor:", pool.submit(meaning).result())
    try:
        import multiprocess
    except ImportError:
        return
    with multiprocess.get_context(method).Pool(1) as pool:
        print("multiprocess:", pool.apply(meaning))
