"""The report as one HTML file: it opens offline, in any browser, and needs no script.

Panels share the axis of steps. Whatever lies under the pointer says its figures (SVG titles); a mark on the axis of
levels is a decision, and says why.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from hvdplus.log.columns import INK, LOSS_COLOUR, columns_of
from hvdplus.log.facts import (
    Record,
    Traffic,
    bandwidth,
    decisions_of,
    delay_prices,
    evidence_by_level,
    fp32_bytes,
    number_of,
    run_of,
    samples_per_second,
    spans_by_level,
    steps_in,
    traffic,
    windows_of,
)
from hvdplus.log.panels import LEFT, RIGHT, WIDTH, Scale, legend, levels, line, middle_of, times
from hvdplus.log.summary import about, end_text, warnings
from hvdplus.log.words import closing, count, decision_line, evidence_text, printable, three_digits

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1140px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin: 1.4em 0 .3em; } h1:first-child { margin-top: 0; }
h2 { font-size: 1.1em; margin: 1.6em 0 .3em; }
.verdict { font-size: 1.2em; margin: .6em 0; } .warning { background: #fff3d6; padding: .5em .8em; margin: .5em 0; }
table { border-collapse: collapse; } td, th { padding: .15em .9em .15em 0; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; } th { color: #666; font-weight: normal; }
td.text { white-space: normal; text-align: left; } svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: #333; } .muted { color: #666; }
.legend span { display: inline-block; width: .9em; height: .9em; margin: 0 .4em 0 1.2em; vertical-align: -.1em; }
ol li { margin: .4em 0; } g.column:hover rect { opacity: .75; }
"""


def page(runs: Mapping[str, Sequence[Record]], top: str = "") -> str:
    """The page of a run, or of several beside each other.

    Args:
        runs: name -> records of its log.
        top: HTML that comes first, instead of the runs side by side.

    Raises:
        ValueError: a log holds no window of steps.
    """
    runs = {printable(name): printable(list(records)) for name, records in runs.items()}
    body = [top or _comparison(runs)] if len(runs) > 1 or top else []
    for name, records in runs.items():
        body.append(_run(name, records))
    title = " | ".join(runs)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def write_page(runs: Mapping[str, Sequence[Record]], path: str | os.PathLike[str], top: str = "") -> Path:
    """Write the page (see ``page``) to a file; returns its path.

    Raises:
        ValueError: a log holds no window of steps.
        OSError: the file cannot be written.
    """
    text, target = page(runs, top), Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target


def _run(name: str, records: Sequence[Record]) -> str:
    columns = columns_of(records)
    spans = columns.spans
    scale = Scale(spans[0].first_step, spans[-1].last_step + 1, LEFT, WIDTH - RIGHT)
    decisions = decisions_of(records)
    error = [(middle_of(span), span.error) for span in spans]
    loss = [(middle_of(span), span.loss) for span in spans]
    dense = fp32_bytes(records)
    ratio = [(middle_of(span), dense / span.payload_bytes if span.payload_bytes else math.nan) for span in spans]
    unequal = [
        (
            (window["first_step"] + window["last_step"] + 1) / 2,
            number_of(window.get("slowest_compute_ms")) / (number_of(window.get("middle_compute_ms")) or math.nan),
        )
        for window in windows_of(records)
    ]
    panels = [
        ("Milliseconds a step", legend(), times(spans, scale, decisions)),
        ("Level", "<p class=muted>A number marks a decision: point at it.</p>", levels(columns, scale, decisions)),
        ("Loss", "", line(loss, scale, decisions, LOSS_COLOUR, "{:.4g}".format)),
        ("‖residual‖ / ‖gradient‖, what is held back", "", line(error, scale, decisions, "#cc79a7", "{:.2f}".format)),
        ("Bytes of fp32 over bytes sent", "", line(ratio, scale, decisions, "#0072b2", "{:.1f} x".format)),
        ("Bandwidth of the link, by the model, MB/s", "", line(link_of(decisions), scale, (), INK, "{:.1f}".format)),
        (
            "Slowest rank's computation over the middle rank's",
            "",
            line(unequal, scale, (), "#e69f00", "{:.2f} x".format),
        ),
    ]
    drawn = [f"<h2>{title}</h2>{note}{svg}" for title, note, svg in panels if svg]
    return "\n".join(
        [
            f"<h1>{escape(name)}</h1>",
            f'<p class="verdict">{escape(closing(records))}</p>',
            *(f'<p class="warning">{escape(warning)}</p>' for warning in warnings(records)),
            _by_level(records),
            *drawn,
            _decisions(decisions),
            "<h2>The run</h2><table>",
            *(
                f"<tr><td>{escape(key)}</td><td class=text>{escape(text)}</td></tr>"
                for key, text in about(records).items()
            ),
            f"<tr><td>end</td><td class=text>{escape(end_text(records).removeprefix('End: '))}</td></tr></table>",
        ]
    )


