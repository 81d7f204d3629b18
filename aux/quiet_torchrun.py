"""torchrun, except for what it does when a rank has failed: one line instead of a page, and that rank's exit status.

torchrun.sh calls it with torchrun's arguments. torchrun itself ends with status 1, whatever the rank's was, and with a
page of its own below the rank's last output.
"""

import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

HOST = os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def report(rank: int, exit_code: int) -> int:
    """Says which rank failed first, here and in JOB_FAILURE, for the last line of the log. Returns its status."""
    status = exit_code if exit_code >= 0 else 128 - exit_code  # as a shell counts a signal
    how = f"ended with status {status}" if exit_code >= 0 else f"was killed by {signal.Signals(-exit_code).name}"
    failure = f"rank {rank} on {HOST} {how}"
    print(f"torchrun: {failure}; the other ranks here are ended", file=sys.stderr, flush=True)
    try:
        with open(os.environ.get("JOB_FAILURE", os.devnull), "x") as file:  # x: the first one stays
            file.write(f"{status} {failure}\n")
    except OSError:
        pass
    return status


if __name__ == "__main__":
    try:
        main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        sys.exit(report(rank, failure.exitcode))
    except SignalException as error:
        sys.exit(128 + error.sigval)
