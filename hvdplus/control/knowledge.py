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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdplus.control.blocks import FAR, NOISE_FLOOR, Block, Guess
from hvdplus.control.delay import Errors, price_of_delay
from hvdplus.control.handling import Seen, codec_of
from hvdplus.control.hiding import Hiding
from hvdplus.control.link import MODEL_ERROR, LevelCost, LinkEstimate

DRIFT = 0.0015
"""Standard deviation that the logarithm of a step's seconds gains in a step in which nobody looks, as a random walk."""
EXPOSED_ERROR = 0.25
"""Standard deviation of predicted communication, as a share of it."""
OVERLAP_ERROR = 0.5
"""The same of what runs behind the computation."""
WITHIN = 1.25
"""Seconds a byte within training, over those that sums before training show: a processor that computes has less time
for bytes (0.6 to 1.7 times in the recorded traces)."""
WAIT_ERROR = 0.5
"""Standard deviation of what an all-reduce takes within training, however small it is and a byte, as shares of what
sums before training show. (Horovod begins one every millisecond; a sum by itself just misses one of these turns, or it
does not: the large one, too, so that as much of a wait may be in what its bytes seem to take, or be missing there.)"""
BENT, FIRST_BENT, MOST_BENT = 0.15, 0.5, 100.0
"""Standard deviation of a level's communication from the link's straight line, as a share of it; the same, at most, of
the first level that runs, from what sums before training show; and the largest factor between them. Links carry little
at any speed after a rest, and ranks that wait for each other are slower, five times where sums are small."""
ANOTHER = 2.0
"""Factor by which a probe changes what is known of seconds a byte, from which on the next one is due at once: it is of
the size that tells most of the link as known."""
BURST = 256e3
"""Bytes that a link may have carried at any speed, in the first level that runs."""


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
    bent: float
    """Seconds of communication over those of the link: no link is a straight line. 0: the link is another since."""
    own: Guess
    """Logarithm of a step's seconds over those of the model."""
    steps: int
    """Steps seen when it was measured."""
    doubt: float
    """Variance of what its communication makes a step wait, in seconds², by what was known of the link then."""

    @property
    def comm(self) -> float:
        """All communication of the last block, hidden or not."""
        return self.exposed + self.overlapped


