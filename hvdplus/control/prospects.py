"""What a trial of another level costs and promises, and so whether it is worth its time; see ``trial.py`` for the trial
itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdplus.control.config import Config
from hvdplus.control.delay import left_behind
from hvdplus.control.exploring import Exploring
from hvdplus.control.knowledge import Knowledge
from hvdplus.control.trial import promised

LONGEST = 3
"""Largest factor by which noise makes a trial's blocks longer."""


class Prospects(NamedTuple):
    """Of trials against the level held."""

    config: Config
    known: Knowledge
    exploring: Exploring
    held: int
    noise: float
    """Variance of a trial's ratio, as blocks of the level held let expect."""
    lost: Mapping[int, int]
    """Level -> trials that it lost against the level held; each makes it promise more to be tried again."""

    def promises(self, usable: Sequence[int]) -> dict[int, float]:
        """Level -> what a trial of it may bring, for levels that are worth one."""
        now, least, promises = self.known.cost(self.held, self.held), self.config.margin / 2, dict[int, float]()
        for level in usable:
            guess = self.known.cost(level, self.held)
            gain = now.mean - self.need(level) - guess.mean
            certainty = self.config.certainty if level > self.held else 0.0  # half a proof is no reason to look for it
            promise = promised(gain, guess.variance + now.variance, self.noise, certainty)
            promise -= least * self.lost.get(level, 0) + self._rest(level)
            if level != self.held and promise > least and (gain > 0 or self.affords(gain, promise)):
                promises[level] = promise
        return promises

    def dearer(self, level: int) -> float:
        """Logarithm of a level's price of delay over that of the level held."""
        return math.log(self.known.price(level) / self.known.price(self.held))

    def need(self, level: int) -> float:
        """Gain that a level has to show, as a logarithm."""
        return self.config.margin * (self.burden(level) or -0.5)

    def burden(self, level: int) -> float:
        """How much of a proof it takes: half of one, where more compression holds nothing back; none for less."""
        if level <= self.held:
            return 0.0
        return 1.0 if self.known.costs[level].keeps_residual else 0.5

    @property
    def turn(self) -> int:
        """Steps of a turn that count. Where steps are noisy, long turns cost less than many."""
        margin = self.config.margin
        longer = max(1, min(LONGEST, round(math.sqrt(self.noise) / margin))) if margin else 1
        return self.config.block_steps * longer

    @property
    def _first_turn(self) -> int:
        """All steps of a level's first turn."""
        return self.turn + self.config.settle_steps

    def affords(self, gain: float, promise: float) -> bool:
        """Whether the first turn of a trial that probably gains nothing (``gain``: a logarithm) takes no longer than
        what it promises all the same would save, and fits into the time for exploring."""
        longer = self._first_turn * self.known.seconds(self.held) * (math.exp(-gain) - 1)
        worth = promise * self.exploring.horizon
        return longer <= worth and self.exploring.affords(longer, self.config.explore)

    def _rest(self, level: int) -> float:
        """What a level's first turn would leave to the level held costs a step, over as long as the trial is of use."""
        known, held, horizon = self.known, self.held, self.exploring.horizon
        if not (horizon and known.costs[level].keeps_residual and known.costs[held].keeps_residual):
            return 0.0
        error, before = known.error(level).mean, known.error(held).mean
        rest = left_behind(error, self._first_turn, before, known.share(level), known.share(held))
        return known.kappa(held) * rest * known.seconds(held) / horizon
