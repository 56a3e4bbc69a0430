"""The report as plain text: facts, one row for each stretch of windows at one level, decisions, the end of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdplus.log.facts import (
    MEDIANS,
    Record,
    Span,
    decisions_of,
    levels_passed_over,
    levels_refused,
    number_of,
    run_of,
    stretches,
)
from hvdplus.log.words import (
    FRAMEWORKS,
    TRANSPORTS,
    alone_text,
    closing,
    count,
    explain,
    fill,
    ladder_text,
    ranks_and_hosts,
    three_digits,
)


def table(records: Sequence[Record]) -> str:
    """The report as plain text: facts, one row for each stretch of windows at one level, decisions, end, one
    sentence."""
    return "\n\n".join(
        block
        for block in (
            fill(alone_text(records), ""),
            _facts(records),
            _rows(stretches(records), number_of(run_of(records).get("gradient_bytes"))),
            _decision_list(records),
            _left_out(records),
            fill(_end(records), "") + "\n" + fill(closing(records), ""),
        )
        if block
    )


def _facts(records: Sequence[Record]) -> str:
    run_record = run_of(records)
    if not run_record:
        return "hvdplus run: the log does not describe the run."
    hosts = run_record.get("hosts") or {}
    names = ", ".join(f"{host}: {ranks}" for host, ranks in list(hosts.items())[:4])
    more = f", +{len(hosts) - 4} more" if len(hosts) > 4 else ""
    transport = str(run_record.get("transport", "?"))
    framework = str(run_record.get("framework", "?"))
    facts = {
        "started": f"{run_record.get('started_at', '?')}, hvdplus {run_record.get('hvdplus', '?')}",
        "framework": FRAMEWORKS.get(framework, framework),
        "ranks": ranks_and_hosts(run_record) + (f" ({names}{more})" if names else ""),
        "transport": f"{TRANSPORTS.get(transport, transport)}, collective {run_record.get('collective', '?')}",
        "compression": ladder_text(run_record, " -> "),
        "gradient": f"{run_record.get('parameters') or 0:,} parameters, "
        f"{three_digits(number_of(run_record.get('gradient_bytes')) / 1e6)} MB in fp32",
    }
    if rhythm := next((record for record in records if record["kind"] == "local"), None):
        every, others = rhythm.get("every"), rhythm.get("fragments") or 1
        facts["local steps"] = f"{every} between two exchanges; a step below is an exchange with those before it" + (
            f", of one of {others} fragments" if others > 1 else ""
        )
    if passed_over := levels_passed_over(records):
        facts["passed over"] = "; ".join(
            f"{name} (sends {three_digits(sent / 1e6)} MB, no less than {below}: {three_digits(less / 1e6)} MB)"
            for name, sent, below, less in passed_over
        )
    if refused := levels_refused(records):
        reasons = dict.fromkeys(refused.values())
        facts["refused"] = "; ".join(
            f"{', '.join(level for level, why in refused.items() if why == reason)} {reason}" for reason in reasons
        )
    return "\n".join(["hvdplus run", *(fill(fact, f"  {name:<11}  ") for name, fact in facts.items())])


COLUMNS = (
    ("steps", ""), ("level", ""), ("step", "ms"), ("compute", "ms"), ("codec", "ms"), ("exposed", "comm ms"),
    ("hidden", "comm ms"), ("input", "wait ms"), ("error", "to gradient"), ("MB sent", "a step"), ("ratio", "to fp32"),
    ("loss", "at end"),
)  # fmt: skip


def _rows(spans: Sequence[Span], gradient_bytes: float) -> str:
    """One row for each stretch. ``gradient_bytes``: bytes of an uncompressed step."""
    if not spans:
        return ""
    rows = [list(row) for row in zip(*COLUMNS, strict=True)]
    for span in spans:
        ratio = gradient_bytes / span.payload_bytes if span.payload_bytes else math.nan
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


def _decision_list(records: Sequence[Record]) -> str:
    decisions = decisions_of(records)
    memory = (run_of(records).get("limits") or {}).get("memory_steps")
    rests_on = (
        f" and their evidence: lower quartiles over pairs of consecutive steps, a level's latest {memory} at most"
        if memory
        else ""
    )
    lines = [explain(number, decision) for number, decision in enumerate(decisions, start=1)]
    return "\n".join([f"Decisions{rests_on}", *lines]) if lines else ""


def _left_out(records: Sequence[Record]) -> str:
    left_out = sum(record["records"] for record in records if record["kind"] == "left_out")
    return f"{count(left_out, 'older record')} of this run are not shown; the run log has them." if left_out else ""


def _end(records: Sequence[Record]) -> str:
    end = next((record for record in records if record["kind"] == "end"), None)
    if end is None:
        return "The log has no end: the job is still running, or was stopped."
    extras = [
        f"{name} {three_digits(value) if isinstance(value, float) else value}"
        for name, value in end.items()
        if name not in ("kind", "steps", "wall_seconds")
    ]
    done = f"{count(end.get('steps') or 0, 'step')} in {three_digits(number_of(end.get('wall_seconds')))} s"
    return "; ".join([f"End: {done}", *extras])