@dataclass
class Knowledge:
    """Estimates of all levels; levels are indices of the ladder."""

    costs: tuple[LevelCost, ...]
    delay_price: float
    """κ, at this time."""
    link: LinkEstimate = LinkEstimate()
    pace: Guess = Guess(0.0, 0.0)
    """Logarithm of the computation's seconds over those at the beginning, whatever the level."""
    hiding: Hiding = field(default_factory=Hiding)
    levels: dict[int, Level] = field(default_factory=dict)
    errors: Errors = field(default_factory=Errors)
    steps: int = 0

    def learn(self, level: int, block: Block, *, held: bool, flushes: bool = False) -> None:
        """Take in a block.

        Args:
            held: the level ran before it, too, so a change of its computation is the machine's.
            flushes: its steps also sent a residual, which says nothing of the level's codec.
        """
        aged = DRIFT**2 * max(1, self.steps - max((known.steps for known in self.levels.values()), default=0))
        known = self.levels.get(level)
        self.pace = Guess(self.pace.mean, self.pace.variance + aged)
        if known and held:
            noise = block.busy_variance / block.busy**2 + NOISE_FLOOR**2
            self.pace = self.pace.updated(math.log(block.busy / known.busy), noise)
        self._see_hiding(level, block)
        others = {} if known and known.bent else self.levels
        before = {other: (self._model(other), self._comm(other)) for other in others if other != level}
        # What runs behind the computation may wait for other ranks: so much of it says little of the link.
        doubt = block.comm_variance + (OVERLAP_ERROR * block.overlapped) ** 2
        if known and known.bent:  # only what a level takes beside what it took says that the link has changed
            bent = known.bent
            self.link = self.link.older(aged).updated(self.costs[level], block.comm / bent, doubt / bent**2)
        else:
            burst = 0.0 if self.levels else BURST / max(1, self.costs[level].payload_bytes)
            doubt += (min(FIRST_BENT, BENT + burst) * self._comm(level)) ** 2
            self.link = self.link.older(aged).updated(self.costs[level], block.comm, doubt, same=bool(self.levels))
            bent = self._bent(self.costs[level], block.comm)
        for other, (model, comm) in before.items():  # the link is no other: what was measured still holds
            self.levels[other] = self.levels[other]._replace(bent=self._bent(self.costs[other], comm))
            self._keep(other, model)
        pace = math.exp(self.pace.mean)
        own = self.known_own(level) if known else Guess()
        measured = self.codec(level).mean if flushes else block.codec / pace
        known = known or Level(block.busy / pace, measured, 0.0, 0.0, 0.0, bent, own, self.steps, 0.0)
        codec = known.codec + 0.3 * (measured - known.codec)
        self.levels[level] = known._replace(
            codec=codec, step=block.step, exposed=block.exposed, overlapped=block.overlapped, bent=bent
        )
        self._measured(level, own.updated(math.log(block.step) - self._model(level), block.step_variance))

    def _measured(self, level: int, own: Guess) -> None:
        """What is known of a level is of today, and of the link as it is known today."""
        self.levels[level] = self.levels[level]._replace(own=own, steps=self.steps, doubt=self._link_doubt(level))

    def _see_hiding(self, level: int, block: Block) -> None:
        """Take in how much communication a block hid: it tells of levels that never ran, and of no other."""
        models = {other: self._model(other) for other in self.levels}
        self.hiding.see(block, self.costs[level], self.link.link)
        for other, model in models.items():
            self._keep(other, model)

    def _keep(self, level: int, model: float) -> None:
        """What a level was measured to take still holds, though the model, which said ``model``, has become better."""
        mean, variance = self.levels[level].own
        own = Guess(mean + model - self._model(level), variance)
        self.levels[level] = self.levels[level]._replace(own=own)

    def is_news(self, level: int, block: Block) -> bool:
        """Whether a block of a level lies far from what was measured of it before."""
        known = self.levels.get(level)
        if not known:
            return False
        variance = self.known_own(level).variance + block.step_variance
        step = abs(math.log(block.step / self.seconds(level))) > FAR * math.sqrt(variance)
        variance = 2 * block.comm_variance + (MODEL_ERROR * known.comm) ** 2
        return step or abs(block.comm - known.comm) > max(FAR * math.sqrt(variance), MODEL_ERROR * block.step)

    def ratio(self, level: int, other: int) -> Guess:
        """Logarithm of a level's seconds over those of another one that was measured: as measured, or as predicted."""
        step = self.seconds(level)
        if level in self.levels:
            variance = self.known_own(level).variance
        else:
            variance = self._doubt(level, other, step) + self.known_own(other).variance + MODEL_ERROR**2
        return Guess(math.log(step / self.seconds(other)), variance)

    def see_probe(self, running: int, size: int, seconds: float) -> bool:
        """Take in what a sum of ``size`` bytes took that nothing else went along with, beside a level that is known.

        Returns whether the link is another. Then what the level ``running`` takes beside it has to show once more: few
        bytes mostly wait for other ranks.
        """
        beta = self.link.beta
        self._see_sum(size, seconds)
        another = not beta / ANOTHER <= self.link.beta <= beta * ANOTHER
        if another:
            self.levels[running] = self.levels[running]._replace(bent=0.0)
        return another

    def _see_sum(self, size: int, seconds: float, *, same: bool = False) -> None:
        """``same``: see ``LinkEstimate.updated``."""
        self.link = self.link.updated(LevelCost.of_sum(size), seconds, (MODEL_ERROR * seconds) ** 2, same=same)

    def begin(self, sums: Sequence[tuple[int, float]]) -> None:
        """Before any step: take in what sums of so many bytes took, so many seconds."""
        for size, seconds in sums:
            self._see_sum(size, seconds, same=True)
        alpha, beta, aa, ab, bb = self.link
        wait, most = WAIT_ERROR * alpha, max(dict(sums), default=1)
        aa, bb = aa + wait**2, WITHIN**2 * bb + (WAIT_ERROR * beta) ** 2 + (wait / most) ** 2
        self.link = LinkEstimate(alpha, WITHIN * beta, aa, WITHIN * ab, bb)

    def learn_ratio(self, level: int, other: int, ratio: Guess) -> None:
        """``level`` was measured to take as long as ``other``, times ``ratio`` (a logarithm)."""
        own = self._model(other) + self.levels[other].own.mean + ratio.mean - self._model(level)
        self._measured(level, Guess(own, ratio.variance))

    def stretch(self, factor: float) -> None:
        """A step has so many times the computation from now on, and as much communication."""
        before = {level: (self.seconds(level), self._busy(level)) for level in self.levels}
        # As many seconds of it are hidden, as far as there are as many.
        self.hiding.share = min(max(1.0, self.hiding.share), self.hiding.share / factor)
        for level, known in self.levels.items():
            self.levels[level] = known._replace(busy=factor * known.busy)
        for level, (step, busy) in before.items():
            now = max(step - busy, 0.0) + factor * busy
            mean, variance = math.log(now) - self._model(level), self.levels[level].own.variance
            own = Guess(mean, variance * max(1.0, step / now) ** 2)
            self.levels[level] = self.levels[level]._replace(own=own, step=now)

    def paying(self, levels: Sequence[int], running: int) -> list[int]:
        """Those that would cost less than the level that runs, if they held nothing back, and were nothing hidden."""
        busy, link = self._busy(running) if self.levels else 0.0, self.link.link
        each = (*levels, running)
        seconds = {level: busy + self.codec(level).mean + link.seconds(self.costs[level]) for level in each}
        return [level for level in levels if seconds[level] < seconds[running] * self.price(running)]

    def known_own(self, level: int) -> Guess:
        """``Level.own``, as much as it is worth today."""
        mean, variance = self.levels[level].own
        return Guess(mean, variance + DRIFT**2 * (self.steps - self.levels[level].steps))

    def seconds(self, level: int) -> float:
        """Seconds of a step: as measured and brought up to date, or as predicted."""
        own = self.levels[level].own.mean if level in self.levels else 0.0
        return math.exp(self._model(level) + own)

    def codec(self, level: int) -> Guess:
        """Seconds of a level's codec at pace 1: as measured, or as expected."""
        if level in self.levels:
            return Guess(self.levels[level].codec, 0.0)
        seen = {other: Seen(known.codec, self._travel(other)) for other, known in self.levels.items()}
        return codec_of(level, self.costs, seen, self._travel(level))

    def _travel(self, level: int) -> float:
        """Seconds in which a level's bytes travel behind computation and codec."""
        travels = self.link.link.seconds(self.costs[level])
        if level in self.levels:
            return min(travels, self.levels[level].overlapped)
        return travels - self._exposed(level, self._busy(level)).mean if self.levels else 0.0

    def error(self, level: int) -> Guess:
        """e, as measured or as guessed."""
        return self.errors.guess(level, self.costs)

    def share(self, level: int) -> float:
        """Of the dense bytes, that a level sends."""
        return self.costs[level].payload_bytes / max(1, self.costs[0].payload_bytes)

    def price(self, level: int) -> float:
        """By what factor a training at this level needs more steps."""
        return price_of_delay(self.kappa(level), self.error(level).mean)

    def kappa(self, level: int) -> float:
        """κ of a level, at this time."""
        return self.delay_price * self.costs[level].delay_weight

    def cost(self, level: int, held: int) -> Guess:
        """Logarithm of seconds times price. ``held``: the level that runs, whose link needs no guess."""
        kappa, error, step = self.kappa(level), self.error(level), self.seconds(level)
        price = price_of_delay(kappa, error.mean)
        delay = (kappa * math.sqrt(error.variance) / price) ** 2
        return Guess(math.log(step * price), self._doubt(level, held, step) + delay)

    def _doubt(self, level: int, held: int, step: float) -> float:
        """Variance of the logarithm of a level's seconds, ``step``."""
        known = self.levels.get(level)
        if known:
            variance = self.known_own(level).variance
        else:
            codec = math.exp(2 * self.pace.mean) * self.codec(level).variance
            variance = (codec + self._exposed(level, self._busy(level)).variance) / step**2
        if level != held:
            # What was measured holds, however little is known of the link, unless less is known of it than was then.
            more = max(0.0, self._link_doubt(level) - (known.doubt if known else 0.0))
            variance += min(1.0, more / step**2)
            if known:  # measured on another link
                variance += (BENT * (self._comm(level) - known.comm) / step) ** 2
        return variance

    def _link_doubt(self, level: int) -> float:
        """Variance of the seconds that a step waits for communication, as far as the link is the reason."""
        cost = self.costs[level]
        hides = self._comm(level) <= self.hiding.least(self._busy(level))
        seen = cost._replace(payload_bytes=cost.last_bytes, messages=cost.passes) if hides else cost
        return self._own_bent(level) ** 2 * self.link.variance(seen)

    def _busy(self, level: int) -> float:
        """Seconds of computation and input wait today."""
        known = self.levels.get(level) or self.levels[max(self.levels, key=lambda each: self.levels[each].steps)]
        return known.busy * math.exp(self.pace.mean)

    def _model(self, level: int) -> float:
        """Logarithm of a step's seconds, by the model."""
        busy = self._busy(level)
        codec = self.codec(level).mean * math.exp(self.pace.mean)
        return math.log(busy + codec + self._exposed(level, busy).mean)

    def _exposed(self, level: int, busy: float) -> Guess:
        """Seconds that a step waits for communication, beside a computation of ``busy`` seconds."""
        exposed = self._waits(level, self.hiding.least(busy))
        if level in self.levels:
            return Guess(exposed, 0.0)
        least = self._waits(level, self.hiding.most(busy))
        middle, half = (exposed + least) / 2, (exposed - least) / 2
        return Guess(middle, half**2 + (EXPOSED_ERROR * middle) ** 2)

    def _waits(self, level: int, hideable: float) -> float:
        """Seconds that a step waits for communication, if computation can hide ``hideable``."""
        bent = self._own_bent(level)
        return bent * self.link.link.exposed(self.costs[level], hideable / bent)

    def _comm(self, level: int) -> float:
        """Seconds of communication, hidden or not."""
        return self.link.link.seconds(self.costs[level]) * self._own_bent(level)

    def _own_bent(self, level: int) -> float:
        """``Level.bent``, as far as it was measured."""
        return self.levels[level].bent or 1.0 if level in self.levels else 1.0

    def _bent(self, cost: LevelCost, comm: float) -> float:
        """``Level.bent`` of one whose communication takes ``comm`` seconds."""
        straight = self.link.link.seconds(cost)
        return min(max(comm / straight, 1 / MOST_BENT), MOST_BENT) if straight else 1.0


