"""What a job keeps of its own log in memory: bounded, however long the job runs.

``History`` holds records for the report at the end of the job, ``Medians`` the times that every rank is asked for.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from statistics import median

from hvdplus.log.facts import Record, level_of, span_of, windows_in

MOST_WINDOWS = 1600
"""More windows than these are condensed."""
NEWEST_WINDOWS = 400
"""The newest windows, which are kept whole."""
MOST_EVENTS = 400
"""Decisions and other records that are no windows. They are few; of more, the oldest are left out."""
MOST_VALUES = 999
"""Values of one ``Medians``."""


class History:
    """The records of a run log, with older windows condensed.

    Neighbouring windows of one level become one window with their medians, weighted by steps: at first three, and three
    times as many whenever that is too little. So all of the run but its newest windows is kept in equal detail.
    """

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._windows = 0
        """Windows among them."""
        self._written = 0
        """Windows that the job wrote."""
        self._together = 1
        """Windows that a condensed one may stand for."""
        self._left_out = 0
        """Records that are in the file alone."""

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
            if self._together > self._written:  # levels change all the time, so that few windows have neighbours
                self._leave_out(windows=True, count=self._windows - enough)
                return
            self._together *= 3

    def _leave_out(self, *, windows: bool, count: int) -> None:
        """Drop the ``count`` oldest windows, or of the other records those that come after the first, the run's."""
        kept = []
        for place, record in enumerate(self._records):
            if count and place and (record["kind"] == "window") == windows:
                count -= 1
                self._left_out += 1
                self._windows -= windows
            else:
                kept.append(record)
        self._records = kept


def _condensed(records: Sequence[Record], old: int, most: int) -> Iterator[Record]:
    """The ``records``, with neighbours of one level among the first ``old`` windows taken together. ``most``: the most
    windows, as the job wrote them, that become one."""
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
    return {"kind": "window", **known, "windows": windows_in(windows)}


class Medians:
    """The median of any number of values, in bounded memory: the remedian of Rousseeuw and Bassett (1990).

    Exact for fewer than ``MOST_VALUES`` values. From then on three values in a row are replaced by their median, again
    and again, which leaves the median of their distribution where it is.
    """

    def __init__(self) -> None:
        self._values = array("d")
        self._waiting: list[list[float]] = []
        """For each time that values were taken together: those that wait for a third one."""

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
        """NaN: there was no value."""
        return median(self._values) if self._values else math.nan
