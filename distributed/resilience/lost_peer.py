"""One line instead of pages when a rank has lost a peer. place.py starts it as a program beside a rank with NCCL.

It copies what the rank's C++ prints to standard error, until a line says that a peer has ended or has not come to a
collective in time: NCCL's watchdog then goes on for a page, and ends the process. Without torch.
"""

import re
import sys

PARTS = "Watchdog caught collective operation timeout|remote process exited or there was a network error"
PARTS += "|Connection closed by remote peer"


def filter_peer_errors(rank: str, host: str):
    for line in sys.stdin:
        if found := re.search(rf"(?:{PARTS}).{{,200}}", line):
            matters = "the error that matters is another rank's"
            print(f"[Rank {rank} on {host}] lost a peer; {matters} ({found[0].strip()})", file=sys.stderr, flush=True)
            break
        print(line, end="", file=sys.stderr, flush=True)
        if "] lost a peer; " in line:  # place.py's own, of an exception
            break
    for _ in sys.stdin:  # nobody who writes has to wait
        pass


if __name__ == "__main__":
    sys.stdin.reconfigure(errors="replace")
    filter_peer_errors(*sys.argv[1:])
