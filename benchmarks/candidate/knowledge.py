"""What the controller knows of every level: the cost of a step, with its variance.

The cost is seconds times the *price of delay*, ``1 + κ e²``: gradients that are held back arrive late, so a training
needs more steps. e is the norm of the residual over the norm of the gradient. All estimates are logarithms: a
difference of 0.02 is two percent.

One model serves all levels. A step takes the computation, which all levels share, the level's codec, and the part of
its communication that the computation does not hide (see ``link.py``). Whatever slows the machine down slows all levels
down; whatever changes the link changes each by the bytes it sends. A level that was measured differs from the model by
a factor of its own, which is remembered, and trusted less the older it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from candidate.blocks import NOISE_FLOOR, Block, Guess
from hvdplus.control.link import LevelCost, Link

EXPOSED_ERROR = 0.25
"""Standard deviation of predicted communication, as a share of it."""
MODEL_ERROR = 0.05
"""Standard deviation of measured communication from the model, as a share of it."""
CODEC_ERROR = 0.5
"""The same of a codec that was timed alone: within a step it shares caches and cores."""
PRICE_ERROR = 0.5
"""The same of what a price adds, where no error was measured."""
ENERGY = 0.02
"""Guess for a level that was never run: ``e² = ENERGY (1 / share - 1)``, with its share of the dense bytes.

