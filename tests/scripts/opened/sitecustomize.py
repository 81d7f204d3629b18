"""With this folder in PYTHONPATH, sys.opened has the files that a process opens, from its start,
and sys.operations counts how often Python names a file or a folder to the file system: to open
it, to list it, or to look for a module. What is forked counts anew."""

import os
import posix
import sys

sys.opened, sys.operations, stat = [], 0, posix.stat


def audit(event: str, arguments: tuple):
    if event in ("open", "os.listdir", "os.scandir"):
        sys.operations += 1
    if event == "open":
        sys.opened.append(str(arguments[0]))


def counted(*arguments, **options):
    sys.operations += 1
    return stat(*arguments, **options)


def forget():
    sys.opened, sys.operations = [], 0


sys.addaudithook(audit)
os.register_at_fork(after_in_child=forget)
posix.stat = counted  # importlib calls this one
