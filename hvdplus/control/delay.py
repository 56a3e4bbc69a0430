"""How late gradients arrive at a level: its error e, and what that costs in steps.

e is the norm of the residual over the norm of the gradient, both summed over ranks. It is measured where a level runs.
Elsewhere it is what a preview on two steps' gradients showed (``exchange/preview.py``), or guessed from the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
PREVIEW_ERROR, LEAST_PREVIEW = 0.5, 0.01
"""The same of an e by a preview (``benchmarks/previews.py``), and the least such e."""
FAR_APART = 10.0
"""Factor between the previews of two levels of about as many bytes, at most: what is beyond is an accident."""
SURE = 3
"""Readings of a level's e that are no accident; a single one may be of an odd batch."""
MOST_ERROR = 10.0
"""Of any level: one that sends a hundredth of the energy of gradient and residual in a step."""
KEPT = 10
"""Readings of a level's e that are kept."""
FOLLOW = 0.65
"""Logarithm by which a level's error moves while another's moves by 1, give or take half of it. (In the trainings that
``benchmarks/traces.py`` recorded: 0.65 to 0.8 between levels of low rank, 0.4 to those of them with an e below 0.15.
``int8`` does not follow, but what it holds back hardly counts.)"""

LEAVES = 8.0
"""Share that a level sends in a step of the energy that the level before it had left, over its share of the dense
bytes: 15 to 20 early in a training (what ``powersgd:4`` left on the laboratory's ``wide``), 3 to 8 after 200 steps."""

OWN = 0.25
"""Least share of the energy of a residual that is taken to be the running level's own, whatever the level before may
have left: how fast that leaves is known badly. (Without it, a level tried after one that holds back much was taken to
hold back nothing.)"""


@dataclass
class Errors:
    """What was seen of the levels' errors."""

    readings: dict[int, list[float]] = field(default_factory=dict)
    """Level -> what its error comes to, by the latest readings, over ``moved``."""
    previews: dict[int, float] = field(default_factory=dict)
    """Level -> what its error comes to, by a preview, over ``moved``."""
    moved: float = 0.0
    """Logarithm of the errors of levels that do not run over those at the beginning: they grow and fall with the
    training (that of ``powersgd:4+fp16`` seven times from step 50 to 250 of the laboratory's ``wide``)."""

    @property
    def levels(self) -> set[int]:
        """Those of which more is known than their bytes."""
        return {*self.readings, *self.previews}

    def learn(
        self, level: int, error: float, age: int, carried: float = 0.0, *, share: float = 1.0, held: bool
    ) -> None:
        """Take in a reading of e, ``age`` steps after the level began; the level before it had come to ``carried``.
        ``share``: of the dense bytes, that it sends.
        ``held``: the level runs all the time, so that the errors of others follow its own."""
        known = self.readings.get(level, [])
        comes_to = max(settled(error, age, carried, share), settled(error * math.sqrt(OWN), age))
        readings = [*known[1 - KEPT :], comes_to / math.exp(self.moved)]
        if held and len(known) >= SURE and min(before := median(known), now := median(readings)):
            moves = FOLLOW * math.log(now / before)
            self.moved += moves
            readings = [reading / math.exp(moves) for reading in readings]
        self.readings[level] = readings

    def foresee(self, level: int, error: float) -> None:
        """Take in what a level held back of a gradient in a preview, as a share of it."""
        self.previews[level] = max(LEAST_PREVIEW, foreseen(error)) / math.exp(self.moved)

    def guess(self, level: int, costs: Sequence[LevelCost]) -> Guess:
        """A level's e, as measured or as guessed."""
        mean, variance = expected(level, self.readings, costs, self.previews)
        return Guess(mean * math.exp(self.moved), variance * math.exp(2 * self.moved))

    def least(self, level: int) -> float:
        """The least of the last readings of e; 0: there are few. A single one may be of an odd batch."""
        readings = self.readings.get(level, [])[-SURE:]
        return min(readings) * math.exp(self.moved) if len(readings) == SURE else 0.0

    def are_plausible(self) -> bool:
        """Whether they can have been seen."""
        seen = [*self.previews.values(), *(error for readings in self.readings.values() for error in readings)]
        return (
            all(self.readings.values())
            and all(self.previews.values())
            and min(seen, default=0.0) >= 0
            and abs(self.moved) < 50
        )


