"""Where a step's time goes: compute, codec, exposed communication, input wait.

``StepMeter`` is a stopwatch with an injectable clock; the torch adapter drives it, compiled Keras steps bring their
own timestamps. ``reduce_times`` turns all ranks' figures into the one set that decisions are made from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import NamedTuple


class StepTimes(NamedTuple):
    """One training step, in seconds."""

    step: float = 0.0
    """From the end of one optimizer step to the end of the next."""
    codec: float = 0.0
    """Packing, encoding, decoding."""
    exposed_comm: float = 0.0
    """Standing still until sums arrive; what overlaps with computation does not count."""
    input_wait: float = 0.0
    """From the end of a step to the first computation of the next."""
    overlapped_comm: float = 0.0
    """Communication that went on while this rank computed: no part of the step's time, but of what the wire did."""
    sounding: float = 0.0
    """A sum that was sent for no other reason than to see how long it takes; 0: none was."""

    @property
    def comm(self) -> float:
        """All communication, hidden or not."""
        return self.exposed_comm + self.overlapped_comm

    @property
    def compute(self) -> float:
        """All the rest: forward, backward, optimizer, and the user's own code."""
        return max(0.0, self.step - self.codec - self.exposed_comm - self.input_wait - self.sounding)


def reduce_times(ranks: Sequence[StepTimes]) -> StepTimes:
    """One set of figures for the job.

    Whoever comes last waits least, and for the wire alone: the least exposed time over the ranks is communication,
    the rest of the others' waiting is somebody's computation. So is it with all communication, exposed or not.
    """
    exposed = min(times.exposed_comm for times in ranks)
    return StepTimes(
        step=fmean(times.step for times in ranks),
        codec=max(times.codec for times in ranks),
        exposed_comm=exposed,
        input_wait=max(times.input_wait for times in ranks),
        overlapped_comm=min(times.comm for times in ranks) - exposed,
        sounding=min(times.sounding for times in ranks),
    )


def median_times(steps: Sequence[StepTimes]) -> StepTimes:
    """Medians, figure by figure."""
    return StepTimes(*(median(figure) for figure in zip(*steps, strict=True)))


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of what (begin, end) intervals cover together; one that ends before it begins covers nothing."""
    covered, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


LOOK_SECONDS = 0.0005
"""The least time between two looks."""


class StepMeter:
    """Stopwatch of one rank. Nothing is measured until the first ``end_step``, because no step has begun before.

    The wire is busy while a sum is under way or is waited for. That a sum has ended is noticed when somebody looks: its
    end is taken to lie half way between two looks, so it is known to half the time between them; an end that is waited
    for is exact.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._codec = self._exposed_comm = self._input_wait = self._sounding = 0.0
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
    def sounding(self) -> Iterator[None]:
        """Time spent inside is that of a sounding."""
        began = self._clock()
        try:
            yield
        finally:
            self._sounding += self._clock() - began

    def sum_begins(self, key: int, done: Callable[[], bool]) -> None:
        """A sum is on its way; ``done`` tells whether it is there."""
        self._under_way[key] = (self._clock(), done)

    def look(self) -> None:
        """Notice which sums have ended. They end in the order in which they began, so that few are asked; and not too
        often, because asking costs some microseconds."""
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
        """Time spent inside is exposed communication, and then the sums are there."""
        self.look()
        with self.exposed_comm():
            yield
        now = self._clock()
        for key in keys:
            if key in self._under_way:
                self._busy.append((self._under_way.pop(key)[0], now))

    def input_arrived(self) -> None:
        """The first computation of a step begins now."""
        if self._began is not None:
            self._input_wait = self._clock() - self._began

    def end_step(self) -> None:
        """The optimizer has taken its step; the next begins now."""
        now = self._clock()
        if self._began is not None:
            overlapped = max(0.0, union_seconds(self._busy) - self._exposed_comm)
            self.last = StepTimes(
                now - self._began, self._codec, self._exposed_comm, self._input_wait, overlapped, self._sounding
            )
        self._began = now
        self._codec = self._exposed_comm = self._input_wait = self._sounding = 0.0
        self._busy.clear()


class _Codec:
    """What ``StepMeter.codec`` returns; entered for every gradient, hence no generator."""

    __slots__ = ("_began", "_meter")

    def __init__(self, meter: StepMeter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._began = self._meter._clock()

    def __exit__(self, *failure: object) -> None:
        self._meter._codec += self._meter._clock() - self._began
