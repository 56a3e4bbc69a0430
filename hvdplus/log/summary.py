"""A run in brief, for every form of the report: what the run was, what it came to, what to look at first.

``summary`` is all of it as plain values, which ``hvdplus report --json`` prints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvdplus.log.facts import (
    Record,
    bandwidth,
    decisions_of,
    delay_prices,
    fp32_bytes,
    levels_passed_over,
    levels_refused,
    number_of,
    rhythm_of,
    run_of,
    samples_per_second,
    spans_by_level,
    spread,
    stretches,
    traffic,
)
from hvdplus.log.words import (
    FRAMEWORKS,
    TRANSPORTS,
    alone_text,
    closing,
    count,
    ladder_text,
    ranks_and_hosts,
    spread_text,
    three_digits,
)


def about(records: Sequence[Record]) -> dict[str, str]:
    """What the run was: name of a fact -> text; empty if the log does not describe the run."""
    run_record = run_of(records)
    if not run_record:
        return {}
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
        f"{three_digits(fp32_bytes([run_record]) / 1e6)} MB in fp32",
    }
    if rhythm := rhythm_of(records):
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
    return facts


def warnings(records: Sequence[Record]) -> list[str]:
    """Sentences on what matters more than any level of compression; mostly none."""
    return [text for text in (alone_text(records), spread_text(records)) if text]


def end_text(records: Sequence[Record]) -> str:
    """How the job ended, in a sentence."""
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


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """The run as numbers, text, None, and lists and dictionaries of them. ``_ms``: milliseconds a step.

    ``about``, ``verdict``, ``warnings``, ``end`` are sentences, as in the report. ``levels``: level -> what all of its
    steps were like, its price of delay, and its bandwidths in bytes a second. ``stretches``: the same in order.
    """
    run_record, ranks, prices = run_of(records), run_of(records).get("ranks") or 1, delay_prices(records)
    sent, unequal = traffic(records), spread(records)
    found: dict[str, Any] = plain(
        {
            "about": about(records),
            "verdict": closing(records),
            "warnings": warnings(records),
            "end": end_text(records),
            "ranks": ranks,
            "gradient_bytes": number_of(run_record.get("gradient_bytes")),
            "bytes_sent": sent.bytes,
            "bytes_dense": sent.dense_bytes,
            "saved_share": sent.saved_share,
            "levels": {
                level: {
                    **span._asdict(),
                    "price_of_delay": prices.get(level, 1.0),
                    "samples_per_second": samples_per_second(span, records),
                    "algorithm_bytes_per_second": bandwidth(span, ranks).algorithm,
                    "bus_bytes_per_second": bandwidth(span, ranks).bus,
                }
                for level, span in spans_by_level(records).items()
            },
            "stretches": [span._asdict() for span in stretches(records)],
            "slowest_rank": {**unequal._asdict(), "times": unequal.times} if unequal else None,
            "decisions": [
                {name: each.get(name) for name in ("step", "from", "to", "reason", "evidence")}
                for each in decisions_of(records)
            ],
        }
    )
    return found


def plain(value: Any) -> Any:
    """A copy in which what is not finite is None, as JSON wants it."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