def expected(
    level: int, errors: Mapping[int, Sequence[float]], costs: Sequence[LevelCost], previews: Mapping[int, float]
) -> Guess:
    """A level's e: as measured, or else by its preview or its bytes, and by a level measured with about as many bytes.
    Of a level that has a preview others tell only if they have one, too, and as many passes.

    Fewer than ``SURE`` readings count where they are below the guess: an odd batch of small gradients makes e larger,
    and would price a level and its neighbours out for good.

    Args:
        errors: level -> what its error comes to, by readings.
        costs: of every level.
        previews: level -> what its error comes to, by a preview.
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
        if (len(errors[other]) >= SURE or error < _unmeasured(other, costs, previews).mean)
        and distance(other) < math.log(NEAR)
        and _left_out(other, costs)
        and (level not in previews or (other in previews and costs[other].passes == costs[level].passes))
    ]
    guess = _unmeasured(level, costs, previews)
    if near:
        nearest = min(near, key=distance)
        if level in previews:
            times = min(max(previews[level] / previews[nearest], 1 / FAR_APART), FAR_APART)
        else:
            times = (_left_out(level, costs) / _left_out(nearest, costs)) ** (POWER / 2)
        guess = _within(known[nearest] * times, NEAR_ERROR)
    return _within(median(seen), NEAR_ERROR) if seen and median(seen) < guess.mean else guess


def _unmeasured(level: int, costs: Sequence[LevelCost], previews: Mapping[int, float]) -> Guess:
    """e, where no level was measured that tells more of it."""
    if level in previews:
        return _within(previews[level], PREVIEW_ERROR)
    return _within(math.sqrt(ENERGY * _left_out(level, costs)), GUESS_ERROR)


def _within(error: float, spread: float) -> Guess:
    """An e with a standard deviation of ``spread``, as a share of it."""
    return Guess(error, (spread * error) ** 2)


def _left_out(level: int, costs: Sequence[LevelCost]) -> float:
    """Bytes that are not sent over bytes that are."""
    dense, sent = costs[0].payload_bytes, costs[level].payload_bytes
    return max(0.0, dense / max(1, sent) - 1)


def price_of_delay(kappa: float, error: float) -> float:
    """By what factor a training at an error e needs more steps than dense."""
    return 1 + kappa * error


def left_behind(settled: float, steps: int, before: float, share: float, share_before: float) -> float:
    """What a level leaves to the one before it, after ``steps`` on the way to ``settled`` from an error of ``before``:
    the sum, over all later steps, of the errors beyond ``before``.

    Args:
        share, share_before: of the dense bytes, that each of them sends.
    """
    more = max(0.0, reached(settled, steps, before, share) - before)
    stays = math.sqrt(max(0.0, 1 - LEAVES * max(1e-6, share_before)))
    return more * stays / (1 - stays)


def settled(error: float, age: int, carried: float = 0.0, share: float = 1.0) -> float:
    """What a level's error comes to, by a reading ``age`` steps after the level began, at an error of ``carried``.

    The inverse of ``reached``, by bisection. A reading that is too large for any level stands for itself.
    """
    if not error:
        return 0.0
    low, high = 0.0, MOST_ERROR
    if reached(high, age, carried, share) <= error:
        return error
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle, age, carried, share) > error else (middle, high)
    return high


def foreseen(error: float) -> float:
    """What a level's error comes to, if it would hold back ``error`` of a first gradient, as a share of its norm."""
    return MOST_ERROR if error >= reached(MOST_ERROR, 1) else settled(error, 1)


def reached(settled: float, age: int, carried: float = 0.0, share: float = 1.0) -> float:
    """A level's error ``age`` steps after it began, at an error of ``carried``, if it comes to ``settled``.

    A step sends the share δ of the energy of gradient and residual. If gradients are mostly noise, then
    ``e² = (1 - δ) / δ · (1 - (1 - δ)^age) + carried² (1 - δ')^age``, and ``settled² = (1 - δ) / δ``. What the level
    before has left is what low rank does not send, so a level that sends the ``share`` of the dense bytes sends no more
    of it than ``δ' = LEAVES · share``.
    """
    steps = max(1, age)
    kept = settled**2 / (1 + settled**2)
    stays = max(kept, 1 - min(1.0, LEAVES * share))
    return math.sqrt(settled**2 * (1 - kept**steps) + carried**2 * stays**steps)
