"""``hvdplus report``: print a run log as a table and draw its picture."""

from __future__ import annotations

import argparse
import sys

from hvdplus.cli.text import FOREIGN, foreign, read_log
from hvdplus.log.picture import picture
from hvdplus.log.table import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``hvdplus report``."""
    parser.add_argument("runlog", metavar="RUNLOG", help="run log of a job (HVDPLUS_RUN_LOG)")
    picture_choice = parser.add_mutually_exclusive_group()
    picture_choice.add_argument("--png", metavar="PATH", help="where the picture goes (default: beside the log)")
    picture_choice.add_argument("--no-png", action="store_true", help="print the table only")


def run(args: argparse.Namespace) -> int:
    """Print the table and draw the picture.

    Returns 0; 2 with a message if the log cannot be read, or the picture of ``--png`` cannot be drawn. If the default
    picture cannot be drawn, it prints the message and returns 0.
    """
    try:
        records = read_log(args.runlog)
        if not records:
            raise ValueError(f"{args.runlog}: the log is empty; the job wrote nothing")
    except ValueError as error:
        print(f"hvdplus report: {error}", file=sys.stderr)
        return 2
    try:
        print(table(records))
    except FOREIGN as error:
        print(f"hvdplus report: {foreign(args.runlog, error)}", file=sys.stderr)
        return 2
    if args.no_png:
        return 0
    # A log with another ending, such as RUNLOG.1, is another optimizer's and gets a picture of its own.
    target = args.png or f"{args.runlog.removesuffix('.jsonl')}.png"
    try:
        print(f"\nPicture: {picture(records, target)}")
    except (ImportError, OSError, *FOREIGN) as error:
        sys.stdout.flush()  # the table comes first, also where both streams go into one file
        why = f"cannot write {target}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"hvdplus report: no picture: {why}", file=sys.stderr)
        return 2 if args.png else 0
    return 0
