"""``hvdplus report``: a run log as a table and a picture, as a page, as data, as a trace, or live.

hvdplus report run.jsonl                    the table, and run.png beside the log
hvdplus report run.jsonl --html             also run.html, which opens in any browser
hvdplus report a.jsonl b.jsonl              two runs side by side; with --html on one page
hvdplus report run.jsonl --json             all figures, for programs
hvdplus report run.jsonl --trace run.json   for Perfetto, or Chrome's tracing page
hvdplus report run.jsonl --follow           a table that follows the job while it runs
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdplus.cli.text import FOREIGN, columns, foreign, read_log
from hvdplus.log.facts import Record
from hvdplus.log.follow import follow
from hvdplus.log.page import HEAD, row_of_run, write_page
from hvdplus.log.picture import picture
from hvdplus.log.summary import summary
from hvdplus.log.table import table
from hvdplus.log.timeline import timeline


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``hvdplus report``."""
    parser.add_argument("runlogs", metavar="RUNLOG", nargs="*", help="run log of a job (HVDPLUS_RUN_LOG)")
    pictures = parser.add_mutually_exclusive_group()
    pictures.add_argument("--png", metavar="PATH", help="where the picture goes (default: beside the log)")
    pictures.add_argument("--no-png", action="store_true", help="no picture")
    parser.add_argument("--html", metavar="PATH", nargs="?", const="", help="also a page (default: beside the log)")
    parser.add_argument("--why", action="store_true", help="all decisions, with all figures that they rest on")
    parser.add_argument("--trace", metavar="PATH", help="also a trace for Perfetto, a process a rank")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print figures as JSON instead of the table")
    forms.add_argument("--follow", action="store_true", help="show the job while it runs, until it ends")


def run(args: argparse.Namespace) -> int:
    """Print and write what was asked for.

    Returns 0; 2 with a message if a log cannot be read, or a file that was asked for cannot be written. If the default
    picture cannot be drawn, it prints the message and returns 0.
    """
    paths: list[str] = args.runlogs
    if args.html and (not paths or _is_log(args.html)):  # `--html run.jsonl`: the next word is a log
        paths, args.html = [args.html, *paths], ""
    if not paths:
        return _failed("name a run log (HVDPLUS_RUN_LOG), such as run.jsonl")
    one = len(paths) == 1
    for option in ("png", "trace", "follow") if not one else ():
        if getattr(args, option):
            return _failed(f"--{option} wants one run log. Received: {len(paths)}")
    for option in ("png", "html", "trace", "why") if args.follow else ():
        if getattr(args, option) not in (None, False):
            return _failed(f"--follow shows a job that runs: --{option} goes with its log once it has ended")
    if args.why and (args.json or not one):
        return _failed("--why goes with the table of one run log")
    if args.follow:
        try:
            return follow(paths[0])
        except (OSError, ImportError, ValueError) as error:
            return _failed(str(error))
        except FOREIGN as error:
            return _failed(foreign(paths[0], error))
    try:
        runs = {path: _read(path) for path in paths}
    except ValueError as error:
        return _failed(str(error))
    try:
        print(_as_json(runs) if args.json else _as_text(runs, args.why))
    except FOREIGN as error:
        return _failed(foreign(" or ".join(paths), error))
    beside = paths[0].removesuffix(".jsonl")
    code = 0
    if args.html is not None:
        code = _write("page", args.html or f"{beside}.html", lambda path: write_page(runs, path), quiet=args.json)
    if args.trace:
        code = _write("trace", args.trace, lambda path: _write_json(timeline(runs[paths[0]]), path), args.json) or code
    if args.no_png or (args.json and not args.png) or not one:
        return code
    # A log with another ending, such as RUNLOG.1, is another optimizer's and gets a picture of its own.
    drawn = _write("picture", args.png or f"{beside}.png", lambda path: picture(runs[paths[0]], path), args.json)
    return code or (drawn if args.png else 0)


def _as_json(runs: Mapping[str, Sequence[Record]]) -> str:
    """One run's figures, or those of several by their logs' paths."""
    figures = {path: summary(records) for path, records in runs.items()}
    return json.dumps(figures if len(runs) > 1 else next(iter(figures.values())), indent=1, allow_nan=False)


def _as_text(runs: Mapping[str, Sequence[Record]], why: bool) -> str:
    """One run's table, or a row for each of several."""
    if len(runs) == 1:
        return table(next(iter(runs.values())), why)
    return columns([HEAD, *(row_of_run(path, records) for path, records in runs.items())], range(2, len(HEAD)))


def _read(path: str) -> list[Record]:
    records = read_log(path)
    if not records:
        raise ValueError(f"{path}: the log is empty; the job wrote nothing")
    return records


def _write(what: str, path: str, write: Callable[[str], Any], quiet: bool = False) -> int:
    """Write a file and say so; 0, or 2 after a message."""
    try:
        if _is_log(path):
            raise ValueError(f"{path} is a run log, and would be overwritten")
        write(path)
    except (ImportError, OSError, *FOREIGN) as error:
        sys.stdout.flush()  # the table comes first, also where both streams go into one file
        why = f"cannot write {path}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"hvdplus report: no {what}: {why}", file=sys.stderr)
        return 2
    if not quiet:
        print(f"\n{what.capitalize()}: {path}")
    return 0


def _is_log(path: str) -> bool:
    file = Path(path)
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(8).startswith(b'{"kind"')


def _write_json(value: Any, path: str) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")


def _failed(why: str) -> int:
    print(f"hvdplus report: {why}", file=sys.stderr)
    return 2
