"""What a job keeps of its own log in memory: bounded, however long the job runs.

``History`` holds records for the report at the end of the job, ``Medians`` the times that every rank is asked for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from statistics import median

from hvdplus.log.facts import Record, level_of, span_of, steps_in, windows_in

MOST_WINDOWS = 1600
"""Most windows; beyond this number, older ones are condensed."""
NEWEST_WINDOWS = 400
"""Number of newest windows that are never condensed."""
MOST_EVENTS = 400
"""Most records that are no windows, such as decisions; beyond this number, the oldest are left out."""
KEPT = ("run", "local", "resize", "forbid")
"""Kinds of records that are never left out: the report's sentences rest on them, and a job has few."""
SLOWEST = ("slowest_rank", "slowest_compute_ms", "middle_compute_ms")
MOST_VALUES = 999
"""Values in the memory of one ``Medians``, at most."""


class History:
    """The records of a run log, with older windows condensed.

    Neighbouring windows of one level are merged into one, with medians weighted by steps: three at first, and three
    times as many whenever memory is still too full. So the run is kept in equal detail, except its newest windows.
    """

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._windows = 0
        """Windows in ``_records``."""
        self._written = 0
        """Windows that the job wrote."""
        self._together = 1
        """Most windows that one condensed window may stand for."""
        self._left_out = 0
        """Records that only the file has."""

    @property
    def records(self) -> list[Record]:
        """The records in order. Where some had to be left out, one of kind ``left_out`` at the front counts them."""
        left_out = [{"kind": "left_out", "records": self._left_out}] if self._left_out else []
        return left_out + self._records if left_out else self._records

    def add(self, record: Record) -> None:
        """Keep one more record."""
        self._records.append(record)
        if record["kind"] == "window":
            self._windows += 1
            self._written += 1
            if self._windows > MOST_WINDOWS:
                self._condense()
        elif len(self._records) - self._windows > MOST_EVENTS:
            self._leave_out(windows=False, count=MOST_EVENTS // 4)

    def _condense(self) -> None:
        enough = MOST_WINDOWS - NEWEST_WINDOWS
        while True:
            self._records = list(_condensed(self._records, self._windows - NEWEST_WINDOWS, self._together))
            self._windows = sum(record["kind"] == "window" for record in self._records)
            if self._windows <= enough:
                return
            if self._together > self._written:  # levels change so often that few windows have a neighbour to merge with
                self._leave_out(windows=True, count=self._windows - enough)
                return
            self._together *= 3

    def _leave_out(self, *, windows: bool, count: int) -> None:
        """Drop the ``count`` oldest windows, or the ``count`` oldest other records that may be left out."""
        kept = []
        for record in self._records:
            if count and record["kind"] not in KEPT and (record["kind"] == "window") == windows:
                count -= 1
                self._left_out += 1
                self._windows -= windows
            else:
                kept.append(record)
        self._records = kept


def _condensed(records: Sequence[Record], old: int, most: int) -> Iterator[Record]:
    """The ``records``, with neighbours of one level merged among the first ``old`` windows. ``most``: windows that the
    job wrote and one merged window may stand for."""
    group: list[Record] = []
    for record in records:
        fits = record["kind"] == "window" and old > 0
        if group and not (fits and level_of(record) == level_of(group[0]) and windows_in([*group, record]) <= most):
            yield _together(group)
            group = []
        if fits:
            group.append(record)
            old -= 1
        else:
            yield record
    if group:
        yield _together(group)


def _together(windows: Sequence[Record]) -> Record:
    if len(windows) == 1:
        return windows[0]
    figures = span_of(windows, {})._asdict()
    known = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in figures.items()}
    longest = max(windows, key=steps_in)
    slowest = {name: longest[name] for name in SLOWEST if name in longest}
    return {"kind": "window", **known, **slowest, "windows": windows_in(windows)}


class Medians:
    """The median of any number of values, in bounded memory: the remedian of Rousseeuw and Bassett (1990).

    Exact for fewer than ``MOST_VALUES`` values. From then on three values in a row are replaced by their median, again
    and again, which leaves the median of their distribution where it is.
    """

    def __init__(self) -> None:
        self._values = array("d")
        self._waiting: list[list[float]] = []
        """For each merge of values so far: the values that wait until they are three."""

    def add(self, value: float) -> None:
        """Take in one more value."""
        for waiting in self._waiting:
            waiting.append(value)
            if len(waiting) < 3:
                return
            value = median(waiting)
            waiting.clear()
        self._values.append(value)
        if len(self._values) >= MOST_VALUES:
            threes = zip(*(self._values[first::3] for first in range(3)), strict=True)
            self._values = array("d", map(median, threes))
            self._waiting.append([])

    @property
    def median(self) -> float:
        """The median so far; NaN if there was no value."""
        return median(self._values) if self._values else math.nan
