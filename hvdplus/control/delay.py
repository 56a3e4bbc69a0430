"""How late gradients arrive at a level: its error e, and what that costs in steps.

e is the norm of the residual over the norm of the gradient, both summed over ranks. It is measured where a level runs,
and guessed elsewhere from the bytes that are sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from hvdplus.control.blocks import Guess
from hvdplus.control.link import LevelCost

ENERGY, POWER = 0.027, 1.75
"""Guesses for a level that was never run, with its share of the dense bytes: ``e² = ENERGY (1 / share - 1)``, or
``e² ∝ (1 / share - 1)^POWER`` from a level that ran and sends about as many bytes. Both are fits to low-rank levels."""
NEAR = 3.0
"""Factor between the bytes of such two levels, at most: beyond, they are seldom of one kind."""
GUESS_ERROR, NEAR_ERROR = 0.7, 0.3
"""Standard deviations of such an e, as a share of it (``benchmarks/results/delay.txt``)."""
SURE = 3
"""Readings of a level's e that are no accident; a single one may be of an odd batch."""
MOST_ERROR = 10.0
"""Of any level: one that sends a hundredth of the energy of gradient and residual in a step."""


def expected(level: int, errors: Mapping[int, Sequence[float]], costs: Sequence[LevelCost]) -> Guess:
    """A level's e: as measured, or else as guessed from its bytes and from the level measured with about as many.

    Fewer than ``SURE`` readings count where they are below the guess: an odd batch of small gradients makes e larger,
    and would price a level and its neighbours out for good.

    Args:
        errors: level -> what its error comes to, by readings.
        costs: of every level.
    """
    seen = errors.get(level, ())
    if len(seen) >= SURE:
        return Guess(median(seen), 0.0)
    if not costs[level].keeps_residual:
        return Guess(0.0, 0.0)
    sent = costs[level].payload_bytes

    def distance(other: int) -> float:
        return abs(math.log(max(1, costs[other].payload_bytes) / max(1, sent)))

    known = {other: median(errors[other]) for other in errors if costs[other].keeps_residual and other != level}
    near = [
        other
        for other, error in known.items()
        if (len(errors[other]) >= SURE or error < _by_bytes(other, costs))
        and distance(other) < math.log(NEAR)
        and _left_out(other, costs)
    ]
    if not near:
        error, spread = _by_bytes(level, costs), GUESS_ERROR
    else:
        nearest = min(near, key=distance)
        times = _left_out(level, costs) / _left_out(nearest, costs)
        error, spread = known[nearest] * times ** (POWER / 2), NEAR_ERROR
    if seen and median(seen) < error:
        error, spread = median(seen), NEAR_ERROR
    return Guess(error, (spread * error) ** 2)


def _by_bytes(level: int, costs: Sequence[LevelCost]) -> float:
    return math.sqrt(ENERGY * _left_out(level, costs))


def _left_out(level: int, costs: Sequence[LevelCost]) -> float:
    """Bytes that are not sent over bytes that are."""
    dense, sent = costs[0].payload_bytes, costs[level].payload_bytes
    return max(0.0, dense / max(1, sent) - 1)


def price_of_delay(kappa: float, error: float) -> float:
    """By what factor a training at an error e needs more steps than dense."""
    return 1 + kappa * error


def settled(error: float, age: int, carried: float = 0.0) -> float:
    """What a level's error comes to, by a reading ``age`` steps after the level began, at an error of ``carried``.

    The inverse of ``reached``, by bisection. A reading that is too large for any level stands for itself.
    """
    if not error:
        return 0.0
    low, high = 0.0, MOST_ERROR
    if reached(high, age, carried) <= error:
        return error
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle, age, carried) > error else (middle, high)
    return high


def reached(settled: float, age: int, carried: float = 0.0) -> float:
    """A level's error ``age`` steps after it began, at an error of ``carried``, if it comes to ``settled``.

    A step sends the share δ of the energy of gradient and residual. If gradients are mostly noise, then
    ``e² = (1 - δ) / δ · (1 - (1 - δ)^age) + carried² (1 - δ)^age``, and ``settled² = (1 - δ) / δ``.
    """
    kept = (settled**2 / (1 + settled**2)) ** max(1, age)
    return math.sqrt(settled**2 * (1 - kept) + carried**2 * kept)
