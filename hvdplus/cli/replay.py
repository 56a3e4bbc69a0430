"""``hvdplus replay``: decide once more from a run log's figures, with other limits if you like."""

from __future__ import annotations

import argparse
import math
import operator
import sys
from dataclasses import asdict
from itertools import takewhile

from hvdplus.controller import Limits
from hvdplus.log.replay import replay
from hvdplus.log.runlog import read
from hvdplus.log.words import explain

DEFAULTS: dict[str, float] = asdict(Limits())


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

    Returns 0, or 1 if they are not though the limits are the job's, or 2 with a message for a log or a limit that is
    of no use.
    """
    try:
        limits = dict(map(_limit, args.limit))
        records = read(args.runlog)
        names, replayed = replay(records, **limits)
    except (OSError, ValueError) as error:
        reason = f"cannot read {args.runlog}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"hvdplus replay: {reason}", file=sys.stderr)
        return 2
    except (AttributeError, LookupError, TypeError) as error:
        print(f"hvdplus replay: {args.runlog} holds records that hvdplus does not write: {error!r}", file=sys.stderr)
        return 2
    logged = [record for record in records if record["kind"] == "decision"]
    made = [{key: record.get(key) for key in ("from", "to", "reason", "evidence")} for record in logged]
    decided = [
        {"from": names[before], "to": names[level], "reason": reason, "evidence": evidence}
        for before, (level, reason, evidence) in replayed
    ]
    same = sum(takewhile(bool, map(operator.eq, decided, made)))
    # Steps without figures that count are not in the log's traces, so the step of a new decision is not known.
    for number, decision in enumerate([*logged[:same], *decided[same:]], start=1):
        print(explain(number, decision))
    if same == len(decided) == len(logged):
        print(f"\nAll {same} decisions are the run's, figure for figure.")
        return 0
    print(f"\n{same} of the run's {len(logged)} decisions come out the same, figure for figure.")
    if same < len(decided):
        print("What is decided after them rests on steps that happened to run at the levels decided here.")
    if same < len(logged):
        print(f"The run's next decision was:\n\n{explain(same + 1, logged[same])}")
    return 0 if limits else 1


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
