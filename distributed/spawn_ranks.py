"""Start this machine's ranks with torch.multiprocessing: as one node of a job (way 3), or by hand on one machine.

    python distributed/spawn_ranks.py distributed/train_ddp.py --epochs 3
    NPROC_PER_NODE=4 python distributed/spawn_ranks.py distributed/train_ddp.py    (default: one rank per GPU, or two)

What torchrun does, in one readable file: every rank gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and
runs the script as __main__. The first rank that fails ends the others; its exit code becomes this program's.
"""

import atexit
import contextlib
import ctypes
import logging
import os
import runpy
import signal
import socket
import sys
import threading
import weakref
from pathlib import Path

HOST = os.environ.get("SLURMD_NODENAME") or socket.gethostname()


# --- arguments --------------------------------------------------------------------------------------------------------
def parse_arguments() -> list[str]:
    """The script and its arguments; ends the program when there is no script, or when it is not there."""
    command = sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit(0 if command else 2)
    if not os.path.isfile(command[0]):
        print(f"spawn_ranks.py: no such script: {command[0]!r} (in {os.getcwd()})", file=sys.stderr)
        sys.exit(2)
    return command


if __name__ == "__main__":
    command = parse_arguments()  # before torch: a typing mistake costs no second
    # Slurm signals every process of a step; the ranks decide what it means. By default SIGUSR1 ends a process, so they
    # inherit it ignored.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

import torch
import torch.multiprocessing as mp


def run_rank(local_rank: int, node_rank: int, nnodes: int, nproc_per_node: int, command: list[str]):
    """One rank, in a process of its own: the environment torchrun would give it, then the script."""
    os.environ.update(
        SPAWN_RANKS="1",  # set by this spawner alone: scripts take RANK, and not SLURM_PROCID
        RANK=str(node_rank * nproc_per_node + local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(nnodes * nproc_per_node),
        LOCAL_WORLD_SIZE=str(nproc_per_node),
        GROUP_RANK=str(node_rank),
        GROUP_WORLD_SIZE=str(nnodes),
    )
    if numpy_random := sys.modules.get("numpy.random"):  # numpy 1 comes with torch
        numpy_random.seed()  # or forked ranks draw the same numbers
    if sys.version_info >= (3, 13):  # a fork forgets what imports have registered
        for function in (weakref.finalize._exitfunc, logging.shutdown):
            atexit.register(function)
    mp.set_start_method(None, force=True)  # loader workers start as they do elsewhere: spawn would run the script again
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)  # as `python script.py` has it
    try:
        runpy.run_path(command[0], run_name="__main__")
    except KeyboardInterrupt:
        sys.exit(130)  # torch would end the rank with status 0
    except Exception:
        sys.excepthook(*sys.exc_info())  # the script's own prints it, once; torch would print it in the parent, too
        sys.exit(1)
    finally:  # multiprocessing ends a forked process with os._exit: what Python does before its end is done here
        with contextlib.suppress(KeyboardInterrupt):
            threading._shutdown()  # waits for threads that are no daemons
        atexit._run_exitfuncs()
        ctypes.CDLL(None).fflush(None)  # lines that are still in C's buffers, as NCCL's


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(command: list[str]) -> int:
    """Starts the ranks and waits for all of them. Returns 0, or the exit code of the rank that failed first."""
    in_job = os.environ.keys() >= {"NNODES", "SLURM_NODEID"}  # env.sh has been read, and srun has started this
    if in_job:
        nnodes, node_rank = int(os.environ["NNODES"]), int(os.environ["SLURM_NODEID"])
        nproc_per_node = int(os.environ["NPROC_PER_NODE"])
    else:
        nnodes, node_rank = 1, 0
        nproc_per_node = int(os.environ.get("NPROC_PER_NODE") or torch.cuda.device_count() or 2)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free_port())
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpus // nproc_per_node)))

    # Forked ranks have the torch that this process has imported. By hand, device_count() may have used CUDA: ranks that
    # are forked after that cannot.
    method = "fork" if in_job and not torch.cuda.is_initialized() else "spawn"
    values = (node_rank, nnodes, nproc_per_node, command)
    ranks = mp.start_processes(run_rank, values, nprocs=nproc_per_node, join=False, start_method=method)
    logging.disable()  # torch warns of every rank that it ends. The ranks, which have started, still log
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # this process ends after its ranks, which may be saving
    try:
        while not ranks.join():
            pass
    except mp.ProcessExitedException as failure:
        rank = node_rank * nproc_per_node + failure.error_index
        return report(rank, failure.exit_code, failure.signal_name)
    return 0


def report(rank: int, exit_code: int, signal_name: str | None) -> int:
    """Leaves in JOB_FAILURE which rank failed first, for the last line of the job's log. Returns its status."""
    status = exit_code if exit_code >= 0 else 128 - exit_code  # as a shell counts a signal
    how = f"ended with status {status}" if exit_code >= 0 else f"was killed by {signal_name}"
    if "JOB_FAILURE" in os.environ:  # finish_job prints it
        with contextlib.suppress(OSError), open(os.environ["JOB_FAILURE"], "x") as file:  # x: once
            file.write(f"{status} rank {rank} on {HOST} {how}\n")
    elif exit_code < 0:  # what ends with a status has said why
        print(f"spawn_ranks.py: rank {rank} on {HOST} {how}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(command))
