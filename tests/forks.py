"""Trainings of this machine without their import of torch, which takes most of their time: a
process that has imported it forks the ranks. Jobs, and what has a launcher, start Python as a
reader does.

    python tests/forks.py SOCKET PID      # ends with the process PID

A connection sends a line of JSON, {"command": [...], "cwd": ..., "environments": [...], "out": ...,
"err": ..., "timeout": ...}, and gets the status, or nothing when the time is up.
"""

import atexit
import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import sys
import threading
import time
from pathlib import Path
from socketserver import ForkingMixIn, StreamRequestHandler, UnixStreamServer

MODULES = "torch torchvision torch.distributed.checkpoint torch.distributed.fsdp "
MODULES += "torch.distributed.tensor.parallel torch.distributed.checkpoint.state_dict"
PACKAGES = sys.path[1:]


def become(command: list[str], cwd: str, env: dict[str, str], out: str, err: str):
    """`python COMMAND`, in a process group of its own."""
    os.setsid()
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    theirs = [path for path in env.get("PYTHONPATH", "").split(":") if path]
    sys.path[:] = [str(Path(command[0]).resolve().parent), *theirs, *PACKAGES]
    status = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
        if not isinstance(status, int | None):
            sys.stderr.write(f"{status}\n")  # at once, because others write as well
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status or 0)


class Run(StreamRequestHandler):
    """One command on its ranks. If one fails, the others have three seconds for their last
    words."""

    def handle(self):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asked = json.loads(self.rfile.readline())
        deadline = time.monotonic() + asked["timeout"]
        started, failed = [], None
        for env in asked["environments"]:
            started.append(os.fork())
            if started[-1] == 0:
                become(asked["command"], asked["cwd"], env, asked["out"], asked["err"])
        left = set(started)
        # A connection that is closed can be read.
        while left and time.monotonic() < deadline:
            if select.select([self.connection], [], [], 0.02)[0]:
                break
            for process in [*left]:
                ended, status = os.waitpid(process, os.WNOHANG)
                if not ended:
                    continue
                left.remove(process)
                if status and failed is None:
                    failed = os.waitstatus_to_exitcode(status)
                    deadline = min(deadline, time.monotonic() + 3)
        for process in started:  # also the workers of those that have ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        for process in left:  # one may have no group yet
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        if failed is not None or not left:
            self.wfile.write(f"{failed or 0}\n".encode())


class Server(ForkingMixIn, UnixStreamServer):
    max_children = 1000

    def service_actions(self):
        super().service_actions()
        if os.getppid() != int(sys.argv[2]):
            sys.exit()


if __name__ == "__main__":
    for name in MODULES.split():
        importlib.import_module(name)
    # Under its name the socket can be connected to.
    server = Server(f"{sys.argv[1]}.new", Run)
    os.rename(f"{sys.argv[1]}.new", sys.argv[1])
    server.serve_forever()