def evidence(known: Knowledge, names: Sequence[str], usable: Sequence[int]) -> dict[str, float]:
    """All figures that decisions rest on; the unit stands in the name."""
    found: dict[str, float] = {}
    for level, its in sorted(known.levels.items()):
        figures = {"step": known.seconds(level), "exposed_comm": its.exposed}
        figures |= {"overlapped_comm": its.overlapped, "codec": its.codec}
        found |= {f"{names[level]}.{name}_ms": value * 1e3 for name, value in figures.items()}
    for level in usable if known.levels else ():
        if level not in known.levels:
            found[f"{names[level]}.predicted_step_ms"] = known.seconds(level) * 1e3
        if error := known.error(level).mean:
            found[f"{names[level]}.error"] = error
    found["link.ms_per_allreduce"], found["link.ms_per_MB"] = known.link.alpha * 1e3, known.link.beta * 1e9
    return {name: round(value, 4) for name, value in found.items()}


def plausible(known: Knowledge, blocks: Sequence[Block]) -> bool:
    """Whether all that should be above 0 is."""
    link, pace, levels = known.link, known.pace, known.levels.values()
    variances = [link.aa, link.bb, pace.variance, *(each.own.variance for each in levels)]
    variances += [each.doubt for each in levels]
    seconds = [*(each.busy for each in levels), *(each.step for each in levels)]
    for block in blocks:
        variances += [block.step_variance, block.busy_variance, block.rest_variance, block.comm_variance]
        seconds += [block.step, block.busy]
    rest = [*(each.bent for each in levels), link.alpha, link.beta, known.hiding.share]
    rest += [*(each.codec for each in levels), *(block.rest for block in blocks)]
    logarithms = [abs(pace.mean), *(abs(each.own.mean) for each in levels)]
    fits = known.errors.are_plausible() and max(logarithms) < 50
    return fits and min(variances) >= 0 and min(seconds, default=1.0) > 0 <= min(rest)
