"""What the controller knows of every level: the cost of a step, with its variance.

The cost is seconds times the *price of delay*, ``1 + κ e``: gradients that are held back arrive late, so a training
needs more steps. e is the norm of the residual over the norm of the gradient. All estimates are logarithms: a
difference of 0.02 is two percent.

One model serves all levels. A step takes the computation, which all levels share, the level's codec, and the part of
its communication that the computation does not hide (see ``link.py``). Whatever slows the machine down slows all levels
down; whatever changes the link changes each by the bytes it sends. A level that was measured differs from the model by
a factor of its own, which is remembered, and trusted less the older it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from hvdplus.control.blocks import FAR, NOISE_FLOOR, Block, Guess
from hvdplus.control.link import MODEL_ERROR, LevelCost, LinkEstimate

DRIFT = 0.0015
"""Standard deviation that the logarithm of a step's seconds gains in a step in which nobody looks, as a random walk."""
EXPOSED_ERROR = 0.25
"""Standard deviation of predicted communication, as a share of it."""
OVERLAP_ERROR = 0.5
"""The same of what runs behind the computation."""
CROWD, CODEC_ERROR, SCALED_ERROR = 1.5, 0.4, 0.15
"""A codec's time in a step over that alone, and standard deviations as shares of it: of any, and of one that is scaled
from another's. (1.3 to 1.7 were measured on two cores, and 0.1 between ranks of ``lowrank``.)"""
ENERGY, POWER = 0.027, 1.75
"""Guesses for a level that was never run, with its share of the dense bytes: ``e² = ENERGY (1 / share - 1)``, or
``e² ∝ (1 / share - 1)^POWER`` from a level that ran and sends about as many bytes. Both are fits to low-rank levels."""
NEAR = 3.0
"""Factor between the bytes of such two levels, at most: beyond, they are seldom of one kind."""
GUESS_ERROR, NEAR_ERROR = 0.7, 0.3
"""Standard deviations of such an e, as a share of it (``benchmarks/results/delay.txt``)."""
ERRORS_KEPT = 10
LEAST_SENT = 0.01
"""Least share of the energy of gradient and residual that a level sends in a step: e comes to 10 at most."""
COMPUTATIONS = (1e-3, 1e-2, 1e-1, 1.0)
"""Seconds that the computation of a step may take, before one was seen; half of them may hide communication."""
HIDES = 0.7
"""Share of the computation that communication may hide behind, where no step has shown how much it is."""
BOUND = 1.5
"""Exposed communication over the last bucket's, from which it shows that."""


class Level(NamedTuple):
    """What was measured of one level."""

    busy: float
    """Seconds of computation and input wait, at pace 1."""
    codec: float
    """Seconds, at pace 1."""
    step: float
    """Seconds of a step in the last block."""
    exposed: float
    overlapped: float
    own: Guess
    """Logarithm of a step's seconds over those of the model."""
    steps: int
    """Steps seen when it was measured."""