Not fitted to measured errors. It turns the steps that PowerSGD at ranks 16, 8 and 4 needs (1.04, 1.09 and 1.21 times
those of dense) into e² by κ = 0.05, and assumes the bytes of ``lowrank:16+fp16`` to ``lowrank:4+fp16``, on the same
text model."""
ERRORS_KEPT = 10


class LinkEstimate(NamedTuple):
    """α and β with the covariance of their errors: a Kalman filter over measured communication."""

    alpha: float = 0.0
    beta: float = 0.0
    aa: float = (3e-4) ** 2
    """Variance of α; at first, what all-reduces of clusters take."""
    ab: float = 0.0
    bb: float = (1e-6) ** 2
    """Variance of β; at first, anything from 1 MB/s on."""

    @property
    def link(self) -> Link:
        """The link as estimated."""
        return Link(self.alpha, self.beta)

    def variance(self, cost: LevelCost) -> float:
        """Of the seconds that a level's communication takes, as far as the link is the reason."""
        m, b = cost.messages, cost.payload_bytes
        return max(0.0, m * m * self.aa + 2 * m * b * self.ab + b * b * self.bb)

    def older(self, share: float) -> LinkEstimate:
        """α and β may each have changed; ``share``: variance of the change, relative to their squares."""
        return self._replace(aa=self.aa + share * self.alpha**2, bb=self.bb + share * self.beta**2)

    def updated(self, cost: LevelCost, seconds: float, variance: float) -> LinkEstimate:
        """With a level's measured communication. Measurements far from the estimate say that the link has changed."""
        m, b = cost.messages, cost.payload_bytes
        if seconds <= 0 or not b:
            return self
        noise = variance + (MODEL_ERROR * seconds) ** 2
        expected = self.link.seconds(cost)
        off, known = seconds - expected, self
        if expected and off * off > 9 * (self.variance(cost) + noise):
            share = (off / expected) ** 2
            known = self.older(share)._replace(ab=self.ab + share * self.alpha * self.beta / 2)
        pa, pb = m * known.aa + b * known.ab, m * known.ab + b * known.bb
        total = m * pa + b * pb + noise
        ka, kb = pa / total, pb / total
        alpha, beta = self.alpha + ka * off, self.beta + kb * off
        if alpha < 0:
            alpha, beta = 0.0, max(0.0, beta + alpha * m / b)
        elif beta < 0:
            alpha, beta = max(0.0, alpha + beta * b / m), 0.0
        return LinkEstimate(alpha, beta, known.aa - ka * pa, known.ab - ka * pb, known.bb - kb * pb)


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
    drift: float
    """Standard deviation that a logarithm gains in a step in which nobody looks, as a random walk."""
    price_of_delay: float
    """κ, at this time."""
    link: LinkEstimate = LinkEstimate()
    pace: Guess = Guess(0.0, 0.0)
    """Logarithm of the computation's seconds over those at the beginning, whatever the level."""
    hidden: float = 0.0
    """Communication that was hidden, as a share of the computation that it hid behind: the most that was seen."""
    levels: dict[int, Level] = field(default_factory=dict)
    errors: dict[int, list[float]] = field(default_factory=dict)
    """Level -> what its error comes to, by the latest readings."""
    steps: int = 0

    def learn(self, level: int, block: Block, *, held: bool) -> None:
        """Take in a block. ``held``: the level ran before it, too, so a change of its computation is the machine's."""
        aged = self.drift**2 * max(1, self.steps - max((known.steps for known in self.levels.values()), default=0))
        known = self.levels.get(level)
        self.pace = Guess(self.pace.mean, self.pace.variance + aged)
        if known and held:
            noise = block.busy_variance / block.busy**2 + NOISE_FLOOR**2
            self.pace = self.pace.updated(math.log(block.busy / known.busy), noise)
        self.hidden = max(self.hidden, block.overlapped / block.busy)
        self.link = self.link.older(aged).updated(self.costs[level], block.comm, block.comm_variance)
        pace = math.exp(self.pace.mean)
        own = self.known_own(level) if known else Guess()
        known = known or Level(block.busy / pace, block.codec / pace, 0.0, 0.0, 0.0, own, self.steps)
        codec = known.codec + 0.3 * (block.codec / pace - known.codec)
        self.levels[level] = known._replace(
            codec=codec, step=block.step, exposed=block.exposed, overlapped=block.overlapped, steps=self.steps
        )
        own = own.updated(math.log(block.step) - self._model(level), block.step_variance)
        self.levels[level] = self.levels[level]._replace(own=own)

    def learn_ratio(self, level: int, other: int, ratio: Guess) -> None:
        """``level`` was measured to take as long as ``other``, times ``ratio`` (a logarithm)."""
        own = self._model(other) + self.levels[other].own.mean + ratio.mean - self._model(level)
        self.levels[level] = self.levels[level]._replace(own=Guess(own, ratio.variance), steps=self.steps)

    def learn_error(self, level: int, error: float, age: int) -> None:
        """Take in a reading of e, ``age`` steps after the level began."""
        self.errors[level] = [*self.errors.get(level, [])[1 - ERRORS_KEPT :], settled(error, age)]

    def forget_errors(self) -> None:
        """The gradients are others now."""
        self.errors.clear()

    def known_own(self, level: int) -> Guess:
        """``Level.own``, as much as it is worth today."""
        mean, variance = self.levels[level].own
        return Guess(mean, variance + self.drift**2 * (self.steps - self.levels[level].steps))

    def seconds(self, level: int) -> float:
        """Seconds of a step: as measured and brought up to date, or as predicted."""
        own = self.levels[level].own.mean if level in self.levels else 0.0
        return math.exp(self._model(level) + own)

    def error(self, level: int) -> float:
        """e, as measured, or else as guessed from the bytes and from the level measured with about as many."""
        if level in self.errors:
            return median(self.errors[level])
        sent = self.costs[level].payload_bytes

        def distance(other: int) -> float:
            return abs(math.log(max(1, self.costs[other].payload_bytes) / max(1, sent)))

        near = [other for other in self.errors if distance(other) < math.log(4) and self._guess(other)]
        nearest = min(near, key=distance, default=None)
        scale = 1.0 if nearest is None else median(self.errors[nearest]) / self._guess(nearest)
        return scale * self._guess(level)

    def price(self, level: int) -> float:
        """By what factor a training at this level needs more steps."""
        return 1 + self.price_of_delay * self.error(level) ** 2

    def cost(self, level: int, held: int) -> Guess:
        """Logarithm of seconds times price. ``held``: the level that runs, whose link needs no guess."""
        cost, step, busy = self.costs[level], self.seconds(level), self._busy(level)
        mean = math.log(step * self.price(level))
        if level in self.levels:
            variance = self.known_own(level).variance
        else:
            exposed = self.link.link.exposed(cost, self.hidden * busy)
            variance = ((CODEC_ERROR * cost.codec) ** 2 + (EXPOSED_ERROR * exposed) ** 2) / step**2
        if level not in self.errors:
            variance += (PRICE_ERROR * (self.price(level) - 1)) ** 2
        if level != held:
            hides = self.link.link.seconds(cost) <= self.hidden * busy
            seen = cost._replace(payload_bytes=cost.last_bytes, messages=1) if hides else cost
            variance += min(1.0, self.link.variance(seen) / step**2)
        return Guess(mean, variance)

    def _busy(self, level: int) -> float:
        """Seconds of computation and input wait today."""
        known = self.levels.get(level) or self.levels[max(self.levels, key=lambda each: self.levels[each].steps)]
        return known.busy * math.exp(self.pace.mean)

    def _model(self, level: int) -> float:
        """Logarithm of a step's seconds, by the model."""
        busy, known = self._busy(level), self.levels.get(level)
        codec = known.codec if known else self.costs[level].codec
        exposed = self.link.link.exposed(self.costs[level], self.hidden * busy)
        return math.log(busy + codec * math.exp(self.pace.mean) + exposed)

    def _guess(self, level: int) -> float:
        dense, sent = self.costs[0].payload_bytes, self.costs[level].payload_bytes
        return math.sqrt(ENERGY * max(0.0, dense / max(1, sent) - 1))


def settled(error: float, age: int) -> float:
    """What a level's error comes to, by a reading ``age`` steps after the level began with no residual.

    A step sends the share δ of the energy of gradient and residual. If gradients are mostly noise, then
    ``e² = (1 - δ) / δ · (1 - (1 - δ)^age)``, which is solved for δ by bisection.
    """
    if not error:
        return 0.0
    low, high = 1e-4, 1.0
    for _ in range(24):
        share = math.sqrt(low * high)
        reached = (1 - share) / share * (1 - (1 - share) ** max(1, age))
        low, high = (share, high) if reached > error * error else (low, share)
    return math.sqrt((1 - low) / low)
