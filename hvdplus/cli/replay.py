"""``hvdplus replay``: decide once more from a run log's figures, with other limits if you like."""

from __future__ import annotations

import argparse
import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile

from hvdplus.cli.text import FOREIGN, foreign, read_log
from hvdplus.control.config import Config
from hvdplus.log.facts import Record, decisions_of
from hvdplus.log.replay import Replayed, replay
from hvdplus.log.words import explain

DEFAULTS: dict[str, float] = asdict(Config())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``hvdplus replay``."""
    parser.add_argument("runlog", metavar="RUNLOG", help="run log of a job at compression auto (HVDPLUS_RUN_LOG)")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="NAME=VALUE",
        help="another limit than the job's, several times if need be; the defaults: "
        + ", ".join(f"{name}={value}" for name, value in DEFAULTS.items()),
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the decisions that the log's figures lead to, and whether they are the logged ones.

    Returns 0 if they are, or if ``--limit`` was given; 1 if they are not; 2 with a message for a log or a limit
    that cannot be used.
    """
    try:
        limits = dict(map(_limit, args.limit))
        records = read_log(args.runlog)
    except ValueError as error:
        print(f"hvdplus replay: {error}", file=sys.stderr)
        return 2
    try:
        text, same = _compared(records, *replay(records, **limits))
    except ValueError as error:
        print(f"hvdplus replay: {args.runlog}: {error}", file=sys.stderr)
        return 2
    except FOREIGN as error:
        print(f"hvdplus replay: {foreign(args.runlog, error)}", file=sys.stderr)
        return 2
    print(text)
    return 0 if same or limits else 1


def _compared(records: Sequence[Record], names: Sequence[str], replayed: Sequence[Replayed]) -> tuple[str, bool]:
    """The decisions replayed beside the logged ones, and whether they are the same."""
    logged = decisions_of(records)
    made = [{key: record.get(key) for key in ("from", "to", "reason", "evidence")} for record in logged]
    decided = [
        {"from": names[before], "to": names[level], "reason": reason, "evidence": evidence}
        for before, (level, reason, evidence) in replayed
    ]
    same = sum(takewhile(bool, map(operator.eq, decided, made)))
    # The log's traces leave out steps whose figures do not count, so the step of a new decision is not known.
    lines = [explain(number, each) for number, each in enumerate([*logged[:same], *decided[same:]], start=1)]
    if same == len(decided) == len(logged):
        return "\n".join([*lines, f"\nAll {same} decisions are the run's, figure for figure."]), True
    lines.append(f"\n{same} of the run's {len(logged)} decisions come out the same, figure for figure.")
    if same < len(decided):
        lines.append("Later decisions here rest on steps that the run took at other levels than replayed here.")
    if same < len(logged):
        lines.append(f"The run's next decision was:\n\n{explain(same + 1, logged[same])}")
    return "\n".join(lines), False


def _limit(text: str) -> tuple[str, float]:
    """``margin=0.05`` as name and value, in the type of the default."""
    name, _, value = text.partition("=")
    if name not in DEFAULTS:
        raise ValueError(f"--limit takes one of {', '.join(DEFAULTS)}, as in margin=0.05. Received: {text}")
    kind = type(DEFAULTS[name])
    try:
        number = kind(value)
    except ValueError:
        number = kind(-1)
    if not 0 <= number < math.inf:
        what = "whole number" if kind is int else "number"
        raise ValueError(f"--limit {name} takes a {what} of 0 or more, as in {name}={DEFAULTS[name]}. Received: {text}")
    return name, number
