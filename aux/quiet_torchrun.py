"""torchrun, except for what it does when a rank has failed: one line instead of a page, and that rank's exit status.

torchrun.sh calls it with torchrun's arguments. torchrun itself ends with status 1, whatever the rank's was, and with a
page of its own below the rank's last output. And it starts no rank before all nodes are there: here they are started at
once, so that rank 0 can name those that did not join.
"""

import contextlib
import functools
import logging
import os
import signal
import sys

LEVEL = os.environ.get("TORCH_CPP_LOG_LEVEL")
if "LOGLEVEL" not in os.environ:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # of this process alone: torch reads it when it is imported

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous
from torch.distributed.run import main

HOST = os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def report(rank: int, exit_code: int) -> int:
    """Leaves in JOB_FAILURE which rank failed first, for the last line of the job's log. Returns its status."""
    status = exit_code if exit_code >= 0 else 128 - exit_code  # as a shell counts a signal
    how = f"ended with status {status}" if exit_code >= 0 else f"was killed by {signal.Signals(-exit_code).name}"
    with contextlib.suppress(OSError), open(os.environ.get("JOB_FAILURE", os.devnull), "x") as file:  # x: once
        file.write(f"{status} rank {rank} on {HOST} {how}\n")
    if exit_code < 0 and "JOB_FAILURE" not in os.environ:  # what ends with a status has said why
        print(f"torchrun: rank {rank} on {HOST} {how}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    if "LOGLEVEL" not in os.environ:
        logging.disable()
        del os.environ["TORCH_CPP_LOG_LEVEL"]
        os.environ |= {"TORCH_CPP_LOG_LEVEL": LEVEL} if LEVEL else {}  # the ranks'
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # every node has as many ranks: nobody has to be asked
    static_tcp_rendezvous.TCPStore = functools.partial(static_tcp_rendezvous.TCPStore, wait_for_workers=False)
    try:
        main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(report(rank, failure.exitcode))
    except dist.DistError as error:
        if os.environ.get("SLURM_NODEID") in ("0", "1"):  # one of the nodes says it
            reason = str(error).splitlines()[0]
            print(f"torchrun on {HOST}: no rendezvous at node rank 0: {reason}", file=sys.stderr, flush=True)
        sys.exit(1)
    except SignalException as error:
        sys.exit(128 + error.sigval)