@dataclass
class Knowledge:
    """Estimates of all levels; levels are indices of the ladder."""

    costs: tuple[LevelCost, ...]
    delay_price: float
    """κ, at this time."""
    link: LinkEstimate = LinkEstimate()
    pace: Guess = Guess(0.0, 0.0)
    """Logarithm of the computation's seconds over those at the beginning, whatever the level."""
    hidden: float = 0.0
    """Communication that was hidden, as a share of the computation that it hid behind: the most that was seen."""
    bound: bool = False
    """Whether a step waited for more than its last bucket, so that the computation hides no more than that."""
    levels: dict[int, Level] = field(default_factory=dict)
    errors: dict[int, list[float]] = field(default_factory=dict)
    """Level -> what its error comes to, by the latest readings."""
    steps: int = 0

    def learn(self, level: int, block: Block, *, held: bool) -> None:
        """Take in a block. ``held``: the level ran before it, too, so a change of its computation is the machine's."""
        aged = DRIFT**2 * max(1, self.steps - max((known.steps for known in self.levels.values()), default=0))
        known = self.levels.get(level)
        before = {} if known else {other: self._model(other) for other in self.levels}
        self.pace = Guess(self.pace.mean, self.pace.variance + aged)
        if known and held:
            noise = block.busy_variance / block.busy**2 + NOISE_FLOOR**2
            self.pace = self.pace.updated(math.log(block.busy / known.busy), noise)
        self.hidden = max(self.hidden, block.overlapped / block.busy)
        self.bound |= block.exposed > BOUND * self.link.link.exposed(self.costs[level], math.inf) > 0.0
        # What runs behind the computation may wait for other ranks: so much of it says little of the link.
        doubt = block.comm_variance + (OVERLAP_ERROR * block.overlapped) ** 2
        self.link = self.link.older(aged).updated(self.costs[level], block.comm, doubt)
        for other, model in before.items():  # the link is known better, it is no other: what was measured still holds
            mean, variance = self.levels[other].own
            own = Guess(mean + model - self._model(other), variance)
            self.levels[other] = self.levels[other]._replace(own=own)
        pace = math.exp(self.pace.mean)
        own = self.known_own(level) if known else Guess()
        known = known or Level(block.busy / pace, block.codec / pace, 0.0, 0.0, 0.0, own, self.steps)
        codec = known.codec + 0.3 * (block.codec / pace - known.codec)
        self.levels[level] = known._replace(
            codec=codec, step=block.step, exposed=block.exposed, overlapped=block.overlapped, steps=self.steps
        )
        own = own.updated(math.log(block.step) - self._model(level), block.step_variance)
        self.levels[level] = self.levels[level]._replace(own=own)

    def is_news(self, level: int, block: Block) -> bool:
        """Whether a block of a level lies far from what was measured of it before."""
        known = self.levels.get(level)
        if not known:
            return False
        variance = self.known_own(level).variance + block.step_variance
        step = abs(math.log(block.step / self.seconds(level))) > FAR * math.sqrt(variance)
        comm = known.exposed + known.overlapped
        variance = 2 * block.comm_variance + (MODEL_ERROR * comm) ** 2
        return step or abs(block.comm - comm) > max(FAR * math.sqrt(variance), MODEL_ERROR * block.step)

    def ratio(self, level: int, other: int) -> Guess:
        """Logarithm of a level's seconds over another's, as far as it was measured."""
        if level not in self.levels or other not in self.levels:
            return Guess()
        return Guess(math.log(self.seconds(level) / self.seconds(other)), self.known_own(level).variance)

    def see_sum(self, size: int, seconds: float, *, first: bool = False) -> None:
        """Take in what a sum of ``size`` bytes took that nothing else went along with. ``first``: before any step."""
        self.link = self.link.updated(LevelCost.of_sum(size), seconds, (MODEL_ERROR * seconds) ** 2, same=first)

    def best_start(self, usable: Sequence[int], steps: Callable[[float], float]) -> int:
        """The level to begin with, before any step was seen: that of least regret, which is what the start is expected
        to cost beyond the best level's, if the computation may as well take any of ``COMPUTATIONS``.

        Args:
            steps: seconds of a step -> steps of the start.
        """

        def cost(level: int, busy: float) -> float:
            exposed = self.link.link.exposed(self.costs[level], busy / 2)
            return self.price(level) * (busy + CROWD * self.costs[level].codec + exposed)

        regrets = dict.fromkeys(usable, 0.0)
        for busy in COMPUTATIONS:
            costs = {level: cost(level, busy) for level in usable}
            for level in usable:
                regrets[level] += steps(costs[level]) * (costs[level] - min(costs.values()))
        return min(usable, key=lambda level: regrets[level])

    def plausible(self, blocks: Sequence[Block]) -> bool:
        """Whether all that should be above 0 is."""
        link, pace, levels = self.link, self.pace, self.levels.values()
        variances = [link.aa, link.bb, pace.variance, *(known.own.variance for known in levels)]
        seconds = [*(known.busy for known in levels), *(known.step for known in levels)]
        for block in blocks:
            variances += [block.step_variance, block.busy_variance, block.rest_variance, block.comm_variance]
            seconds += [block.step, block.busy]
        rest = [
            link.alpha,
            link.beta,
            self.hidden,
            *(known.codec for known in levels),
            *(block.rest for block in blocks),
        ]
        errors = [error for readings in self.errors.values() for error in readings]
        logarithms = [abs(pace.mean), *(abs(known.own.mean) for known in levels)]
        fits = all(self.errors.values()) and max(logarithms) < 50
        return fits and min(variances) >= 0 and min(seconds, default=1.0) > 0 <= min(*rest, *errors)

    def learn_ratio(self, level: int, other: int, ratio: Guess) -> None:
        """``level`` was measured to take as long as ``other``, times ``ratio`` (a logarithm)."""
        own = self._model(other) + self.levels[other].own.mean + ratio.mean - self._model(level)
        self.levels[level] = self.levels[level]._replace(own=Guess(own, ratio.variance), steps=self.steps)

    def learn_error(self, level: int, error: float, age: int, carried: float = 0.0) -> None:
        """Take in a reading of e, ``age`` steps after the level began; the level before it had come to ``carried``."""
        self.errors[level] = [*self.errors.get(level, [])[1 - ERRORS_KEPT :], settled(error, age, carried)]

    def known_own(self, level: int) -> Guess:
        """``Level.own``, as much as it is worth today."""
        mean, variance = self.levels[level].own
        return Guess(mean, variance + DRIFT**2 * (self.steps - self.levels[level].steps))

    def seconds(self, level: int) -> float:
        """Seconds of a step: as measured and brought up to date, or as predicted."""
        own = self.levels[level].own.mean if level in self.levels else 0.0
        return math.exp(self._model(level) + own)

    def error(self, level: int) -> Guess:
        """e, as measured, or else as guessed from the bytes and from the level measured with about as many."""
        if level in self.errors:
            return Guess(median(self.errors[level]), 0.0)
        if not self.costs[level].keeps_residual:
            return Guess(0.0, 0.0)
        sent = self.costs[level].payload_bytes

        def distance(other: int) -> float:
            return abs(math.log(max(1, self.costs[other].payload_bytes) / max(1, sent)))

        kept = [other for other in self.errors if self.costs[other].keeps_residual]
        near = [other for other in kept if distance(other) < math.log(NEAR) and self._left_out(other)]
        if not near:
            error, spread = math.sqrt(ENERGY * self._left_out(level)), GUESS_ERROR
        else:
            nearest = min(near, key=distance)
            times = self._left_out(level) / self._left_out(nearest)
            error, spread = median(self.errors[nearest]) * times ** (POWER / 2), NEAR_ERROR
        return Guess(error, (spread * error) ** 2)

    def price(self, level: int) -> float:
        """By what factor a training at this level needs more steps."""
        return price_of_delay(self.delay_price, self.error(level).mean)

    def cost(self, level: int, held: int) -> Guess:
        """Logarithm of seconds times price. ``held``: the level that runs, whose link needs no guess."""
        cost, step, busy = self.costs[level], self.seconds(level), self._busy(level)
        mean = math.log(step * self.price(level))
        if level in self.levels:
            variance = self.known_own(level).variance
        else:
            variance = (self._codec(level).variance + self._exposed(level, busy).variance) / step**2
        variance += self.delay_price**2 * self.error(level).variance / self.price(level) ** 2
        if level != held:
            hides = self.link.link.seconds(cost) <= self.hidden * busy
            seen = cost._replace(payload_bytes=cost.last_bytes, messages=1) if hides else cost
            variance += min(1.0, self.link.variance(seen) / step**2)
        return Guess(mean, variance)

    def evidence(self, names: Sequence[str], usable: Sequence[int]) -> dict[str, float]:
        """All figures that decisions rest on; the unit stands in the name."""
        found: dict[str, float] = {}
        for level, known in sorted(self.levels.items()):
            figures = {"step": self.seconds(level), "exposed_comm": known.exposed}
            figures |= {"overlapped_comm": known.overlapped, "codec": known.codec}
            found |= {f"{names[level]}.{name}_ms": value * 1e3 for name, value in figures.items()}
        for level in usable if self.levels else ():
            if level not in self.levels:
                found[f"{names[level]}.predicted_step_ms"] = self.seconds(level) * 1e3
            if error := self.error(level).mean:
                found[f"{names[level]}.error"] = error
        found["link.ms_per_allreduce"], found["link.ms_per_MB"] = self.link.alpha * 1e3, self.link.beta * 1e9
        return {name: round(value, 4) for name, value in found.items()}

    def _busy(self, level: int) -> float:
        """Seconds of computation and input wait today."""
        known = self.levels.get(level) or self.levels[max(self.levels, key=lambda each: self.levels[each].steps)]
        return known.busy * math.exp(self.pace.mean)

    def _model(self, level: int) -> float:
        """Logarithm of a step's seconds, by the model."""
        busy = self._busy(level)
        codec = self._codec(level).mean * math.exp(self.pace.mean)
        return math.log(busy + codec + self._exposed(level, busy).mean)

    def _exposed(self, level: int, busy: float) -> Guess:
        """Seconds that a step waits for communication, beside a computation of ``busy`` seconds."""
        exposed = self.link.link.exposed(self.costs[level], self.hidden * busy)
        if level in self.levels:
            return Guess(exposed, 0.0)
        least = exposed if self.bound else self.link.link.exposed(self.costs[level], max(HIDES, self.hidden) * busy)
        middle, half = (exposed + least) / 2, (exposed - least) / 2
        return Guess(middle, half**2 + (EXPOSED_ERROR * middle) ** 2)

    def _codec(self, level: int) -> Guess:
        """Seconds at pace 1: as measured, or else from what it takes alone and what the nearest level takes.

        In the crowd of a whole step a codec is slower than alone, whatever the level, and every level packs. Where
        there is none (dense), half of what the nearest level takes beyond its own is taken for packing, give or take.
        """
        if level in self.levels:
            return Guess(self.levels[level].codec, 0.0)
        codec = CROWD * self.costs[level].codec
        if not self.levels:
            return Guess(codec, (CODEC_ERROR * codec) ** 2)
        near = min(self.levels, key=lambda other: abs(other - level))
        taken, theirs = self.levels[near].codec, CROWD * self.costs[near].codec
        if codec and theirs:
            return Guess(codec * taken / theirs, (SCALED_ERROR * codec * taken / theirs) ** 2)
        beyond = max(0.0, taken - theirs)
        packs, doubt = (beyond / 2, beyond / 2) if near else (beyond, 0.0)
        return Guess(codec + packs, doubt**2 + (CODEC_ERROR * codec) ** 2)

    def _left_out(self, level: int) -> float:
        """Bytes that are not sent over bytes that are."""
        dense, sent = self.costs[0].payload_bytes, self.costs[level].payload_bytes
        return max(0.0, dense / max(1, sent) - 1)


def price_of_delay(kappa: float, error: float) -> float:
    """By what factor a training at an error e needs more steps than dense."""
    return 1 + kappa * error


def settled(error: float, age: int, carried: float = 0.0) -> float:
    """What a level's error comes to, by a reading ``age`` steps after the level began, at an error of ``carried``.

    A step sends the share δ of the energy of gradient and residual. If gradients are mostly noise, then
    ``e² = (1 - δ) / δ · (1 - (1 - δ)^age) + carried² (1 - δ)^age``, which is solved for δ by bisection. A reading that
    is too large for any δ stands for itself.
    """
    if not error:
        return 0.0

    def reached(share: float) -> float:
        kept = (1 - share) ** max(1, age)
        return (1 - share) / share * (1 - kept) + carried**2 * kept

    low, high = LEAST_SENT, 1.0
    if reached(low) <= error * error:
        return error
    for _ in range(24):
        share = math.sqrt(low * high)
        low, high = (share, high) if reached(share) > error * error else (low, share)
    return math.sqrt((1 - low) / low)
