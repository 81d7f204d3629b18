"""A Python command without its import of torch, which takes most of a short training's time:
multiprocessing's fork server has imported it. Jobs, and what has a launcher, start Python as a
reader does."""

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

MODULES = "torch torchvision torch.distributed.checkpoint torch.distributed.fsdp "
MODULES += "torch.distributed.tensor.parallel torch.distributed.checkpoint.state_dict"


def end_with_the_tests():
    """However they end."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def become(command: list[str], cwd: str, env: dict[str, str], out: str, err: str):
    """`python COMMAND`, in a process group of its own."""
    os.setsid()
    # What the script starts is started as in any Python, and not by a fork server.
    multiprocessing.set_start_method(None, force=True)
    threading.Thread(target=end_with_the_tests, daemon=True).start()
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    packages = [path for path in sys.path if "/lib/python" in path]
    theirs = [path for path in env.get("PYTHONPATH", "").split(":") if path]
    sys.path[:] = [str(Path(command[0]).resolve().parent), *theirs, *packages]
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
