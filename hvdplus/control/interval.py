"""How many local steps between two exchanges, and how many of them run beside an exchange: as few as make a step cheap.

    cost = (computation of a step + (codec + what nothing hides of the communication) / H)
           * (1 + (price * (H - 1) + price of late means * overlap / H) * (rate / highest rate)²)

What an exchange takes hardly depends on H, so one that was measured tells of all. Steps that ranks take apart bring
them less far, and so does a mean that arrives late. Both prices are fitted to trainings of two transformers, to their
losses all along the way (``benchmarks/rhythm.py --only prices``). They fall with the square of the learning rate, so
that H grows as the rate falls, as in the quadratic synchronisation rule (arXiv 2310.14423).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from hvdplus.control.memory import restore, to_plain
from hvdplus.control.meter import StepTimes


class Choice(NamedTuple):
    """How often ranks exchange."""

    steps: int
    """H: local steps between two exchanges."""
    overlap: int = 0
    """Steps that ranks go on for until an exchange is complete."""


class Seconds(NamedTuple):
    """What was measured."""

    compute: float
    """Computation and input of one local step."""
    codec: float
    comm: float
    """Communication of one exchange, hidden or not."""


LADDER = ("none", "fp16", "int8", "int4")
"""Levels that ``auto`` chooses from for what local steps came to. An adaptive optimizer makes entries of like size, in
directions that change from one exchange to the next: integers lose little of that, low-rank levels a lot."""
LEAST, MOST, START = 1, 64, 16
"""Local steps. The start is where compression hardly matters any more, so that the level is not chosen for its sake."""
PRICE, LATE_PRICE = 0.0058, 0.32
"""Of every step beyond the first between two exchanges, and of means that are late by a whole period, as shares of all
steps."""
SPARE = 1.2
"""What hides communication is longer than it by this factor."""
MARGIN = 0.02
"""Share of the cost that more steps have to save; fewer have to save half of it."""
KEPT, SETTLED = 8, 3
"""Exchanges that count, the latest ones; after a change, so many are waited for before the next one."""


def cost(choice: Choice, seconds: Seconds, learning_rate: float = 1.0) -> float:
    """Seconds of a step times the price of steps apart and of late means. ``learning_rate``: over the highest one."""
    waits = max(0.0, seconds.comm - choice.overlap * seconds.compute)
    price = PRICE * (choice.steps - 1) + LATE_PRICE * choice.overlap / choice.steps
    return (seconds.compute + (seconds.codec + waits) / choice.steps) * (1 + price * learning_rate**2)


def cheapest(seconds: Seconds, learning_rate: float = 1.0, *, overlaps: bool = False) -> Choice:
    """The choice of least cost. ``overlaps``: whether ranks can go on while they exchange."""
    return min(_choices(seconds, overlaps), key=lambda choice: (cost(choice, seconds, learning_rate), choice))


def _choices(seconds: Seconds, overlaps: bool) -> Iterator[Choice]:
    """All that may be the cheapest."""
    hides = math.ceil(SPARE * seconds.comm / seconds.compute) if overlaps and seconds.compute else 0
    for steps in range(LEAST, MOST + 1):
        yield Choice(steps)
        if hides and steps > 1:
            yield Choice(steps, min(hides, steps - 1))


@dataclass
class Interval:
    """Chooses both. Equal on every rank, as it hears what all ranks share."""

    overlaps: bool = False
    """Whether ranks can go on while they exchange."""
    steps: int = START
    overlap: int = 0
    """The present choice."""
    highest_rate: float = 0.0
    since: int = 0
    """Exchanges since it changed."""
    compute: list[float] = field(default_factory=list)
    codec: list[float] = field(default_factory=list)
    comm: list[float] = field(default_factory=list)
    """``Seconds``, in the latest periods."""

    @property
    def choice(self) -> Choice:
        """The present choice."""
        return Choice(self.steps, self.overlap)

    def observe(self, times: StepTimes, steps: int, learning_rate: float) -> Choice:
        """Take in a period of so many local ``steps``; return the choice. ``learning_rate``: 0: unknown."""
        self.highest_rate = max(self.highest_rate, learning_rate)
        if not times.step or steps < 1:
            return self.choice
        self.compute = [*self.compute, (times.compute + times.input_wait) / steps][-KEPT:]
        self.codec, self.comm = [*self.codec, times.codec][-KEPT:], [*self.comm, times.comm][-KEPT:]
        self.since += 1
        if self.since >= SETTLED and bool(learning_rate) == bool(self.highest_rate):  # a rate of 0 says nothing
            share = learning_rate / self.highest_rate if self.highest_rate else 1.0
            seconds = Seconds(median(self.compute), median(self.codec), median(self.comm))
            best = cheapest(seconds, share, overlaps=self.overlaps)
            margin = MARGIN if best > self.choice else MARGIN / 2
            if cost(best, seconds, share) < (1 - margin) * cost(self.choice, seconds, share):
                (self.steps, self.overlap), self.since = best, 0
        return self.choice

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values."""
        return to_plain(self, without=("overlaps",))  # type: ignore[no-any-return]

    def load(self, state: Any) -> None:
        """Go on from a ``state`` that ``state()`` returned.

        Raises:
            ValueError: it is damaged.
        """
        known = Interval(self.overlaps)
        restore(known, state, without=("overlaps",))
        seconds = [*known.compute, *known.codec, *known.comm, known.highest_rate]
        if not LEAST <= known.steps <= MOST or not 0 <= known.overlap < max(1, known.steps) or min(seconds) < 0:
            raise ValueError(
                f"it has {known.steps} local steps, {known.overlap} of them beside an exchange, or steps that took "
                "less than no time"
            )
        if not self.overlaps:
            known.overlap = 0
        self.__dict__.update(known.__dict__)
