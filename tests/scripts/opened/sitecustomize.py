"""With this folder in PYTHONPATH, sys.opened has the files that a process opens, from its start."""

import sys

sys.opened = []
sys.addaudithook(lambda event, arguments: sys.opened.append(str(arguments[0])) if event == "open" else None)
