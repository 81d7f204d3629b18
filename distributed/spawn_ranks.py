"""Start the ranks of this node with torch.multiprocessing.spawn, in a job or by hand.

    srun --ntasks-per-node=1 python distributed/spawn_ranks.py distributed/train_ddp.py
    NPROC_PER_NODE=4 python distributed/spawn_ranks.py distributed/train_ddp.py

By hand it starts one rank per GPU of this machine, or two on the CPU. Each rank runs the
script as __main__, with the variables that torchrun would set.
"""

import os
import runpy
import signal
import socket
import sys

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    # Checked before every rank imports torch for nothing.
    if not os.path.exists(sys.argv[1]):
        sys.exit(f"spawn_ranks.py: {sys.argv[1]}: No such file or directory")
    # Ignore SIGTERM while torch is imported: if it ended this process, the job would have failed,
    # and Slurm does not requeue failed jobs.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

import torch
import torch.multiprocessing as mp


def run_rank(local_rank: int, node_rank: int, nnodes: int, nproc_per_node: int, command: list[str]):
    """One rank, in a process of its own."""
    variables = {
        "RANK": node_rank * nproc_per_node + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": nnodes * nproc_per_node,
        "LOCAL_WORLD_SIZE": nproc_per_node,
        "GROUP_RANK": node_rank,
        "GROUP_WORLD_SIZE": nnodes,
        # Lightning takes RANK instead of Slurm's task number if it finds this.
        "TORCHELASTIC_RUN_ID": os.environ.get("SLURM_JOB_ID", "none"),
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    sys.argv = command
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    # The script's loader workers start as under plain python. Spawned ones would each run the
    # script again.
    mp.set_start_method(None, force=True)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        # End as python ends a script, because the hook may be the script's own.
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def main(command: list[str]) -> int:
    """Returns 0 when all ranks have ended well, or the status of the first one that has not."""
    if "NNODES" in os.environ:
        nnodes, node_rank = int(os.environ["NNODES"]), int(os.environ["SLURM_NODEID"])
        nproc_per_node = int(os.environ["NPROC_PER_NODE"])
    else:
        nnodes, node_rank = 1, 0
        nproc_per_node = int(os.environ.get("NPROC_PER_NODE") or torch.cuda.device_count() or 2)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free_port())
        os.environ.setdefault(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc_per_node))
        )

    processes = []

    def forward(number: int, frame: object):
        """Slurm signals only this process. Ctrl-C at a terminal reaches the ranks by itself."""
        for process in processes:
            if number != signal.SIGINT and process.is_alive():
                os.kill(process.pid, number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, forward)
    arguments = (node_rank, nnodes, nproc_per_node, command)
    ranks = mp.spawn(run_rank, arguments, nprocs=nproc_per_node, join=False)
    processes += ranks.processes
    try:
        while not ranks.join():
            pass
    except mp.ProcessExitedException as error:
        rank = node_rank * nproc_per_node + error.error_index
        print(
            f"spawn_ranks.py: rank {rank} on {socket.gethostname()}: {error}",
            file=sys.stderr,
            flush=True,
        )
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
