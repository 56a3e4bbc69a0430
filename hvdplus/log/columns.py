"""What the pictures of a run draw: columns of windows, the order of levels, the parts of a step and their colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from hvdplus.log.facts import DRAINING, Record, Span, level_of, run_of, span_of, windows_in, windows_of

# Parts of a step, bottom of the stack first: field, name, colour. From Okabe and Ito's colour-blind-safe palette; a
# warm colour marks exposed communication, which hvdplus shortens.
PARTS = (
    ("compute_ms", "compute", "#c3cad3"),
    ("codec_ms", "codec", "#0072b2"),
    ("exposed_comm_ms", "exposed communication", "#d55e00"),
    ("input_wait_ms", "input wait", "#f0e442"),
)
INK = "#333333"
LOSS_COLOUR = "#009e73"
MOST_COLUMNS = 400
"""More columns than this show noise, not a run."""
PERCENTILE = 0.95


class Columns(NamedTuple):
    """A run in columns."""

    spans: list[Span]
    """Each of one window, or of a few windows of one level."""
    windows: int
    """Most windows in a column."""
    levels: list[str]
    """Names on the axis of levels, lowest first. Flushing steps come below dense."""


def columns_of(records: Sequence[Record]) -> Columns:
    """Columns of a run.

    Raises:
        ValueError: there is no window.
    """
    windows, run_record = windows_of(records), run_of(records)
    if not windows:
        raise ValueError("the log holds no window of steps yet")
    together = math.ceil(len(windows) / MOST_COLUMNS)
    columns = []
    for _, group in groupby(windows, key=level_of):
        stretch = list(group)
        columns += [stretch[i : i + together] for i in range(0, len(stretch), together)]
    spans = [span_of(column, run_record) for column in columns]
    names = dict.fromkeys([*(run_record.get("ladder") or []), *(span.level for span in spans)])
    levels = sorted(names, key=lambda name: name != DRAINING)
    return Columns(spans, max(map(windows_in, columns)), levels)


def total_ms(span: Span) -> float:
    """Height of a column: its parts, which are medians each for itself."""
    return sum(or_zero(getattr(span, field)) for field, *_ in PARTS)


def sensible_top(columns: Sequence[Span]) -> float:
    """Top of the axis in ms. The usual step of each level fits, and so do most windows; a compilation need not."""
    totals = [total_ms(span) for span in columns]
    by_level: dict[str, list[float]] = {}
    for span, total in zip(columns, totals, strict=True):
        by_level.setdefault(span.level, []).append(total)
    usual = max(sorted(group)[(len(group) - 1) // 2] for group in by_level.values())
    most = sorted(totals)[int(PERCENTILE * (len(totals) - 1))]
    top = 1.5 * max(usual, most)
    return (1.08 * max(totals) if max(totals) <= top else top) or 1.0


def or_zero(value: float) -> float:
    """0 for NaN: an unknown part has no height."""
    return 0.0 if math.isnan(value) else value
