"""Start the ranks of this node with torch.multiprocessing.spawn, in a job or by hand.

    srun --ntasks-per-node=1 python aux/launch/spawn_ranks.py distributed/train_ddp.py
    NPROC_PER_NODE=4 python aux/launch/spawn_ranks.py distributed/train_ddp.py
    python aux/launch/spawn_ranks.py -m package.module

By hand it starts one rank per GPU of this machine, or two on the CPU. Each rank runs the
script or module as __main__, with the variables that torchrun would set.
"""

import os
import runpy
import signal
import socket
import sys
from typing import Any

asked = 0


def ask(number: int, frame: object):
    global asked
    asked = number


if __name__ == "__main__":
    # Before torch is imported, because these signals would end the job as failed, and Slurm does
    # not requeue a job that has failed.
    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGUSR1, ask)
    words = sys.argv[1:]
    is_module = words[:1] == ["-m"]
    if is_module:
        del words[0]
    # A `--` beside the script or the module is for torchrun.
    if "--" in words[:2]:
        words.remove("--")
    if not words or words[0] in ("-h", "--help"):
        sys.exit(__doc__)
    if not is_module and not os.path.exists(words[0]):
        sys.exit(f"spawn_ranks.py: {words[0]}: No such file or directory")

import torch
import torch.multiprocessing as mp


def run_rank(
    local_rank: int, ready: Any, node_rank: int, nnodes: int, words: list[str], is_module: bool
):
    """One rank, in a process of its own. `ready` is a semaphore, released once torch is there."""
    nproc_per_node = int(os.environ["NPROC_PER_NODE"])
    variables = {
        "RANK": node_rank * nproc_per_node + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": nnodes * nproc_per_node,
        "LOCAL_WORLD_SIZE": nproc_per_node,
        "GROUP_RANK": node_rank,
        "GROUP_WORLD_SIZE": nnodes,
        # Lightning looks for this variable before it takes RANK.
        "TORCHELASTIC_RUN_ID": os.environ.get("SLURM_JOB_ID", "none"),
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    # Whole lines: PYTHONUNBUFFERED would write each argument of a print by itself, and the ranks of
    # a node share one log.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    sys.argv = words
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(words[0]))
    # The script's loader workers start as under plain python.
    mp.set_start_method(None, force=True)
    ready.release()
    try:
        if is_module:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:
        # Printed as python does. mp.spawn would hand the error to the parent, which prints it late.
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main(words: list[str], is_module: bool) -> int:
    """Starts the ranks of this node: `words` are a script or a module, and its arguments. Returns 0
    once all have ended well, or the status of the first one that has not."""
    global asked
    if "NNODES" in os.environ:
        nnodes, node_rank = int(os.environ["NNODES"]), int(os.environ["SLURM_NODEID"])
        nproc_per_node = int(os.environ["NPROC_PER_NODE"])
    else:
        nnodes, node_rank = 1, 0
        gpus = torch.cuda.device_count() or torch.xpu.device_count()
        nproc_per_node = int(os.environ.get("NPROC_PER_NODE") or gpus or 2)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ["NPROC_PER_NODE"] = str(nproc_per_node)
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    ready = mp.get_context("spawn").Semaphore(0)
    arguments = (ready, node_rank, nnodes, words, is_module)
    ranks = mp.spawn(run_rank, arguments, nprocs=nproc_per_node, join=False)
    # Slurm signals only this process, but Ctrl-C at a terminal reaches the ranks as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    started = seconds = 0
    try:
        while not ranks.join(timeout=1):
            # Counted by hand, because macOS cannot read a semaphore.
            while ready.acquire(block=False):
                started += 1
            # A script that listens for signals begins to in its first seconds. An earlier signal
            # would end it.
            seconds += started == nproc_per_node
            if asked and seconds > 3:
                number, asked = asked, 0
                for process in ranks.processes:
                    if process.is_alive():
                        os.kill(process.pid, number)
    except mp.ProcessExitedException as error:
        rank = node_rank * nproc_per_node + error.error_index
        print(f"spawn_ranks.py: rank {rank} on {socket.gethostname()}: {error}", file=sys.stderr)
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(words, is_module))