def _by_level(records: Sequence[Record]) -> str:
    ranks, prices, sent = run_of(records).get("ranks") or 1, delay_prices(records), traffic(records)
    head = (
        "level",
        "steps",
        "ms a step",
        "samples/s",
        "it waits",
        "price of delay",
        "MB a step",
        "bus MB/s",
        "last loss",
    )
    rows = [
        (
            level,
            f"{span.steps:,}",
            three_digits(span.step_ms),
            three_digits(samples_per_second(span, records)),
            "-" if math.isnan(span.exposed_share) else f"{span.exposed_share:.0%}",
            f"{prices.get(level, 1.0):.3f}",
            three_digits(span.payload_bytes / 1e6),
            three_digits(bandwidth(span, ranks).bus / 1e6),
            three_digits(span.loss),
        )
        for level, span in spans_by_level(records).items()
    ]
    saved = (
        f"<p>A rank sent {three_digits(sent.bytes / 1e6)} MB; in fp32 the same steps would have sent "
        f"{three_digits(sent.dense_bytes / 1e6)} MB: {_less(sent)}.</p>"
        if sent.dense_bytes and not math.isnan(sent.dense_bytes)
        else ""
    )
    known = [place for place in range(len(head)) if any(row[place] != "-" for row in rows)]
    return table([head[place] for place in known], [[row[place] for place in known] for row in rows]) + saved


def _less(sent: Traffic) -> str:
    """What was saved, as a share; as a factor where nearly all was."""
    return (
        f"{sent.saved_share:.0%} less"
        if sent.saved_share < 0.99 or not sent.bytes
        else f"1/{sent.dense_bytes / sent.bytes:,.0f} of it"
    )


HEAD = ("run", "mostly at", "ms a step", "steps", "seconds", "MB sent", "loss at end")
"""Of the table of runs side by side."""


def row_of_run(name: str, records: Sequence[Record]) -> tuple[str, ...]:
    """A run's row, see ``HEAD``."""
    levels, end = spans_by_level(records), next((each for each in records if each["kind"] == "end"), {})
    main, windows = max(levels.values(), key=lambda span: span.steps, default=None), windows_of(records)
    losses = [loss for window in windows if not math.isnan(loss := number_of(window.get("loss")))]
    return (
        name,
        main.level if main else "-",
        three_digits(main.step_ms) if main else "-",
        f"{sum(map(steps_in, windows)):,}" if windows else "-",  # a checkpoint may have been loaded between
        three_digits(number_of(end.get("wall_seconds"))),
        three_digits(traffic(records).bytes / 1e6),
        three_digits(losses[-1]) if losses else "-",
    )


def _comparison(runs: Mapping[str, Sequence[Record]]) -> str:
    """The runs in a table, one a row."""
    return "<h1>Side by side</h1>" + table(HEAD, [row_of_run(name, records) for name, records in runs.items()])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As HTML."""

    def row_of(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row_of(head, "th") + "".join(row_of(row, "td") for row in rows) + "</table>"


def _decisions(decisions: Sequence[Record]) -> str:
    if not decisions:
        return ""
    items = (
        f"<li>{escape(decision_line(each, ' → '))}<br><span class=muted>{escape(evidence_text(each))}</span></li>"
        for each in decisions
    )
    how_many = count(len(decisions), "decision")
    return f"<details><summary>{how_many}, with evidence</summary><ol>{''.join(items)}</ol></details>"


def link_of(decisions: Sequence[Record]) -> list[tuple[float, float]]:
    """(step, MB/s) of every decision that knows the link."""
    found = []
    for each in decisions:
        slope = evidence_by_level(each).get("link", {}).get("ms_per_MB", 0.0)
        if slope > 0:
            found.append((float(each["step"]), 1e3 / slope))
    return found
