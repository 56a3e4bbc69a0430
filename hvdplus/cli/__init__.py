"""The command line: ``hvdplus COMMAND``.

A command is a module of this package with ``add_arguments(parser)`` and ``run(args) -> exit code``, imported only when
it is asked for. Importing ``hvdplus`` or ``hvdplus.cli`` imports no framework and starts no MPI.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from hvdplus import __version__

#: Command -> (module of this package, one line of help).
COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("doctor", "show versions, MPI and settings, and how to mend what is missing"),
    "install-horovod": ("horovod", "build and install Horovod for the PyTorch, TensorFlow and MPI found here"),
    "compressors": ("compressors", "list the compressors: what each of them sends, keeps and learns"),
    "plan": ("plan", "say what compression would cost and save: for a model, or on more ranks from a run log"),
    "lab": ("lab", "run a script on several hosts with a slow network, all on this machine"),
    "try": ("attempt", "say what hvdplus would bring to a script, on networks of several speeds"),
    "report": ("report", "show what a run did: times, levels, decisions"),
    "replay": ("replay", "decide once more from a run log's figures, with other limits if you like"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 its check failed, 2 error, 130 interrupted, 141 not read."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="hvdplus", description="Adaptive gradient compression on Horovod and MPI.")
    parser.add_argument("--version", action="version", version=f"hvdplus {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = argv[0] if argv else ""
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == asked:
            import_module(f"{__name__}.{module}").add_arguments(command)
    args = parser.parse_args(argv)
    try:
        code = int(import_module(f"{__name__}.{COMMANDS[args.command][0]}").run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough, as `head` has; leave nothing to flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # what a shell reports of a program that a broken pipe ended
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
