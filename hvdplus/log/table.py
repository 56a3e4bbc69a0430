"""The report as plain text: facts, one row for each stretch of windows at one level, decisions, the end of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdplus.log.facts import IN_TURNS, MEDIANS, Record, Span, decisions_of, fp32_bytes, run_of, stretches
from hvdplus.log.summary import about, end_text, warnings
from hvdplus.log.words import closing, count, explain, fill, three_digits


def table(records: Sequence[Record], why: bool = False) -> str:
    """The report as plain text: facts, one row for each stretch of windows at one level, decisions, end, one sentence.

    Args:
        why: all decisions with all their figures. Else only the last one has its figures, and a trial is shown by its
            outcome.
    """
    return "\n\n".join(
        block
        for block in (
            *(fill(warning, "") for warning in warnings(records)),
            _facts(records),
            _rows(stretches(records), fp32_bytes(records)),
            _decision_list(records, why),
            _left_out(records),
            fill(end_text(records), "") + "\n" + fill(closing(records), ""),
        )
        if block
    )


def _facts(records: Sequence[Record]) -> str:
    known = about(records)
    if not known:
        return "hvdplus run: the log does not describe the run."
    return "\n".join(["hvdplus run", *(fill(fact, f"  {name:<11}  ") for name, fact in known.items())])


COLUMNS = (
    ("steps", ""), ("level", ""), ("step", "ms"), ("compute", "ms"), ("codec", "ms"), ("exposed", "comm ms"),
    ("hidden", "comm ms"), ("input", "wait ms"), ("error", "to gradient"), ("MB sent", "a step"), ("ratio", "to fp32"),
    ("loss", "at end"),
)  # fmt: skip


def _rows(spans: Sequence[Span], dense: float) -> str:
    """One row for each stretch. ``dense``: bytes of all gradients in float32."""
    if not spans:
        return ""
    rows = [list(row) for row in zip(*COLUMNS, strict=True)]
    for span in spans:
        ratio = dense / span.payload_bytes if span.payload_bytes else math.nan
        times = (getattr(span, field) for field in MEDIANS if field.endswith("_ms"))
        rows.append(
            [
                f"{span.first_step}-{span.last_step}",
                span.level,
                *("-" if math.isnan(time) else f"{time:.2f}" for time in times),
                "-" if math.isnan(span.error) else f"{span.error:.2f}",
                three_digits(span.payload_bytes / 1e6),
                "-" if math.isnan(ratio) else f"{ratio:.1f} x",
                three_digits(span.loss),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)  # words to the left, figures to the right
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _decision_list(records: Sequence[Record], why: bool) -> str:
    decisions = list(enumerate(decisions_of(records), start=1))
    shown = [
        (n, one) for n, one in decisions if why or n == len(decisions) or not str(one["reason"]).endswith(IN_TURNS)
    ]
    memory = (run_of(records).get("limits") or {}).get("memory_steps")
    rests_on = (
        f" and their evidence: lower quartiles over pairs of consecutive steps, a level's latest {memory} at most"
        if memory
        else ""
    )
    lines = [explain(number, decision, why or number == len(decisions)) for number, decision in shown]
    short = "" if why or len(decisions) == 1 else " (`hvdplus report --why` has all, with their figures)"
    return "\n".join([f"Decisions{rests_on}{short}", *lines]) if lines else ""


def _left_out(records: Sequence[Record]) -> str:
    left_out = sum(record["records"] for record in records if record["kind"] == "left_out")
    return f"{count(left_out, 'older record')} of this run are not shown; the run log has them." if left_out else ""
