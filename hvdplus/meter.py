"""Where a step's time goes: compute, codec, exposed communication, input wait.

``StepMeter`` is a stopwatch with an injectable clock; the torch adapter drives it, compiled Keras steps bring their
own timestamps. ``reduce_times`` turns all ranks' figures into the one set that decisions are made from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
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

    @property
    def compute(self) -> float:
        """All the rest: forward, backward, optimizer, and the user's own code."""
        return max(0.0, self.step - self.codec - self.exposed_comm - self.input_wait)


def reduce_times(ranks: Sequence[StepTimes]) -> StepTimes:
    """One set of figures for the job.

    Whoever comes last waits least, and for the wire alone: the least exposed time over the ranks is communication,
    the rest of the others' waiting is somebody's computation.
    """
    return StepTimes(
        step=fmean(times.step for times in ranks),
        codec=max(times.codec for times in ranks),
        exposed_comm=min(times.exposed_comm for times in ranks),
        input_wait=max(times.input_wait for times in ranks),
    )


def median_times(steps: Sequence[StepTimes]) -> StepTimes:
    """Medians, figure by figure."""
    return StepTimes(*(median(figure) for figure in zip(*steps, strict=True)))


class StepMeter:
    """Stopwatch of one rank. Nothing is measured until the first ``end_step``, because no step has begun before."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None
        self._codec = self._exposed_comm = self._input_wait = 0.0
        self.last = StepTimes()
        """The last complete step; zeros if there is none yet."""

    @contextmanager
    def codec(self) -> Iterator[None]:
        """Time spent inside counts as codec."""
        began = self._clock()
        try:
            yield
        finally:
            self._codec += self._clock() - began

    @contextmanager
    def exposed_comm(self) -> Iterator[None]:
        """Time spent inside counts as exposed communication."""
        began = self._clock()
        try:
            yield
        finally:
            self._exposed_comm += self._clock() - began

    def input_arrived(self) -> None:
        """The first computation of a step begins now."""
        if self._began is not None:
            self._input_wait = self._clock() - self._began

    def end_step(self) -> None:
        """The optimizer has taken its step; the next begins now."""
        now = self._clock()
        if self._began is not None:
            self.last = StepTimes(now - self._began, self._codec, self._exposed_comm, self._input_wait)
        self._began = now
        self._codec = self._exposed_comm = self._input_wait = 0.0
