"""Run by test_style.py: the options of some programs, in JSON, as they give them to argparse."""

import argparse
import contextlib
import json
import runpy
import sys

found = {}


def note(parser: argparse.ArgumentParser):
    found[sys.argv[0]] = {
        each.option_strings[0]: {
            "kind": type(each).__name__,
            "type": getattr(each.type, "__name__", None),
            "default": str(each.default),
            "choices": each.choices and list(each.choices),
            "help": each.help,
        }
        for each in parser._actions
        if each.option_strings
    }
    sys.exit()


argparse.ArgumentParser.parse_args = note
for program in sys.argv[1:]:
    sys.argv = [program]
    sys.path[0] = program.rpartition("/")[0]
    with contextlib.suppress(SystemExit):
        runpy.run_path(program, run_name="__main__")
print(json.dumps(found))
