"""Where a step's time goes: compute, codec, exposed communication, input wait.

``StepMeter`` is a stopwatch with an injectable clock, for frameworks that compute at once; compiled steps bring their
own timestamps. ``reduce_times`` turns all ranks' figures into one set, as reading the metadata does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any, NamedTuple


class StepTimes(NamedTuple):
    """One training step, in seconds."""

    step: float = 0.0
    """From the end of one optimizer step to the end of the next."""
    codec: float = 0.0
    """Packing, encoding, decoding."""
    exposed_comm: float = 0.0
    """Waiting for sums; communication behind computation does not count."""
    input_wait: float = 0.0
    """From the end of a step to the first computation of the next."""
    overlapped_comm: float = 0.0
    """Communication behind this rank's computation; no part of ``step``."""
    probe: float = 0.0
    """The step's bandwidth probe, or preview of levels; 0: there was none."""

    @property
    def comm(self) -> float:
        """All communication, hidden or not."""
        return self.exposed_comm + self.overlapped_comm

    @property
    def compute(self) -> float:
        """All the rest: forward, backward, optimizer, and the user's own code."""
        return max(0.0, self.step - self.codec - self.exposed_comm - self.input_wait - self.probe)


def reduce_times(ranks: Sequence[StepTimes]) -> StepTimes:
    """One set of figures for the job: the reference for ``exchange.metadata.read``, which does the same on arrays.

    The rank that arrives last waits least, and only for the wire. So the least exposed time over the ranks is
    communication; the longer waits of other ranks are that rank's computation. The same holds for ``comm``.
    """
    exposed = min(times.exposed_comm for times in ranks)
    return StepTimes(
        step=fmean(times.step for times in ranks),
        codec=max(times.codec for times in ranks),
        exposed_comm=exposed,
        input_wait=max(times.input_wait for times in ranks),
        overlapped_comm=min(times.comm for times in ranks) - exposed,
        probe=min(times.probe for times in ranks),
    )


def median_times(steps: Sequence[StepTimes]) -> StepTimes:
    """Medians, figure by figure."""
    return StepTimes(*(median(figure) for figure in zip(*steps, strict=True)))


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (begin, end) intervals; an interval that ends before it begins is empty."""
    covered, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


LOOK_SECONDS = 0.0005
"""Least time between two looks (``StepMeter.look``)."""


class StepMeter:
    """Stopwatch of one rank. Nothing is measured until the first ``end_step``, because no step has begun before.

    The wire is busy while a sum is in flight or awaited. The end of an awaited sum is exact. Any other end is noticed
    by ``look``, and taken to lie half way between that look and the one before.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._codec = self._exposed_comm = self._input_wait = self._probe = 0.0
        self._busy: list[tuple[float, float]] = []
        self._under_way: dict[int, tuple[float, Callable[[], bool]]] = {}
        self._looked = -math.inf
        self.last = StepTimes()
        """The last complete step; zeros if there is none yet."""

    def codec(self) -> _Codec:
        """Time spent inside counts as codec."""
        return _Codec(self)

    @contextmanager
    def exposed_comm(self) -> Iterator[None]:
        """Time spent inside counts as exposed communication."""
        began = self._clock()
        try:
            yield
        finally:
            now = self._clock()
            self._exposed_comm += now - began
            self._busy.append((began, now))

    @contextmanager
    def waits_in_codec(self, *keys: int) -> Iterator[None]:
        """As ``awaited``, inside of ``codec``."""
        began = self._clock()
        with self.awaited(*keys):
            yield
        self._codec -= self._clock() - began

    @contextmanager
    def probe(self) -> Iterator[None]:
        """Time spent inside counts as a bandwidth probe, or as a preview of levels: for exploring."""
        began = self._clock()
        try:
            yield
        finally:
            self._probe += self._clock() - began

    def sum_begins(self, key: int, done: Callable[[], bool], ended: Any = None) -> None:
        """A sum is in flight. ``done``: whether it has ended. ``ended``: see ``Transport.ended``; not used here."""
        self._under_way[key] = (self._clock(), done)

    def look(self) -> None:
        """Notice which sums have ended, at most once in ``LOOK_SECONDS``, because asking costs some microseconds. Sums
        end in the order in which they began, so the first one that has not ended is the last one asked."""
        now = self._clock()
        if now - self._looked < LOOK_SECONDS:
            return
        while self._under_way:
            key, (began, done) = next(iter(self._under_way.items()))
            if not done():
                break
            del self._under_way[key]
            self._busy.append((began, (max(began, self._looked) + now) / 2))
        self._looked = now

    @contextmanager
    def awaited(self, *keys: int) -> Iterator[None]:
        """Time spent inside counts as exposed communication; at its end the sums ``keys`` have ended."""
        self.look()
        with self.exposed_comm():
            yield
        now = self._clock()
        for key in keys:
            if key in self._under_way:
                self._busy.append((self._under_way.pop(key)[0], now))

    def input_arrived(self) -> None:
        """A computation begins now; the first one of a step counts."""
        if self._began is not None and not self._input_wait:
            self._input_wait = self._clock() - self._began

    def end_step(self) -> None:
        """The optimizer has taken its step; the next begins now."""
        now = self._clock()
        if self._began is not None:
            overlapped = max(0.0, union_seconds(self._busy) - self._exposed_comm)
            self.last = StepTimes(
                now - self._began, self._codec, self._exposed_comm, self._input_wait, overlapped, self._probe
            )
        self._began = now
        self._codec = self._exposed_comm = self._input_wait = self._probe = 0.0
        self._busy.clear()


class _Codec:
    """Context manager of ``StepMeter.codec``. No generator, as every gradient enters it and a class is faster."""

    __slots__ = ("_began", "_meter")

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._began = self._meter._clock()

    def __exit__(self, *failure: object) -> None:
        self._meter._codec += self._meter._clock() - self._began
