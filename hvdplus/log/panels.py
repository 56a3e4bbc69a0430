"""Panels of the report's page, as SVG: what lies under the pointer says its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from hvdplus.log.columns import INK, PARTS, Columns, or_zero, sensible_top, total_ms
from hvdplus.log.facts import Record, Span
from hvdplus.log.words import decision_line, three_digits

WIDTH, LEFT, RIGHT = 1100, 150, 20
"""Of a panel, in units of its picture: all of it, and what is left free for names and numbers."""
TICKS = 5
"""On an axis, about."""


class Scale(NamedTuple):
    """Values -> units of a picture."""

    low: float
    high: float
    at_low: float
    at_high: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low or 1.0)
        return round(self.at_low + share * (self.at_high - self.at_low), 2)


def middle_of(span: Span) -> float:
    """The step in the middle."""
    return (span.first_step + span.last_step + 1) / 2


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``TICKS`` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / TICKS
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _svg(height: float, parts: Iterator[str] | Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img">{"".join(parts)}</svg>'


def _frame(steps: Scale, values: Scale, written: Callable[[float], str]) -> Iterator[str]:
    """Both axes: lines across at the values' ticks, steps below."""
    for tick in ticks(values.low, values.high):
        y = values(tick)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#e6e6e6"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{written(tick)}</text>'
    yield from _step_axis(steps, values.at_low)


def _step_axis(steps: Scale, y: float) -> Iterator[str]:
    for tick in ticks(steps.low, steps.high):
        yield f'<text x="{steps(tick)}" y="{y + 16}" text-anchor="middle">{tick:g}</text>'
    yield f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">step</text>'


def _marks(decisions: Sequence[Record], steps: Scale, top: float, bottom: float) -> Iterator[str]:
    for each in decisions:
        x = steps(each["step"])
        yield f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" stroke="{INK}" stroke-dasharray="1 3" opacity=".5"/>'


def legend() -> str:
    items = (f'<span style="background:{colour}"></span>{name}' for _, name, colour in PARTS)
    return f'<p class="legend muted">{"".join(items)}</p>'


def described(span: Span) -> str:
    """A column in words."""
    parts = ", ".join(f"{name} {three_digits(getattr(span, field))}" for field, name, _ in PARTS)
    text = f"steps {span.first_step} to {span.last_step}, {span.level}: {three_digits(span.step_ms)} ms a step ({parts}"
    return f"{text}; hidden communication {three_digits(span.overlapped_comm_ms)})"


def times(spans: Sequence[Span], steps: Scale, decisions: Sequence[Record]) -> str:
    height, bottom = 260.0, 230.0
    values = Scale(0.0, sensible_top(spans), bottom, 8.0)

    def columns() -> Iterator[str]:
        for span in spans:
            x, width = steps(span.first_step), max(0.6, steps(span.last_step + 1) - steps(span.first_step))
            yield f'<g class="column"><title>{escape(described(span))}</title>'
            below = 0.0
            for field, _, colour in PARTS:
                part = or_zero(getattr(span, field))
                top, low = values(min(below + part, values.high)), values(min(below, values.high))
                if low > top:
                    yield f'<rect x="{x}" y="{top}" width="{width:.2f}" height="{low - top:.2f}" fill="{colour}"/>'
                below += part
            if total_ms(span) > values.high:
                yield f'<text x="{x + width / 2:.2f}" y="8" text-anchor="middle">↑</text>'
            yield "</g>"

    return _svg(height, [*_frame(steps, values, "{:g}".format), *columns(), *_marks(decisions, steps, 8, bottom)])


def levels(columns: Columns, steps: Scale, decisions: Sequence[Record]) -> str:
    names, row = columns.levels, 24.0
    bottom = 12 + row * len(names)
    places = {name: bottom - row * (number + 0.5) for number, name in enumerate(names)}

    def parts() -> Iterator[str]:
        for name in names:
            y = places[name]
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#eee"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(name)}</text>'
        for level, group in groupby(columns.spans, key=lambda span: span.level):
            stretch = list(group)
            first, last = stretch[0].first_step, stretch[-1].last_step
            shade = 30 + 45 * names.index(level) / max(1, len(names) - 1)
            said, width = escape(f"steps {first} to {last} at {level}"), max(1.0, steps(last + 1) - steps(first))
            yield (
                f'<g class="column"><title>{said}</title><rect x="{steps(first)}" y="{places[level] - 8}" '
                f'width="{width:.2f}" height="16" fill="hsl(215 45% {90 - shade:.0f}%)"/></g>'
            )
        for number, each in enumerate(decisions, start=1):
            x, y = steps(each["step"]), places.get(each["to"], bottom)
            why = escape(f"{number}. {decision_line(each, ' → ')}")
            yield (
                f"<g><title>{why}</title>"
                f'<circle cx="{x}" cy="{y}" r="8" fill="{INK}" stroke="#fff" stroke-width="1.5"/>'
                f'<text x="{x}" y="{y + 4}" text-anchor="middle" style="fill:#fff">{number}</text></g>'
            )

    return _svg(bottom + 22, [*parts(), *_step_axis(steps, bottom)])


def line(
    points: Sequence[tuple[float, float]],
    steps: Scale,
    decisions: Sequence[Record],
    colour: str,
    written: Callable[[float], str],
) -> str:
    """A line through what is known; empty if that is less than two points."""
    known = [(step, value) for step, value in points if math.isfinite(value) and steps.low <= step <= steps.high]
    if len(known) < 2:
        return ""
    height, bottom = 140.0, 112.0
    low, high = min(value for _, value in known), max(value for _, value in known)
    room = 0.08 * (high - low) or 0.5 * abs(high) or 1.0
    values = Scale(max(0.0, low - room) if low >= 0 else low - room, high + room, bottom, 8.0)
    path = " ".join(f"{steps(step)},{values(value)}" for step, value in known)

    def dots() -> Iterator[str]:
        for step, value in known:
            yield (
                f'<circle cx="{steps(step)}" cy="{values(value)}" r="2.5" fill="{colour}"><title>step {step:g}: '
                f"{escape(written(value))}</title></circle>"
            )

    drawn = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
    return _svg(height, [*_frame(steps, values, written), *_marks(decisions, steps, 8, bottom), drawn, *dots()])
