"""How many local steps between two exchanges: the fewest that make a step cheap.

    cost of H = (computation of a step + what an exchange takes / H) * (1 + price * (H - 1) * (rate / highest rate)²)

What an exchange takes hardly depends on H, so one that was measured tells of all. Steps that ranks take apart bring
them less far; the price of that is a guess, until it is fitted to what ``benchmarks/rhythm.py`` measures. It falls with
the square of the learning rate, so that H grows as the rate falls, as in the quadratic synchronisation rule (arXiv
2310.14423).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hvdplus.control.memory import restore, to_plain
from hvdplus.control.meter import StepTimes

LEAST, MOST, START = 1, 64, 4
"""Local steps; at the start as in PyTorch's own local SGD."""
PRICE = 0.004
"""Of every step beyond the first, as a share of all steps."""
MARGIN = 0.02
"""Share of the cost that more steps have to save; fewer have to save half of it."""
KEPT, SETTLED = 8, 3
"""Exchanges that count, the latest ones; after a change of H, so many are waited for before the next change."""


def cost(steps: int, compute: float, exchange: float, rate: float = 1.0) -> float:
    """Seconds of a step times the price of ``steps`` that ranks take apart.

    Args:
        compute, exchange: seconds of a step's computation, and of an exchange.
        rate: learning rate over the highest one.
    """
    return (compute + exchange / steps) * (1 + PRICE * (steps - 1) * rate**2)


def fewest(compute: float, exchange: float, rate: float = 1.0) -> int:
    """The number of steps of least cost; arguments as of ``cost``."""
    return min(range(LEAST, MOST + 1), key=lambda steps: (cost(steps, compute, exchange, rate), steps))


@dataclass
class Interval:
    """Chooses H. Equal on every rank, as it hears what all ranks share."""

    steps: int = START
    """H."""
    highest_rate: float = 0.0
    since: int = 0
    """Exchanges since H changed."""
    compute: list[float] = field(default_factory=list)
    """Seconds of computation and input of one local step, in the latest periods."""
    exchange: list[float] = field(default_factory=list)
    """Seconds of the latest exchanges that ranks waited for."""

    def observe(self, times: StepTimes, steps: int, learning_rate: float) -> int:
        """Take in a period of so many local ``steps``; return H. ``learning_rate``: 0: unknown."""
        self.highest_rate = max(self.highest_rate, learning_rate)
        if not times.step or steps < 1:
            return self.steps
        waited = times.exposed_comm + times.codec
        self.compute = [*self.compute, max(0.0, times.step - times.probe - waited) / steps][-KEPT:]
        self.exchange = [*self.exchange, waited][-KEPT:]
        self.since += 1
        if self.since >= SETTLED:
            share = learning_rate / self.highest_rate if self.highest_rate and learning_rate else 1.0
            known = median(self.compute), median(self.exchange), share
            best = fewest(*known)
            margin = MARGIN if best > self.steps else MARGIN / 2
            if cost(best, *known) < (1 - margin) * cost(self.steps, *known):
                self.steps, self.since = best, 0
        return self.steps

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values."""
        return to_plain(self)  # type: ignore[no-any-return]

    def load(self, state: Any) -> None:
        """Go on from a ``state`` that ``state()`` returned.

        Raises:
            ValueError: it is damaged.
        """
        known = Interval()
        restore(known, state)
        seconds = [*known.compute, *known.exchange, known.highest_rate]
        if not LEAST <= known.steps <= MOST or min(seconds) < 0:
            raise ValueError(f"it has {known.steps} local steps, or steps that took less than no time")
        self.__dict__.update(known.__dict__)
